#!/usr/bin/env python3
"""shardmesh.client while workers die: a reader goes on, or has an error that says what is gone."""
import threading
import unittest

import shardmesh
from cluster import Cluster, until
from counting import assert_whole
from shardmesh import errors


class WorkersDie(unittest.TestCase):
    def setUp(self):
        self.seen = {}

    def test_reader_goes_on_with_a_worker_that_is_started_again(self):
        with Cluster(retained=True) as cluster:
            trainer = cluster.train("counting")
            job = shardmesh.connect(cluster.address).job("counting")
            trainer.start(250, 10)
            threads = []
            for way in ("attached", "pulled"):
                threads.append(threading.Thread(target=self.follow, args=(job, way)))
                threads[-1].start()
            for step, name in ((30, "w-0"), (80, "w-1"), (130, "w-0")):
                until(lambda: (job.versions().committed or 0) >= step, what=f"step {step}")
                cluster.kill(name)
            for thread in threads:
                thread.join()
            self.assertEqual(trainer.wait(), 250)
            self.assertEqual(self.seen, {"attached": 250, "pulled": 250})

    def follow(self, job, way):
        last = -1
        for version in job.follow(way=way, timeout=60):
            if version.step <= last:
                raise AssertionError(f"{version.step} after {last}")
            assert_whole(self, version)
            last = version.step
            if last == 250:
                break
        self.seen[way] = last

    def test_job_that_lost_a_worker_fails_by_name(self):
        with Cluster() as cluster:
            cluster.train("counting", to=3)
            job = shardmesh.connect(cluster.address).job("counting")
            followers = [job.follow(way=way, timeout=60) for way in ("attached", "pulled")]
            held = [next(follower) for follower in followers]
            cluster.kill("w1")
            for follower in followers:
                with self.assertRaisesRegex(errors.Unavailable, "worker w1 .* is gone"):
                    next(follower)
            for version in held:
                assert_whole(self, version)


if __name__ == "__main__":
    unittest.main()
