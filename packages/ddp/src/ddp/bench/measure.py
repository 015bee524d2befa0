"""Step time and exposed communication of every design beside torch's own, step by step in turns.

Alone it starts two processes. Under torchrun, or on emulated hosts, it joins the group there is:

    python tests/emulated_hosts.py --hosts 2 --rate 2gbit -- python -m ddp.bench

Before the turns it times single all-reduces, and from these alone predicts the best bucket size.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from ddp.bench.designs import Design, Timing, Workload, designs
from ddp.bench.rows import Link, Measured, Row
from ddp.metering.trace import svg, write

SIZES_MB = (1.0, 10.0, 25.0, 100.0, 1000.0)


@dataclass(frozen=True)
class Options:
    """What the command line chooses; functions are given as module:name."""

    device: str = "cpu"
    quick: bool = False
    model: str = ""
    designs: str = ""
    all_reduce: str = ""
    allocate: str = ""
    rounds: int = 0
    picture: str = ""


def bench(*, device: str = "cpu", quick: bool = False, **more: Any) -> list[Row]:
    """Measure; the rows go to rank 0, the other ranks get none. `more`: fields of `Options`."""
    options = Options(device=device, quick=quick, **more)
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            start_processes(_start, (2, folder, asdict(options)), nprocs=2, start_method="spawn")
            rows: list[Row] = json.loads(Path(folder, "rows.json").read_text())
            return rows
    if dist.is_initialized():
        return _rows(options)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        return _rows(options)
    finally:
        dist.destroy_process_group()


def _start(rank: int, world: int, folder: str, fields: dict[str, Any]) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    options = Options(**fields)
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
    )
    rows = _rows(options)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _rows(options: Options) -> list[Row]:
    device = torch.device(options.device)
    link = _time_link(device, options.quick)
    rows: list[Row] = []
    for path in options.model.split(",") if options.model else _usual_workloads():
        rows += _measure(options, _named(path), link, device).rows
        gc.collect()
    return rows if dist.get_rank() == 0 else []


def _usual_workloads() -> list[str]:
    """A small batch, and over a network also one with enough computation to hide the wire behind.

    Each network namespace counts as a host.
    """
    names = ["transformer", "busy_transformer"] if _count_hosts() > 1 else ["transformer"]
    return [f"ddp.bench.designs:{name}" for name in names]


def _count_hosts() -> int:
    network = Path("/proc/self/ns/net")
    return len(set(_gathered((socket.gethostname(), network.exists() and os.readlink(network)))))


def _cores_per_rank() -> float:
    """Hosts that are emulated on one machine share its cores."""
    ranks = _gathered(socket.gethostname()).count(socket.gethostname())
    return max(1.0, (os.cpu_count() or 1) / ranks)


def _gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _measure(options: Options, workload: Workload, link: Link, device: torch.device) -> Measured:
    """Let all designs take turns on one workload."""
    module, loss = workload(device)
    model_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    predicted_mb = link.best_mb(model_bytes)
    given = {"all_reduce": options.all_reduce, "allocate": options.allocate}
    given = {key: _named(path) for key, path in given.items() if path}
    wanted = [
        f"{predicted_mb:g} MB" if name == "predicted" else name
        for name in filter(None, options.designs.split(","))
    ]
    asked_mb = (float(name[:-3]) for name in wanted if re.fullmatch(r"[\d.]+ MB", name))
    contenders = designs(module, sorted({*SIZES_MB, predicted_mb, *asked_mb}), wanted, given)
    rounds = options.rounds or (2 if options.quick else 12)
    seconds = torch.zeros(2 + rounds, len(contenders), len(Timing._fields), dtype=torch.float64)
    for turn in range(2 + rounds):
        for place, contender in enumerate(contenders):
            dist.barrier()
            seconds[turn, place] = torch.tensor(contender.step(loss, device))
    if options.picture and dist.get_rank() == 0:
        draw(options.picture, contenders)
    slowest = seconds.to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    # Two turns warm up: in the second one the buckets are rebuilt.
    timings = slowest[2:].cpu().numpy()
    cores = _cores_per_rank()
    return Measured(workload.__name__, model_bytes, link, cores, contenders, timings)


def draw(path: str, contenders: Sequence[Design]) -> None:
    """A step of each design as an SVG: of those after the warm-up, the one of median length."""
    steps = {}
    for design in contenders:
        if design.meter:
            taken = sorted(list(design.meter.steps)[2:], key=lambda step: step.seconds)
            steps[design.name] = taken[len(taken) // 2]
    write(path, svg(steps))


def _time_link(device: torch.device, quick: bool) -> Link:
    """Time all-reduces of two sizes by themselves; the same on every rank."""
    small, large = 2**14, 2**24 if not quick else 2**22
    times = {}
    for size in (small, large):
        tensor = torch.ones(size // 4, device=device)
        taken = []
        for _ in range(8):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            tensor.fill_(1)
            float(tensor[0])
            taken.append(time.perf_counter() - begin)
        times[size] = median(taken[2:])
    found = torch.tensor([times[small], times[large]], dtype=torch.float64, device=device)
    dist.broadcast(found, 0)
    call, whole = found.tolist()
    bandwidth = (large - small) / max(whole - call, 1e-9)
    return Link(bandwidth, max(call - small / bandwidth, 1e-6))


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table; write the rows as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m ddp.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--model", default="", help="module:name of a Workload, or several")
    parser.add_argument("--designs", default="", help="only these: none,flat,25 MB,predicted,...")
    parser.add_argument("--all-reduce", default="", help="module:name, for the designs 'given'")
    parser.add_argument("--allocate", default="", help="module:name, for the designs 'given'")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each design")
    parser.add_argument("--picture", default="", help="draw a step of each design to this SVG")
    arguments = vars(parser.parse_args(argv))
    path = arguments.pop("json")
    rows = bench(**arguments)
    if not rows:
        return
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n")
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
