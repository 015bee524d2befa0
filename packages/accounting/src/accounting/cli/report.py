"""The cost of one plan, as text or as JSON."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from accounting.breakdown import Breakdown, binary_size, readable
from accounting.flops import flops
from accounting.hardware import Hardware
from accounting.kv_cache import kv_cache
from accounting.memory.training import training_memory
from accounting.model.shape import Shape
from accounting.parameters import parameters
from accounting.plan import Plan
from accounting.time.collective import Communication
from accounting.time.communication import communication
from accounting.time.published import Interval, predicted
from accounting.time.step import step_time
from accounting.workload import Workload

Show = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All costs of training a model with a plan, and the size of its KV cache."""

    model: Shape
    plan: Plan
    hardware: Hardware
    work: Workload
    parameters: Breakdown
    active: Breakdown
    flops: Breakdown
    memory: Breakdown
    cache: Breakdown
    traffic: Communication
    #: Modeled seconds of a step, by part.
    step: Breakdown
    #: Predicted seconds of a step.
    seconds: Interval

    @property
    def fits(self) -> bool:
        """Return True if the plan fits in the memory of the fullest device."""
        return self.memory.total <= self.hardware.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all devices."""
        return self.work.batch * self.work.seq / self.seconds.middle

    @property
    def mfu(self) -> Interval:
        """Return the useful operations per second as a fraction of the peak of all devices."""
        peak = self.plan.devices * self.hardware.peak(self.work.kind.compute)
        return self.seconds.rate(float(self.flops.total) / peak)

    def costs(self) -> tuple[tuple[str, str, Breakdown, Show], ...]:
        """Return a key, a heading, the breakdown and the number format of each cost."""
        return (
            ("parameters", "Parameters", self.parameters, readable),
            ("flops", "FLOPs per step", self.flops, lambda value: f"{value:.3g}"),
            ("memory", "Memory of the fullest device", self.memory, binary_size),
            ("kv_cache", "KV cache", self.cache, binary_size),
            ("communication", "Bytes sent by a device", self.traffic.wire, binary_size),
            ("step_time", "Time of a step", self.step, lambda value: f"{value:.3g} s"),
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain dictionaries and numbers for `json.dumps`."""
        return {
            "model": self.model.name,
            "hardware": self.hardware.name,
            "devices": self.plan.devices,
            "plan": asdict(self.plan),
            "precision": self.work.kind.name,
            "batch": self.work.batch,
            "seq": self.work.seq,
            "fits": self.fits,
            "mfu": self.mfu.middle,
            "predicted": {"seconds": asdict(self.seconds), "mfu": asdict(self.mfu)},
            "tokens_per_second": self.tokens_per_second,
            "active_parameters": self.active.total,
            **{key: cost.to_dict() for key, _, cost, _ in self.costs()},
        }


def report(
    model: Shape,
    plan: Plan,
    work: Workload,
    *,
    hardware: Hardware,
) -> Report:
    """Compute all costs of one plan."""
    run: dict[str, Any] = {"batch": work.batch, "seq": work.seq}
    step = step_time(model, plan, work, hardware=hardware)
    about: dict[str, Any] = {"model": model, "hardware": hardware, "precision": work.kind}
    return Report(
        model=model,
        plan=plan,
        hardware=hardware,
        work=work,
        parameters=parameters(model),
        active=parameters(model, active=True),
        flops=flops(model, **run),
        memory=training_memory(model, plan, work),
        cache=kv_cache(model, seq=work.seq),
        traffic=communication(model, plan, **run | work.kind.wire_dtypes),
        step=step,
        seconds=predicted(float(step.total), **about),
    )


def as_text(result: Report) -> str:
    """Return the report as text for a terminal."""
    plan = result.plan
    device = result.hardware
    work = result.work
    verdict = "fits" if result.fits else "DOES NOT FIT"
    active, all_of_them = result.active.total, result.parameters.total
    some = f", {active:,} active" if active < all_of_them else ""
    memory = f"{binary_size(result.memory.total)} of {binary_size(device.memory_bytes)}"
    heads = {
        "parameters": f"parameters      {all_of_them:,}{some}",
        "flops": f"FLOPs per step  {float(result.flops.total):.4g}, forward and backward, causal",
        "memory": f"device memory   {memory}: {verdict}",
        "kv_cache": f"KV cache        {binary_size(result.cache.total)} for {work.seq} tokens",
        "communication": f"sent per device {binary_size(result.traffic.wire.total)} per step",
        "step_time": f"step            {result.seconds} s, MFU {result.mfu}, "
        f"{result.tokens_per_second:,.0f} tokens/s",
    }
    lines = [
        f"{result.model.name} on {plan.devices} x {device.name}: {plan.layout}",
        f"batch {work.batch} x {work.seq} tokens, {work.kind.name}",
        "",
    ]
    for key, _, cost, show in result.costs():
        lines.append(heads[key])
        lines += cost.shares(show) if key != "kv_cache" else []
        if key == "step_time":
            lines.append(f"  {result.seconds.basis}")
    return "\n".join(lines)
