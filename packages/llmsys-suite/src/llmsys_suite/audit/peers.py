"""Second implementations of torch's DDP and FSDP2, which the audit times beside the run's.

Every ratio of a run is relative to torch's DDP, SDPA or float32. If the run slowed its peer, all
other variants would look fast. The audit therefore times its own peers in the rounds of the run's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from flashattn2 import flash_attention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from llmsys_suite.audit.tolerances import PEER_BAND
from llmsys_suite.measure.samples import PEER
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants import VARIANTS
from llmsys_suite.variants.initial_weights import seeded

#: Seconds by call and round.
Rounds = dict[str, list[float]]
#: Variants with which a peer's time is compared; the first one that was trained is used.
OTHERS = ("ddp bucketed", "ddp flat")
#: Maximum number of rounds, and number of rounds after which the audit decides whether to stop.
ROUNDS, ROUNDS_PER_DECISION = 15, 5
#: A median within this factor of 1 needs no further rounds: they could move it out of PEER_BAND
#: only if they differed greatly from the earlier ones.
CLEAR = math.sqrt(PEER_BAND)


def time_peers(run: Run, trained: list[str]) -> dict[str, dict[str, float]]:
    """Return time ratios of each trained peer, as medians over rounds and ranks.

    The entry "audit" is the time of the run's peer divided by the audit's implementation. Any other
    entry is divided by the time of the variant that its key names.
    """
    wrappers = {PEER: _replicated, "torch FSDP2": _sharded} if run.world > 1 else {}
    other = next((name for name in OTHERS if name in trained), None)
    return {
        name: _time_peer(run, name, wrap, other)
        for name, wrap in wrappers.items()
        if name in trained
    }


def _time_peer(
    run: Run, name: str, wrap: Callable[[Decoder], nn.Module], other: str | None
) -> dict[str, float]:
    tokens, targets = run.batch(0, shared=True)
    model = wrap(seeded(run, run.model, attention=flash_attention))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.config.learning_rate, fused=True)

    def step() -> None:
        with run.autocast():
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()

    names = [name] if other is None else [name, other]
    variants = {name: VARIANTS[name](run, run.model) for name in names}
    calls: dict[str, Callable[[], object]] = {
        name: partial(variant.step, tokens, targets) for name, variant in variants.items()
    }
    run.barrier()
    ratios = _median_ratios(run, name, calls | {"audit": step})
    for variant in variants.values():
        variant.close()
    # Discard the phases that the recorder timed outside of any step.
    run.recorder.take()
    return ratios


def _median_ratios(
    run: Run, name: str, calls: Mapping[str, Callable[[], object]]
) -> dict[str, float]:
    """Return the median ratio of the time of the call `name` to that of each other call."""
    for call in calls.values():
        call()
    ratios = {"audit": math.inf}
    seconds: Rounds = {timed: [] for timed in calls}
    while len(seconds[name]) < ROUNDS and not 1 / CLEAR < ratios["audit"] < CLEAR:
        more = timed_in_turns(run, calls, ROUNDS_PER_DECISION)
        for timed in calls:
            seconds[timed] += more[timed]
        for other in calls:
            if other != name:
                ratio = median_ratio(seconds[name], seconds[other])
                ratios[other] = float(statistics.median(run.gather(ratio)))
    return ratios


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
) -> Rounds:
    """Return the seconds of each call in each round; every round runs each call once."""
    seconds: Rounds = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start_time = monotonic(run)
            call()
            seconds[name].append(monotonic(run) - start_time)
    return seconds


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median of `ours / theirs`, taken round by round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def monotonic(run: Run) -> float:
    """Return the seconds of a wall clock after the device has finished its work."""
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    return time.monotonic()
