"""Two hosts for tests: network namespaces that a pair of virtual interfaces joins. Needs root and iproute2."""
import os
import shutil
import subprocess

ADDRESSES = "10.0.0.1", "10.0.0.2"


class Unavailable(Exception):
    """There can be none here; says why."""


class TwoHosts:
    """They go with close(), and what runs there must have ended before."""

    def __init__(self):
        self.names = [f"sm-{number}-{os.getpid()}" for number in (1, 2)]
        if shutil.which("ip") is None:
            raise Unavailable("iproute2's ip is not installed")
        if os.geteuid() != 0:
            raise Unavailable("this user is not root")
        try:
            for name in self.names:
                self._ip("netns", "add", name)
                self._ip("-n", name, "link", "set", "lo", "up")
            first, second = self.names
            self._ip("-n", first, "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", second)
            for name, address in zip(self.names, ADDRESSES):
                self._ip("-n", name, "addr", "add", address + "/24", "dev", "veth0")
                self._ip("-n", name, "link", "set", "veth0", "up")
        except Unavailable:
            self.close()
            raise

    @staticmethod
    def _ip(*arguments):
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            raise Unavailable(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    def command(self, host, *command):
        """That runs on the first (0) or second (1) one."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)
