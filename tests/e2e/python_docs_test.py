#!/usr/bin/env python3
"""The examples of docs/python.md, "Versions of a running job", run with one. The current folder is the repository's."""
import doctest
import unittest

import shardmesh
from cluster import Cluster, until


class DocsTest(unittest.TestCase):
    def test_examples_print_what_the_page_says(self):
        with open("docs/python.md", encoding="utf-8") as control:
            section = control.read().partition("## Versions of a running job\n")[2].partition("\n## ")[0]
        with Cluster() as cluster:
            cluster.train("gpt", to=12)
            job = shardmesh.connect(cluster.address).job("gpt")
            until(lambda: job.versions().published == [11, 12])
            text = section.replace("127.0.0.1:7000", cluster.address)
            runner = doctest.DocTestRunner()
            runner.run(doctest.DocTestParser().get_doctest(text, {}, "docs/python.md", "docs/python.md", 0))
        self.assertGreater(runner.tries, 15)
        self.assertEqual(runner.failures, 0)


if __name__ == "__main__":
    unittest.main()
