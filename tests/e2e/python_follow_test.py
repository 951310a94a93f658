#!/usr/bin/env python3
"""Readers of shardmesh.client over a real coordinator and two workers: one version after the other, waits, forks."""
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

import shardmesh
from cluster import until
from counting import Reading, assert_whole
from shardmesh import errors


class Follow(Reading):
    def test_versions_ascend_and_each_is_whole(self):
        for way in ("attached", "pulled"):
            with self.subTest(way):
                job, trainer = self.counting()
                trainer.start(40, 5)
                seen = []
                with job.follow(way=way, timeout=60) as follower:
                    self.assertEqual(follower.attached, way == "attached")
                    for version in follower:
                        self.assertEqual(version.attached, way == "attached")
                        assert_whole(self, version)
                        seen.append(version.step)
                        if version.step >= 40:
                            break
                self.assertEqual(seen, sorted(set(seen)))
                self.assertGreater(len(seen), 2)
                self.doCleanups()

    def test_one_before_stays_until_the_next_but_one(self):
        job, trainer = self.counting(8)
        follower = job.follow()
        first = next(follower)
        trainer.to(1)
        second = next(follower)
        assert_whole(self, first)
        trainer.to(2)
        next(follower)
        with self.assertRaisesRegex(errors.FailedPrecondition, "version 0 was let go"):
            first["w"]
        assert_whole(self, second)
        follower.close()
        with self.assertRaises(errors.FailedPrecondition):
            second["w"]
        self.assertEqual(list(follower), [])

    def test_job_with_one_publication(self):
        for way in ("attached", "pulled"):
            with self.subTest(way):
                job, trainer = self.counting(1)
                for version in job.follow(way=way, timeout=20):
                    assert_whole(self, version)
                    if version.step >= 3:
                        break
                    trainer.start(version.step + 2, 200)  # the first may meet this one, held
                self.doCleanups()

    def test_first_version(self):
        job, trainer = self.counting(8, to=3)
        self.assertEqual(next(job.follow(exact=2)).step, 2)
        self.assertEqual(next(job.follow(since=2)).step, 3)
        with self.assertRaises(errors.DeadlineExceeded):
            next(job.follow(since=3, timeout=0.1))
        follower = job.follow(since=3)
        trainer.to(4)
        self.assertEqual(next(follower).step, 4)

    def test_held_version_does_not_change_under_training(self):
        job, trainer = self.counting()
        version = job.hold(exact=0)
        trainer.to(50)
        assert_whole(self, version)
        until(lambda: 0 in job.versions().published)
        self.assertEqual(job.pull(exact=0).step, 0)

    def test_array_keeps_a_version_that_was_let_go(self):
        job, trainer = self.counting()
        with job.hold(exact=0) as version:
            weights = version["w"]
        trainer.to(50)
        self.assertTrue((weights == 0).all())
        self.assertEqual(self.holders(job), [0])
        del weights
        gc.collect()
        self.assertEqual(self.holders(job), [])
        trainer.to(60)
        with self.assertRaises(errors.OutOfRange):
            job.pull(exact=0)

    def test_two_readers(self):
        job, trainer = self.counting(8)
        seen, failures = ([], []), []

        def read(into):
            try:
                for version in job.follow(timeout=60):
                    assert_whole(self, version)
                    into.append(version.step)
                    if version.step == 30:
                        return
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=read, args=(into,)) for into in seen]
        for thread in threads:
            thread.start()
        trainer.start(30, 5)
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        for into in seen:
            self.assertEqual(into, sorted(set(into)))

    def test_callback(self):
        job, trainer = self.counting()
        trainer.start(30, 5)
        seen = []
        follower = job.follow(lambda version: seen.append(version.step) or version.step < 20)
        self.assertGreaterEqual(seen[-1], 20)
        self.assertEqual(seen, sorted(set(seen)))
        self.assertEqual(list(follower), [])
        trainer.wait()

    def test_error_of_a_callback_ends_it(self):
        job, _ = self.counting(to=1)

        def fail(version):
            raise ZeroDivisionError(version.step)

        with self.assertRaisesRegex(ZeroDivisionError, "1"):
            job.follow(fail)
        self.assertEqual(self.holders(job), [])

    def test_close_by_another_thread_ends_a_wait(self):
        for way in ("attached", "pulled"):
            with self.subTest(way):
                job, _ = self.counting()
                follower = job.follow(way=way, timeout=600)
                next(follower)
                threading.Timer(0.2, follower.close).start()
                began = time.monotonic()
                self.assertEqual(list(follower), [])
                self.assertLess(time.monotonic() - began, 10)
                self.doCleanups()

    def test_another_thread_that_waits_is_said(self):
        job, trainer = self.counting()
        follower = job.follow(since=0, timeout=60)
        waits = threading.Thread(target=next, args=(follower,))
        waits.start()

        def refused():
            try:
                follower._reader.take("at_least", 1, timeout=0)
            except errors.DeadlineExceeded:
                return False
            except errors.FailedPrecondition as error:
                return "another thread waits" in str(error)

        until(refused, what="the other thread's wait")
        trainer.to(1)
        waits.join()
        self.assertEqual(follower._held[0].step, 1)

    def test_timeout_leaves_the_follower_usable(self):
        for way in ("attached", "pulled"):
            with self.subTest(way):
                job, trainer = self.counting()
                follower = job.follow(way=way, timeout=0.2)
                next(follower)
                with self.assertRaisesRegex(errors.DeadlineExceeded, "version >= 1 within 200ms"):
                    next(follower)
                trainer.to(1)
                self.assertEqual(next(follower).step, 1)
                self.doCleanups()

    def test_deleted_job_ends_it(self):
        for way in ("attached", "pulled"):
            with self.subTest(way):
                trainer = self.cluster.train("deleted-" + way)
                follower = self.client.job("deleted-" + way).follow(way=way, timeout=30)
                next(follower)
                threading.Timer(0.2, self.cluster.shardctl, ("delete", "deleted-" + way)).start()
                with self.assertRaises(errors.NotFound):
                    next(follower)
                trainer.stop()


