"""Step time and exposed communication of every design beside torch's own, step by step in turns.

Alone it starts two processes. Under torchrun, or on emulated hosts, it joins the group there is:

    python tests/emulated_hosts.py --hosts 2 --rate 2gbit -- python -m ddp.bench

Before the turns it times single all-reduces, and from these alone predicts the best bucket size.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from ddp.bench_designs import Design, Workload, designs
from ddp.overhead import fit, optimal_bucket_bytes, overhead_seconds

Row = dict[str, float | int | str]

SIZES_MB = (1.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True)
class Options:
    """What the command line chooses; functions are given as module:name."""

    device: str = "cpu"
    quick: bool = False
    model: str = "ddp.bench_designs:transformer"
    designs: str = ""
    all_reduce: str = ""
    allocate: str = ""
    rounds: int = 0


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
    workload: Workload = _named(options.model)
    module, loss = workload(device)
    model_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    bandwidth, latency = _time_link(device, options.quick)
    predicted_mb = optimal_bucket_bytes(model_bytes, bandwidth, latency) / 2**20
    predicted_mb = float(f"{predicted_mb:.3g}")

    given = {"all_reduce": options.all_reduce, "allocate": options.allocate}
    given = {key: _named(path) for key, path in given.items() if path}
    sizes = sorted({*SIZES_MB, predicted_mb})
    wanted = [
        f"{predicted_mb:g} MB" if name == "predicted" else name
        for name in filter(None, options.designs.split(","))
    ]
    contenders = designs(module, sizes, wanted, given)
    rounds = options.rounds or (2 if options.quick else 12)
    seconds = torch.zeros(2 + rounds, len(contenders), 2, dtype=torch.float64)
    for turn in range(2 + rounds):
        for place, contender in enumerate(contenders):
            dist.barrier()
            seconds[turn, place] = torch.tensor(contender.step(loss, device))
    slowest = seconds.to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if dist.get_rank():
        return []
    # Two turns warm up: in the second one the buckets are rebuilt.
    times = slowest[2:].cpu().numpy()
    steps = {c.name: times[:, place, 0] for place, c in enumerate(contenders)}
    after = {c.name: times[:, place, 1] for place, c in enumerate(contenders)}
    rows = [_step_row(contender, steps, after) for contender in contenders]
    swept = [c for c in contenders if c.name[0].isdigit()]
    if len(swept) >= 3:
        rows += _sweep_rows(swept, steps, after, model_bytes, bandwidth, latency, predicted_mb)
    return rows


def _time_link(device: torch.device, quick: bool) -> tuple[float, float]:
    """Bytes per second and seconds a call of the all-reduce by itself, the same on every rank."""
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
    return bandwidth, max(call - small / bandwidth, 1e-6)


def _step_row(design: Design, steps: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> Row:
    own = steps[design.name]
    row: Row = {
        "case": "step",
        "design": design.name,
        "step_ms": 1e3 * median(own),
        "after_backward_ms": 1e3 * median(after[design.name]),
        "calls": design.meter.last.calls if design.meter else "-",
        "gradient_bytes": design.meter.last.gradient_bytes if design.meter else "-",
        "extra_bytes": design.meter.last.extra_bytes if design.meter else "-",
        "communication_share": 1 - median(steps["none"] / own) if "none" in steps else "-",
    }
    for peer in ("none", "torch", "torch tuned"):
        ratios = own / steps[peer] if peer in steps else None
        for percent in (50, 10, 90):
            key = f"ratio_to_{peer.replace(' ', '_')}_p{percent}"
            row[key] = float(np.percentile(ratios, percent)) if ratios is not None else "-"
    return row


def _sweep_rows(
    swept: Sequence[Design],
    steps: dict[str, np.ndarray],
    after: dict[str, np.ndarray],
    model_bytes: int,
    bandwidth: float,
    latency: float,
    predicted_mb: float,
) -> list[Row]:
    """The overhead model beside the sweep: predicted from the link alone, and fitted to it."""
    counts = [design.meter.last.calls for design in swept if design.meter]
    exposed = [median(after[design.name]) for design in swept]
    try:
        fitted = fit(model_bytes, counts, exposed)
    except ValueError:
        fitted = None
    best = min(swept, key=lambda design: float(median(steps[design.name])))
    rows: list[Row] = [
        {
            "case": "sweep",
            "design": design.name,
            "num_buckets": count,
            "step_ms": 1e3 * median(steps[design.name]),
            "after_backward_ms": 1e3 * measured,
            "model_ms": 1e3 * overhead_seconds(model_bytes, bandwidth, latency, count),
            "fitted_ms": 1e3 * fitted.seconds(count) if fitted else "-",
            "ratio_to_best_p50": median(steps[design.name] / steps[best.name]),
        }
        for design, count, measured in zip(swept, counts, exposed, strict=True)
    ]
    rows.append(
        {
            "case": "prediction",
            "bandwidth_gbps": bandwidth / 1e9,
            "latency_ms": 1e3 * latency,
            "predicted_mb": predicted_mb,
            "fitted_mb": fitted.bucket_bytes / 2**20 if fitted else "-",
            "best_design": best.name,
        }
    )
    return rows


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table; write the rows as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m ddp.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--model", default=Options.model, help="module:name of a Workload")
    parser.add_argument("--designs", default="", help="only these, with commas between them")
    parser.add_argument("--all-reduce", default="", help="module:name, for the designs 'given'")
    parser.add_argument("--allocate", default="", help="module:name, for the designs 'given'")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each design")
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


if __name__ == "__main__":
    main()
