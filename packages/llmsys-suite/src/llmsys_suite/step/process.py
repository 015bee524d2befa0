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
from llmsys_suite.ranks.failure import end_with_parent
from llmsys_suite.step.case import STEPS, WARMUPS, Case
from llmsys_suite.step.kernels import profile_phases
from llmsys_suite.step.training import AUTOCAST, Step


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
        "operators": profile_phases(step) if profile else [],
    }


def main() -> None:
    """Measure the case in the first argument, a JSON object that may also contain `profile`."""
    end_with_parent(os.getppid())
    options = json.loads(sys.argv[1])
    profile = options.pop("profile", False)
    print(json.dumps(measure(Case(**options), profile=profile)))


if __name__ == "__main__":
    main()
