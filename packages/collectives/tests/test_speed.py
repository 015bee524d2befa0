"""All-reduce beside gloo's, in turns: the ratios that the package promises."""

from functools import partial

import collectives
import numpy as np
import pytest
import torch
import torch.distributed as dist
from collectives import bench
from worker_pool import run_ranks

pytestmark = pytest.mark.timing


def ratios(sizes):
    """Median over rounds of gloo's time over ours, by size: of any tensor, of shared ones."""
    found = {}
    for size in sizes:
        plain = torch.randn(size // 4)
        shared = collectives.shared_empty(size // 4).copy_(plain)
        contenders = {
            "gloo": partial(dist.all_reduce, plain),
            "any": partial(collectives.all_reduce, plain),
            "shared": partial(collectives.all_reduce, shared),
        }
        times = bench.time_in_turns(contenders, size, quick=False, device="cpu")
        found[size] = [
            float(np.median(times["gloo"].rounds / times[name].rounds))
            for name in ("any", "shared")
        ]
    return found


KIB, MIB = 1 << 10, 1 << 20


def test_two_ranks_are_faster_than_gloo_by_what_is_promised():
    found = run_ranks(ratios, 2, (64 * KIB, MIB, 100 * MIB))[0]
    promised = {64 * KIB: (5, 15), MIB: (4, 8), 100 * MIB: (2, 4)}
    for size, (least_any, least_shared) in promised.items():
        assert found[size][0] >= least_any, (size, found)
        assert found[size][1] >= least_shared, (size, found)


def test_four_ranks_are_faster_than_gloo_at_every_size():
    found = run_ranks(ratios, 4, (KIB, 64 * KIB, MIB, 10 * MIB, 100 * MIB))[0]
    assert all(min(pair) >= 1.5 for pair in found.values()), found
