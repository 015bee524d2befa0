"""Times of the phases of a step: forward, backward, communication, optimizer.

One context manager times a phase, and labels it for NVTX and for torch.profiler. On a GPU a phase
is timed by two events on the current stream, because a synchronization inside a step would prevent
communication from overlapping with computation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from llmsys_suite.folder import Sample
from llmsys_suite.measure.interleaved import read_clock
from llmsys_suite.measure.samples import WHOLE_STEP


class Recorder:
    """A collector of the samples of one rank, which `take` returns."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._samples: list[Sample] = []
        self._labels: Sample = {}
        #: Phases of the current step on a GPU: name, and the events at their start and end.
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def step(self, *, stage: str, variant: str, step: int, warmup: bool) -> Iterator[Sample]:
        """Time one whole step; yield a dict for further entries of the sample of this step."""
        self._labels = {"stage": stage, "variant": variant, "step": step, "warmup": warmup}
        extra: Sample = {}
        try:
            start_time = read_clock(self.device)
            yield extra
            self._append(WHOLE_STEP, read_clock(self.device) - start_time, extra)
            for name, start_event, stop_event in self._events:
                self._append(name, start_event.elapsed_time(stop_event) / 1e3, {})
        finally:
            self._labels = {}
            self._events.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time and label one phase of the current step; outside of a step, only label it."""
        with named_range(name, self.device):
            if not self._labels:
                yield
                return
            if self.device.type == "cuda":
                start_event, stop_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start_event.record()
                yield
                stop_event.record()
                self._events.append((name, start_event, stop_event))
                return
            start_time = time.perf_counter()
            yield
            self._append(name, time.perf_counter() - start_time, {})

    def take(self) -> list[Sample]:
        """Return the samples since the last call."""
        samples = self._samples
        self._samples = []
        return samples

    def _append(self, phase: str, seconds: float, extra: Sample) -> None:
        extra.update(self._labels, rank=self.rank, phase=phase, seconds=seconds)
        self._samples.append(extra)


@contextmanager
def named_range(name: str, device: torch.device) -> Iterator[None]:
    """Label the `with` block as `name` for torch.profiler, and on a GPU also for Nsight."""
    with torch.profiler.record_function(name):
        if device.type != "cuda":
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
