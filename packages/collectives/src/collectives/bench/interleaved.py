"""Interleaved timing of contenders, on machines whose speed changes over time.

Every contender runs in every round, so other load on the machine affects all of them, and ratios
are computed within a round. A contender's first call in a round is an untimed warm-up call, because
the previous contender has changed the caches and the state of the ranks' threads. Long calls need
no warm-up.

Wire bytes are the data bytes that TCP has sent for the sockets of this process, including
retransmissions. Other programs on the interface do not matter. Shared memory and NCCL's own
transports are not counted.
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
# A call with more bytes takes so long that it does not need a warm-up call.
WARM_UP_BYTES = 32 << 20
HUGE_BYTES = 256 << 20
# Offset of tcpi_bytes_sent in Linux's struct tcp_info (since 4.19), and the size that is read.
_BYTES_SENT_OFFSET = 200
_TCP_INFO_BYTES = 256


@dataclass(frozen=True)
class Times:
    """The times of one contender; each time is the time of the slowest rank."""

    #: Mean seconds per call, by round.
    rounds: np.ndarray
    #: Seconds of every call.
    calls: np.ndarray
    #: Bytes per call that a rank sent over TCP, the maximum over the ranks.
    wire_bytes: float


def time_interleaved(
    contenders: Contenders, size: int, quick: bool, device: str, *, rounds: int = 0
) -> dict[str, Times]:
    """Time every contender in every round; the first round is not counted.

    `size` (bytes) determines the number of calls per round, and the number of rounds unless
    `rounds` is passed.
    """
    rounds = rounds or _choose_num_rounds(size, quick)
    repeats = max(1, min(20, (4 << 20) // size))
    seconds = np.zeros((len(contenders), rounds, repeats))
    sent = np.zeros(len(contenders))
    for j in range(-1, rounds):
        for i, call in enumerate(contenders.values()):
            if size <= WARM_UP_BYTES:
                call()
            (collectives if device == "cpu" else dist).barrier()
            bytes_before = count_sent_bytes()
            call_seconds = [_measure_call(call, device) for _ in range(repeats)]
            if j >= 0:
                seconds[i, j] = call_seconds
                sent[i] += (count_sent_bytes() - bytes_before) / rounds / repeats
    slowest = torch.from_numpy(np.concatenate([seconds.ravel(), sent])).to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    values = slowest.cpu().numpy()
    seconds = values[: seconds.size].reshape(seconds.shape)
    sent = values[seconds.size :]
    return {
        name: Times(seconds[i].mean(axis=1), seconds[i].ravel(), float(sent[i]))
        for i, name in enumerate(contenders)
    }


def _choose_num_rounds(size: int, quick: bool) -> int:
    if size > HUGE_BYTES:
        return 2
    return 5 if quick or size > WARM_UP_BYTES else 9


def _measure_call(call: Callable[[], object], device: str) -> float:
    start_time = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_time


def count_sent_bytes() -> int:
    """Return the bytes that this process's open TCP connections have sent, without headers."""
    if not sys.platform.startswith("linux"):
        return 0
    return sum(_count_socket_bytes(int(name)) for name in os.listdir("/proc/self/fd"))


def _count_socket_bytes(descriptor: int) -> int:
    """Return the bytes that a TCP socket has sent, or 0 for any other file or a closed one."""
    with suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                if len(info) >= _BYTES_SENT_OFFSET + 8:
                    return int(struct.unpack_from("<Q", info, _BYTES_SENT_OFFSET)[0])
    return 0
