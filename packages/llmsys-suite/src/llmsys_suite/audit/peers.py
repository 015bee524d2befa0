"""Peers that the audit builds and times itself, so that a slowed or shortened one is detected.

Every ratio of a run divides by torch's DDP, SDPA or float32. If the run slowed its peer, all others
would look fast. The audit's peers are written out here and timed in the same rounds as the run's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from flashattn2 import flash_attention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from llmsys_suite.measure.samples import PEER
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants import VARIANTS, variants_here

ROUNDS = 15


def peer_ratios(run: Run) -> dict[str, float]:
    """Return the time of each of the run's peers over that of the audit's, the median of ranks."""
    wrappers = {PEER: _replicated, "torch FSDP2": _sharded} if run.world > 1 else {}
    trained = variants_here(run.device, run.config.epochs)
    ratios = {}
    for name, wrap in wrappers.items():
        if name in trained:
            ratio = _peer_ratio(run, name, wrap)
            ratios[name] = float(statistics.median(run.gather(ratio)))
    return ratios


def _peer_ratio(run: Run, name: str, wrap: Callable[[Decoder], nn.Module]) -> float:
    tokens, targets = run.batch(0, shared=True)
    torch.manual_seed(run.config.seed)
    model = wrap(Decoder(run.model, attention=flash_attention).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.config.learning_rate)

    def step() -> None:
        with run.autocast():
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()

    variant = VARIANTS[name](run, run.model)
    run.barrier()
    seconds = timed_in_turns(run, {"run": lambda: variant.step(tokens, targets), "audit": step})
    variant.close()
    # Discard the phases that the recorder timed outside of any step.
    run.recorder.take()
    return median_ratio(seconds["run"], seconds["audit"])


def _replicated(decoder: Decoder) -> nn.Module:
    return nn.parallel.DistributedDataParallel(decoder, gradient_as_bucket_view=True)


def _sharded(decoder: Decoder) -> nn.Module:
    mesh = init_device_mesh(
        next(decoder.parameters()).device.type, (torch.distributed.get_world_size(),)
    )
    for block in decoder.layers():
        fully_shard(block, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    return decoder


def timed_in_turns(
    run: Run, calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Return the seconds of each call, round by round, after one round without timing."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            begin = monotonic(run)
            call()
            if number:
                seconds[name].append(monotonic(run) - begin)
    return seconds


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median ratio of the times of one round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def monotonic(run: Run) -> float:
    """Return the seconds of a wall clock after the device has finished its work."""
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    return time.monotonic()
