"""The memory of a pipeline stage during a step, micro-batch by micro-batch."""

from dataclasses import dataclass
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, binary_size
from accounting.memory.fsdp_pipeline import FsdpStage
from accounting.memory.states import distinct_stages
from accounting.memory.training import training_memory
from accounting.model.shape import Shape
from accounting.plan import Plan, fitted
from accounting.workload import WORKLOAD, Workload, workload

_BACKWARD = ("one block recomputed", "head and loss", "gradients in flight")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of a step, and its live bytes by kind."""

    when: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Return the live bytes of all kinds."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The moments of a step on one device, in chronological order."""

    name: str
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """Return the first moment with the most live bytes."""
        return max(self.moments, key=lambda moment: moment.total)

    def explain(self) -> str:
        """Return the peak, its parts, and the number of moments."""
        peak = self.peak
        rows = [f"  {name:<24}{binary_size(size):>12}" for name, size in peak.parts.items() if size]
        head = f"{self.name}: {binary_size(peak.total)} at {peak.when}"
        return "\n".join([f"{head}, the fullest of {len(self.moments)} moments", *rows])

    __str__ = explain


@checks.entry(*WORKLOAD, stage=0)
def memory_timeline(
    model: Shape,
    plan: Plan | None = None,
    work: Workload | None = None,
    *,
    stage: int | None = None,
    **run: Any,
) -> Timeline:
    """Return the memory of a device of `stage` during a step; the default is the fullest stage.

    `run` contains fields of a `Workload`. A forward allocates the activations of a micro-batch, or
    of one chunk of the stage, and a backward frees them. All forwards run first (`gpipe`), or
    forwards and backwards alternate after the warm-up (`1f1b`, `interleaved`). Gradients are None
    between steps, so the first backward allocates them. Recomputed tensors, and the loss with the
    gradient of the logits, exist only during a backward. A timeline shows at most about a thousand
    micro-batches. The peak equals `training_memory` if there are more micro-batches than the
    maximum in flight, and is otherwise lower.
    """
    work = workload(work, run)
    plan = fitted(plan, model, batch=work.batch, seq=work.seq)
    checks.whole("batch", work.batch)
    if stage is None:
        stages = distinct_stages(model, plan)
        sizes = {s: training_memory(model, plan, work, stage=s).total for s in stages}
        stage = max(stages, key=sizes.__getitem__)
    whole = training_memory(model, plan, work, stage=stage)
    if plan.keeps_weights_whole():
        return Timeline(
            name=f"{whole.name}, in time", moments=_fsdp_moments(model, plan, work, stage)
        )
    states = {part.name: float(part.total) for part in whole}
    flight = plan.in_flight(stage)
    activation_bytes = states.pop("activations", 0.0) / flight
    gradients = states.pop("gradients", 0.0)
    unsharded = {name: states.pop(name, 0.0) for name in ("cast weights", "gathered")}
    backward = {name: states.pop(name, 0.0) for name in _BACKWARD}
    moments: list[Moment] = []

    def moment(when: str, alive: int, working: bool, grown: bool, back: bool = False) -> None:
        parts = states | {"gradients": gradients * grown, "activations": activation_bytes * alive}
        parts |= {name: size * working for name, size in unsharded.items()}
        parts |= {name: size * back for name, size in backward.items()}
        moments.append(Moment(when=when, parts=parts))

    # The middle of a long step repeats itself, so it is cut.
    chunks = min(plan.microbatches * plan.virtual_stages, flight + 1000)
    what = "micro-batch" if plan.virtual_stages == 1 else "chunk"
    ahead = done = 0
    moment("the start of the step", 0, False, False)
    while done < chunks:
        if ahead < chunks and ahead - done < flight:
            ahead += 1
            moment(f"the forward of {what} {ahead}", ahead - done, True, done > 0)
        else:
            # All saved tensors of the micro-batch are alive at the start of its backward.
            done += 1
            moment(f"the backward of {what} {done}", ahead - done + 1, True, done > 1, True)
    moment("the optimizer", 0, False, True)
    return Timeline(name=f"{whole.name}, in time", moments=tuple(moments))


def _fsdp_moments(model: Shape, plan: Plan, work: Workload, stage: int) -> tuple[Moment, ...]:
    """Return the moments of a stage of FSDP2 modules.

    See Note [FSDP2 under torch's pipeline schedules] in fsdp_pipeline.py.
    """
    device, flight = FsdpStage(model, plan, work, stage), plan.in_flight(stage)
    moments: list[tuple[str, Breakdown]] = []
    chunks = min(plan.microbatches, flight + 1000)
    ahead = done = 0
    whole = False
    moments.append(("the start of the step", device.between_steps(reduced=False)))
    while done < chunks:
        if ahead < chunks and ahead - done < flight:
            ahead += 1
            moment = device.forward(ahead - done, accumulated=done > 0, whole=whole)
            whole = not plan.reshard_after_forward
            moments.append((f"the forward of micro-batch {ahead}", moment))
            continue
        moment = device.backward(ahead - done, accumulated=done > 0, whole=whole)
        done, whole = done + 1, True
        if done == chunks:
            moment = max(moment, *device.reduction(), key=lambda moment: moment.total)
        moments.append((f"the backward of micro-batch {done}", moment))
    moments.append(("the optimizer", device.between_steps(reduced=True)))
    names = dict.fromkeys(part.name for _, moment in moments for part in moment)
    return tuple(
        Moment(
            when=when,
            parts={n: float(moment[n].total) if n in moment else 0.0 for n in names},
        )
        for when, moment in moments
    )
