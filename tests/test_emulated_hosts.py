"""Emulated hosts send at the rate that was chosen, and count the bytes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from emulated_hosts import emulated_hosts, explain_refusal

REASON = explain_refusal()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

SCRIPT = Path(__file__).with_name("emulated_hosts.py")
SEND = """
import socket, sys
rank, address, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if rank == 0:
    with socket.create_server((address, 5000)) as server:
        print("listening", flush=True)
        peer, _ = server.accept()
        left = size
        while left:
            left -= len(peer.recv(min(left, 1 << 20)))
        peer.sendall(b"x")
else:
    peer = socket.create_connection((address, 5000))
    peer.sendall(bytes(size))
    peer.recv(1)
"""


def test_the_link_holds_its_rate_and_counts_its_bytes():
    size = 25_000_000
    with emulated_hosts(2, "500mbit") as hosts:
        server = hosts[0].popen(
            [sys.executable, "-c", SEND, "0", hosts[0].address, str(size)], stdout=subprocess.PIPE
        )
        assert server.stdout.readline() == "listening\n"
        before = hosts[1].sent_bytes()
        start = time.monotonic()
        client = hosts[1].popen([sys.executable, "-c", SEND, "1", hosts[0].address, str(size)])
        assert client.wait(30) == 0
        assert server.wait(30) == 0
        server.stdout.close()
        seconds = time.monotonic() - start
        sent = hosts[1].sent_bytes() - before
    assert 1.0 <= sent / size < 1.05
    # 200 Mbit at 500 Mbit/s
    assert seconds > 0.38


def test_command_that_a_signal_ends_on_one_host_is_a_failure():
    command = [sys.executable, SCRIPT, "--hosts", "2", "--"]
    command += ["sh", "-c", 'test "$RANK" = 0 || kill -9 $$']
    assert subprocess.run(command, check=False).returncode == 9


def test_nothing_is_left_behind():
    with emulated_hosts(2, "1gbit") as hosts:
        names = [host.namespace for host in hosts]
        assert all(os.path.exists(f"/run/netns/{name}") for name in names)
    assert not any(os.path.exists(f"/run/netns/{name}") for name in names)
