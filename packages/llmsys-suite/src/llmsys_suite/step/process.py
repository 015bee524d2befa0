"""Run one case in a new process, so that its first step includes all start-up costs.

    python -m llmsys_suite.step.process '{"size": "small", "rows": 1}'

The command prints the output of `measure` as JSON. On a GPU, `nsys profile -t cuda,nvtx` of this
command shows the phases and their kernels.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from llmsys_suite.environment import peak_memory_bytes
from llmsys_suite.measure.clocks import product_rate
from llmsys_suite.ranks.failure import end_with_parent
from llmsys_suite.step.case import STEPS, WARMUPS, Case
from llmsys_suite.step.training import AUTOCAST, Step


def measure(case: Case) -> dict[str, Any]:
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
    }


def main() -> None:
    """Measure the case in the first argument, a JSON object."""
    end_with_parent(os.getppid())
    print(json.dumps(measure(Case(**json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
