#!/usr/bin/env python3
"""Trains handwritten digits on three hosts, loses one of them whole in the middle, and compares the bits with one host.

The hosts are network namespaces on this machine, each with a shardmesh-node and two workers; what crosses between them
goes over TLS. The coordinator and two trainers are beside them. The job runs twice, with the same seed, slots and steps:
  1. on ddp=3,fsdp=2: each host has a replica of both shards. After a third of the steps one host is killed, node and
     workers at once: the job continues on the two others. After two thirds the host is started again, and
     `shardctl reshard` brings the job back to all three while it trains
  2. on one worker of a host of its own, undisturbed
Then a table: steps, steps per second, mesh, digest of weights and optimizer state. The digests must be one value.

Needs root, since only root may make network namespaces.

Example: sudo ./demo hosts --steps 600
"""
import argparse
import os
import signal
import subprocess
import sys
import time

import demo
from demo import HERE, Failure, Table

HOSTS, WORKERS, LOST = 3, 2, 1
MESH = "ddp=3,fsdp=2"
NET, HERE_ADDRESS = "10.213.80", "10.213.80.1"
TIMEOUT_MS = 1000  # silence after which a worker is lost


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin-dir", default=HERE.parents[1] / "bazel-bin",
                        help="where the built programs are (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=900, help="steps of each run (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that one step may take (default: %(default)s)")
    parser.add_argument("--keep-logs", metavar="DIR", help="keep the logs of all processes in a new folder below this one")
    return parser.parse_args()


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failure(f"ip {' '.join(arguments)}: {done.stderr.strip()}; network namespaces are needed for this demo")


class Hosts:
    """Network namespaces on one bridge, which this machine is on as well."""

    def __init__(self):
        self.bridge, self.names = f"smdm{os.getpid()}", [f"shardmesh-demo-{os.getpid()}-{host}" for host in range(HOSTS)]

    @staticmethod
    def address(host):
        return f"{NET}.{11 + host}"

    def __enter__(self):
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{HERE_ADDRESS}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for host, name in enumerate(self.names):
            link = f"smdl{os.getpid()}-{host}"
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("link", "add", link, "type", "veth", "peer", "name", "veth0", "netns", name)
            ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
            ip("link", "set", link, "master", self.bridge, "up")
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)


class HostsCluster(demo.Cluster):
    """The coordinator on this machine, a node with its workers on each host, TLS between all."""

    def __init__(self, bin_dir, folder, hosts):
        super().__init__(bin_dir, folder)
        self.hosts, self.nodes = hosts, {}
        self.address = f"{HERE_ADDRESS}:0"
        addresses = ",".join([HERE_ADDRESS, *map(hosts.address, range(HOSTS))])
        certs = self.folder / "certs"
        subprocess.run([HERE.parents[1] / "deploy" / "make_certs.sh", certs, f"all={addresses}"], check=True,
                       capture_output=True)
        os.environ.update(SHARDMESH_TLS_CERT=str(certs / "all.pem"), SHARDMESH_TLS_KEY=str(certs / "all.key"),
                          SHARDMESH_TLS_CA=str(certs / "ca.pem"))
        self.tls = ["--tls-cert", certs / "all.pem", "--tls-key", certs / "all.key", "--tls-ca", certs / "ca.pem"]

    def spawn(self, name, *arguments, log, **options):
        if name == "shardmesh-coordinator":
            arguments = [*arguments, "--heartbeat-timeout-ms", TIMEOUT_MS, "--heartbeat-interval-ms", 100, *self.tls]
        return super().spawn(name, *arguments, log=log, **options)

    def start_host(self, host):
        address = self.hosts.address(host)
        for file in self.addresses(host):
            file.unlink(missing_ok=True)
        self.nodes[host] = self.spawn(
            "shardmesh-node", "--coordinator", self.address, "--workers", WORKERS, "--name", f"h{host}", "--local-dir",
            self.folder / f"local-{host}", "--address-dir", self.folder / "workers", "--stop-grace", 5, "--", "--listen",
            f"{address}:0", "--group-address", address, *self.tls, log=f"host-{host}",
            prefix=["ip", "netns", "exec", self.hosts.names[host]])

    def addresses(self, host):
        """The files that the host's workers write when they are there."""
        return [self.folder / "workers" / f"h{host}-{i}" for i in range(WORKERS)]

    def await_host(self, host):
        for file in self.addresses(host):
            self.await_file(file, self.nodes[host], f"node of host {host}, or its worker {file.name},")

    def kill_host(self, host):
        """What a power failure does."""
        workers = self.shardctl("status")  # of the job
        pids = [worker["pid"] for worker in workers if worker["worker"].startswith(f"h{host}-")]
        self.nodes[host].kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def reshard(self, job):
        """Back to all hosts: the coordinator hears of new workers a moment after they are there."""
        deadline = time.monotonic() + 30
        while True:
            try:
                return self.shardctl("reshard", job, "--mesh", MESH)
            except Failure:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def hosts_of(self, job):
        return sorted(f"{len(host['ranks'])} ranks on host {host['workers'][0][1]}"
                      for host in self.shardctl("plan", job)["hosts"])


