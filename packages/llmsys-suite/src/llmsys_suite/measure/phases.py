"""Where a step's time goes: forward, backward, communication, optimizer.

One context manager times a phase, and names it for NVTX and for torch.profiler; on a GPU it waits
for the device at both ends, since a kernel's launch is not its run. Beside the wall's clock stands
this thread's, which does not run while another program has the core.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llmsys_suite.folder import Sample
from llmsys_suite.measure import reference_matmul
from llmsys_suite.measure.samples import WHOLE_STEP


class Recorder:
    """Collects one rank's samples until they are taken."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._samples: list[Sample] = []
        self._labels: Sample = {}

    @contextmanager
    def step(self, *, stage: str, variant: str, step: int, warmup: bool) -> Iterator[Sample]:
        """Time one whole step; what is put into the yielded dict, later too, is kept with it."""
        self._labels = {"stage": stage, "variant": variant, "step": step, "warmup": warmup}
        extra: Sample = {}
        begin, core = self._now(), reference_matmul.clock(self.device)
        yield extra
        extra["core_s"] = reference_matmul.clock(self.device) - core
        self._keep(WHOLE_STEP, self._now() - begin, extra)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one part of the step that is under way."""
        with named_range(name, self.device):
            begin, core = self._now(), reference_matmul.clock(self.device)
            yield
            core_s = reference_matmul.clock(self.device) - core
            self._keep(name, self._now() - begin, {"core_s": core_s})

    def take(self) -> list[Sample]:
        """Return the samples since the last call."""
        taken, self._samples = self._samples, []
        return taken

    def _keep(self, phase: str, seconds: float, extra: Sample) -> None:
        extra.update(self._labels, rank=self.rank, phase=phase, seconds=seconds)
        self._samples.append(extra)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@contextmanager
def named_range(name: str, device: torch.device) -> Iterator[None]:
    """Label the block as `name` for torch.profiler, and on a GPU for Nsight."""
    with torch.profiler.record_function(name):
        if device.type != "cuda":
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
