"""The order of forward and backward passes in a pipeline, recorded while a step runs.

GPipe and 1F1B compute the same gradients. They differ only in the order of events: 1F1B runs a
backward pass as soon as it can, so that fewer microbatches are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.distributed.pipelining import PipelineStage


@contextmanager
def record_passes() -> Iterator[list[str]]:
    """Yield a list of "forward" and "backward", the passes of this rank in the `with` statement."""
    events: list[str] = []

    def record(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            events.append(kind)
            return original(*args, **options)

        return call

    methods = {"forward": "forward_one_chunk", "backward": "backward_one_chunk"}
    with ExitStack() as stack:
        for kind, method in methods.items():
            original = getattr(PipelineStage, method)
            stack.enter_context(mock.patch.object(PipelineStage, method, record(kind, original)))
        yield events


def count_max_in_flight(events: list[str]) -> int:
    """Return the largest number of forward passes whose backward passes have not yet run."""
    maximum = 0
    in_flight = 0
    for kind in events:
        in_flight += 1 if kind == "forward" else -1
        maximum = max(maximum, in_flight)
    return maximum


def compute_expected_in_flight(split: str, rank: int, ranks: int, microbatches: int) -> int | None:
    """Return the expected `count_max_in_flight` of a rank; None for a split without pipeline.

    GPipe: Huang et al. 2019, section 2.3. 1F1B: Narayanan et al. 2021, section 2.2.1.
    """
    if split == "pipeline (GPipe)":
        return microbatches
    if split == "pipeline (1F1B)":
        return min(microbatches, ranks - rank)
    return None
