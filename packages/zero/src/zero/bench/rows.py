"""Step time, wire bytes and peak memory of stages 0 to 3 beside torch's own.

Stage 0 is torch DDP; the rivals of stages 1 and 2 are DDP + ZeroRedundancyOptimizer, of 3 FSDP2.
Under torchrun (or tests/emulated_hosts.py) it uses that group; else it starts two processes.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from zero.allocator import peak_bytes
from zero.bench import rivals
from zero.fsdp.fsdp import FSDP
from zero.memory import memory_report
from zero.partition import by_element, by_parameter
from zero.wire import wire_bytes

Row = dict[str, float | int | str]


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """Rows of `balance`, `memory`, `peak`, `stage3` and `step`, from rank 0.

    On a CPU two processes; on GPUs as many as there are, two at the most.
    """
    if "RANK" in os.environ:
        return _on_this_rank(device, quick)
    with tempfile.TemporaryDirectory() as folder:
        world = min(2, torch.cuda.device_count()) if device == "cuda" else 2
        arguments = (folder, device, quick, world)
        torch.multiprocessing.spawn(_spawned, arguments, nprocs=world)
        rows: list[Row] = json.loads(Path(folder, "rows").read_text())
        return rows


def gpt2_shapes() -> list[tuple[int, ...]]:
    """Parameter shapes of GPT-2 124M."""
    width = 768
    block: list[tuple[int, ...]] = [
        (width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
        (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [(50257, width), (1024, width), *(block * 12), (width,), (width,)]


def _balance() -> list[Row]:
    numels = [torch.Size(shape).numel() for shape in gpt2_shapes()]
    rows: list[Row] = []
    for world in range(2, 17):
        row: Row = {"case": "balance", "ranks": world}
        for name, cut in (("elements", by_element), ("whole_parameters", by_parameter)):
            partition = cut(numels, world, 25 * 2**18)
            held = [sum(p.numel for p in partition.shard_pieces(r)) for r in range(world)]
            row[f"{name}_max_over_mean"] = max(held) / statistics.mean(held)
        rows.append(row)
    return rows


def _memory(size: str, device: str) -> list[Row]:
    rows: list[Row] = []
    for stage in range(4):

        def build_one(group: Any, stage: int = stage) -> rivals.Trained:
            return rivals.build_stage(stage, rivals.make_model(size), group)

        report = memory_report(build_one, partial(rivals.loss_of, size=size), device=device)
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


def _peaks(size: str, device: str) -> list[Row]:
    """What the allocator counts, for ours and torch's own alike."""

    peaks = {}
    for name in rivals.NAMES:
        with torch.device(device):
            trained = rivals.build(name, rivals.make_model(size))
            peaks[name] = peak_bytes(*trained, partial(rivals.loss_of, size=size))
    rows: list[Row] = []
    for name, peak in peaks.items():
        rival = min(rivals.RIVALS.get(name, ("ddp",)), key=peaks.__getitem__)
        row: Row = {"case": "peak", "name": name, "ranks": dist.get_world_size()}
        row["allocator_peak_mib"] = peak / 2**20
        row["rival"] = rival
        row["peak_over_rival"] = peak / peaks[rival]
        rows.append(row)
    return rows


def _layers(size: str, device: str) -> Row:
    """How much of stage 3's parameters is whole at once, seen from hooks of every layer."""
    model, _ = rivals.build_stage(3, rivals.make_model(size).to(device))
    assert isinstance(model, FSDP)
    units, largest = model.units, [0]

    def look(*_: Any) -> None:
        largest[0] = max(largest[0], sum(unit.unsharded_bytes for unit in units))

    for module in model.modules():
        module.register_forward_pre_hook(look)
    for unit in units:
        for parameter in unit.parameters:
            parameter.whole.register_hook(look)
    with torch.device(device):
        for _ in range(2):
            rivals.loss_of(model, size).backward()
    world = dist.get_world_size()
    parameters = sum(p.shape.numel() for unit in units for p in unit.parameters)
    return {
        "case": "stage3",
        "ranks": world,
        "share_times_ranks_over_parameters": sum(u.shard.numel() for u in units)
        * (world / parameters),
        "whole_at_once_over_largest_layer": largest[0] / max(u.full.numel() * 4 for u in units),
    }


