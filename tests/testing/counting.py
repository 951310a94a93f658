"""Jobs that count, for tests in Python: every element of version N is N."""
import json
import unittest

import numpy as np
import shardmesh
from cluster import Cluster


def assert_whole(test, version):
    """Every element of it says which version it is, quantized ones as well as the code can."""
    step = version.step
    for name in ("w", "four.w"):
        test.assertTrue((version.decode(name) == step).all(), f"{name} of version {step}")
    test.assertTrue((version.decode("embed.w") == step).all(), f"embed.w of version {step}")
    np.testing.assert_allclose(version.decode("rows.w"), step, rtol=1 / 16)


class Reading(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster()
        cls.addClassCleanup(cls.cluster.close)
        cls.client = shardmesh.connect(cls.cluster.address)

    def counting(self, *arguments, to=0):
        """A new job, named after the test."""
        name = self.id().rpartition(".")[2][:100]
        trainer = self.cluster.train(name, *arguments, to=to)
        self.addCleanup(self.cluster.shardctl, "delete", name)
        self.addCleanup(trainer.stop)
        return self.client.job(name), trainer

    def holders(self, job):
        leases = json.loads(self.cluster.shardctl("leases", job.name, "--json"))
        return [holder["version"] for holder in leases["holders"]]
