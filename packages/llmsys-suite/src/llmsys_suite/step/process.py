"""A command that measures one case; its first step includes start-up costs.

    python -m llmsys_suite.step.process '{"size": "small", "rows": 1}'

The command prints the output of `measure` as JSON. It can be run under `nsys profile`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from llmsys_suite.environment import read_peak_memory_bytes
from llmsys_suite.measure.clocks import measure_product_rate
from llmsys_suite.measure.interleaved import read_clock
from llmsys_suite.measure.phases import named_range
from llmsys_suite.model import Decoder, plain_attention
from llmsys_suite.ranks.failure import end_with_parent
from llmsys_suite.step.case import PHASES, STEPS, WARMUPS, Case
from llmsys_suite.step.kernels import profile_phases

#: Dtype of matrix products by the dtype of a case.
AUTOCAST = dict.fromkeys(("fp32", "tf32"), torch.float32)
AUTOCAST |= {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Initial scale of the loss in float16. With torch's default of 65536, gradients of an untrained
#: model overflow, and the scaler would skip the first timed steps.
LOSS_SCALE = 1024.0


class Step:
    """A decoder, its optimizer, random tokens, and a loss scaler, which is enabled for fp16."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high" if case.dtype == "tf32" else "highest")
        self.device = torch.device(case.device)
        self.model = Decoder(case.model, plain_attention).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        shape = (case.rows, case.context)
        self.tokens = torch.randint(case.model.vocabulary, shape, device=self.device)
        self.loss_of = (
            torch.compile(self.model.compute_loss) if case.compile else self.model.compute_loss
        )
        self.scaler = torch.amp.GradScaler(
            case.device, init_scale=LOSS_SCALE, enabled=case.dtype == "fp16"
        )
        dtype = AUTOCAST[case.dtype]
        self.autocast = torch.autocast(case.device, dtype=dtype, enabled=dtype != torch.float32)
        self.phases = dict(zip(PHASES, (self.forward, self.backward, self.optimize), strict=True))

    def forward(self) -> None:
        """Compute the loss, which `backward` reads."""
        with self.autocast:
            self.loss = self.loss_of(self.tokens, self.tokens)

    def backward(self) -> None:
        """Compute the gradient of every parameter."""
        self.scaler.scale(self.loss).backward()

    def optimize(self) -> None:
        """Take an AdamW step and clear the gradients.

        Raises RuntimeError if a float16 gradient overflowed, because the scaler skips such a step.
        """
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < scale:
            raise RuntimeError(f"gradients overflowed at a loss scale of {scale:g}; use bf16")
        self.optimizer.zero_grad()

    def take_timed_step(self) -> list[float]:
        """Take one step and return the seconds of each phase, after synchronizing the device."""
        seconds = []
        for name, phase in self.phases.items():
            with named_range(name, self.device):
                start_time = read_clock(self.device)
                phase()
                seconds.append(read_clock(self.device) - start_time)
        return seconds


def measure(case: Case, *, profile: bool = False) -> dict[str, Any]:
    """Return the seconds of each phase of each step, and other measurements of the process."""
    step = Step(case)
    seconds = [step.take_timed_step() for _ in range(max(WARMUPS) + STEPS)]
    on_gpu = step.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else read_peak_memory_bytes()
    return {
        "seconds": seconds,
        "loss": float(step.loss.detach()),
        "peak_bytes": peak,
        "threads": torch.get_num_threads(),
        "product_rate": measure_product_rate(step.device, AUTOCAST[case.dtype]),
        "operators": profile_phases(step.phases, step.device) if profile else [],
    }


def main() -> None:
    """Measure the case in the first argument, a JSON object that may also contain `profile`."""
    end_with_parent(os.getppid())
    options = json.loads(sys.argv[1])
    profile = options.pop("profile", False)
    print(json.dumps(measure(Case(**options), profile=profile)))


if __name__ == "__main__":
    main()
