"""Benchmark of this package's collectives against the backend's own, with nccl-tests' columns.

    python -m collectives.bench --quick
    python -m collectives.bench --world 2 4 6 --json rows.json --plot bandwidth.png

Sizes and bandwidths are defined as in nccl-tests. The size is that of the whole array. algbw is
size / time, and busbw is algbw times 2(n-1)/n for all-reduce, and (n-1)/n for reduce-scatter and
all-gather. `ratio` is the backend's own time divided by ours in the same round (in place for
all-reduce); its columns are the median and the 10th and 90th percentiles over the rounds.
`wire_bytes` are the bytes that a rank sends over TCP per call, the maximum over the ranks. `runs`
is the algorithm that ran. Each rank needs memory for twice the largest size.
"""

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes

import collectives
from collectives.algorithms.reduction import split_into_pieces
from collectives.bench.interleaved import Times, time_interleaved
from collectives.choice.cost import list_candidates
from collectives.groups import get_communicator

Row = dict[str, float | int | str]
# Number of elements after which the values of a tensor repeat.
BLOCK = 1 << 20
TIMEOUT = timedelta(seconds=200)
QUICK = (1 << 10, 64 << 10, 1 << 20)
FULL = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 1 << 20, 10 << 20, 100 << 20, 1 << 30)
# The name of the function for each collective.
FUNCTIONS = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_gather": "all_gather_into_tensor",
}
CASES = tuple(FUNCTIONS)


def bench(
    *,
    device: str = "cpu",
    quick: bool = False,
    worlds: Sequence[int] = (),
    sizes: Sequence[int] = (),
    cases: Sequence[str] = CASES,
) -> list[Row]:
    """Measure the collectives and return the rows; under torchrun, on rank 0 only.

    Under torchrun, the launched group is measured. Otherwise this function starts groups of new
    processes, one group per number of ranks in `worlds`. The default is one group of two processes,
    or of one process on a machine with one GPU. `sizes` are in bytes; `cases` are keys of
    `FUNCTIONS`. Raise ValueError if a group has no rank or a size is too small.
    """
    sizes = tuple(sizes) or (QUICK if quick else FULL)
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        worlds = [int(os.environ["WORLD_SIZE"])]
    elif not worlds:
        worlds = [min(2, torch.cuda.device_count()) if device == "cuda" else 2]
    if min(worlds) < 1:
        raise ValueError(f"expected groups of at least one rank, got {min(worlds)} ranks")
    if min(sizes) < 4 * max(worlds):
        raise ValueError(
            f"expected sizes of at least {4 * max(worlds)} bytes, one float32 for each of "
            f"{max(worlds)} ranks, got {min(sizes)}"
        )
    if "RANK" in os.environ:
        is_new = not dist.is_initialized()
        if is_new:
            dist.init_process_group(backend, timeout=TIMEOUT)
        rows = _measure(device, sizes, quick, cases)
        if is_new:
            dist.destroy_process_group()
        return rows if int(os.environ["RANK"]) == 0 else []
    rows = []
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            args = (world, folder, backend, device, sizes, quick, cases)
            start_processes(_run_rank, args=args, nprocs=world, start_method="spawn")
            rows += json.loads(Path(folder, "rows").read_text())
    return rows


def _run_rank(rank: int, world: int, folder: str, backend: str, *args: Any) -> None:
    """Measure on one rank of a new group; rank 0 writes the rows to the folder."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("LOCAL_RANK", str(rank))
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    rows = _measure(*args)
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _measure(device: str, sizes: Sequence[int], quick: bool, cases: Sequence[str]) -> list[Row]:
    """Return the rows of every case and size, measured on the current group."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rows = []
    for case, size in itertools.product(cases, sizes):
        rows += _measure_rows(case, size, device, quick)
    return rows


class _Case:
    """One collective at one size: its contenders and their tensors."""

    def __init__(self, kind: str, size: int, device: str) -> None:
        self.kind = kind
        self.size = size
        self.device = device
        #: The name of the backend, whose own collective is a contender.
        self.native = dist.get_backend()
        world = dist.get_world_size()
        #: Elements of the tensor for all-reduce, otherwise of each rank's part.
        self.count = size // 4 // (1 if kind == "all_reduce" else world)
        result = torch.empty(self.count * (world if kind == "all_gather" else 1), device=device)
        source = torch.empty(self.count * (world if kind == "reduce_scatter" else 1), device=device)
        #: The function of each contender.
        self.calls: dict[str, Callable[..., object]] = {self.native: getattr(dist, FUNCTIONS[kind])}
        ours = getattr(collectives, FUNCTIONS[kind])
        for name in ("auto", *_list_algorithms(kind, device)):
            self.calls[name] = partial(ours, algorithm=name)
        #: The result and the source of each contender.
        self.tensors = dict.fromkeys(self.calls, (result, source))
        if kind == "all_reduce" and device == "cpu":
            # `result` and `shared` are each other's source, which saves a third tensor.
            shared = collectives.shared_empty(self.count)
            self.tensors = dict.fromkeys(self.calls, (result, shared))
            self.tensors["shared_empty"] = (shared, result)
            self.calls["shared_empty"] = ours

    def run(self, name: str) -> None:
        """Run a contender from its source to its result."""
        result, source = self.tensors[name]
        if self.kind == "all_reduce":
            self.calls[name](result.copy_(source))
        else:
            self.calls[name](result, source)

    def run_in_place(self, name: str) -> None:
        """Run an all-reduce in place, on the result tensor."""
        self.calls[name](self.tensors[name][0])

    def count_wrong(self, name: str, expected: Sequence[Tensor], *, in_place: bool) -> int:
        """Run a contender on known values and return the number of wrong elements."""
        result, source = self.tensors[name]
        result.fill_(torch.nan)
        block = _make_values(dist.get_rank(), self.device)
        for part in (result if in_place else source).split(self.count):
            for piece in split_into_pieces(part, BLOCK):
                piece.copy_(block[: piece.numel()])
        if in_place:
            self.run_in_place(name)
        else:
            self.run(name)
        parts = result.split(self.count)
        return sum(_count_wrong(part, block) for part, block in zip(parts, expected, strict=False))


