"""The meter counts bytes and calls correctly, and shows overlap only where it exists."""

import tempfile
import time
from collections import deque
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from ddp import (
    DDP,
    BucketRecord,
    Meter,
    StepRecord,
    all_reduce_gradients,
    all_reduce_gradients_flat,
)
from ddp.metering.trace import list_bars
from torch import nn
from worker_pool import run_on_shared_ranks, run_ranks

MIB = 2**20
LAYERS = 6
COMPUTE = 0.06  # seconds per layer
TRAVEL = 0.02  # seconds per layer


class Clock:
    """A replacement of `time.perf_counter` that advances only by simulated work and waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: deque[tuple[float, torch.futures.Future]] = deque()

    def __call__(self) -> float:
        return self.now

    def move_to(self, then: float) -> None:
        """Advance the clock, and complete the futures that are due, each at its time."""
        while self.due and self.due[0][0] <= then:
            self.now, future = self.due.popleft()
            future.set_result(None)
        self.now = max(self.now, then)


class Slow(torch.autograd.Function):
    """Identity whose backward pass takes simulated time."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.move_to(ctx.clock.now + COMPUTE)
        return grad, None


class SlowNet(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(LAYERS))
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Slow.apply(layer(x), self.clock)
        return x.sum()


class Handle:
    def __init__(self, clock: Clock, end: float) -> None:
        self.clock = clock
        self.end = end
        self.future = torch.futures.Future()

    def wait(self) -> None:
        self.clock.move_to(self.end)

    def get_future(self) -> torch.futures.Future:
        return self.future


