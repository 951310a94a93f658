#!/usr/bin/env python3
"""PyTorch trains on another host than the service, over TLS: docs/tls.md, typed as it stands, on two network namespaces.

Skipped, with the reason, where there can be no namespaces.
"""
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)
from two_hosts import TwoHosts, Unavailable

BIN = os.environ.get("SHARDMESH_BIN_DIR", "")
PATIENCE = 120  # seconds, of each command
VARIABLES = "SHARDMESH_TLS_"
ELSEWHERE = """
import json, sys, time
import torch
import shardmesh
import shardmesh.torch as sm

def model():
    return torch.nn.Linear(64, 8)

def optimizer(**tls):
    sm.Optimizer(model(), "AdamW", lr=0.1, job=tls.pop("job", "other"), timeout=20, **{"service": "10.0.0.1:7000", **tls})

def follow(**tls):
    sm.follow(model(), job="first", timeout=20, **{"service": "10.0.0.1:7000", **tls}).close()

def jobs(service="10.0.0.1:7000", **tls):
    shardmesh.connect(service, **tls).jobs()

said = []
for tls in json.loads(sys.argv[1]):
    for call in optimizer, follow, jobs:
        begin = time.monotonic()
        try:
            call(**tls)
        except Exception as error:
            said.append((call.__name__, type(error).__name__, str(error), time.monotonic() - begin))
        else:
            said.append((call.__name__, "OK", "", time.monotonic() - begin))
print(json.dumps(said))
"""
GOOD = {"tls_cert": "certs/trainer.pem", "tls_key": "certs/trainer.key", "tls_ca": "certs/ca.pem"}
READS = """
import shardmesh
import torch
import shardmesh.torch as sm
tls = dict(tls_cert="certs/trainer.pem", tls_key="certs/trainer.key", tls_ca="certs/ca.pem")
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 8))
with sm.follow(model, service="10.0.0.1:7000", job="first", **tls) as following:
    print(following.attached, shardmesh.connect("10.0.0.1:7000", **tls).job("first").pull().step)
"""


