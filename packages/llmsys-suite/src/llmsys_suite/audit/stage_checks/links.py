"""Checks of the stage `links`: its columns and bytes by formulas, and its sums in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product

import collectives
import numpy as np
import torch
import torch.distributed as dist

from llmsys_suite import results
from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, Sources, compare_rows
from llmsys_suite.audit.tolerances import SUMS
from llmsys_suite.config import RunConfig
from llmsys_suite.folder import RunFolder
from llmsys_suite.ranks.rank import Run

#: Message sizes in bytes at which the stage measures every algorithm.
SIZES = (1 << 10, 64 << 10, 1 << 20)
#: The collectives that the stage measures.
CASES = ("all_reduce", "reduce_scatter", "all_gather")


def check_records(folder: RunFolder, result: results.Links | results.Skipped) -> Iterator[Check]:
    """Check that the table is complete, and compare its columns with formulas."""
    world = folder.config.world
    if isinstance(result, results.Skipped):
        ranks = Sources("the run", "a run without links")
        yield ranks.check_equal("number of ranks if the stage is skipped", 1, world)
        return
    rows = result.rows
    wrong = [f"{r['case']} {r['algorithm']}" for r in rows if r["wrong"]]
    yield Sources("the bench's own count", "correct sums").check_none("elements in error", wrong)
    for case in CASES:
        pairs = [(r["algorithm"], r["size_bytes"]) for r in rows if r["case"] == case]
        # Other algorithms depend on the hosts of the ranks.
        names = {name for name, _ in pairs} | {folder.config.backend, "auto"}
        if folder.config.device == "cpu":
            names |= {"ring", "tree"} if case == "all_reduce" else {"ring"}
        yield compare_rows(f"{case}: algorithms and sizes", product(names, SIZES), pairs)
    yield from _check_columns(folder.config, rows)


def check_stage(run: Run, result: results.Links | results.Skipped) -> Iterator[Check]:
    """Compare the sums of every all-reduce algorithm on every rank with float64."""
    rows = run.gather(None if isinstance(result, results.Skipped) else result.rows)[0] or []
    errors = []
    for algorithm in dict.fromkeys(r["algorithm"] for r in rows if r["case"] == "all_reduce"):
        for size in dict.fromkeys(r["size_bytes"] for r in rows):
            where = f"{algorithm}, {size} bytes"
            errors.append((_compute_all_reduce_error(run, algorithm, size // 4), where))
    errors_of_ranks = chain(*run.gather(errors))
    if rows:
        algorithms = Sources("every algorithm, every rank", "float64")
        yield algorithms.check_distances("all-reduce", errors_of_ranks, SUMS)


def _check_columns(config: RunConfig, rows: results.Rows) -> Iterator[Check]:
    ring = (config.world - 1) / config.world
    bandwidths = []
    wire = []
    shapes = []
    for r in rows:
        factor = ring * (2 if r["case"] == "all_reduce" else 1)
        moved = factor * r["size_bytes"]
        where = f"{r['case']} {r['algorithm']}, {r['size_bytes']}"
        bandwidths.append((moved / (r["time_us"] * 1e3), r["busbw_gbps"], where))
        plain = r["size_bytes"] / (r["time_us"] * 1e3)
        bandwidths.append((plain, r["algbw_gbps"], f"{where}, algorithm"))
        shapes.append((config.world, r["world"], f"{where}, ranks"))
        shapes.append((r["size_bytes"] / 4, r["count"], f"{where}, elements"))
        if r["case"] == "all_reduce" and r["size_bytes"] >= 2**20:
            if r["algorithm"] in ("gloo", "ring"):
                wire.append((moved, r["wire_bytes"], where))
            elif r["algorithm"] in ("shared_memory", "shared_empty") and r["hosts"] == 1:
                wire.append((0, r["wire_bytes"], where))
    yield Sources("bench", "bytes over time").check_all_equal("bandwidths", bandwidths, 1e-6)
    yield Sources("bench", "the run's ranks and sizes").check_all_equal("shapes", shapes)
    if config.backend == "gloo":
        sockets = Sources("the kernel's sockets", "2 (n-1)/n, or 0 in shared memory")
        yield sockets.check_all_equal("wire bytes of an all-reduce", wire, 0.02)


def _compute_all_reduce_error(run: Run, algorithm: str, count: int) -> float:
    """Return the relative distance of an all-reduce of `count` random numbers from float64."""

    def contribution(rank: int) -> np.ndarray:
        return np.random.default_rng(1000 + rank).standard_normal(count)

    if algorithm == "shared_empty":
        tensor = collectives.shared_empty(count)
    else:
        tensor = torch.empty(count, device=run.device)
    tensor.copy_(torch.from_numpy(contribution(run.rank)))
    if algorithm in ("gloo", "nccl"):
        dist.all_reduce(tensor)
    elif algorithm == "shared_empty":
        collectives.all_reduce(tensor)
    else:
        collectives.all_reduce(tensor, algorithm=algorithm)
    terms = (contribution(rank).astype(np.float32) for rank in range(run.world))
    exact = sum(term.astype(np.float64) for term in terms)
    return reference.compute_distance(tensor.cpu(), torch.from_numpy(np.asarray(exact)))