class SlowLink:
    """A network with one call at a time and TRAVEL seconds per 64 gradients, which counts bytes."""

    def __init__(self, clock: Clock) -> None:
        self.bytes = 0
        self.calls = 0
        self.clock = clock
        self.free = 0.0

    def __call__(self, tensor, op, group, async_op):
        self.bytes += tensor.numel() * tensor.element_size()
        self.calls += 1
        self.free = max(self.free, self.clock.now) + TRAVEL * (tensor.numel() // 64)
        handle = Handle(self.clock, self.free)
        self.clock.due.append((self.free, handle.future))
        return handle if async_op else handle.wait()


def measure_design(design: str) -> dict:
    time.perf_counter = clock = Clock()
    module = SlowNet(clock)
    link = SlowLink(clock)
    meter = Meter()
    x = torch.ones(1, 8)
    if design in ("naive", "flat"):
        with meter.forward():
            loss = module(x)
        loss.backward()
        function = all_reduce_gradients if design == "naive" else all_reduce_gradients_flat
        function(module, all_reduce=link, meter=meter)
    else:
        size = {"overlapped": None, "two per bucket": 512 / MIB, "one bucket": 1.0}[design]
        model = DDP(module, size, all_reduce=link)
        meter = model.meter
        model(x).backward()
        model.finish_gradient_synchronization()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.svg")
        meter.write_trace(path)
        picture = path.read_text()
        assert [*Path(folder).iterdir()] == [path]
    step = meter.last
    assert [link.bytes, link.calls] == [step.gradient_bytes + step.extra_bytes, step.calls]
    return {
        "bytes": step.gradient_bytes,
        "extra": step.extra_bytes,
        "calls": step.calls,
        "exposed": step.exposed_seconds,
        "hidden": step.hidden_seconds,
        "buckets": [(b.hidden_seconds, b.exposed_seconds) for b in step.buckets],
        "picture": picture,
        "step": step,
    }


def measure_designs() -> dict[str, dict]:
    designs = "naive", "flat", "overlapped", "two per bucket", "one bucket"
    return {design: measure_design(design) for design in designs}


@cache
def measure_outcomes() -> dict[str, dict]:
    return run_ranks(measure_designs, 1)[0]


def run(design: str) -> dict:
    return measure_outcomes()[design]


CALLS = {"naive": LAYERS, "flat": 1, "overlapped": LAYERS, "two per bucket": LAYERS // 2}


@pytest.mark.parametrize("design", CALLS)
def test_meter_counts_the_bytes_and_calls_of_the_collective(design) -> None:
    got = run(design)
    assert got["bytes"] == LAYERS * 8 * 8 * 4
    assert got["calls"] == CALLS[design]
    # One flag per parameter and three per bucket. Designs without overlap use a separate call.
    expected = 0 if design in ("naive", "flat") else 4 * (LAYERS + 3 * CALLS[design])
    assert got["extra"] == expected


@pytest.mark.parametrize(("design", "last"), [("overlapped", 1), ("two per bucket", 2)])
def test_overlap_hides_all_but_the_last_bucket(design: str, last: int) -> None:
    got = run(design)
    assert got["exposed"] == pytest.approx(last * TRAVEL)
    assert got["hidden"] == pytest.approx((LAYERS - last) * TRAVEL)
    for hidden, exposed in got["buckets"][:-1]:
        assert (hidden, exposed) == (pytest.approx(last * TRAVEL), 0)
    assert got["buckets"][-1] == (pytest.approx(0), pytest.approx(last * TRAVEL))


@pytest.mark.parametrize("design", ["naive", "flat", "one bucket"])
def test_without_overlap_everything_is_exposed(design: str) -> None:
    got = run(design)
    assert got["exposed"] == pytest.approx(LAYERS * TRAVEL)
    assert got["hidden"] == 0


@pytest.mark.parametrize(("design", "overlaps"), [("overlapped", True), ("flat", False)])
def test_records_show_the_overlap(design, overlaps) -> None:
    step = run(design)["step"]
    start, stop = step.backward
    assert stop - start == pytest.approx(LAYERS * COMPUTE)
    hidden = [bucket for bucket in step.buckets if bucket.done < stop]
    assert len(hidden) == (LAYERS - 1 if overlaps else 0)
    seconds = TRAVEL * (1 if overlaps else LAYERS)
    assert all(bucket.seconds == pytest.approx(seconds) for bucket in step.buckets)
    assert all("weight" in bar.title for bar in list_bars(step) if bar.lane)


@pytest.mark.parametrize(("design", "overlaps"), [("overlapped", True), ("flat", False)])
def test_chart_shows_hidden_and_exposed_communication(design, overlaps) -> None:
    picture = ElementTree.fromstring(run(design)["picture"])
    bars = [bar for bar in picture.iter() if bar.tag.endswith("rect") and len(bar)]
    hidden = [bar for bar in bars if bar.get("fill") == "#74c476"]
    exposed = [bar for bar in bars if bar.get("fill") == "#fdae6b"]
    assert (len(hidden), len(exposed)) == ((LAYERS - 1, 1) if overlaps else (0, 1))
    (waiting,) = (bar for bar in bars if bar.get("fill") == "#de2d26")
    # All bars have the same scale: the exposed part is as long as the wait.
    assert float(exposed[0].get("width")) == pytest.approx(float(waiting.get("width")), abs=0.02)


def test_buckets_in_flight_together_have_separate_lanes_and_count_once_as_hidden() -> None:
    spans = [(0.0, 3.0), (1.0, 4.0), (4.25, 6.0)]
    buckets = tuple(BucketRecord((), 1, 4, 0, sent, done, 0.0) for sent, done in spans)
    step = StepRecord((), backward=(0.0, 4.5), waiting=(4.5, 6.0), buckets=buckets)
    assert step.hidden_seconds == 4.0 + 0.25
    assert [bar.lane for bar in list_bars(step) if bar.lane] == [1, 2, 1, 1]


def train_on_gloo() -> tuple:
    model = DDP(nn.Linear(100, 100), None)
    finish_times, finish = [], model._replica.reducer.finish

    def finish_late(**options) -> set[int]:
        reductions = model._replica.reducer.reductions.launched
        while not all(reduction.completion_times for reduction in reductions):
            # The launch of a later bucket polls too.
            for reduction in reductions:
                reduction.poll()
            time.sleep(0.001)
        finish_times.append(time.perf_counter())
        return finish(**options)

    model._replica.reducer.finish = finish_late
    model(torch.ones(1, 100)).sum().backward()
    return finish_times[0], model.meter.last.waiting[0], [b.done for b in model.meter.last.buckets]


def test_completion_time_is_recorded_when_the_collective_completes() -> None:
    for finish_times, waiting, ends in run_on_shared_ranks(train_on_gloo, 2):
        assert len(ends) == 2
        assert max(ends) <= finish_times <= waiting


def test_last_step_before_the_first_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no step was recorded"):
        _ = Meter().last


def test_chart_in_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ends in \.svg, got 'trace\.json'; use torch\.profiler"):
        Meter().write_trace("trace.json")


def evaluate_often() -> int:
    model = DDP(nn.Linear(2, 2))
    for _ in range(300):
        with torch.no_grad():
            model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    return len(model.meter._forwards)


def test_forward_passes_without_backward_are_dropped() -> None:
    assert run_on_shared_ranks(evaluate_often, 1) == [100]
