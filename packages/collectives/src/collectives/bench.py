"""Time collectives beside the backend's own, in turns: nccl-tests' columns, p99 and wire bytes.

    python -m collectives.bench --quick
    python -m collectives.bench --world 2 4 6 --json rows.json --plot bandwidth.png
    torchrun --nproc-per-node 2 -m collectives.bench --sizes 1073741824

Sizes and bandwidths are defined as nccl-tests defines them: the size is the whole array; algbw is
size / time, and busbw is algbw times 2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter and
all-gather. `ratio` is the backend's own time over ours, pair by pair in the same round (in place
for all-reduce). `wire_bytes` are the bytes that left the network interface, per rank and call.
A rank holds five times the largest size in memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes

import collectives
from collectives.communicator import communicator
from collectives.cost import CostModel, Sample, candidates
from collectives.reduction import in_pieces

Row = dict[str, float | int | str]
Contenders = dict[str, Callable[[], object]]
TIMEOUT = timedelta(seconds=60)
QUICK = (1 << 10, 64 << 10, 1 << 20)
FULL = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 1 << 20, 10 << 20, 100 << 20, 1 << 30)
OTHERS = ("reduce_scatter", "all_gather")


def bench(
    *,
    device: str = "cpu",
    quick: bool = False,
    worlds: Sequence[int] = (2,),
    sizes: Sequence[int] = (),
) -> list[Row]:
    """Rows for all-reduce, reduce-scatter and all-gather at several sizes, on rank 0.

    Inside torchrun it measures that group; otherwise it starts `worlds` processes itself.
    """
    sizes = tuple(sizes) or (QUICK if quick else FULL)
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        made = not dist.is_initialized()
        if made:
            dist.init_process_group(backend, timeout=TIMEOUT)
        rows = _measure(device, sizes, quick)
        if made:
            dist.destroy_process_group()
        return rows if int(os.environ["RANK"]) == 0 else []
    rows = []
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            start_processes(
                _rank,
                args=(world, folder, backend, device, sizes, quick),
                nprocs=world,
                start_method="spawn",
            )
            rows += json.loads(Path(folder, "rows").read_text())
    return rows


def _rank(
    rank: int,
    world: int,
    folder: str,
    backend: str,
    device: str,
    sizes: Sequence[int],
    quick: bool,
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("LOCAL_RANK", str(rank))
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    rows = _measure(device, sizes, quick)
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _measure(device: str, sizes: Sequence[int], quick: bool) -> list[Row]:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rows: list[Row] = []
    for size in sizes:
        rows += _all_reduce_rows(device, size, quick)
    for kind in OTHERS:
        for size in sizes:
            rows += _other_rows(kind, device, size, quick)
    return _with_model(rows)


def _all_reduce_rows(device: str, size: int, quick: bool) -> list[Row]:
    count, rank, native = size // 4, dist.get_rank(), dist.get_backend()
    source = _values(count, rank, device)
    plain, result = source.clone(), torch.empty_like(source)

    def out_of_place(call: Callable[..., object]) -> None:
        result.copy_(source)
        call(result)

    calls: dict[str, tuple[Callable[..., object], Tensor]] = {native: (dist.all_reduce, plain)}
    for name in ("auto", *_algorithms("all_reduce")):
        calls[name] = (partial(collectives.all_reduce, algorithm=name), plain)
    if device == "cpu":
        shared = collectives.shared_empty(count).copy_(source)
        calls["shared_empty"] = (collectives.all_reduce, shared)
    inside = time_in_turns({n: partial(c, t) for n, (c, t) in calls.items()}, size, quick, device)
    outside = time_in_turns(
        {n: partial(out_of_place, c) for n, (c, _) in calls.items()}, size, quick, device
    )
    want, rows = _sum(count, device), []
    for name, (call, tensor) in calls.items():
        result.fill_(torch.nan)
        out_of_place(call)
        wrong = _wrong(result, want)
        tensor.copy_(source)
        call(tensor)
        row = _row("all_reduce", name, size, outside[name], wrong)
        row |= {f"in_place_{k}": v for k, v in _speed("all_reduce", size, inside[name]).items()}
        rows.append(row | {"in_place_wrong": _wrong(tensor, want)} | _ratios(inside, name, native))
    return rows


def _other_rows(kind: str, device: str, size: int, quick: bool) -> list[Row]:
    rank, world, native = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    count = size // 4 // world
    short, long = torch.empty(count, device=device), torch.empty(count * world, device=device)
    theirs, ours = {
        "reduce_scatter": (
            partial(dist.reduce_scatter_tensor, short, long),
            partial(collectives.reduce_scatter_tensor, short, long),
        ),
        "all_gather": (
            partial(dist.all_gather_into_tensor, long, short),
            partial(collectives.all_gather_into_tensor, long, short),
        ),
    }[kind]
    calls: Contenders = {native: theirs}
    calls |= {n: partial(ours, algorithm=n) for n in ("auto", *_algorithms(kind))}
    scatter = kind == "reduce_scatter"
    out = short if scatter else long
    if scatter:
        want = _sum(count * world, device).chunk(world)[rank]
        long.copy_(_values(count * world, rank, device))
    else:
        want = torch.cat([_values(count, r, device) for r in range(world)])
        short.copy_(_values(count, rank, device))
    measured = time_in_turns(calls, size, quick, device)
    rows = []
    for name, call in calls.items():
        out.fill_(torch.nan)
        call()
        row = _row(kind, name, size, measured[name], _wrong(out, want))
        rows.append(row | _ratios(measured, name, native))
    return rows


@dataclass(frozen=True)
class Times:
    """Seconds a call, the slowest rank's, by round; the slowest call; bytes a call."""

    rounds: np.ndarray
    calls: np.ndarray
    wire_bytes: float


