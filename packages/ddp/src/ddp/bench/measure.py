"""Interleaved measurement of every design: step time and exposed communication.

The command starts two processes, or one process on a machine with one GPU. In processes that
torchrun or `emulated_hosts.py` has started, it measures the group of all these processes:

    python tests/emulated_hosts.py --hosts 2 --rate 2gbit -- python -m ddp.bench

The command first measures single all-reduces, and predicts the best bucket size from them.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes

from ddp.bench.designs import Design, Timing, Workload, make_designs
from ddp.bench.rows import Link, Row, WorkloadTimings, compute_median_rows
from ddp.metering.trace import draw_steps, write_atomically

SIZES_MB = (1.0, 10.0, 25.0, 100.0, 1000.0)
#: Rounds before the measured rounds. Buckets are rebuilt in the second one.
WARMUP_ROUNDS = 2


@dataclass(frozen=True)
class BenchOptions:
    """Options of the command line, as described in `main`."""

    device: str = "cpu"
    quick: bool = False
    model: str = "ddp.bench.designs:transformer"
    designs: str = ""
    all_reduce: str = ""
    allocate: str = ""
    rounds: int = 0
    runs: int = 1
    picture: str = ""


def bench(*, device: str = "cpu", quick: bool = False, **more: Any) -> list[Row]:
    """Measure the designs. Return the rows on rank 0, and an empty list on other ranks.

    `more` contains other fields of `BenchOptions`. Raises `ValueError` if several runs are
    requested in a process of torchrun.
    """
    options = BenchOptions(device=device, quick=quick, **more)
    if "RANK" not in os.environ:
        return compute_median_rows([_run_once(options) for _ in range(options.runs)])
    if options.runs != 1:
        raise ValueError(
            f"expected runs=1 in a process of torchrun, got {options.runs}; start the command "
            "without torchrun, or start it several times"
        )
    if dist.is_initialized():
        return _measure_rows(options)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        return _measure_rows(options)
    finally:
        dist.destroy_process_group()


def _run_once(options: BenchOptions) -> list[Row]:
    """Return the rows of one run in new processes."""
    world_size = min(2, torch.cuda.device_count()) if options.device == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, folder, options)
        start_processes(_run_process, arguments, nprocs=world_size, start_method="spawn")
        rows: list[Row] = json.loads(Path(folder, "rows.json").read_text())
        return rows


def _run_process(rank: int, world_size: int, folder: str, options: BenchOptions) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
    rows = _measure_rows(options)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _measure_rows(options: BenchOptions) -> list[Row]:
    device = torch.device(options.device)
    link = _measure_link(device, options.quick)
    rows: list[Row] = []
    for path in options.model.split(","):
        rows += _measure(options, _import_name(path), link, device).rows
        gc.collect()
    return rows if dist.get_rank() == 0 else []


def _measure(
    options: BenchOptions, workload: Workload, link: Link, device: torch.device
) -> WorkloadTimings:
    """Run one step of each design per round, and return the timings of the slowest rank."""
    module, loss = workload(device)
    model_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    predicted_mb = link.predict_best_mb(model_bytes)
    contenders = _select_designs(options, module, predicted_mb)
    rounds = WARMUP_ROUNDS + (options.rounds or (2 if options.quick else 12))
    seconds = torch.zeros(rounds, len(contenders), len(Timing._fields), dtype=torch.float64)
    for number in range(rounds):
        for column, contender in enumerate(contenders):
            dist.barrier()
            seconds[number, column] = torch.tensor(contender.step(loss, device))
    if options.picture and dist.get_rank() == 0:
        draw_median_steps(options.picture, contenders)
    slowest = seconds.to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    timings = slowest.cpu().numpy()
    return WorkloadTimings(
        workload.__name__,
        model_bytes,
        link,
        contenders,
        timings[WARMUP_ROUNDS:],
        first_steps=timings[:WARMUP_ROUNDS, :, Timing._fields.index("step")],
    )


def _select_designs(options: BenchOptions, module: nn.Module, predicted_mb: float) -> list[Design]:
    custom = {}
    for name, path in (("all_reduce", options.all_reduce), ("allocate", options.allocate)):
        if path:
            custom[name] = _import_name(path)
    names = []
    sizes_mb = {*SIZES_MB, predicted_mb}
    for name in options.designs.split(","):
        if name == "predicted":
            names.append(f"{predicted_mb:g} MB")
        elif name:
            names.append(name)
            if re.fullmatch(r"[\d.]+ MB", name):
                sizes_mb.add(float(name.removesuffix(" MB")))
    return make_designs(module, sorted(sizes_mb), names, custom)


def draw_median_steps(path: str, contenders: Sequence[Design]) -> None:
    """Write an SVG of the step of median duration of each design that has a meter."""
    steps = {}
    for design in contenders:
        if design.meter:
            measured = list(design.meter.steps)[WARMUP_ROUNDS:]
            measured.sort(key=lambda step: step.seconds)
            steps[design.name] = measured[len(measured) // 2]
    write_atomically(path, draw_steps(steps))


def _measure_link(device: torch.device, quick: bool) -> Link:
    """Return bandwidth and latency from all-reduces of two sizes, as measured on rank 0."""
    small_bytes = 2**14
    large_bytes = 2**22 if quick else 2**24
    small_seconds = _measure_all_reduce(small_bytes, device)
    large_seconds = _measure_all_reduce(large_bytes, device)
    measured = torch.tensor([small_seconds, large_seconds], dtype=torch.float64, device=device)
    dist.broadcast(measured, 0)
    small_seconds, large_seconds = measured.tolist()
    bandwidth = (large_bytes - small_bytes) / max(large_seconds - small_seconds, 1e-9)
    return Link(bandwidth, max(small_seconds - small_bytes / bandwidth, 1e-6))


def _measure_all_reduce(num_bytes: int, device: torch.device) -> float:
    """Return the median seconds of an all-reduce, after two warm-up calls."""
    tensor = torch.ones(num_bytes // 4, device=device)
    durations = []
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        float(tensor[0])  # waits for a GPU
        durations.append(time.perf_counter() - start)
    return median(durations[2:])


def _import_name(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows as a table, and write them as JSON if requested."""
    # Options that are not passed have the defaults of `BenchOptions`.
    parser = argparse.ArgumentParser(
        prog="python -m ddp.bench", description=__doc__, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--quick", action="store_true", help="run for seconds instead of minutes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--model", help="module:name of workloads, separated by commas")
    parser.add_argument("--designs", help="names, such as none,flat,25 MB,predicted")
    parser.add_argument("--all-reduce", help="module:name of a function for the designs 'given'")
    parser.add_argument("--allocate", help="module:name of a function for the designs 'given'")
    parser.add_argument("--rounds", type=int, help="number of measured rounds")
    parser.add_argument("--runs", type=int, help="runs in new processes; rows are their medians")
    parser.add_argument("--picture", help="draw a step of each design to this SVG")
    arguments = vars(parser.parse_args(argv))
    path = arguments.pop("json", None)
    rows = bench(**arguments)
    if not rows:
        return
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n")
    print(format_table(rows))


def format_table(rows: list[Row]) -> str:
    """Return the rows as aligned text, one block per set of columns."""
    blocks = []
    for columns, group in itertools.groupby(rows, key=tuple):
        cells = [columns]
        for row in group:
            texts = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
            cells.append(tuple(texts))
        widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
        lines = []
        for line in cells:
            padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
            lines.append("  ".join(padded))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