def _measure_rows(kind: str, size: int, device: str, quick: bool) -> list[Row]:
    """Return one row per contender for a collective at one size."""
    case = _Case(kind, size, device)
    expected = [_make_values(rank, device) for rank in range(dist.get_world_size())]
    if kind != "all_gather":
        expected = [torch.stack(expected).sum(0)]
    rows: dict[str, Row] = {name: {} for name in case.calls}
    modes = {"": False, "in_place_": True} if kind == "all_reduce" else {"": False}
    for prefix, in_place in modes.items():
        run = case.run_in_place if in_place else case.run
        wrong = {name: case.count_wrong(name, expected, in_place=in_place) for name in case.calls}
        contenders = {name: partial(run, name) for name in case.calls}
        times = time_interleaved(contenders, size, quick, device)
        for name, row in rows.items():
            for column, value in _compute_speed(kind, size, times[name]).items():
                row[prefix + column] = value
            row[f"{prefix}wrong"] = wrong[name]
            # The in-place ratios replace the out-of-place ratios.
            row |= _compute_ratios(times, name, case.native)
    # The choice of "auto" is known only after its calls.
    return [_describe_row(kind, name, size, device) | row for name, row in rows.items()]


def _list_algorithms(kind: str, device: str) -> list[str]:
    """Return the names of this package's algorithms, which run on CPU tensors only."""
    if device != "cpu":
        return []
    topology = get_communicator().topology
    return list(list_candidates(kind, topology.ranks_per_host, shared=topology.is_single_host))


def _make_values(rank: int, device: str) -> Tensor:
    """Return the block of values that is repeated in a rank's tensor."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(BLOCK, generator=generator).to(device)


def _count_wrong(result: Tensor, block: Tensor) -> int:
    """Return how many elements of `result` differ from the repeated block."""
    wrong = 0
    for piece in split_into_pieces(result, BLOCK):
        wrong += int((~piece.isclose(block[: piece.numel()], rtol=1e-5, atol=1e-5)).sum())
    return wrong


def _describe_row(kind: str, name: str, size: int, device: str) -> Row:
    """Return the columns that identify a row."""
    comm = get_communicator()
    # The array is a multiple of one float32, and of one per rank if it is scattered or gathered.
    multiple = 4 if kind == "all_reduce" else 4 * comm.world_size
    whole = size // multiple * multiple
    runs = "shared_memory" if name == "auto" else name
    if name == "auto" and device != "cpu":
        runs = dist.get_backend()
    elif name == "auto" and not comm.topology.is_single_host:
        # A single rank runs the ring without a choice.
        known = comm.choices
        runs = known.get((kind, whole, True)) or known.get((kind, whole, False), "ring")
    return {
        "case": kind,
        "algorithm": name,
        "runs": runs,
        "world": dist.get_world_size(),
        "hosts": len(comm.topology.hosts),
        "size_bytes": size,
        "count": size // 4,
        "type": "float32",
        "redop": "none" if kind == "all_gather" else "sum",
    }


def _compute_speed(kind: str, size: int, times: Times) -> Row:
    """Return the columns of time and bandwidth."""
    world = dist.get_world_size()
    seconds = float(np.median(times.rounds))
    factor = (2 if kind == "all_reduce" else 1) * (world - 1) / world
    return {
        "time_us": seconds * 1e6,
        "p99_us": float(np.quantile(times.calls, 0.99)) * 1e6,
        "algbw_gbps": size / seconds / 1e9,
        "busbw_gbps": size / seconds / 1e9 * factor,
    }


def _compute_ratios(times: dict[str, Times], name: str, native: str) -> Row:
    """Return the columns that compare a contender with the backend's own collective."""
    by_round = times[native].rounds / times[name].rounds
    return {
        "wire_bytes": times[name].wire_bytes,
        "ratio_p50": float(np.median(by_round)),
        "ratio_p10": float(np.quantile(by_round, 0.1)),
        "ratio_p90": float(np.quantile(by_round, 0.9)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m collectives.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--quick", action="store_true", help="measure fewer sizes and rounds")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--world", type=int, nargs="+", default=[], help="numbers of ranks")
    parser.add_argument("--sizes", type=int, nargs="+", default=[], help="sizes in bytes")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES, help="default: all")
    parser.add_argument("--plot", type=Path, help="plot the bandwidth by size to this file")
    args = parser.parse_args(argv)
    rows = bench(
        device=args.device, quick=args.quick, worlds=args.world, sizes=args.sizes, cases=args.cases
    )
    # Under torchrun only rank 0 has rows.
    if not rows:
        return
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot:
        from collectives.bench.plot import plot

        plot(rows, args.plot)


def table(rows: list[Row]) -> str:
    """Return rows as aligned text, with one block per set of columns."""
    blocks = []
    for columns, group in itertools.groupby(rows, key=tuple):
        cells = [list(columns)]
        for row in group:
            values = row.values()
            cells.append([f"{v:.4g}" if isinstance(v, float) else str(v) for v in values])
        widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
        lines = []
        for line in cells:
            lines.append("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
