"""Emulated hosts on one machine: network namespaces that are joined by links of a chosen rate.

    python tests/emulated_hosts.py --hosts 2 --rate 2gbit -- python -m ddp.bench --quick

runs the command in each namespace, once or `--ranks` times, with torchrun's variables set (RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME). A token bucket limits the rate at which
each host sends; the kernel's counters give the bytes that crossed the link. It needs root and
iproute2.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

PORT = 29500  # free in every new namespace


@dataclass(frozen=True)
class Host:
    """One network namespace, whose interface `device` leads to all other hosts."""

    number: int
    namespace: str
    device: str
    address: str

    def popen(self, command: list[str], **kwargs: object) -> subprocess.Popen[str]:
        """Start `command` inside this host."""
        inside = ["ip", "netns", "exec", self.namespace, *command]
        return subprocess.Popen(inside, text=True, **kwargs)  # type: ignore[call-overload,no-any-return]

    def sent_bytes(self) -> int:
        """Return the number of bytes that left this host so far, headers included."""
        path = f"/sys/class/net/{self.device}/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self.namespace, "cat", path))

    def environment(self, hosts: list[Host], ranks: int = 1, local: int = 0) -> dict[str, str]:
        """Return the environment with which a rank of this host joins the group of all hosts."""
        return {
            "RANK": str(self.number * ranks + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(len(hosts) * ranks),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": self.device,
        }


@cache
def explain_refusal() -> str:
    """Return the reason why this machine cannot emulate hosts, or an empty string if it can."""
    if sys.platform != "linux":
        return "network namespaces exist on linux only"
    if os.geteuid() != 0:
        return "creating network namespaces needs root"
    try:
        with emulated_hosts(2, "1gbit"):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        return f"this kernel or its rights do not allow network namespaces: {detail.strip()}"


@contextmanager
def emulated_hosts(count: int, rate: str) -> Iterator[list[Host]]:
    """Provide `count` hosts on one switch; each sends at most at `rate`, such as "2gbit"."""
    tag = uuid.uuid4().hex[:6]
    switch = f"sw{tag}"
    hosts = [Host(i, f"h{tag}{i}", f"v{tag}{i}", f"10.77.0.{i + 1}") for i in range(count)]
    namespaces = []
    try:
        _run("ip", "netns", "add", switch)
        namespaces.append(switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up", "mtu", "9000")
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            namespaces.append(host.namespace)
            _connect(host, switch, rate)
        yield hosts
    finally:
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False)


def run_everywhere(
    hosts: list[Host],
    command: list[str],
    environment: Mapping[str, str],
    ranks: int = 1,
    *,
    seconds: float | None = None,
) -> list[int]:
    """Run a command as `ranks` processes on every host and return their exit statuses."""
    running = [
        host.popen(command, env={**environment, **host.environment(hosts, ranks, local)})
        for host in hosts
        for local in range(ranks)
    ]
    try:
        return [process.wait(seconds) for process in running]
    finally:
        for process in running:
            process.kill()


def _connect(host: Host, switch: str, rate: str) -> None:
    port, inside = f"p{host.device}", host.namespace
    link = ("link", "add", host.device, "netns", inside, "type", "veth")
    _run("ip", *link, "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "br0", "mtu", "9000", "up")
    _run("ip", "-n", inside, "addr", "add", f"{host.address}/24", "dev", host.device)
    _run("ip", "-n", inside, "link", "set", "lo", "up")
    _run("ip", "-n", inside, "link", "set", host.device, "mtu", "9000", "up")
    token_bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    _run("tc", "-n", inside, "qdisc", "add", "dev", host.device, "root", *token_bucket)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Run one command on every emulated host and return the largest exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="2gbit")
    parser.add_argument("--ranks", type=int, default=1, help="processes on each host")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    # On SIGTERM the context manager below still removes the namespaces.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with emulated_hosts(arguments.hosts, arguments.rate) as hosts:
        statuses = run_everywhere(hosts, arguments.command, os.environ, arguments.ranks)
        # The status of a process that a signal has ended is negative.
        return max(map(abs, statuses))


if __name__ == "__main__":
    sys.exit(main())
