"""One question, one answer: how to train this model on those devices, how long, for how much."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, binary_size
from accounting.flops import flops
from accounting.hardware import Hardware, find
from accounting.memory.training import training_memory
from accounting.model.shape import Shape
from accounting.plan import Plan
from accounting.precision import Precision, recipe
from accounting.search.launch import command_lines
from accounting.search.plans import AXES, Candidate, plans_that_fit
from accounting.time.goodput import LLAMA3_405B, Goodput, goodput
from accounting.time.published import Interval, predicted
from accounting.time.step import step_time
from accounting.workload import Workload

TOKENS_A_STEP = 4 * 2**20
"""A batch of four million tokens, where none is given and the devices do not ask for more."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best plan for a question, and what a run by it takes; others that fit stand behind."""

    model: Shape
    hardware: Hardware
    recipe: Precision
    batch: int
    seq: int
    tokens: float
    best: Candidate
    others: tuple[Candidate, ...]
    memory: Breakdown
    """Of the fullest device."""
    step: Breakdown
    """As modeled, part by part."""
    seconds: Interval
    """Of a step, as predicted."""
    mfu: Interval
    days: Interval
    usd: Interval
    megawatt_hours: Interval
    failures: Goodput

    @property
    def precision(self) -> str:
        """The name of the recipe."""
        return self.recipe.name

    @property
    def plan(self) -> Plan:
        """The layout."""
        return self.best.plan

    @property
    def _has_price(self) -> bool:
        return self.hardware.usd_per_hour is not None or self.usd.middle > 0

    def commands(self) -> dict[str, str]:
        """The command lines that run it."""
        asked: Any = {"batch": self.batch, "seq": self.seq, "dtype": self.recipe.activations}
        return command_lines(self.model, self.plan, **asked)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries and numbers, ready for `json.dumps`."""
        ranges = ("seconds", "mfu", "days", "usd", "megawatt_hours")
        same = ("precision", "batch", "seq", "tokens")
        return {
            "model": self.model.name,
            "hardware": self.hardware.name,
            "devices": self.plan.devices,
            **{name: getattr(self, name) for name in same},
            "plan": asdict(self.plan),
            "memory": self.memory.to_dict(),
            "step_time": self.step.to_dict(),
            "goodput": asdict(self.failures),
            "commands": self.commands(),
            "others": [asdict(other) for other in self.others],
            **{name: asdict(getattr(self, name)) for name in ranges},
        }

    def explain(self) -> str:
        """The answer, on one screen."""
        plan, device = self.plan, self.hardware
        rows = [
            f"{self.model.name} on {plan.devices:,} {device.name}, {self.tokens:.4g} tokens, "
            f"{self.batch:,} x {self.seq:,} a step, {self.precision}",
            f"layout     {layout(plan)}",
            f"memory     {binary_size(self.memory.total)} of {binary_size(device.memory_bytes)}",
            *_parts(self.memory, binary_size),
            f"step       {self.seconds} s",
            *_parts(self.step, lambda value: f"{value:.4g} s"),
            f"MFU        {self.mfu}",
            f"intervals  {self.seconds.basis}",
            f"days       {self.days}, failures and checkpoints counted in: "
            f"{self.failures.failures:,.0f} failures, goodput {self.failures.goodput:.1%}",
            f"price      {self.usd} USD" if self._has_price else "price      not known; give it",
            f"energy     {self.megawatt_hours} MWh, devices alone",
        ]
        if self.others:
            rows.append("others that fit, with the step as modeled")
            rows += [
                f"  {other.step_seconds:8.4g} s {binary_size(other.memory_bytes):>10}  "
                f"{layout(other.plan)}"
                for other in self.others[:4]
            ]
        return "\n".join(rows + [f"\n{name}:\n  {line}" for name, line in self.commands().items()])

    __str__ = explain


@checks.entry(*AXES, usd_per_hour=0)
def plan_for(
    model: Shape,
    *,
    gpus: int,
    hardware: str | Hardware = "H100",
    tokens: float = 1e12,
    seq: int = 4096,
    batch: int | None = None,
    memory_bytes: float | None = None,
    usd_per_hour: float | None = None,
    precision: str | None = None,
    **given: Any,
) -> Answer:
    """The fastest plan that fits over all axes, and what a run of `tokens` by it takes.

    Fields of `Plan` that are `given` are kept. `ValueError` where nothing fits. Failures come as
    often as in the 54 days of Llama 3 405B, a device and hour.
    """
    device = find(hardware)
    price = (device.usd_per_hour or 0.0) if usd_per_hour is None else usd_per_hour
    if precision is None:
        precision = "megatron_bf16" if "bf16" in device.peaks else "mixed_fp16"
    kind = recipe(precision)
    if batch is None:
        batch = max(TOKENS_A_STEP // seq, 1)
        # A multiple of the devices, so that any number of them may share it.
        unit = gpus if batch > gpus else max(1, gpus // 8)
        batch = -(-max(batch, unit) // unit) * unit
    question: dict[str, Any] = {"hardware": device, "devices": gpus, "batch": batch, "seq": seq}
    question |= {"precision": kind, "memory_bytes": memory_bytes}
    found = plans_that_fit(model, **question, **given)
    # What has no room may have it where the host keeps a part.
    for offload in ("optimizer", "activations"):
        if not found and "offload" not in given:
            found = plans_that_fit(model, **question, **given, offload=offload)
    if not found:
        raise ValueError(no_room(model, device, gpus, batch, seq, given))
    best, *others = found
    work = Workload(batch=batch, seq=seq, precision=kind, fused_gate=True)
    seconds = predicted(best.step_seconds, model=model, hardware=device, precision=kind)
    useful = float(flops(model, seq=seq, batch=batch).total) / gpus / device.peak(kind.compute)
    hours = seconds.scaled(tokens / (batch * seq) / 3600)
    failures = goodput(
        replace(LLAMA3_405B, work_hours=hours.middle, devices=gpus, usd_per_device_hour=price)
    )
    wall = hours.scaled(1 / failures.goodput)
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
        mfu=seconds.rate(useful),
        days=wall.scaled(1 / 24),
        usd=wall.scaled(gpus * price),
        megawatt_hours=wall.scaled(gpus * device.power_watts / 1e6),
        failures=failures,
    )


def no_room(
    model: Shape, device: Hardware, gpus: int, batch: int, seq: int, given: Mapping[str, Any]
) -> str:
    """What to say where no plan fits: what is given may contradict itself, or the model."""
    chunks = given.get("virtual_stages", 1) > 1
    usual: dict[str, Any] = {"schedule": "interleaved" if chunks else "1f1b"}
    usual["microbatches"] = given.get("pipeline", 1)
    if given.get("offload") == "activations":
        usual["recompute"] = "full"
    try:
        plan = Plan(**usual | dict(given))
        plan.check(model, seq=seq)
        # The ranks that would share weights are not known here.
        replace(plan, data=max(2, plan.data), devices=0).keeps_weights_whole()
    except ValueError as error:
        return str(error)
    kept = ", ".join(f"{name}={value}" for name, value in given.items()) or "nothing given"
    return (
        f"no plan over {gpus} {device.name} with {kept} divides batch={batch} and has room for it "
        f"at seq={seq}; give more devices, another batch, or fewer fields of the plan"
    )


def layout(plan: Plan) -> str:
    """A plan on one line."""
    chunks = f" in {plan.virtual_stages} chunks" if plan.virtual_stages > 1 else ""
    return (
        f"data {plan.data}, tensor {plan.tensor}, pipeline {plan.pipeline} ({plan.schedule}"
        f"{chunks}), context {plan.context}, expert {plan.expert}, ZeRO {plan.zero}, "
        f"{plan.microbatches} micro-batches, recompute {plan.recompute}, offload {plan.offload}"
    )


def _parts(whole: Breakdown, show: Callable[[float], str]) -> list[str]:
    return [
        f"  {part.name:<30}{show(float(part.total)):>14} {part.total / whole.total:>6.1%}"
        for part in sorted(whole.parts, key=lambda part: -float(part.total))
    ]
