"""What a plan costs, on one screen: as text, as JSON, or as one page with stacked bars."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import asdict, dataclass

from accounting.breakdown import Breakdown, binary_size, readable
from accounting.flops import flops
from accounting.hardware import Hardware
from accounting.kv_cache import kv_cache
from accounting.memory.training import training_memory
from accounting.model.shape import Shape
from accounting.parameters import parameters
from accounting.plan import Plan
from accounting.precision import Precision, recipe
from accounting.time.collective import Communication
from accounting.time.communication import communication
from accounting.time.step import step_time

Show = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every cost of training a model by a plan, and of its cache."""

    model: Shape
    plan: Plan
    hardware: Hardware
    batch: int
    seq: int
    parameters: Breakdown
    active: Breakdown
    flops: Breakdown
    memory: Breakdown
    cache: Breakdown
    traffic: Communication
    step: Breakdown
    precision: Precision

    @property
    def fits(self) -> bool:
        """The fullest device has room for it."""
        return self.memory.total <= self.hardware.memory_bytes

    @property
    def mfu(self) -> float:
        """Useful operations a second, as a share of the peak of all devices."""
        peak = self.plan.devices * self.hardware.peak(self.precision.compute)
        return float(self.flops.total) / float(self.step.total) / peak

    def to_dict(self) -> dict[str, object]:
        """Plain dictionaries and numbers, ready for `json.dumps`."""
        return {
            "model": self.model.name,
            "hardware": self.hardware.name,
            "devices": self.plan.devices,
            "plan": asdict(self.plan),
            "precision": self.precision.name,
            "batch": self.batch,
            "seq": self.seq,
            "fits": self.fits,
            "mfu": self.mfu,
            "tokens_per_second": self.batch * self.seq / float(self.step.total),
            "parameters": self.parameters.to_dict(),
            "active_parameters": self.active.total,
            "flops": self.flops.to_dict(),
            "memory": self.memory.to_dict(),
            "kv_cache": self.cache.to_dict(),
            "communication": self.traffic.wire.to_dict(),
            "step_time": self.step.to_dict(),
        }


def report(
    model: Shape,
    plan: Plan,
    *,
    hardware: Hardware,
    batch: int,
    seq: int,
    precision: str = "mixed_bf16",
    efficiency: float | None = None,
) -> Report:
    """Work out everything for one plan."""
    kind = recipe(precision)
    # What travels is what is computed with: a copy in fewer bytes where the recipe makes one.
    weights = kind.cast_weights or kind.weights
    return Report(
        model=model,
        plan=plan,
        hardware=hardware,
        batch=batch,
        seq=seq,
        parameters=parameters(model),
        active=parameters(model, active=True),
        flops=flops(model, seq=seq, batch=batch),
        memory=training_memory(model, plan, batch=batch, seq=seq, precision=kind),
        cache=kv_cache(model, seq=seq),
        traffic=communication(
            model,
            plan,
            batch=batch,
            seq=seq,
            weights=weights,
            gradients=kind.gradients,
            activations=kind.activations,
        ),
        step=step_time(
            model,
            plan,
            batch=batch,
            seq=seq,
            hardware=hardware,
            efficiency=efficiency,
            precision=kind,
        ),
        precision=kind,
    )


def as_text(result: Report) -> str:
    """The table for a terminal."""
    plan, device = result.plan, result.hardware
    verdict = "fits" if result.fits else "DOES NOT FIT"
    active = (
        f", {result.active.total:,} active" if result.active.total < result.parameters.total else ""
    )
    lines = [
        f"{result.model.name} on {plan.devices} x {device.name}: data {plan.data}, "
        f"tensor {plan.tensor}, pipeline {plan.pipeline}, context {plan.context}, "
        f"expert {plan.expert}, ZeRO {plan.zero}",
        f"batch {result.batch} x {result.seq} tokens in {plan.microbatches} micro-batches, "
        f"{plan.schedule} with {plan.virtual_stages} chunks a stage, "
        f"recompute {plan.recompute}, offload {plan.offload}, {result.precision.name}",
        "",
        f"parameters      {result.parameters.total:,}{active}",
        *_shares(result.parameters, readable),
        f"FLOPs a step    {float(result.flops.total):.4g}, forward and backward, causal",
        *_shares(result.flops, lambda value: f"{value:.3g}"),
        f"memory a device {binary_size(result.memory.total)} of "
        f"{binary_size(device.memory_bytes)}: {verdict}",
        *_shares(result.memory, binary_size),
        f"KV cache        {binary_size(result.cache.total)} for {result.seq} tokens",
        f"sent a device   {binary_size(result.traffic.wire.total)} a step",
        *_shares(result.traffic.wire, binary_size),
        f"step            {float(result.step.total):.4g} s, MFU {result.mfu:.1%}, "
        f"{result.batch * result.seq / float(result.step.total):,.0f} tokens/s",
        *_shares(result.step, lambda value: f"{value:.3g} s"),
    ]
    return "\n".join(lines)


def as_html(result: Report) -> str:
    """One page without scripts or other files: a stacked bar and its derivation for every cost."""
    blocks = (
        ("Parameters", result.parameters, readable),
        ("FLOPs a step", result.flops, lambda value: f"{value:.3g}"),
        ("Memory of the fullest device", result.memory, binary_size),
        ("KV cache", result.cache, binary_size),
        ("Bytes sent by a device", result.traffic.wire, binary_size),
        ("Time of a step", result.step, lambda value: f"{value:.3g} s"),
    )
    title = html.escape(f"{result.model.name} on {result.plan.devices} x {result.hardware.name}")
    body = "\n".join(_bar(name, part, show) for name, part, show in blocks if part.total)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n<h1>{title}</h1>\n"
        f"<p>{html.escape(repr(result.plan))}, batch {result.batch} x {result.seq}</p>\n"
        f"{body}\n</html>\n"
    )


def _shares(whole: Breakdown, show: Show) -> list[str]:
    """A line for each part, the largest first, with its share as a bar of blocks."""
    total = float(whole.total) or 1.0
    parts = sorted(whole.parts, key=lambda part: -float(part.total))
    return [
        f"  {part.name:<36}{show(part.total):>20} {float(part.total) / total:>6.1%} "
        f"{'#' * round(30 * float(part.total) / total)}".rstrip()
        for part in parts
    ]


def _bar(name: str, whole: Breakdown, show: Show) -> str:
    total = float(whole.total)
    pieces = "".join(
        f'<i style="width:{100 * float(part.total) / total:.3f}%;'
        f'background:hsl({47 * index % 360} 55% 62%)" title="{html.escape(part.name)}"></i>'
        for index, part in enumerate(whole.parts)
    )
    legend = "".join(
        f'<li style="--c:hsl({47 * index % 360} 55% 62%)">{html.escape(part.name)} '
        f"{html.escape(show(part.total))} ({float(part.total) / total:.1%})</li>"
        for index, part in enumerate(whole.parts)
    )
    return (
        f"<section><h2>{name}: {html.escape(show(whole.total))}</h2>"
        f'<div class="bar">{pieces}</div><ul>{legend}</ul>'
        f"<details><summary>derivation</summary><pre>{html.escape(whole.explain())}</pre>"
        "</details></section>"
    )


_STYLE = (
    "body{font:15px system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h2{font-size:1.05rem;margin-bottom:.3rem}.bar{display:flex;height:1.6rem}"
    ".bar i{display:block}ul{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;"
    "list-style:none;padding:0}"
    "li::before{content:'';display:inline-block;width:.8em;height:.8em;"
    "background:var(--c);"
    "margin-right:.4em}pre{overflow:auto;font-size:12px}"
)