def time_in_turns(contenders: Contenders, size: int, quick: bool, device: str) -> dict[str, Times]:
    """Every contender in every round, one after the other; one more round before, not counted."""
    rounds = 3 if size > 256 << 20 else 5 if quick or size > 32 << 20 else 9
    repeats = max(1, min(4 if quick else 20, (4 << 20) // size))
    seconds = np.zeros((len(contenders), rounds, repeats))
    sent = np.zeros(len(contenders))
    for j in range(-1, rounds):
        for i, call in enumerate(contenders.values()):
            collectives.barrier() if device == "cpu" else dist.barrier()
            before = _sent_bytes()
            for k in range(repeats):
                start = time.perf_counter()
                call()
                if device == "cuda":
                    torch.cuda.synchronize()
                if j >= 0:
                    seconds[i, j, k] = time.perf_counter() - start
            if j >= 0:
                sent[i] += (_sent_bytes() - before) / rounds / repeats
    slowest = torch.from_numpy(np.concatenate([seconds.ravel(), sent])).to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    found = slowest.cpu().numpy()
    seconds, sent = found[: seconds.size].reshape(seconds.shape), found[seconds.size :]
    return {
        name: Times(seconds[i].mean(axis=1), seconds[i].ravel(), float(sent[i]))
        for i, name in enumerate(contenders)
    }


def _algorithms(kind: str) -> list[str]:
    topology = communicator().topology
    names = candidates(kind, topology.ranks_per_host, shared=topology.one_host)
    return [name for name in names if name != "shared_memory"]


def _values(count: int, rank: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator).to(device)


def _sum(count: int, device: str) -> Tensor:
    total = torch.zeros(count, device=device)
    for rank in range(dist.get_world_size()):
        total += _values(count, rank, device)
    return total


def _wrong(result: Tensor, want: Tensor) -> int:
    pieces = zip(in_pieces(result, 1 << 20), in_pieces(want, 1 << 20), strict=True)
    return sum(int((~a.isclose(b, rtol=1e-5, atol=1e-5)).sum()) for a, b in pieces)


def _row(kind: str, name: str, size: int, times: Times, wrong: int) -> Row:
    return {
        "case": kind,
        "algorithm": name,
        "world": dist.get_world_size(),
        "hosts": len(communicator().topology.hosts),
        "size_bytes": size,
        "count": size // 4,
        "type": "float32",
        "redop": "none" if kind == "all_gather" else "sum",
        **_speed(kind, size, times),
        "wrong": wrong,
    }


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
    ratios = times[native].rounds / times[name].rounds
    return {
        "wire_bytes": times[name].wire_bytes,
        "ratio_p50": float(np.median(ratios)),
        "ratio_p10": float(np.quantile(ratios, 0.1)),
        "ratio_p90": float(np.quantile(ratios, 0.9)),
    }


def _sent_bytes() -> float:
    """Bytes that left the interface; the loopback carries every rank's."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    counter = Path(f"/sys/class/net/{device}/statistics/tx_bytes")
    share = dist.get_world_size() if device == "lo" else 1
    return int(counter.read_text()) / share if counter.exists() else 0.0


def _with_model(rows: list[Row]) -> list[Row]:
    """Add the time that a cost model, fitted to these rows, gives to each."""
    topology = communicator().topology
    hosts, samples = topology.ranks_per_host, {}
    for i, row in enumerate(rows):
        name = str(row["algorithm"])
        if name == "auto" and topology.one_host:
            name = "shared_memory"
        if name in candidates(str(row["case"]), hosts):
            size, seconds = int(row["size_bytes"]), float(row["time_us"]) / 1e6
            samples[i] = Sample(str(row["case"]), name, size, hosts, seconds)
    model = CostModel.fit(list(samples.values())) if samples else CostModel()
    for i, row in enumerate(rows):
        row["model_us"] = float("nan")
        if i in samples:
            s = samples[i]
            row["model_us"] = model.predict(s.collective, s.algorithm, s.size_bytes, hosts) * 1e6
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table; write the rows as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m collectives.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--world", type=int, nargs="+", default=[2], help="processes to start")
    parser.add_argument("--sizes", type=int, nargs="+", default=[], help="bytes")
    parser.add_argument("--plot", type=Path, help="draw bandwidth against size into this file")
    arguments = parser.parse_args(argv)
    rows = bench(
        device=arguments.device,
        quick=arguments.quick,
        worlds=arguments.world,
        sizes=arguments.sizes,
    )
    # Other ranks of a group that was here before have nothing to show.
    if not rows:
        return
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.plot:
        from collectives.plot import plot

        plot(rows, arguments.plot)
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


if __name__ == "__main__":
    main()