def _on_this_rank(device: str, quick: bool) -> list[Row]:
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    size = "quick" if quick else "full"
    rows = _balance() + _memory(size, device) + _peaks(size, device) + [_layers(size, device)]
    rows += _steps(size, device, rounds=3 if quick else 20)
    return rows if dist.get_rank() == 0 else []


def _steps(size: str, device: str, rounds: int) -> list[Row]:
    vocabulary, _, _, tokens = rivals.SIZES[size]
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, targets = torch.randint(vocabulary, (2, tokens), generator=generator).to(device)
    sent = _sent_bytes()
    names = rivals.NAMES + rivals.FLOORS
    times: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    wires: dict[str, list[int]] = {name: [] for name in names}
    payload: dict[str, dict[str, int]] = {}
    made = {name: rivals.make_model(size).to(device) for name in names}
    bare = {name: rivals.bare(name, made.pop(name)) for name in names if name.startswith("bare")}
    built = {name: rivals.build(name, model) for name, model in made.items()}

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    steps = {name: partial(train, *trained) for name, trained in built.items()} | bare
    takes = {name: rivals.payload_of(built[name]) for name in rivals.NAMES}
    for turn in range(rounds + 2):
        for name in names:
            dist.barrier()
            before, start, worked = sent(), time.perf_counter(), time.process_time()
            steps[name]()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds, crossed = time.perf_counter() - start, sent() - before
            # A slow rank makes the step slow.
            both = [seconds, time.process_time() - worked]
            slowest = torch.tensor(both, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            take = takes.get(name)
            if take is not None:
                payload[name] = take()
            # The first step learns orders, the second still warms up.
            if turn >= 2:
                times[name].append(slowest[0].item())
                cpu[name].append(slowest[1].item())
                wires[name].append(crossed)
    model_bytes = sum(p.numel() * p.element_size() for p in built["ddp"][0].parameters())
    rows: list[Row] = []
    for name in names:
        link = "loopback" if _loopback() else os.environ.get("LINK", "network")
        row: Row = {"case": "step", "link": link, "name": name, "ranks": dist.get_world_size()}
        row["time_ms"] = 1e3 * statistics.median(times[name])
        row["sent_over_parameters"] = statistics.median(wires[name]) / model_bytes
        row["predicted_over_parameters"] = (
            wire_bytes(payload[name], dist.get_world_size()) / model_bytes
            if name in payload
            else float("nan")
        )
        # Torch's own take the faster of two ways.
        rival = min(rivals.RIVALS.get(name, ("ddp",)), key=lambda r: statistics.median(times[r]))
        ratios = [a / b for a, b in zip(times[name], times[rival], strict=True)]
        row["rival"] = rival
        row["ratio_p50"] = statistics.median(ratios)
        row["ratio_p10"], row["ratio_p90"] = _quantile(ratios, 0.1), _quantile(ratios, 0.9)
        # What a rank works, all its threads together: it does not depend on who else is running.
        pairs = zip(cpu[name], cpu[rival], strict=True)
        row["cpu_ratio_p50"] = statistics.median(a / b for a, b in pairs)
        rows.append(row)
    return rows


def _quantile(values: list[float], q: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(q))


def _sent_bytes() -> Callable[[], int]:
    """The kernel's count of bytes that left by the interface of this group."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    path = Path(f"/sys/class/net/{device}/statistics/tx_bytes")
    # On the loopback every rank's bytes leave by the same interface.
    sharing = dist.get_world_size() if _loopback() else 1
    return lambda: int(path.read_text()) // sharing if path.exists() else 0


def _loopback() -> bool:
    return os.environ.get("GLOO_SOCKET_IFNAME", "lo") == "lo"


def _spawned(rank: int, folder: str, device: str, quick: bool, world: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", world)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    rows = _on_this_rank(device, quick)
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table; write the rows as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m zero.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes")
    parser.add_argument("--link", default="network", help="what to call the link in the rows")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args(argv)
    os.environ["LINK"] = arguments.link
    rows = bench(device=arguments.device, quick=arguments.quick)
    if arguments.json and rows:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if rows:
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
