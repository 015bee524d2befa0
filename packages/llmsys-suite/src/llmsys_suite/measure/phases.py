"""Times of the phases of a step: forward, backward, communication, optimizer.

One context manager times a phase, and labels it for NVTX and for torch.profiler. On a GPU a phase
is timed by two events of the current stream. Synchronizing inside a step would prevent
communication and computation from overlapping.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from llmsys_suite.folder import Sample
from llmsys_suite.measure.interleaved import now
from llmsys_suite.measure.samples import WHOLE_STEP


class Recorder:
    """A collector of one rank's samples until `take` returns them."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._samples: list[Sample] = []
        self._labels: Sample = {}
        #: Phases of the current step on a GPU: name, and the events at their start and end.
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def step(self, *, stage: str, variant: str, step: int, warmup: bool) -> Iterator[Sample]:
        """Time one whole step; entries that the caller adds to the yielded dict join its sample."""
        self._labels = {"stage": stage, "variant": variant, "step": step, "warmup": warmup}
        extra: Sample = {}
        try:
            start_time = now(self.device)
            yield extra
            self._keep(WHOLE_STEP, now(self.device) - start_time, extra)
            for name, start_event, stop_event in self._events:
                self._keep(name, start_event.elapsed_time(stop_event) / 1e3, {})
        finally:
            self._labels = {}
            self._events.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase of the current step; outside of a step, only label it."""
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
            self._keep(name, time.perf_counter() - start_time, {})

    def take(self) -> list[Sample]:
        """Return the samples since the last call, and discard them here."""
        taken, self._samples = self._samples, []
        return taken

    def _keep(self, phase: str, seconds: float, extra: Sample) -> None:
        extra.update(self._labels, rank=self.rank, phase=phase, seconds=seconds)
        self._samples.append(extra)


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
