"""The audit's own set-ups of torch's DDP and FSDP2, timed in the same rounds as the run's.

The ratios of variants are relative to torch's DDP. If the run slowed this peer, all other variants
would look fast. The audit therefore times its own DDP and FSDP2 in the same rounds.

Other programs lengthen the wall time of a step. Two other measures hardly depend on such programs:
the needed time of a step, which is its wall time without waiting for a core, and its processor
time. A peer that sleeps needs more time, and a peer that does more work uses more processor time.

A rank may also wait for another rank that waits for a core. No counter contains this time. It is
about equal for two peers of the same kind, but not for a peer and another variant. The needed times
of these two are compared in undisturbed rounds only, and only if there are `LEAST_ROUNDS` of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from flashattn2 import flash_attention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from llmsys_suite.audit.tolerances import NEEDED_BAND, PROCESSOR_BAND
from llmsys_suite.folder import Sample
from llmsys_suite.measure import others
from llmsys_suite.measure.clocks import read_core_wait_seconds
from llmsys_suite.measure.samples import CORE_WAIT, PEER, PROCESSOR, compute_needed_seconds
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.variants import VARIANTS
from llmsys_suite.variants.initial_weights import build_seeded_model

#: A peer's time is compared with the first of these variants that was trained.
OTHER_VARIANTS = ("ddp bucketed", "ddp flat")
MAX_ROUNDS = 20
#: Number of rounds after which the audit decides whether to stop.
ROUNDS_PER_DECISION = 5
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

    def compute_quantile_seconds(self, steps: list[Sample]) -> float:
        """Return the quantile of the times of the steps."""
        ordered = sorted(self.seconds_of(step) for step in steps)
        return ordered[int(self.quantile * (len(ordered) - 1))]


#: The needed time includes waits for another rank that waits for a core. A low quantile leaves out
#: the rounds in which this wait was long.
MEASURES = {
    "needed time": Measure(compute_needed_seconds, 0.2, NEEDED_BAND, needs_undisturbed_rounds=True),
    "processor time": Measure(
        lambda step: float(step[PROCESSOR]), 0.5, PROCESSOR_BAND, needs_undisturbed_rounds=False
    ),
}


def time_peers(run: Run, trained: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Return {peer: {measure: {divisor: time ratio}}} for each trained peer, DDP and FSDP2.

    A ratio is the time of the run's peer over that of a divisor: "audit" is the same peer as the
    audit sets it up, and the other key is one of `OTHER_VARIANTS`. The latter is missing if no such
    variant was trained, or if too few rounds were undisturbed for the measure.
    """
    wrappers = {PEER: _wrap_in_ddp, "torch FSDP2": _wrap_in_fsdp} if run.world > 1 else {}
    other = next((name for name in OTHER_VARIANTS if name in trained), None)
    return {
        name: _time_peer(run, name, wrap, other)
        for name, wrap in wrappers.items()
        if name in trained
    }


def _time_peer(
    run: Run, name: str, wrap: Callable[[Decoder], nn.Module], other: str | None
) -> dict[str, dict[str, float]]:
    tokens, targets = run.draw_batch(0, split=True)
    model = wrap(build_seeded_model(run, run.model, attention=flash_attention))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.config.learning_rate, fused=True)

    def step() -> None:
        with run.autocast():
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()

    variants = {name: VARIANTS[name](run, run.model)}
    if other is not None:
        variants[other] = VARIANTS[other](run, run.model)
    calls: dict[str, Callable[[], object]] = {
        variant_name: partial(variant.step, tokens, targets)
        for variant_name, variant in variants.items()
    }
    run.barrier()
    ratios = _measure_time_ratios(run, name, calls | {"audit": step})
    for variant in variants.values():
        variant.close()
    return ratios