class Page:
    """Of docs/tls.md: what is typed, and the programs that are saved, in order."""

    def __init__(self):
        with open(os.path.join(ROOT, "docs", "tls.md"), encoding="utf-8") as page:
            text = page.read()
        self.commands = [block for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if not kind]
        names = re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)^```$", text, re.M | re.S)
        self.programs = dict(names)
        self.says = re.search(r"It says `(.*?)`", text).group(1)
        for spoken, what in (("make_certs.sh", "certificates"), ("shardctl up", "service"), ("export", "variables"),
                             ("torchrun", "train"), ("python follow.py", "follow")):
            setattr(self, what, next(command for command in self.commands if spoken in command))


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class TlsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        try:
            cls.hosts = TwoHosts()
        except Unavailable as reason:
            print(f"SKIPPED: no network namespaces here: {reason}", file=sys.stderr)
            raise unittest.SkipTest(f"no network namespaces here: {reason}") from None
        cls.addClassCleanup(cls.hosts.close)
        cls.folder = tempfile.mkdtemp(prefix="sm-tls-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        os.symlink(os.path.join(ROOT, "deploy"), os.path.join(cls.folder, "deploy"))
        programs = os.path.join(cls.folder, "bin")
        os.mkdir(programs)
        os.symlink(BIN + "/client/cli/shardctl", os.path.join(programs, "shardctl"))
        for name, module in (("python", ""), ("torchrun", " -m torch.distributed.run")):
            with open(os.path.join(programs, name), "w", encoding="utf-8") as script:
                script.write(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n')
            os.chmod(script.name, 0o755)
        cls.environment = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLES)}
        cls.environment.update(PATH=programs + ":" + os.environ["PATH"], OMP_NUM_THREADS="1")
        cls.page = Page()
        for name, text in cls.page.programs.items():
            with open(os.path.join(cls.folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        cls.type(0, cls.page.certificates)
        cls.type(0, cls.page.certificates.replace(" certs ", " foreign "))
        cls.start()

    @classmethod
    def start(cls):
        cls.up = subprocess.Popen(cls.hosts.command(0, "bash", "-c", cls.page.service), cwd=cls.folder,
                                  env=cls.environment, stdout=subprocess.PIPE)
        cls.addClassCleanup(cls.stop)
        said, deadline = b"", time.monotonic() + PATIENCE
        while cls.page.says.encode() not in said:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([cls.up.stdout], [], [], left)[0]:
                raise RuntimeError(f"the service did not say {cls.page.says!r} in time, but {said.decode()}")
            part = os.read(cls.up.stdout.fileno(), 1 << 16)
            if not part:
                raise RuntimeError(f"the service ended before it was ready: {said.decode()}")
            said += part

    @classmethod
    def stop(cls):
        cls.up.terminate()
        cls.up.wait(timeout=60)
        cls.up.stdout.close()

    @classmethod
    def type(cls, host, commands, **variables):
        """What they print."""
        done = subprocess.run(cls.hosts.command(host, "bash", "-e", "-c", commands), cwd=cls.folder,
                              env={**cls.environment, **variables}, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode != 0:
            raise AssertionError(f"{commands}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def digest(self, output):
        return re.search(r"step 10 digest [0-9a-f]{16}", output).group(0)

    def alone(self, service, job, host=0, variables="", **more):
        """The digest of the page's training by one rank."""
        train = self.page.programs["train.py"].replace('service="10.0.0.1:7000", job="first"', f"service={service!r}, job={job!r}")
        with open(os.path.join(self.folder, job + ".py"), "w", encoding="utf-8") as file:
            file.write(train)
        return self.digest(self.type(host, f"{variables}\npython {job}.py", **more))

    def test_1_the_page_as_it_stands_trains_as_one_host_does(self):
        page = self.page
        digest = self.digest(self.type(1, page.variables + page.train))
        self.assertTrue(self.type(1, page.variables + page.follow).endswith("\nat step 10\n"))
        # With a service of its own, which ignores the variables, and on one rank.
        wrong = {VARIABLES + what: "/nowhere" for what in ("CERT", "KEY", "CA", "NAME")}
        self.assertEqual(self.alone(None, "own", **wrong), digest)
        self.assertEqual(self.alone("10.0.0.1:7000", "connected", host=1, variables=page.variables), digest)
        self.assertEqual(self.alone("10.0.0.1:7000", "attached", host=0, variables=page.variables), digest)

    def test_2_arguments_do_without_variables(self):
        self.assertEqual(self.type(1, f"python - <<'END'\n{READS}\nEND\n"), "False 10\n")

    def said(self, host, cases, **variables):
        """Of each case: (call, exception, message) of an Optimizer, follow() and connect().jobs()."""
        program = os.path.join(self.folder, "elsewhere.py")
        with open(program, "w", encoding="utf-8") as file:
            file.write(ELSEWHERE)
        said = json.loads(self.type(host, f"python elsewhere.py '{json.dumps(cases)}'", **variables))
        for call, kind, message, seconds in said:
            self.assertLess(seconds, 15, (call, kind, message))
        return [[one[:3] for one in said[3 * index:3 * index + 3]] for index in range(len(cases))]

    def check(self, said, kind, *texts):
        for call, raised, message in said:
            with self.subTest(call=call, texts=texts):
                self.assertEqual(raised, kind, message)
                for text in texts:
                    self.assertIn(text, message)
                self.assertNotIn("--tls-cert", message)  # that is for programs

    def test_3_who_is_not_let_in_is_told_what_to_do(self):
        foreign = {name: value.replace("certs/", "foreign/") for name, value in GOOD.items()}
        none, stranger, authority, name, missing, nowhere, key = self.said(1, [
            {},
            {**foreign, "tls_ca": GOOD["tls_ca"]},
            {**GOOD, "tls_ca": foreign["tls_ca"]},
            {**GOOD, "tls_name": "other.example"},
            {"tls_cert": GOOD["tls_cert"], "tls_key": GOOD["tls_key"]},
            {**GOOD, "tls_ca": "certs/nowhere.pem"},
            {**GOOD, "tls_key": foreign["tls_key"]},
        ])
        self.check(none, "InvalidArgument", "tls_cert=, tls_key= and tls_ca=", "SHARDMESH_TLS_CERT")
        self.check(stranger, "Unavailable", 'did not sign tls_cert="foreign/trainer.pem"')
        self.check(authority, "Unavailable", 'the authority in tls_ca="foreign/ca.pem" did not sign the server\'s')
        self.check(name, "Unavailable", "other.example", "tls_name= or SHARDMESH_TLS_NAME")
        self.check(missing, "InvalidArgument", "tls_ca= is missing", 'tls_cert="certs/trainer.pem"', "SHARDMESH_TLS_CA")
        self.check(nowhere, "NotFound", 'tls_ca="certs/nowhere.pem" cannot be read')
        self.check(key, "InvalidArgument", 'tls_key="foreign/trainer.key" is not the key of tls_cert="certs/trainer.pem"')

    def test_4_variables_are_named_where_they_are_wrong(self):
        [missing] = self.said(1, [{}], SHARDMESH_TLS_CERT="certs/trainer.pem", SHARDMESH_TLS_KEY="certs/trainer.key")
        self.check(missing, "InvalidArgument", "tls_ca= is missing", "SHARDMESH_TLS_CERT=certs/trainer.pem")
        [none] = self.said(1, [{}], SHARDMESH_TLS_CERT="certs/trainer.pem", SHARDMESH_TLS_KEY="certs/trainer.key",
                           SHARDMESH_TLS_CA="certs/none.pem")
        self.check(none, "NotFound", "SHARDMESH_TLS_CA=certs/none.pem cannot be read")

    def test_5_who_is_on_the_host_without_certificates_is_told(self):
        # 127.0.0.1 is served, too, with TLS.
        [plain] = self.said(0, [{"service": "127.0.0.1:7000"}])
        self.check(plain, "Unavailable", "if it uses TLS, give tls_cert=, tls_key= and tls_ca=")

    def test_6_shardctl_names_flags(self):
        done = subprocess.run(self.hosts.command(1, "shardctl", "jobs", "--coordinator", "10.0.0.1:7000"),
                              env=self.environment, capture_output=True, text=True, timeout=PATIENCE)
        self.assertEqual(done.returncode, 2 if "Usage" in done.stderr else 1)
        self.assertIn("give --tls-cert, --tls-key and --tls-ca, or set SHARDMESH_TLS_CERT", done.stderr)

    def test_7_a_service_that_nobody_could_reach_does_not_start(self):
        for arguments, text in (
            (["--listen", "0.0.0.0:7001"], "--advertise HOST"),
            (["--listen", "127.0.0.1:0", "--advertise", "10.0.0.1"], "no other host reaches"),
            (["--listen", "127.0.0.1:0", "--tls-cert", "certs/server.pem"], "--tls-key and --tls-ca are missing"),
        ):
            with self.subTest(arguments):
                done = subprocess.run(self.hosts.command(0, "shardctl", "up", *arguments), cwd=self.folder,
                                      env=self.environment, capture_output=True, text=True, timeout=PATIENCE)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(text, done.stderr)


if __name__ == "__main__":
    unittest.main()
