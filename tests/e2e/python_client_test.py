#!/usr/bin/env python3
"""shardmesh.client over a real coordinator and two workers: pulled versions, and what it asks."""
import os
import subprocess
import tempfile
import time
import unittest

import numpy as np
import shardmesh
from cluster import Cluster, Trainer, until
from counting import Reading, assert_whole
from shardmesh import errors


class Pull(Reading):
    def test_exact_at_least_and_latest(self):
        job, trainer = self.counting(to=3)
        for version in (job.pull(), job.pull(latest=True), job.pull(exact=3), job.pull(at_least=2)):
            self.assertEqual(version.step, 3)
            self.assertFalse(version.attached)
            assert_whole(self, version)
        old = job.pull(exact=2)
        trainer.to(9)
        self.assertEqual(job.pull(at_least=5).step, 9)
        assert_whole(self, old)

    def test_at_least_waits(self):
        job, trainer = self.counting(to=1)
        trainer.start(4, 100)
        self.assertGreaterEqual(job.pull(at_least=4).step, 4)
        trainer.wait()
        with self.assertRaisesRegex(errors.DeadlineExceeded, "version >= 50"):
            job.pull(at_least=50, timeout=0.2)

    def test_version_that_is_not_there(self):
        job, _ = self.counting(to=7)
        for way in ("pull", "hold"):
            with self.subTest(way), self.assertRaisesRegex(errors.OutOfRange, "published: 6, 7"):
                getattr(job, way)(exact=1)

    def test_arguments(self):
        job, _ = self.counting(to=1)
        for wrong in ({"exact": 1, "latest": True}, {"at_least": 1, "exact": 1}, {"exact": -1}, {"exact": 2**70}):
            with self.subTest(wrong), self.assertRaises(errors.InvalidArgument):
                job.pull(**wrong)
        for limit in (float("nan"), float("inf"), -0.1):
            with self.subTest(limit), self.assertRaisesRegex(errors.InvalidArgument, "of 0 to 1e.07 seconds"):
                job.follow(timeout=limit)
        with self.assertRaises(TypeError):
            job.pull(exact="1")
        with self.assertRaises(errors.InvalidArgument):
            job.follow(way="teleport")

    def test_arrays_are_views_that_cannot_be_written(self):
        job, _ = self.counting(to=2)
        with job.hold(exact=2) as version:
            weights = version["w"]
            self.assertEqual((weights.dtype, weights.shape), (np.float32, (500, 400)))
            self.assertEqual(version["embed.w"].dtype, np.uint16)
            self.assertFalse(weights.flags.writeable)
            self.assertFalse(weights.flags.owndata)
            with self.assertRaises(ValueError):
                weights.flags.writeable = True
            with self.assertRaises(ValueError):
                weights[0] = 1
            self.assertTrue(np.shares_memory(weights, version["w"]))

    def test_names_and_formats(self):
        job, _ = self.counting(to=2)
        version = job.pull()
        self.assertEqual(version.names, ["w", "embed.w", "head.w", "rows.w", "four.w"])
        self.assertEqual(version.ties, {"head.w": "embed.w"})
        self.assertEqual(version.shapes["head.w"], (64, 48))
        self.assertIn("_orig_mod.w", version)
        self.assertNotIn("nothing", version)
        self.assertEqual(version.tensor("_orig_mod.head.w").name, "embed.w")
        with self.assertRaisesRegex(errors.NotFound, "no parameter \"nothing\""):
            version["nothing"]
        with self.assertRaisesRegex(errors.InvalidArgument, "fp8_row; take decode"):
            version["rows.w"]
        rows, four = version.tensor("rows.w"), version.tensor("four.w")
        self.assertEqual({name: (part.dtype.name, part.shape) for name, part in rows.parts.items()},
                         {"codes": ("uint8", (128, 128)), "scales": ("float32", (128, 1))})
        self.assertEqual({name: (part.dtype.name, part.shape) for name, part in four.parts.items()},
                         {"codes": ("uint8", (3500,)), "scales": ("int8", (110,)), "factors": ("float32", (1,)),
                          "mean": ("float32", ())})

    def test_rules_of_names(self):
        name = self.counting(to=1)[0].name
        job = self.client.job(name, root_wrappers=["module"])
        self.assertEqual(job.pull()["module.w"].shape, (500, 400))
        self.assertEqual(job.hold()["module.w"].shape, (500, 400))
        with self.assertRaises(errors.InvalidArgument):
            self.client.job(name, root_wrappers=["not.a.wrapper"])


