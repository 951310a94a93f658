#!/usr/bin/env python3
"""Seeds mistakes into a good Containerfile and expects each to be named."""
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(os.getcwd(), "tools"))
import lint_deploy  # noqa: E402

GOOD = """# A comment
ARG BASE=debian:12-slim
FROM ${BASE} AS build
COPY tools tools
RUN apt-get update \\
 && apt-get install --yes --no-install-recommends g++ \\
 && rm -rf /var/lib/apt/lists/*
FROM ${BASE} AS runtime
USER shardmesh
FROM runtime AS worker
COPY --from=build /out/worker /usr/bin/
ENTRYPOINT ["worker"]
"""


class LintContainerfileTest(unittest.TestCase):
    def test_good_file_passes(self):
        self.assertEqual(list(lint_deploy.lint_containerfile(GOOD)), [])

    def test_each_mistake_is_named(self):
        for old, new, message in (
            ("COPY tools tools", "COPY absent absent", "line 4: COPY absent: not in the repository"),
            ("RUN apt-get", "RUM apt-get", "line 5: unknown instruction RUM"),
            ("apt-get update", "true", "line 5: apt-get install without apt-get update"),
            (" --no-install-recommends", "", "line 5: apt-get install without --yes --no-install-recommends"),
            ("rm -rf /var/lib/apt/lists/*", "true", "line 5: apt's lists are not removed"),
            ("FROM runtime AS worker", "FROM other AS worker", "line 10: FROM other: give a fixed tag"),
            ("FROM runtime AS worker", "FROM debian:latest AS worker", "line 10: FROM debian:latest: give a fixed tag"),
            ("--from=build", "--from=built", "line 11: COPY --from=built: no such stage"),
            ('["worker"]', "worker", "line 12: ENTRYPOINT is not a JSON list"),
            ("USER shardmesh\n", "", "stage worker runs as root"),
        ):
            self.assertIn(old, GOOD)
            found = list(lint_deploy.lint_containerfile(GOOD.replace(old, new)))
            self.assertTrue(any(message in line for line in found), f"{message} not in {found}")

    def test_empty_file_is_named(self):
        self.assertEqual(list(lint_deploy.lint_containerfile("# nothing\n")), ["no FROM"])

    def test_service_links_are_checked(self):
        document = {"services": {"a": {}}, "volumes": {"v": None}}
        service = {"image": "x", "depends_on": ["b"], "network_mode": "service:c", "volumes": ["w:/x", "v:/y", "./z:/z"]}
        self.assertEqual(list(lint_deploy.lint_service("s", service, document, ".")),
                         ["s: no service b", "s: no service c", "s: no volume w"])
        self.assertEqual(list(lint_deploy.lint_service("s", {}, document, ".")), ["s: neither image nor build"])
        build = {"build": {"context": ".", "dockerfile": "absent", "target": "t"}}
        self.assertEqual(list(lint_deploy.lint_service("s", build, document, ".")), ["s: absent does not exist"])


if __name__ == "__main__":
    unittest.main()
