"""Memory of all stages, and step time and bytes sent compared with torch's implementations.

Run it with `python -m zero.bench`. Stages 1 and 2 are compared with DDP with
ZeroRedundancyOptimizer, and stage 3 with FSDP2. torch's implementations are set up as its
documentation advises: DDP's gradients and ZeroRedundancyOptimizer's parameters are views of
buckets, and FSDP2 shards each block and the root. `fsdp2_layers` shards the same modules as
`stage3` instead.
"""

from __future__ import annotations

import argparse
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
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F

from zero.fsdp.fsdp import FSDP
from zero.memory import memory_report
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.process_groups import wire_bytes

Row = dict[str, float | int | str]
Trained = tuple[nn.Module, torch.optim.Optimizer]

#: Vocabulary size, width, number of layers, and tokens per rank.
SIZES = {"quick": (1024, 128, 2, 64), "full": (4096, 512, 6, 128)}
NAMES = ("ddp", "ddp_zero_redundancy", "stage1", "stage2", "fsdp2", "fsdp2_layers", "stage3")
#: The implementations in torch that are closest to each stage.
RIVALS = {
    "stage1": ("ddp_zero_redundancy",),
    "stage2": ("ddp_zero_redundancy",),
    "stage3": ("fsdp2", "fsdp2_layers"),
}


def bench(*, device: str = "cpu", quick: bool = False, rounds: int = 0) -> list[Row]:
    """Return the rows of the cases `memory` and `step`.

    Under torchrun, the benchmark runs on its ranks, and only rank 0 returns rows. Otherwise it runs
    in two processes, or in one if there is only one GPU. `rounds` is the number of measured steps
    of each implementation; 0 means 20, or 3 if `quick` is True.
    """
    rounds = rounds or (3 if quick else 20)
    if "RANK" in os.environ:
        return _measure_on_this_rank(device, quick, rounds)
    with tempfile.TemporaryDirectory() as folder:
        world = min(2, torch.cuda.device_count()) if device == "cuda" else 2
        arguments = (folder, device, quick, rounds, world)
        torch.multiprocessing.spawn(_run_worker, arguments, nprocs=world)
        rows: list[Row] = json.loads(Path(folder, "rows").read_text())
        return rows


def _run_worker(rank: int, folder: str, device: str, quick: bool, rounds: int, world: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", world)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    rows = _measure_on_this_rank(device, quick, rounds)
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _measure_on_this_rank(device: str, quick: bool, rounds: int) -> list[Row]:
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    size = "quick" if quick else "full"
    rows = _measure_memory(size, device) + _measure_steps(size, device, rounds)
    return rows if dist.get_rank() == 0 else []


class Block(nn.Module):
    """A norm and two linear layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the output of the layers."""
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


def make_model(size: str) -> nn.Sequential:
    """Return an embedding, blocks and a head, as in a language model without attention."""
    vocabulary, width, layers, _ = SIZES[size]
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(layers)]
    head = nn.Linear(width, vocabulary, bias=False)
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, head)


def build(name: str, model: nn.Module) -> Trained:
    """Return `model`, wrapped by the implementation called `name`, and its AdamW optimizer."""
    if name in ("fsdp2", "fsdp2_layers"):
        classes = (Block,) if name == "fsdp2" else (nn.Linear, nn.Embedding)
        for module in model.modules():
            if isinstance(module, classes):
                fully_shard(module)
        fully_shard(model)
    elif name in ("ddp", "ddp_zero_redundancy"):
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        # If several optimizers shared a group, their reducers would wait for the end of the
        # backward pass.
        return build_stage(int(name[-1]), model, dist.new_group())
    if name != "ddp_zero_redundancy":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=1e-3,
    )


def build_stage(stage: int, model: nn.Module, group: Any) -> Trained:
    """Return `model` and AdamW at stage 0 (not sharded), 1, 2 or 3."""
    if stage == 3:
        model = FSDP(model, group=group, shard=(nn.Linear, nn.Embedding))
    if stage in (0, 3):
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, group=group, shard_gradients=stage == 2, lr=1e-3
    )


