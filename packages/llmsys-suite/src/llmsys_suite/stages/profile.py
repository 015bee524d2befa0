"""How long a step takes, phase by phase, and which operators take it.

The protocol: forward, forward and backward, and the whole step, after 0, 1, 2 and 5 warm-up steps,
mean and standard deviation over ten. Then one profiled step, from which the usual questions are
answered as a table: the time in each phase, its top operator, the share of matrix products, and
softmax against the products of attention in time and in FLOPs.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from llmsys_suite.config import SIZES
from llmsys_suite.environment import GIB, available_memory_bytes
from llmsys_suite.measure.turns import now, take_turns
from llmsys_suite.model import Decoder, ModelConfig, plain_attention
from llmsys_suite.run import Run
from llmsys_suite.stages.plan import matmul_flops_per_second, predict

WARMUPS = (0, 1, 2, 5)
STEPS = 10
SIZES_TIMED = tuple(size for size in SIZES if size != "mini")
#: A size that would take longer is left out, and the table says so.
SECONDS_A_SIZE = 60.0
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")


def run(run: Run) -> dict[str, Any]:
    """The protocol's table and the profile's, on rank 0."""
    if run.rank != 0:
        return {}
    rows, clocked_s = protocol(run)
    return {
        "protocol": rows,
        "clocked_s": clocked_s,
        "operators": operators(run),
        "roofline": roofline(run) if run.device.type == "cpu" else {},
        "compiled": compiled(run),
    }


class _Step:
    """The three parts of one training step, callable one by one."""

    def __init__(self, run: Run, *, size: str | None = None, compile_model: bool = False) -> None:
        config = ModelConfig.named(size or run.config.size, context=run.config.context)
        torch.manual_seed(run.config.seed)
        self.device = run.device
        self.config = config
        self.model = Decoder(config, plain_attention).to(run.device)
        self.rows = max(1, run.config.rows // run.world)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.tokens, self.targets = (
            t.to(run.device)
            for t in run.corpus.batch(rows=self.rows, context=config.context, seed=0, step=0)
        )
        self.loss_of = torch.compile(self.model.loss) if compile_model else self.model.loss

    def forward(self) -> None:
        self.loss = self.loss_of(self.tokens, self.targets)

    def backward(self) -> None:
        self.loss.backward()

    def optimize(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self) -> dict[str, float]:
        seconds = {}
        for name, part in (
            ("forward", self.forward),
            ("backward", self.backward),
            ("optimizer", self.optimize),
        ):
            begin = now(self.device)
            part()
            seconds[name] = now(self.device) - begin
        return seconds


def protocol(run: Run) -> tuple[list[dict[str, Any]], float]:
    """Mean and standard deviation of each phase over ten steps, for every size that fits.

    And the seconds of all those steps together, by another clock.
    """
    rows: list[dict[str, Any]] = []
    clocked_s = 0.0
    for size in [name for name in SIZES if name in (run.config.size, *SIZES_TIMED)]:
        if reason := _why_not(run, size):
            rows.append({"size": size, "left_out": reason})
            continue
        for warmup in WARMUPS:
            row, seconds = _protocol_of(run, size, warmup)
            rows.append(row)
            clocked_s += seconds
    return rows, clocked_s


def _protocol_of(run: Run, size: str, warmup: int) -> tuple[dict[str, Any], float]:
    step = _Step(run, size=size)
    for _ in range(warmup):
        step.timed()
    begin_ns = time.time_ns()
    samples = [step.timed() for _ in range(STEPS)]
    clocked_s = (time.time_ns() - begin_ns) / 1e9
    row: dict[str, Any] = {"size": size, "rows": step.rows, "warmup": warmup}
    for phase in samples[0]:
        values = [sample[phase] * 1e3 for sample in samples]
        row[f"{phase}_mean_ms"] = statistics.mean(values)
        row[f"{phase}_std_ms"] = statistics.stdev(values)
    return row, clocked_s


def _why_not(run: Run, size: str) -> str:
    """The reason why a size is not timed here: memory first, then the time it would take."""
    config = replace(run.config, size=size, rows=max(1, run.config.rows // run.world), world=1)
    predicted = predict(config)
    available = available_memory_bytes(run.device.type)
    if predicted["training_peak_bytes"] > available:
        return (
            f"needs {predicted['training_peak_bytes'] / GIB:.1f} GiB, "
            f"{available / GIB:.1f} GiB are free"
        )
    steps = sum(WARMUPS) + len(WARMUPS) * STEPS
    # A third of the rate of a matrix product is a usual step.
    seconds = 3 * steps * predicted["step_flops_full"] / matmul_flops_per_second(run, seconds=0.1)
    if seconds > SECONDS_A_SIZE:
        return f"would take {seconds:.0f} s"
    return ""


def operators(run: Run) -> list[dict[str, Any]]:
    """One row a phase: time, top operator and its calls, shares of products and softmax."""
    activities = [ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    step = _Step(run)
    step.timed()
    rows = []
    for phase, part in (
        ("forward", step.forward),
        ("backward", step.backward),
        ("optimizer", step.optimize),
    ):
        with profile(activities=activities, acc_events=True) as profiler:
            begin = now(run.device)
            part()
            seconds = now(run.device) - begin
        row = summarize(profiler.key_averages(), run.device.type)
        rows.append({"phase": phase, "timer_ms": seconds * 1e3} | row)
    config = step.config
    rows[0] |= attention_flops(config, step.rows)
    return rows


def roofline(run: Run) -> dict[str, Any]:
    """Each product of a forward pass by its shape: FLOPs a byte, and FLOPs a second; the roof."""
    step = _Step(run)
    step.timed()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        step.forward()
    rows = []
    for event in seen.key_averages(group_by_input_shape=True):
        if event.key not in PRODUCTS[:2] or not event.self_cpu_time_total:
            continue
        *batch, m, k = event.input_shapes[0]
        n = event.input_shapes[1][-1]
        many = math.prod(batch) * event.count
        seconds = event.self_cpu_time_total / 1e6
        rows.append(
            {
                "operator": f"{event.key.removeprefix('aten::')} {m} x {k} x {n}",
                "calls": event.count,
                "flops_per_byte": 2 * m * k * n / (4 * (m * k + k * n + m * n)),
                "gflops": 2 * m * k * n * many / seconds / 1e9,
            }
        )
    big = torch.ones(2**24, device=run.device)
    begin = now(run.device)
    big.clone()
    moved = 2 * big.nbytes / (now(run.device) - begin)
    return {"rows": rows, "bytes_per_second": moved}


def summarize(events: Any, device_type: str) -> dict[str, Any]:
    """Totals over a profile's operators, by the time that each spends itself."""
    if device_type == "cuda":
        microseconds = {event.key: event.self_device_time_total for event in events}
    else:
        # Ranges such as "Optimizer.step" are no operators.
        operators = (event for event in events if event.key.startswith("aten::"))
        microseconds = {event.key: event.self_cpu_time_total for event in operators}
    calls = {event.key: event.count for event in events}
    total = sum(microseconds.values())
    top = max(microseconds, key=lambda key: microseconds[key])
    softmax = sum(us for key, us in microseconds.items() if "softmax" in key)
    products = sum(us for key, us in microseconds.items() if key in PRODUCTS or "gemm" in key)
    return {
        "total_ms": total / 1e3,
        "top_operator": top,
        "top_calls": calls[top],
        "top_share": microseconds[top] / total,
        "product_share": products / total,
        "softmax_share": softmax / total,
    }


def attention_flops(config: ModelConfig, rows: int) -> dict[str, Any]:
    """FLOPs of softmax and of attention's two products over all layers, scores held whole.

    Softmax takes five operations a score: maximum, difference, exponential, sum, quotient.
    """
    scores = rows * config.num_heads * config.context**2 * config.num_layers
    head_dim = config.d_model // config.num_heads
    return {"softmax_flops": 5 * scores, "attention_product_flops": 4 * scores * head_dim}


def compiled(run: Run) -> list[dict[str, Any]]:
    """Plain and compiled model taking turns; on a GPU only, where compilation pays for itself."""
    if run.device.type != "cuda":
        return []
    steps = {"plain": _Step(run), "compiled": _Step(run, compile_model=True)}
    turns = take_turns({name: step.timed for name, step in steps.items()}, STEPS, run.device)
    return [
        {"model": n, "step_ms": turns.median_ms(n), "ratio_p50": turns.ratio_to("plain", n)}
        for n in steps
    ]
