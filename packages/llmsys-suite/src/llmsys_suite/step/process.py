"""Run one case in a new process, so that its first step includes all start-up costs.

    python -m llmsys_suite.step.process '{"size": "small", "rows": 1}'

The command prints the output of `measure` as JSON. It can be run under `nsys profile`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from llmsys_suite.environment import peak_memory_bytes
from llmsys_suite.measure.clocks import product_rate
from llmsys_suite.measure.interleaved import now
from llmsys_suite.measure.phases import named_range
from llmsys_suite.model import Decoder, plain_attention
from llmsys_suite.ranks.failure import end_with_parent
from llmsys_suite.step.case import PHASES, STEPS, WARMUPS, Case

#: Dtype of matrix products by the dtype of a case.
AUTOCAST = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
#: Initial scale of the loss in float16. torch's default of 65536 overflows in the first steps of an
#: untrained model, so that the scaler would skip the first timed steps.
LOSS_SCALE = 1024.0
#: Operators that count as matrix products, and the number of operators in a profile.
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
SHOWN = 10


class Step:
    """A decoder with random tokens, its optimizer, and a loss scaler, which fp16 enables."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        torch.manual_seed(seed)
        torch.set_float32_matmul_precision("high" if case.dtype == "tf32" else "highest")
        self.case, self.device = case, torch.device(case.device)
        self.model = Decoder(case.model, plain_attention).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.tokens = torch.randint(case.vocabulary, (case.rows, case.context), device=self.device)
        self.loss_of = torch.compile(self.model.loss) if case.compile else self.model.loss
        self.scaler = torch.amp.GradScaler(
            case.device, init_scale=LOSS_SCALE, enabled=case.dtype == "fp16"
        )
        dtype = AUTOCAST[case.dtype]
        self.autocast = torch.autocast(case.device, dtype=dtype, enabled=dtype != torch.float32)
        self.parts = dict(zip(PHASES, (self.forward, self.backward, self.optimize), strict=True))

    def forward(self) -> None:
        """Compute the loss, which `backward` reads."""
        with self.autocast:
            self.loss = self.loss_of(self.tokens, self.tokens)

    def backward(self) -> None:
        """Compute the gradient of every parameter."""
        self.scaler.scale(self.loss).backward()

    def optimize(self) -> None:
        """Take a step of AdamW.

        Raises:
            RuntimeError: a float16 gradient overflowed, so that the scaler skipped the step and its
                time would be too short.
        """
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < scale:
            raise RuntimeError(f"a gradient overflowed float16 at a loss scale of {scale:g}")
        self.optimizer.zero_grad()

    def timed(self) -> list[float]:
        """Take one step and return the seconds of each part, after synchronizing the device."""
        seconds = []
        for name, part in self.parts.items():
            with named_range(name, self.device):
                start_time = now(self.device)
                part()
                seconds.append(now(self.device) - start_time)
        return seconds


def by_phase(step: Step) -> list[dict[str, Any]]:
    """Return a row per phase of a warmed-up step: its operators and their fractions of the time.

    `timer_ms` includes the overhead of the profiler.
    """
    activities = [ProfilerActivity.CPU]
    if step.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    rows = []
    for phase, part in step.parts.items():
        with profile(activities=activities, acc_events=True) as seen:
            begin = now(step.device)
            part()
            seconds = now(step.device) - begin
        summary = summarize(seen.key_averages(), step.device.type)
        rows.append({"phase": phase, "timer_ms": seconds * 1e3} | summary)
    return rows


def summarize(events: Any, device_type: str) -> dict[str, Any]:
    """Return the operators with the largest self time, and the fraction of time per kind.

    Attention is recognized by its batched matmuls, which no other part of the model uses.
    """
    # On a GPU the kernels are events too. They are excluded, because their time is also the device
    # time of the operators that launched them.
    operators = [event for event in events if event.device_type == DeviceType.CPU]
    by_key = {event.key: event for event in operators if not event.is_user_annotation}
    if device_type == "cuda":
        self_us = {key: event.self_device_time_total for key, event in by_key.items()}
    else:
        # Exclude ranges such as "Optimizer.step", which are not operators.
        self_us = {k: e.self_cpu_time_total for k, e in by_key.items() if k.startswith("aten::")}
    total = sum(self_us.values()) or 1.0
    order = sorted((key for key in self_us if self_us[key]), key=lambda key: -self_us[key])[:SHOWN]
    softmax = sum(us for key, us in self_us.items() if "softmax" in key.lower())
    attention = sum(us for key, us in self_us.items() if "bmm" in key)
    products = sum(us for key, us in self_us.items() if key in PRODUCTS or "gemm" in key)
    return {
        "total_ms": total / 1e3,
        "product_share": products / total,
        "attention_product_share": attention / total,
        "softmax_share": softmax / total,
        "top": [
            {
                "operator": key.removeprefix("aten::"),
                "calls": by_key[key].count,
                "ms": self_us[key] / 1e3,
                "share": self_us[key] / total,
            }
            for key in order
        ],
    }


def measure(case: Case, *, profile: bool = False) -> dict[str, Any]:
    """Return the seconds of each part of each step, and other facts about the process."""
    step = Step(case)
    seconds = [step.timed() for _ in range(max(WARMUPS) + STEPS)]
    on_gpu = step.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_memory_bytes()
    return {
        "seconds": seconds,
        "loss": float(step.loss.detach()),
        "peak_bytes": peak,
        "threads": torch.get_num_threads(),
        "product_rate": product_rate(step.device, AUTOCAST[case.dtype]),
        "operators": by_phase(step) if profile else [],
    }


def main() -> None:
    """Measure the case in the first argument, a JSON object that may also contain `profile`."""
    end_with_parent(os.getppid())
    options = json.loads(sys.argv[1])
    profile = options.pop("profile", False)
    print(json.dumps(measure(Case(**options), profile=profile)))


if __name__ == "__main__":
    main()
