"""Time collectives beside the backend's own, in turns: nccl-tests' columns, p99 and wire bytes.

    python -m collectives.bench --quick
    python -m collectives.bench --world 2 4 6 --json rows.json --plot bandwidth.png

Sizes and bandwidths are defined as nccl-tests defines them: the size is the whole array; algbw is
size / time, and busbw is algbw times 2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter and
all-gather. `ratio` is the backend's own time over ours, pair by pair in the same round (in place
for all-reduce). `wire_bytes` are the bytes that a rank hands to TCP in a call, the largest of all
ranks'; `runs` is the algorithm that ran. A rank holds twice the largest size in memory.
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
from collectives.algorithms.reduction import in_pieces
from collectives.bench.turns import Times, time_in_turns
from collectives.choice.cost import candidates
from collectives.communicator import communicator

Row = dict[str, float | int | str]
BLOCK = 1 << 20
TIMEOUT = timedelta(seconds=200)
QUICK = (1 << 10, 64 << 10, 1 << 20)
FULL = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 1 << 20, 10 << 20, 100 << 20, 1 << 30)
# By case, the function's name.
FUNCTIONS = {"all_reduce": "all_reduce", "reduce_scatter": "reduce_scatter_tensor",
             "all_gather": "all_gather_into_tensor"}  # fmt: skip
CASES = tuple(FUNCTIONS)


def bench(
    *, device: str = "cpu", quick: bool = False, worlds: Sequence[int] = (2,),
    sizes: Sequence[int] = (), cases: Sequence[str] = CASES,
) -> list[Row]:  # fmt: skip
    """Rows for all-reduce, reduce-scatter and all-gather at several sizes (bytes), on rank 0.

    Inside torchrun it measures that group; otherwise it starts `worlds` processes itself.
    """
    sizes = tuple(sizes) or (QUICK if quick else FULL)
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        made = not dist.is_initialized()
        if made:
            dist.init_process_group(backend, timeout=TIMEOUT)
        rows = _measure(device, sizes, quick, cases)
        if made:
            dist.destroy_process_group()
        return rows if int(os.environ["RANK"]) == 0 else []
    rows = []
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            how = world, folder, backend, device, sizes, quick, cases
            start_processes(_rank, args=how, nprocs=world, start_method="spawn")
            rows += json.loads(Path(folder, "rows").read_text())
    return rows


def _rank(rank: int, world: int, folder: str, backend: str, *how: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("LOCAL_RANK", str(rank))
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    rows = _measure(*how)
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _measure(device: str, sizes: Sequence[int], quick: bool, cases: Sequence[str]) -> list[Row]:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    found = (_rows(*case, device, quick) for case in itertools.product(cases, sizes))
    return list(itertools.chain(*found))


def _rows(kind: str, size: int, device: str, quick: bool) -> list[Row]:
    rank, world, native = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    count = size // 4 // (1 if kind == "all_reduce" else world)
    shares = {"all_reduce": (1, 1), "reduce_scatter": (1, world), "all_gather": (world, 1)}[kind]
    result, source = (torch.empty(count * share, device=device) for share in shares)
    calls: dict[str, Callable[..., object]] = {native: getattr(dist, FUNCTIONS[kind])}
    ours = getattr(collectives, FUNCTIONS[kind])
    calls |= {name: partial(ours, algorithm=name) for name in ("auto", *_algorithms(kind))}
    # Each contender's result and source.
    tensors = dict.fromkeys(calls, (result, source))
    if kind == "all_reduce" and device == "cpu":
        # Each is the source of the other's copies: memory is what bounds the size.
        shared = collectives.shared_empty(count)
        tensors = dict.fromkeys(calls, (result, shared)) | {"shared_empty": (shared, result)}
        calls["shared_empty"] = ours

    def out_of_place(name: str) -> None:
        result, source = tensors[name]
        if kind == "all_reduce":
            calls[name](result.copy_(source))
        else:
            calls[name](result, source)

    def in_place(name: str) -> None:
        calls[name](tensors[name][0])

    wants = [_values(r, device) for r in range(world)] if kind == "all_gather" else [_sum(device)]
    rows: dict[str, Row] = {name: {} for name in calls}
    ways = {"": out_of_place} | ({"in_place_": in_place} if kind == "all_reduce" else {})
    for way, do in ways.items():
        wrong = dict.fromkeys(calls, 0)
        for name, (result, source) in tensors.items():
            result.fill_(torch.nan)
            for part in (result if way else source).split(max(1, count)):
                _fill(part, _values(rank, device))
            do(name)
            wrong[name] = sum(map(_wrong, result.split(max(1, count)), wants))
        times = time_in_turns({name: partial(do, name) for name in calls}, size, quick, device)
        for name, row in rows.items():
            told = _speed(kind, size, times[name]) | {"wrong": wrong[name]}
            row |= {f"{way}{column}": value for column, value in told.items()}
            row |= _ratios(times, name, native)
    return [_case(kind, name, size) | row for name, row in rows.items()]


def _algorithms(kind: str) -> list[str]:
    topology = communicator().topology
    return list(candidates(kind, topology.ranks_per_host, shared=topology.one_host))


def _values(rank: int, device: str) -> Tensor:
    """What rank `rank` brings, `BLOCK` elements that repeat."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(BLOCK, generator=generator).to(device)