def _measure_time_ratios(
    run: Run, name: str, calls: Mapping[str, Callable[[], object]]
) -> dict[str, dict[str, float]]:
    """Return {measure: {other: time of the call `name` / time of the call `other`}}.

    Rounds are added, up to `MAX_ROUNDS`, until `_are_well_inside_bands`.
    """
    for call in calls.values():
        call()
    # On a GPU, the processor only starts kernels and waits for them.
    measures = dict(MEASURES)
    if run.device.type != "cpu":
        del measures["processor time"]
    steps: dict[str, list[Sample]] = {call_name: [] for call_name in calls}
    ratios: dict[str, dict[str, float]] = {}
    while len(steps[name]) < MAX_ROUNDS and not (ratios and _are_well_inside_bands(ratios)):
        for _ in range(ROUNDS_PER_DECISION):
            for call_name, call in calls.items():
                index = {"step": len(steps[call_name]), "rank": run.rank}
                steps[call_name].append(index | time_call(run, call))
        by_rank = run.gather(steps)
        by_call = {call_name: [steps[call_name] for steps in by_rank] for call_name in calls}
        for measure_name, measure in measures.items():
            ratios[measure_name] = compute_ratios(name, measure, by_call)
    return ratios


def compute_ratios(
    name: str, measure: Measure, by_call: Mapping[str, Sequence[list[Sample]]]
) -> dict[str, float]:
    """Return {other: time of the call `name` / time of the call `other`}; times are rank means.

    `by_call` has a list of steps for each rank. If too few rounds can be compared with a call, its
    entry is missing.
    """
    steps_of_name = list(chain(*by_call[name]))
    fractions = others.compute_foreign_cpu_fractions(steps_of_name)
    rounds = {step["step"] for step in steps_of_name}
    ratios = {}
    for other, steps_by_rank in by_call.items():
        if other == name:
            continue
        compared = rounds
        if measure.needs_undisturbed_rounds and other != "audit":
            both = chain(steps_of_name, *steps_by_rank)
            compared = rounds - others.find_disturbed_rounds(both, fractions)
        if len(compared) >= LEAST_ROUNDS:
            seconds = _compute_mean_seconds(measure, by_call[name], compared)
            ratios[other] = seconds / _compute_mean_seconds(measure, steps_by_rank, compared)
    return ratios


def _compute_mean_seconds(
    measure: Measure, steps_by_rank: Sequence[list[Sample]], rounds: set[int]
) -> float:
    return statistics.mean(
        measure.compute_quantile_seconds([step for step in steps if step["step"] in rounds])
        for steps in steps_by_rank
    )


def _are_well_inside_bands(ratios: dict[str, dict[str, float]]) -> bool:
    """Return True if the square of every ratio to the audit's call lies in the allowed band.

    Further rounds are then unlikely to move the ratio out of the band.
    """
    return all(
        1 / MEASURES[name].allowed_factor < by_call["audit"] ** 2 < MEASURES[name].allowed_factor
        for name, by_call in ratios.items()
    )


def time_call(run: Run, call: Callable[[], object]) -> Sample:
    """Call `call` once; return its wall, processor and core-wait seconds, and the busy clocks."""
    start_time = read_synchronized_time(run)
    # Both counters are read between the two wall-clock readings, so that the wait does not exceed
    # the wall time.
    start_wait = read_core_wait_seconds()
    start_processor = time.process_time()
    call()
    sample = {
        PROCESSOR: time.process_time() - start_processor,
        CORE_WAIT: read_core_wait_seconds() - start_wait,
    }
    sample["seconds"] = read_synchronized_time(run) - start_time
    return sample | others.read_busy_clocks(run.world)


def _wrap_in_ddp(decoder: Decoder) -> nn.Module:
    return nn.parallel.DistributedDataParallel(decoder, gradient_as_bucket_view=True)


def _wrap_in_fsdp(decoder: Decoder) -> nn.Module:
    device = next(decoder.parameters()).device
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for block in decoder.list_blocks():
        fully_shard(block, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    return decoder


def read_synchronized_time(run: Run) -> float:
    """Return a monotonic wall-clock time in seconds, after the device has finished its work."""
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    return time.monotonic()
