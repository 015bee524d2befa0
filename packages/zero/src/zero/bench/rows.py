"""Memory of all stages, and step time and bytes sent compared with torch's implementations.

Stage 0 is torch's DDP. Stages 1 and 2 are compared with DDP and ZeroRedundancyOptimizer, stage 3
with FSDP2. Under torchrun or tests/emulated_hosts.py the benchmark uses that process group;
otherwise it starts two processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from zero.bench import rivals
from zero.memory import memory_report
from zero.process_groups import wire_bytes

Row = dict[str, float | int | str]


def bench(*, device: str = "cpu", quick: bool = False, rounds: int = 0) -> list[Row]:
    """Return the rows of the cases `memory` and `step`, or an empty list on ranks other than 0.

    Under torchrun, the benchmark runs on its ranks; otherwise in two processes, or one if there is
    only one GPU. `rounds` is the number of measured steps of each implementation; 0 means 20, or 3
    if `quick` is True.
    """
    rounds = rounds or (3 if quick else 20)
    if "RANK" in os.environ:
        return _on_this_rank(device, quick, rounds)
    with tempfile.TemporaryDirectory() as folder:
        world = min(2, torch.cuda.device_count()) if device == "cuda" else 2
        arguments = (folder, device, quick, rounds, world)
        torch.multiprocessing.spawn(_spawned, arguments, nprocs=world)
        rows: list[Row] = json.loads(Path(folder, "rows").read_text())
        return rows


def _memory(size: str, device: str) -> list[Row]:
    rows: list[Row] = []
    for stage in range(4):

        def build(group: Any, stage: int = stage) -> rivals.Trained:
            return rivals.build_stage(stage, rivals.make_model(size), group)

        report = memory_report(build, partial(rivals.loss_of, size=size), device=device)
        before = report.measured[2]
        row: Row = {"case": "memory", "stage": stage, "ranks": dist.get_world_size()}
        row["parameters_mib"] = before.parameters / 2**20
        row["gradients_mib"] = before.gradients / 2**20
        row["optimizer_mib"] = before.optimizer / 2**20
        row["activations_mib"] = report.measured[1].activations / 2**20
        row["predicted_peak_mib"] = report.predicted_peak / 2**20
        row["measured_peak_mib"] = report.measured_peak / 2**20
        rows.append(row)
    return rows


def _on_this_rank(device: str, quick: bool, rounds: int) -> list[Row]:
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    size = "quick" if quick else "full"
    rows = _memory(size, device) + _steps(size, device, rounds)
    return rows if dist.get_rank() == 0 else []


@dataclass
class _Samples:
    """Measurements of one implementation, one per round."""

    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    #: Payload bytes of each collective in the latest step; None for torch's implementations.
    payload: dict[str, int] | None = None


def _steps(size: str, device: str, rounds: int) -> list[Row]:
    vocabulary, _, _, tokens = rivals.SIZES[size]
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, targets = torch.randint(vocabulary, (2, tokens), generator=generator).to(device)
    names = rivals.NAMES
    built = {name: rivals.build(name, rivals.make_model(size).to(device)) for name in names}

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    steps = {name: partial(train, *trained) for name, trained in built.items()}
    pop_payload = {name: rivals.payload_of(built[name]) for name in rivals.NAMES}
    samples = {name: _Samples() for name in names}
    for round_index in range(rounds + 2):
        for name in names:
            sample = samples[name] if round_index >= 2 else _Samples()
            # The first step determines the order of collectives, and the second is another warm-up.
            _measure_step(steps[name], device, sample)
            pop = pop_payload.get(name)
            if pop is not None:
                sample.payload = pop()
    model_bytes = sum(p.numel() * p.element_size() for p in built["ddp"][0].parameters())
    return [_step_row(name, samples, model_bytes) for name in names]


def _measure_step(step: Callable[[], None], device: str, sample: _Samples) -> None:
    sent = _sent_bytes()
    dist.barrier()
    sent_before = sent()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    sample.sent_bytes.append(sent() - sent_before)
    # The slowest rank determines the time of the step.
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    sample.seconds.append(slowest.item())


def _step_row(name: str, samples: dict[str, _Samples], model_bytes: int) -> Row:
    sample = samples[name]
    world = dist.get_world_size()
    link = "loopback" if _is_loopback() else os.environ.get("LINK", "network")
    row: Row = {"case": "step", "link": link, "name": name, "ranks": world}
    row["time_ms"] = 1e3 * statistics.median(sample.seconds)
    row["sent_over_parameters"] = statistics.median(sample.sent_bytes) / model_bytes
    row["predicted_over_parameters"] = float("nan")
    if sample.payload is not None:
        row["predicted_over_parameters"] = wire_bytes(sample.payload, world) / model_bytes
    # Each stage is compared with the faster of torch's implementations.
    candidates = rivals.RIVALS.get(name, ("ddp",))
    rival = min(candidates, key=lambda candidate: statistics.median(samples[candidate].seconds))
    pairs = zip(sample.seconds, samples[rival].seconds, strict=True)
    ratios = [seconds / rival_seconds for seconds, rival_seconds in pairs]
    row["rival"] = rival
    for percent in (50, 10, 90):
        row[f"ratio_p{percent}"] = float(np.percentile(ratios, percent))
    return row


def _sent_bytes() -> Callable[[], int]:
    """Return a function that reads the kernel's counter of bytes sent by the group's interface."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    path = Path(f"/sys/class/net/{device}/statistics/tx_bytes")
    # On loopback, all ranks share one interface.
    num_ranks = dist.get_world_size() if _is_loopback() else 1
    return lambda: int(path.read_text()) // num_ranks if path.exists() else 0


def _is_loopback() -> bool:
    return os.environ.get("GLOO_SOCKET_IFNAME", "lo") == "lo"


def _spawned(rank: int, folder: str, device: str, quick: bool, rounds: int, world: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", world)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    rows = _on_this_rank(device, quick, rounds)
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows as tables, and write them to a JSON file if its path is passed."""
    parser = argparse.ArgumentParser(prog="python -m zero.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="run for seconds instead of minutes")
    parser.add_argument("--rounds", type=int, default=0, help="number of measured rounds")
    parser.add_argument("--link", default="network", help="name of the link in the rows")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args(argv)
    os.environ["LINK"] = arguments.link
    rows = bench(device=arguments.device, quick=arguments.quick, rounds=arguments.rounds)
    if arguments.json and rows:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if rows:
        print(table(rows))


def table(rows: list[Row]) -> str:
    """Return rows as aligned text, with one block per set of columns."""
    blocks = []
    for columns, group in itertools.groupby(rows, key=tuple):
        cells = [columns, *(tuple(_cell(v) for v in row.values()) for row in group)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