class HostsRun(demo.Run):
    """Its trainers open the job again when it loses a host, so a step may be told to one of them only."""

    def has_stepped_since(self, moment):
        return any(when > moment for made in self.made for _, when in list(made)[-1:])

    def longest_pause_since(self, moment):
        times = sorted(when for _, when in list(self.made[0]) if when >= moment)
        return max((b - a for a, b in zip([moment, *times], times)), default=0.0)

    def result(self):
        for events in self.events:
            events.join()
        digest = self.cluster.shardctl("digest", self.job)
        return {"run": self.title, "steps": digest["step"], "digest": digest["digest"],
                "steps_per_second": self.events[0].get("done")["steps_per_second"]}


def disturbed_run(cluster, flags, progress, console):
    run = HostsRun(cluster, flags, "3 hosts, one killed", "digits-hosts", MESH, [("0,1", ""), ("2,3", "")], remote=True)
    state = {}

    def disturb(step):
        if "killed" not in state and step >= flags.steps // 3:
            state["before"] = cluster.hosts_of(run.job)
            cluster.kill_host(LOST)
            state["killed"], state["killed_at"] = time.monotonic(), run.step()
        elif "killed" in state and "reopened" not in state and run.events[0].get("reopened"):
            state["reopened"] = time.monotonic()
        elif "reopened" in state and "went_on" not in state and run.has_stepped_since(state["reopened"]):
            state["went_on"] = run.longest_pause_since(state["killed"])
            state["between"] = cluster.hosts_of(run.job)
        elif "went_on" in state and "back" not in state and step >= flags.steps * 2 // 3:
            cluster.start_host(LOST)
            cluster.await_host(LOST)
            state["back"] = time.monotonic()
            cluster.reshard(run.job)
            state["after"] = cluster.hosts_of(run.job)

    demo.follow(run, progress, on_step=disturb)
    if "after" not in state:
        raise Failure(f"training ended before the host was killed and back; use more than {flags.steps} --steps")
    moved = run.longest_pause_since(state["back"])
    console.print(f"host {LOST} killed whole at step {state['killed_at']}: the next step was committed "
                  f"{state['went_on'] * 1000:.0f} ms later ({', '.join(state['before'])}; then {', '.join(state['between'])})")
    console.print(f"host {LOST} started again, and the job brought back to {MESH} while it trained: longest pause "
                  f"{moved * 1000:.0f} ms ({', '.join(state['after'])})")
    return dict(run.result(), mesh=MESH)


def undisturbed_run(cluster, flags, progress):
    run = HostsRun(cluster, flags, "1 worker, undisturbed", "digits-1", "fsdp=1", [("0,1,2,3", "")], remote=True)
    demo.follow(run, progress)
    return dict(run.result(), mesh="fsdp=1")


def report(console, results, flags):
    table = Table(title="the same job, twice")
    for column in ("run", "mesh", "steps", "steps/s", "digest"):
        table.add_column(column, justify="right" if column.startswith("steps") else "left", no_wrap=True)
    for row in results:
        table.add_row(row["run"], row["mesh"], str(row["steps"]), f"{row['steps_per_second']:.0f}", row["digest"])
    console.print(table)
    if any(row["steps"] != flags.steps for row in results):
        raise Failure(f"a run has not {flags.steps} steps")
    if len({row["digest"] for row in results}) != 1:
        raise Failure("the digests differ")
    console.print("one digest, with a host lost on the way and without; no step lost")


def both_runs(cluster, flags, console):
    cluster.start_coordinator()
    for host in range(HOSTS):
        cluster.start_host(host)
    for host in range(HOSTS):
        cluster.await_host(host)
    console.print(f"coordinator at {cluster.address}, {HOSTS} hosts of {WORKERS} workers; {flags.steps} steps, bf16_sr "
                  "weights, AdamW, TLS between all")
    with demo.bars(console) as progress:
        results = [disturbed_run(cluster, flags, progress, console), undisturbed_run(cluster, flags, progress)]
    report(console, results, flags)


def main():
    flags, console = parse_arguments(), demo.terminal()
    if os.geteuid() != 0:
        console.print("demo hosts: only root may make network namespaces; run: sudo ./demo hosts", style="bold red")
        return 1

    def body(folder):
        with Hosts() as hosts:
            cluster = HostsCluster(flags.bin_dir, folder, hosts)
            try:
                both_runs(cluster, flags, console)
            finally:
                cluster.stop()

    return demo.run(flags, console, body)


if __name__ == "__main__":
    sys.exit(main())
