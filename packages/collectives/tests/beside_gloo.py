"""Time `auto` and gloo in interleaved rounds on emulated hosts; rank 0 writes the ratios."""

import json
import sys
from functools import partial
from pathlib import Path

import collectives
import numpy as np
import torch
import torch.distributed as dist
from collectives import bench

KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


def build_calls(kind, size):
    """Return gloo's call and ours, of `size` bytes in total."""
    world = dist.get_world_size()
    short, long = torch.zeros(size // 4 // world), torch.zeros(size // 4 // world * world)
    other, whole = torch.zeros_like(long), torch.zeros(size // 4)
    name, arguments = {
        "all_reduce": ("all_reduce", (whole,)),
        "reduce": ("reduce", (whole, 0)),
        "broadcast": ("broadcast", (whole, 0)),
        "all_gather": ("all_gather_into_tensor", (long, short)),
        "reduce_scatter": ("reduce_scatter_tensor", (short, long)),
        "all_to_all": ("all_to_all_single", (other, long)),
    }[kind]
    return {
        "gloo": partial(getattr(dist, name), *arguments),
        "auto": partial(getattr(collectives, name), *arguments),
    }


def choose_num_rounds(size):
    """Return an odd number of rounds. Long calls on a slow link vary little, so they need few."""
    if size <= 64 << 10:
        return 25
    return 15 if size <= 1 << 20 else 3


def main(path, sizes):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ratios = {}
    for kind in KINDS:
        for size in sizes:
            times = bench.time_interleaved(
                build_calls(kind, size), size, False, "cpu", rounds=choose_num_rounds(size)
            )
            ratio = np.median(times["auto"].rounds / times["gloo"].rounds)
            ratios[f"{kind} {size}"] = float(ratio)
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(ratios))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], tuple(map(int, sys.argv[2:])))
