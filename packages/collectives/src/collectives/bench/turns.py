"""Contenders that take turns: times that can be compared on a machine whose mood changes.

Notable:
- every contender runs in every round, so whatever else the machine does hits all of them alike, and
  a ratio is taken inside a round;
- a turn starts with a call that is not timed: the contender before has left the caches, and often
  the other ranks' threads, in a state of its own;
- bytes are those that this process has handed to TCP, as its own sockets count them: other programs
  on the interface do not matter. Shared memory and NCCL's own transports are not counted.
"""

import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

import collectives

Contenders = Mapping[str, Callable[[], object]]
# Above this a call is long enough to warm itself up.
WARMED_BYTES, HUGE_BYTES = 32 << 20, 256 << 20
# Where Linux's struct tcp_info has tcpi_bytes_sent (since 4.19).
_TCP_INFO_ROOM, _BYTES_SENT_AT = 256, 200


@dataclass(frozen=True)
class Times:
    """Seconds a call, the slowest rank's, by round; the slowest call; bytes a call."""

    rounds: np.ndarray
    calls: np.ndarray
    wire_bytes: float


def time_in_turns(
    contenders: Contenders, size: int, quick: bool, device: str, *, rounds: int = 0
) -> dict[str, Times]:
    """Every contender in every round, one after the other; one more round before, not counted.

    `size` (bytes) decides how often a contender is called in its turn, and the number of rounds if
    it is not given.
    """
    rounds = rounds or (2 if size > HUGE_BYTES else 5 if quick or size > WARMED_BYTES else 9)
    repeats = max(1, min(20, (4 << 20) // size))
    seconds = np.zeros((len(contenders), rounds, repeats))
    sent = np.zeros(len(contenders))
    for j in range(-1, rounds):
        for i, call in enumerate(contenders.values()):
            if size <= WARMED_BYTES:
                call()
            collectives.barrier() if device == "cpu" else dist.barrier()
            before = sent_bytes()
            for k in range(repeats):
                start = time.perf_counter()
                call()
                if device == "cuda":
                    torch.cuda.synchronize()
                if j >= 0:
                    seconds[i, j, k] = time.perf_counter() - start
            if j >= 0:
                sent[i] += (sent_bytes() - before) / rounds / repeats
    slowest = torch.from_numpy(np.concatenate([seconds.ravel(), sent])).to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    found = slowest.cpu().numpy()
    seconds, sent = found[: seconds.size].reshape(seconds.shape), found[seconds.size :]
    return {
        name: Times(seconds[i].mean(axis=1), seconds[i].ravel(), float(sent[i]))
        for i, name in enumerate(contenders)
    }


def sent_bytes() -> int:
    """Bytes that this process's open TCP connections have sent so far, headers not counted."""
    if not sys.platform.startswith("linux"):
        return 0
    total = 0
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_ROOM)
                    if len(info) >= _BYTES_SENT_AT + 8:
                        total += struct.unpack_from("<Q", info, _BYTES_SENT_AT)[0]
    return total