class Asking(Reading):
    def test_jobs_and_versions(self):
        job, _ = self.counting(to=4)
        status = {each.name: each for each in self.client.jobs()}[job.name]
        self.assertEqual((status.state, status.error, status.waits_for), ("READY", "", ""))
        versions = until(lambda: 4 in (found := job.versions()).published and found)
        self.assertEqual(versions[:2], (4, [3, 4]))
        self.assertEqual((job.mesh, job.publications), ("fsdp=2", 3))
        self.assertIn(job.name, repr(job))

    def test_unknown_job(self):
        began = time.monotonic()
        with self.assertRaisesRegex(errors.NotFound, "nowhere"):
            self.client.job("nowhere")
        self.assertLess(time.monotonic() - began, 10)
        with self.assertRaisesRegex(errors.DeadlineExceeded, "somebody to create it"):
            self.client.job("nowhere", await_creation=True, timeout=0.1)

    def test_job_that_waits_for_workers(self):
        trainer = Trainer(self.cluster.address, "wide", [3, "fsdp=4"])
        self.addCleanup(trainer.stop)
        with self.assertRaisesRegex(errors.DeadlineExceeded, "4 live workers"):
            self.client.job("wide", await_creation=True, timeout=2)
        self.assertEqual({each.name: each for each in self.client.jobs()}["wide"].state, "WAITING")

    def test_coordinator_that_is_not_there(self):
        with self.assertRaises(errors.Unavailable):
            shardmesh.connect("127.0.0.1:1", call_timeout=2).jobs()
        with self.assertRaisesRegex(errors.NotFound, "nowhere.pem"):
            shardmesh.connect("127.0.0.1:1", tls_cert="nowhere.pem")

    def test_digest(self):
        job, _ = self.counting(to=2)
        digest = job.digest()
        self.assertEqual(digest.step, 2)
        self.assertEqual(str(digest), self.cluster.shardctl("digest", job.name).strip())

    def test_lease_keeps_a_version(self):
        job, trainer = self.counting(to=1)
        with job.lease(exact=1, ttl=20) as lease:
            trainer.to(30)
            self.assertEqual(lease.step, 1)
            assert_whole(self, job.pull(exact=1))
            lease.renew(30)
            self.assertGreater(lease.ttl, 25)
        trainer.to(40)
        with self.assertRaises(errors.OutOfRange):
            job.pull(exact=1)
        with self.assertRaises(errors.NotFound):
            lease.renew()
        with self.assertRaises(errors.OutOfRange):
            job.lease(exact=1)

    def test_shardctl_releases_a_lease_with_its_nonce(self):
        job, _ = self.counting(to=1)
        lease = job.lease(exact=1)
        told = self.cluster.shardctl("leases", job.name, "--release", f"{lease.id:x}", "--nonce", f"{lease.nonce:x}")
        self.assertEqual(told, f"released {lease.id:016x}\n")
        with self.assertRaises(errors.NotFound):
            lease.renew()

    def test_checkpoint_and_restore(self):
        job, trainer = self.counting(to=2)
        folder = os.path.join(self.cluster.folder, "checkpoints")
        told = []
        self.client.checkpoint(job, folder, progress=lambda *now: told.append(now))
        self.assertEqual(told[-1][0], told[-1][1])
        trainer.to(5)
        saved = self.client.checkpoint(job.name, folder, keep_last=1)
        self.assertEqual((saved.step, saved.removed_steps), (5, [2]))
        self.assertEqual(saved.digest, job.digest().value)
        again = self.client.checkpoint(job, folder)  # the same bits
        self.assertEqual((again.already_there, again.path, again.digest), (True, saved.path, saved.digest))
        restored = self.client.restore(folder, name="restored", mesh="fsdp=1")
        self.addCleanup(self.cluster.shardctl, "delete", "restored")
        self.assertEqual((restored.name, restored.mesh), ("restored", "fsdp=1"))
        self.assertEqual(restored.digest(), (5, saved.digest))
        assert_whole(self, restored.pull(exact=5))
        with self.assertRaises(errors.NotFound):
            self.client.restore(folder + "-nowhere")

    def test_error_of_progress_ends_the_wait(self):
        job, _ = self.counting(to=1)

        def fail(done, total):
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            self.client.checkpoint(job, os.path.join(self.cluster.folder, "failing"), progress=fail)


class Secured(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = lambda name: os.path.join(folder.name, name)
        self.openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=ca", "-keyout", self.file("ca.key"),
                     "-out", self.file("ca.pem"))
        self.openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=one", "-keyout", self.file("one.key"),
                     "-out", self.file("one.csr"))
        with open(self.file("names"), "w", encoding="utf-8") as names:
            names.write("subjectAltName=DNS:elsewhere")
        self.openssl("x509", "-req", "-in", self.file("one.csr"), "-CA", self.file("ca.pem"), "-CAkey",
                     self.file("ca.key"), "-CAcreateserial", "-out", self.file("one.pem"), "-extfile", self.file("names"))

    def openssl(self, *arguments):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)

    def test_files_and_name_are_those_of_the_connection(self):
        files = {"cert": self.file("one.pem"), "key": self.file("one.key"), "ca": self.file("ca.pem")}
        flags = [word for name, file in files.items() for word in (f"--tls-{name}", file)]
        tls = {f"tls_{name}": file for name, file in files.items()}
        with Cluster(workers=0, coordinator_flags=flags) as cluster:
            client = shardmesh.connect(cluster.address, **tls, tls_name="elsewhere")
            self.assertEqual(client.jobs(), [])
            for wrong in (tls, {**tls, "tls_name": "nowhere"}, {}):
                with self.subTest(wrong), self.assertRaises(errors.Unavailable):
                    shardmesh.connect(cluster.address, **wrong, call_timeout=3).jobs()


if __name__ == "__main__":
    unittest.main()