def _sum(device: str) -> Tensor:
    return torch.stack([_values(rank, device) for rank in range(dist.get_world_size())]).sum(0)


def _fill(tensor: Tensor, block: Tensor) -> None:
    for piece in in_pieces(tensor, BLOCK):
        piece.copy_(block[: piece.numel()])


def _wrong(result: Tensor, block: Tensor) -> int:
    pieces = in_pieces(result, BLOCK)
    return sum(
        int((~piece.isclose(block[: piece.numel()], rtol=1e-5, atol=1e-5)).sum())
        for piece in pieces
    )


def _case(kind: str, name: str, size: int) -> Row:
    comm = communicator()
    # What is scattered or gathered is a multiple of the ranks.
    whole = size if kind == "all_reduce" else size // 4 // comm.world * comm.world * 4
    runs = "shared_memory" if name == "auto" else name
    if name == "auto" and not comm.topology.one_host:
        runs = comm.choices.get((kind, whole, True)) or comm.choices[kind, whole, False]
    return {
        "case": kind, "algorithm": name, "runs": runs,
        "world": dist.get_world_size(), "hosts": len(comm.topology.hosts),
        "size_bytes": size, "count": size // 4, "type": "float32",
        "redop": "none" if kind == "all_gather" else "sum",
    }  # fmt: skip


def _speed(kind: str, size: int, times: Times) -> Row:
    world, middle = dist.get_world_size(), float(np.median(times.rounds))
    factor = (2 if kind == "all_reduce" else 1) * (world - 1) / world
    return {
        "time_us": middle * 1e6,
        "p99_us": float(np.quantile(times.calls, 0.99)) * 1e6,
        "algbw_gbps": size / middle / 1e9,
        "busbw_gbps": size / middle / 1e9 * factor,
    }


def _ratios(times: dict[str, Times], name: str, native: str) -> Row:
    by_round = times[native].rounds / times[name].rounds
    return {
        "wire_bytes": times[name].wire_bytes,
        "ratio_p50": float(np.median(by_round)),
        "ratio_p10": float(np.quantile(by_round, 0.1)),
        "ratio_p90": float(np.quantile(by_round, 0.9)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table; write the rows as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m collectives.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--world", type=int, nargs="+", default=[2], help="processes to start")
    parser.add_argument("--sizes", type=int, nargs="+", default=[], help="bytes")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--plot", type=Path, help="draw bandwidth against size into this file")
    given = parser.parse_args(argv)
    asked = {"sizes": given.sizes, "cases": given.cases}
    rows = bench(device=given.device, quick=given.quick, worlds=given.world, **asked)
    # Other ranks of a group that was here before have nothing to show.
    if not rows:
        return
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    if given.plot:
        from collectives.bench.plot import plot

        plot(rows, given.plot)
    print(table(rows))


def table(rows: list[Row]) -> str:
    """Rows as aligned text, a block for each set of columns."""
    blocks = []
    for columns, group in itertools.groupby(rows, key=tuple):
        cells = [columns, *(tuple(_cell(v) for v in row.values()) for row in group)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
