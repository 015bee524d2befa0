"""The best plan to train a model on some devices, its duration and its price."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, format_bytes, format_count
from accounting.flops import flops
from accounting.hardware import Hardware, find
from accounting.memory.training import training_memory
from accounting.model.transformer import Transformer
from accounting.plan import Plan
from accounting.precision import Precision, get_recipe
from accounting.search.plans import (
    MEMORY_FRACTION,
    FittingPlan,
    find_least_memory,
    plans_that_fit,
)
from accounting.search.space import Space
from accounting.time.goodput import Goodput, compute_goodput
from accounting.time.intervals import Interval, predict_seconds
from accounting.time.step import step_time
from accounting.workload import Workload

#: Default batch in tokens; it is larger if the devices need more sequences.
TOKENS_PER_STEP = 4 * 2**20
#: Range of published to predicted hours of the trainings of Llama 3.1. `days` is the interval of a
#: step times the steps, divided by the goodput. Its width covers the error of step times only.
TRAINING_RATIOS = (1.07, 2.85)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of `plan_for`: the best plan, its duration and cost, and alternative plans."""

    model: Transformer
    hardware: Hardware
    recipe: Precision
    batch: int
    seq: int
    tokens: float
    best: FittingPlan
    others: tuple[FittingPlan, ...]
    #: Bytes of the fullest device.
    memory: Breakdown
    #: Modeled seconds of a step, by part.
    step: Breakdown
    #: Predicted seconds of a step.
    seconds: Interval
    mfu: Interval
    days: Interval
    #: Price of the training, or None if the price of the device is unknown.
    usd: Interval | None
    megawatt_hours: Interval
    failures: Goodput

    @property
    def precision(self) -> str:
        """The name of the recipe."""
        return self.recipe.name

    @property
    def plan(self) -> Plan:
        """The best plan."""
        return self.best.plan

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and numbers for `json.dumps`; an unknown price is None."""
        names = ("batch", "seq", "tokens", "precision")
        records = ("plan", "seconds", "mfu", "days", "megawatt_hours")
        return {
            "model": self.model.name,
            "hardware": self.hardware.name,
            "devices": self.plan.devices,
            **{name: getattr(self, name) for name in names},
            **{name: asdict(getattr(self, name)) for name in records},
            "usd": asdict(self.usd) if self.usd else None,
            "memory": self.memory.to_dict(),
            "step_time": self.step.to_dict(),
            "goodput": asdict(self.failures),
            "others": [asdict(other) for other in self.others],
        }

    def explain(self) -> str:
        """Return the answer as text of about twenty lines."""
        plan, device = self.plan, self.hardware
        least_ratio, largest_ratio = TRAINING_RATIOS
        rows = [
            f"{self.model.name} on {plan.devices:,} {device.name}, {self.tokens:.4g} tokens, "
            f"{self.batch:,} x {self.seq:,} per step, {self.precision}",
            f"layout     {plan.layout}",
            f"memory     {format_bytes(self.memory.total)} of {format_bytes(device.memory_bytes)}",
            *self.memory.format_shares(format_bytes),
            f"step       {self.seconds} s",
            *self.step.format_shares(lambda value: f"{value:.4g} s"),
            f"MFU        {self.mfu}",
            f"intervals  of a step, {self.seconds.basis}",
            f"days       {self.days}, with failures and checkpoints: "
            f"{format_count(self.failures.failures, 'failure')}, "
            f"goodput {self.failures.goodput:.1%}",
            f"           3 published trainings took {least_ratio} to {largest_ratio} times the "
            "predicted hours",
            f"price      {self.usd} USD" if self.usd else "price      unknown; pass usd_per_hour",
            f"energy     {self.megawatt_hours} MWh for the devices",
        ]
        if self.others:
            rows.append("alternatives with their modeled step")
            rows += [
                f"  {other.step_seconds:8.4g} s {format_bytes(other.memory_bytes):>10}  "
                f"{other.plan.layout}"
                for other in self.others[:4]
            ]
        return "\n".join(rows)

    __str__ = explain


@checks.validate(usd_per_hour=0)
def plan_for(
    model: Transformer,
    *,
    gpus: int,
    hardware: str | Hardware = "H100",
    tokens: float = 1e12,
    seq: int = 4096,
    batch: int | None = None,
    memory_bytes: float | None = None,
    usd_per_hour: float | None = None,
    precision: str | Precision | None = None,
    time_limit: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    **fixed: Any,
) -> Answer:
    """Return the fastest plan that fits in memory, and the cost of training on `tokens` with it.

    `batch` is in sequences of `seq` tokens; the default is about 4 million tokens. Fields of `Plan`
    that are passed are fixed, and the search varies all other fields. As in `plans_that_fit`,
    `training_memory` with `fused_gate=True` computes the memory. `memory_bytes` replaces the memory
    of the device. `usd_per_hour` is the price of one device; the default is the hardware's price.
    The default `precision` is `megatron_bf16`, or `mixed_fp16` if the device lists no bf16.
    Failures per device-hour are as frequent as in the 54-day run of Llama 3 405B. `time_limit` and
    `progress` are passed to `plans_that_fit`. Raises `ValueError` if no plan fits, and for a
    keyword that is neither an argument nor a field of `Plan`. Raises `TimeoutError` if no fitting
    plan is found within `time_limit` seconds.
    """
    device = find(hardware)
    if memory_bytes is not None:
        # The answer prints this memory, so that a limit in a wrong unit is noticed.
        device = replace(device, memory_bytes=math.ceil(memory_bytes))
    price = device.usd_per_hour if usd_per_hour is None else usd_per_hour
    if precision is None:
        precision = "megatron_bf16" if "bf16" in device.peaks else "mixed_fp16"
    kind = get_recipe(precision)
    if batch is None:
        batch = max(TOKENS_PER_STEP // seq, 1)
        # Round up to a multiple of `gpus`, or of gpus / gcd(gpus, 8) if the batch is small.
        unit = gpus if batch > gpus else gpus // math.gcd(gpus, 8)
        batch = -(-max(batch, unit) // unit) * unit
    work = Workload(batch=batch, seq=seq, precision=kind, fused_gate=True)
    question: dict[str, Any] = {"hardware": device, "devices": gpus, "batch": batch, "seq": seq}
    question |= {"precision": kind, "time_limit": time_limit, "progress": progress}
    candidates = plans_that_fit(model, **question, **fixed)
    if not candidates:
        raise ValueError(explain_no_room(model, device, gpus, work, fixed))
    best, *others = candidates
    seconds = predict_seconds(best.step_seconds, model=model, hardware=device, precision=kind)
    useful = float(flops(model, seq=seq, batch=batch).total) / gpus / device.peak(kind.compute)
    hours = seconds.scale(tokens / (batch * seq) / 3600)
    failures = compute_goodput(hours.middle, gpus)
    wall = hours.scale(1 / failures.goodput)
    return Answer(
        model=model,
        hardware=device,
        recipe=kind,
        batch=batch,
        seq=seq,
        tokens=tokens,
        best=best,
        others=tuple(others),
        memory=training_memory(model, best.plan, work),
        step=step_time(model, best.plan, work, hardware=device),
        seconds=seconds,
        mfu=seconds.to_rate(useful),
        days=wall.scale(1 / 24),
        usd=None if price is None else wall.scale(gpus * price),
        megawatt_hours=wall.scale(gpus * device.power_watts / 1e6),
        failures=failures,
    )


def explain_no_room(
    model: Transformer,
    device: Hardware,
    gpus: int,
    work: Workload,
    fixed: Mapping[str, Any],
) -> str:
    """Return the reason why a search found no plan, for an error message.

    There are three possible reasons. The fixed fields contradict each other or the model, no
    degrees of parallelism divide the devices and the batch, or the memory is too small.
    """
    contradiction = _explain_contradiction(model, work.seq, fixed)
    if contradiction:
        return contradiction
    settings = ", ".join(f"{name}={value}" for name, value in fixed.items()) or "no fixed fields"
    head = f"no plan over {gpus} {device.name} fits batch={work.batch}, seq={work.seq}, {settings}"
    capacity = MEMORY_FRACTION * device.memory_bytes
    space = Space(model, device, gpus, work, fixed)
    needed = find_least_memory(space)
    if needed is None:
        return f"{head}: divisibility fails, not memory. {_explain_indivisible(space)}"
    return (
        f"{head}: the plan with the least memory needs {format_bytes(needed)} per device and "
        f"{format_bytes(capacity)} are usable, so {format_bytes(needed - capacity)} are missing; "
        "use more devices, a smaller batch or fewer options"
    )


def _explain_indivisible(space: Space) -> str:
    """Return a sentence that says which numbers do not divide the devices or the batch."""
    batch, degrees = space.work.batch, space.list_data_degrees()
    fewest = degrees[0] if degrees else 1
    head = f"The fewest data-parallel ranks are {fewest}, and batch={batch} is"
    if batch < fewest:
        return (
            f"{head} {fewest - batch} fewer; pass batch={fewest}, or change the number of devices"
        )
    excess = batch % fewest
    if excess:
        return (
            f"{head} {excess} more than a multiple of {fewest}; pass batch={batch - excess} or "
            f"{batch - excess + fewest}, or change the number of devices"
        )
    return (
        f"No degrees divide {format_count(space.devices, 'device')}, batch={batch}, "
        f"{format_count(space.model.layers, 'layer')} and "
        f"{format_count(space.model.heads, 'head')}; free a fixed field, or change the batch or "
        "the number of devices"
    )


def _explain_contradiction(model: Transformer, seq: int, fixed: Mapping[str, Any]) -> str:
    """Return the error of a plan with the fixed fields, or an empty string if it is valid."""
    interleaved = fixed.get("virtual_stages", 1) > 1
    usual: dict[str, Any] = {
        "schedule": "interleaved" if interleaved else "1f1b",
        "microbatches": fixed.get("pipeline", 1),
    }
    # If the number of data ranks is not fixed, choose one that the expert degree divides.
    data = fixed.get("data", fixed.get("expert", 1))
    try:
        plan = Plan(**usual | dict(fixed) | {"data": data})
        plan.check(model, seq=seq)
        # The number of ranks that share weights is unknown at this point, so assume at least two.
        replace(plan, data=max(2, plan.data)).has_unsharded_weights()
    except ValueError as error:
        return str(error)
    return ""