class Interrupted(Reading):
    def interrupt_after(self, seconds):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        self.addCleanup(timer.join)

    def assert_interrupted(self, call):
        began = time.monotonic()
        self.interrupt_after(0.2)
        with self.assertRaises(KeyboardInterrupt):
            call()
        self.assertLess(time.monotonic() - began, 10)

    def test_wait_for_a_version(self):
        job, trainer = self.counting()
        for way in ("attached", "pulled"):
            with self.subTest(way):
                follower = job.follow(way=way, timeout=5)
                last = next(follower).step
                self.assert_interrupted(lambda: next(follower))
                trainer.to(last + 1)
                self.assertEqual(next(follower).step, last + 1)
                follower.close()

    def test_wait_that_was_given_up_is_in_nobodys_way(self):
        job, _ = self.counting(to=3)
        follower = job.follow(since=3, way="attached", timeout=600)
        self.assert_interrupted(lambda: next(follower))
        self.assertEqual(follower._reader.take("exact", 2, timeout=5).step, 2)

    def test_wait_for_a_job(self):
        self.assert_interrupted(lambda: self.client.job("never", timeout=600, await_creation=True))

    def test_other_threads_run_meanwhile(self):
        job, _ = self.counting()
        counted = []
        stop = threading.Event()

        def count():
            while not stop.wait(0.001):
                counted.append(1)

        thread = threading.Thread(target=count)
        thread.start()
        with self.assertRaises(errors.DeadlineExceeded):
            job.pull(at_least=5, timeout=0.5)
        stop.set()
        thread.join()
        self.assertGreater(len(counted), 20)


class Forked(Reading):
    def in_child(self, call):
        """What `call` returned in a child, as text."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                text = str(call())
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(writing, text.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        return text

    def test_calls_of_a_child_are_refused(self):
        job, _ = self.counting(to=1)
        follower = job.follow()
        for call in (self.client.jobs, job.pull, job.versions, lambda: next(follower),
                     lambda: shardmesh.connect(self.cluster.address)):
            self.assertRegex(self.in_child(call), "^FailedPrecondition: process .* was forked from process")
        self.assertEqual(next(follower).step, 1)

    def test_child_that_drops_a_version_lets_nothing_go(self):
        job, trainer = self.counting(to=1)
        held = [job.hold(exact=1), job.follow()]
        next(held[1])
        arrays = [held[0]["w"]]

        def drop():
            total = float(arrays[0].sum())
            held[0].close()
            held.clear()
            arrays.clear()
            gc.collect()
            return total

        self.assertEqual(self.in_child(drop), "200000.0")
        trainer.to(30)
        assert_whole(self, held[0])
        self.assertTrue((arrays[0] == 1).all())


class Ending(Reading):
    """Processes that end while they use the service; os._exit is none of their ways."""

    BEGIN = """
import os, signal, sys, threading, shardmesh
follower = shardmesh.connect(sys.argv[1]).job(sys.argv[2]).follow(way=sys.argv[3], timeout=600)
array = next(follower)["w"]
"""
    INTERRUPTED = """
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
next(follower)
"""
    THREAD_WAITS = """
begun = threading.Event()
def wait():
    begun.set()
    next(follower)
threading.Thread(target=wait, daemon=True).start()
begun.wait()
"""
    CHILD_TOO = """
child = os.fork()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0)
"""

    def test_ends_as_it_would_otherwise(self):
        job, _ = self.counting(8)
        for way in ("attached", "pulled"):
            for text, status in ((self.INTERRUPTED, -signal.SIGINT), (self.THREAD_WAITS, 0), (self.CHILD_TOO, 0)):
                with self.subTest(way=way, text=text):
                    command = [sys.executable, "-c", self.BEGIN + text, self.cluster.address, job.name, way]
                    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
                    self.assertEqual(done.returncode, status, done.stderr)
        until(lambda: not self.holders(job), what="the end of their holds")


if __name__ == "__main__":
    unittest.main()