def _measure_memory(size: str, device: str) -> list[Row]:
    def compute_loss(model: nn.Module) -> Tensor:
        ids = torch.zeros(SIZES[size][3], dtype=torch.long)
        return F.cross_entropy(model(ids), ids)

    rows: list[Row] = []
    for stage in range(4):

        def build_model(group: Any, stage: int = stage) -> Trained:
            return build_stage(stage, make_model(size), group)

        report = memory_report(build_model, compute_loss, device=device)
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


@dataclass
class _Samples:
    """Measurements of one implementation, one per round."""

    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    #: Payload bytes of each collective in the latest step; None for torch's implementations.
    payload: dict[str, int] | None = None


def _measure_steps(size: str, device: str, rounds: int) -> list[Row]:
    vocabulary, _, _, tokens = SIZES[size]
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, targets = torch.randint(vocabulary, (2, tokens), generator=generator).to(device)
    built = {name: build(name, make_model(size).to(device)) for name in NAMES}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    samples = {name: _Samples() for name in NAMES}
    for round_index in range(rounds + 2):
        for name, trained in built.items():
            sample = samples[name] if round_index >= 2 else _Samples()
            # The first step determines the order of collectives, and the second is another warm-up.
            _measure_step(partial(train, *trained), device, sample)
            for part in trained:
                if isinstance(part, FSDP | ShardedOptimizer):
                    sample.payload = part.communicator.pop_bytes()
    model_bytes = sum(p.numel() * p.element_size() for p in built["ddp"][0].parameters())
    return [_make_step_row(name, samples, model_bytes) for name in NAMES]


def _measure_step(step: Callable[[], None], device: str, sample: _Samples) -> None:
    dist.barrier()
    sent_before = _read_sent_bytes()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    sample.sent_bytes.append(_read_sent_bytes() - sent_before)
    # The slowest rank determines the time of the step.
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    sample.seconds.append(slowest.item())


def _make_step_row(name: str, samples: dict[str, _Samples], model_bytes: int) -> Row:
    sample = samples[name]
    world = dist.get_world_size()
    link = "loopback" if _is_loopback() else os.environ.get("LINK", "network")
    row: Row = {"case": "step", "link": link, "name": name, "ranks": world}
    row["time_ms"] = 1e3 * statistics.median(sample.seconds)
    row["sent_over_parameters"] = statistics.median(sample.sent_bytes) / model_bytes
    row["predicted_over_parameters"] = float("nan")
    if sample.payload is not None:
        row["predicted_over_parameters"] = wire_bytes(sample.payload, world) / model_bytes
    # An implementation with several rivals is compared with the fastest of them.
    candidates = RIVALS.get(name, ("ddp",))
    rival = min(candidates, key=lambda candidate: statistics.median(samples[candidate].seconds))
    pairs = zip(sample.seconds, samples[rival].seconds, strict=True)
    ratios = [seconds / rival_seconds for seconds, rival_seconds in pairs]
    row["rival"] = rival
    for percent in (50, 10, 90):
        row[f"ratio_p{percent}"] = float(np.percentile(ratios, percent))
    return row


def _read_sent_bytes() -> int:
    """Return the bytes that the network interface has sent so far, or 0 if Linux reports none."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    path = Path(f"/sys/class/net/{device}/statistics/tx_bytes")
    # On loopback, all ranks share one interface, so return the average over ranks.
    num_ranks = dist.get_world_size() if _is_loopback() else 1
    return int(path.read_text()) // num_ranks if path.exists() else 0


def _is_loopback() -> bool:
    return os.environ.get("GLOO_SOCKET_IFNAME", "lo") == "lo"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows, and write them to a JSON file if its path is passed."""
    parser = argparse.ArgumentParser(prog="python -m zero.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="run for seconds instead of minutes")
    parser.add_argument("--rounds", type=int, default=0, help="number of measured rounds")
    parser.add_argument("--link", default="network", help="name of a link other than loopback")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args(argv)
    os.environ["LINK"] = arguments.link
    rows = bench(device=arguments.device, quick=arguments.quick, rounds=arguments.rounds)
    for row in rows:
        print(*(f"{key}={value}" for key, value in row.items()))
    if arguments.json and rows:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
