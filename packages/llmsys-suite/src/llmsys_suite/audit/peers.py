"""The audit's own set-ups of torch's DDP and FSDP2, timed in the same rounds as the run's.

The ratios of variants are relative to torch's DDP. If the run slowed this peer, all other variants
would look fast. The audit therefore times its own DDP and FSDP2 in the same rounds.

Other programs lengthen the wall time of a step. Two other measures hardly depend on them: the time
that a step needs, which is its wall time without waiting for a core, and its processor time.
A peer that sleeps needs more time, and a peer that does more work uses more processor time.

A rank may also wait for another thread or rank that waits for a core, which nothing counts. Two
peers of the same kind wait alike. A peer and another variant do not, so their needed times are
compared in undisturbed rounds only. With too few of these, only processor time is compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter

import torch
import torch.nn.functional as F
from flashattn2 import flash_attention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from llmsys_suite.audit.tolerances import NEEDED_BAND, PROCESSOR_BAND
from llmsys_suite.folder import Sample
from llmsys_suite.measure import others
from llmsys_suite.measure.clocks import core_wait_seconds
from llmsys_suite.measure.samples import CORE_WAIT, PEER, PROCESSOR, needed_seconds
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants import VARIANTS
from llmsys_suite.variants.initial_weights import seeded

#: Variants with which a peer's time is compared; the first one that was trained is used.
OTHERS = ("ddp bucketed", "ddp flat")
#: Maximum number of rounds, and number of rounds after which the audit decides whether to stop.
ROUNDS, ROUNDS_PER_DECISION = 20, 5
#: Minimum number of rounds for comparing a peer with another variant.
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Measure:
    """A measure of step time, its quantile over rounds, and the allowed factor between peers.

    If `needs_undisturbed_rounds`, only undisturbed rounds compare a peer with another variant.
    """

    seconds_of: Callable[[Sample], float]
    quantile: float
    allowed_factor: float
    needs_undisturbed_rounds: bool

    def of_rounds(self, steps: list[Sample]) -> float:
        """Return the quantile of the durations of the steps."""
        return sorted(map(self.seconds_of, steps))[int(self.quantile * (len(steps) - 1))]


#: Even without its own waits for a core, a rank may wait for another rank that waits for one. The
#: low quantile of the needed time leaves such rounds out.
MEASURES = {
    "needed time": Measure(needed_seconds, 0.2, NEEDED_BAND, needs_undisturbed_rounds=True),
    "processor time": Measure(
        itemgetter(PROCESSOR), 0.5, PROCESSOR_BAND, needs_undisturbed_rounds=False
    ),
}


def time_peers(run: Run, trained: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the time ratios of each trained peer, by measure.

    The entry "audit" is the time of the run's peer divided by that of the audit's peer. For any
    other entry, the divisor is the time of the variant that its key names. This entry is missing
    if too few rounds were undisturbed.
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
) -> dict[str, dict[str, float]]:
    tokens, targets = run.batch(0, split=True)
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
    ratios = _time_ratios(run, name, calls | {"audit": step})
    for variant in variants.values():
        variant.close()
    return ratios


def _time_ratios(
    run: Run, name: str, calls: Mapping[str, Callable[[], object]]
) -> dict[str, dict[str, float]]:
    """Return the ratio of the time of the call `name` to that of each other call, by measure.

    Rounds are added, up to `ROUNDS`, until the square of every ratio to the audit's call is within
    its band.
    """
    for call in calls.values():
        call()
    # On a GPU, the processor only starts kernels and waits for them.
    measures = dict(MEASURES)
    if run.device.type != "cpu":
        del measures["processor time"]
    steps: dict[str, list[Sample]] = {call_name: [] for call_name in calls}
    ratios: dict[str, dict[str, float]] = {}
    while len(steps[name]) < ROUNDS and not (ratios and _are_well_inside_bands(ratios)):
        for _ in range(ROUNDS_PER_DECISION):
            for call_name, call in calls.items():
                index = {"step": len(steps[call_name]), "rank": run.rank}
                steps[call_name].append(index | timed(run, call))
        by_rank = run.gather(steps)
        by_call = {call_name: [steps[call_name] for steps in by_rank] for call_name in calls}
        for measure_name, measure in measures.items():
            ratios[measure_name] = ratios_to_others(name, measure, by_call)
    return ratios


def ratios_to_others(
    name: str, measure: Measure, by_call: Mapping[str, Sequence[list[Sample]]]
) -> dict[str, float]:
    """Return the ratio of the time of `name` to that of each other call, as means over ranks.

    `by_call` has a list of steps for each rank.
    """
    ratios = {}
    fractions = others.foreign_cpu_fractions([*chain(*by_call[name])])
    rounds = {s["step"] for s in chain(*by_call[name])}
    for other, steps in by_call.items():
        if other == name:
            continue
        compared = rounds
        if measure.needs_undisturbed_rounds and other != "audit":
            both = chain(*by_call[name], *steps)
            compared = rounds - others.disturbed_rounds(both, fractions)
        if len(compared) >= LEAST_ROUNDS:
            seconds, divisor = (
                statistics.mean(
                    measure.of_rounds([s for s in rank_steps if s["step"] in compared])
                    for rank_steps in ranks
                )
                for ranks in (by_call[name], steps)
            )
            ratios[other] = seconds / divisor
    return ratios


def _are_well_inside_bands(ratios: dict[str, dict[str, float]]) -> bool:
    """Return True if further rounds are unlikely to move a ratio out of its band."""
    return all(
        1 / MEASURES[name].allowed_factor < by_call["audit"] ** 2 < MEASURES[name].allowed_factor
        for name, by_call in ratios.items()
    )


def timed(run: Run, call: Callable[[], object]) -> Sample:
    """Call once, and return the wall time, the processor time and the wait for a core."""
    start_time = synchronized_time(run)
    # Both counters are read between the two wall-clock readings, so that the wait does not exceed
    # the wall time.
    waited, processor = core_wait_seconds(), time.process_time()
    call()
    processor, waited = time.process_time() - processor, core_wait_seconds() - waited
    return {
        "seconds": synchronized_time(run) - start_time,
        PROCESSOR: processor,
        CORE_WAIT: waited,
        **others.clocks(run.world),
    }


def _replicated(decoder: Decoder) -> nn.Module:
    return nn.parallel.DistributedDataParallel(decoder, gradient_as_bucket_view=True)


def _sharded(decoder: Decoder) -> nn.Module:
    mesh = init_device_mesh(
        next(decoder.parameters()).device.type, (torch.distributed.get_world_size(),)
    )
    for block in decoder.block_list():
        fully_shard(block, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    return decoder


def synchronized_time(run: Run) -> float:
    """Return the seconds of a wall clock after the device has finished its work."""
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    return time.monotonic()
