"""Times of several implementations of one shape, measured in interleaved rounds.

The FLOPs of every implementation are 4 · batch · heads · seq² · dim forward, half of that if
causal, and 2.5 times that backward.  A `ratio_*` is a row's time divided by the time of our
implementation in the same round, so that it does not depend on changes of the machine's speed.
The rows of an implementation that fails contain the reason instead of times.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashattn2.bench.implementations import Attention
from flashattn2.bench.measure import peak_extra_bytes, time_ms

Row = dict[str, float | int | str]
#: A function to time for each implementation and pass.
Runs = dict[tuple[str, str], Callable[[], Any]]
PASSES = ("forward", "backward", "both")
OUT_OF_MEMORY = "out of memory"
OURS_FAILED = "ours failed"
#: The errors of an implementation that are reported in its rows.
FAILURES = (RuntimeError, TypeError, ValueError)
RATIOS = ("ratio_p50", "ratio_p10", "ratio_p90")


def flops(shape: tuple[int, int, int, int], which: str, is_causal: bool = True) -> float:
    """Return the FLOPs of one pass by the formula in the module docstring."""
    batch, heads, seq, dim = shape
    forward = 4.0 * batch * heads * seq * seq * dim * (0.5 if is_causal else 1.0)
    return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[which]


def compare(
    case: str,
    every: dict[str, Attention],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    quick: bool,
    is_causal: bool = True,
) -> Iterator[Row]:
    """Yield the rows of all implementations of one shape, timed in interleaved rounds."""
    batch, heads, seq, dim = shape
    q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    runs, failures, peaks = prepare_runs(every, leaves, grad, device)
    # On a GPU, each time is already a median of many runs.
    times = interleave(runs, 3 if quick or device == "cuda" else 5, device)
    for which, name in itertools.product(PASSES, every):
        head: Row = {
            "case": case,
            "dtype": str(dtype).removeprefix("torch."),
            "batch": batch,
            "heads": heads,
            "seq": seq,
            "dim": dim,
            "causal": str(is_causal).lower(),
            "pass": which,
            "impl": name,
        }
        work = flops(shape, which, is_causal)
        if name in failures:
            yield {**make_failed_row(head, failures[name]), "peak_mib": failures[name]}
        else:
            row = make_row(head, work, times[name, which], times.get(("ours", which)))
            yield {**row, "peak_mib": peaks[name]}


def interleave(runs: Runs | dict[str, Callable[[], Any]], rounds: int, device: str) -> Any:
    """Return the times in milliseconds of each run, one per round."""
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            times[key].append(time_ms(run, device))
    return times


def make_row(
    head: Row, work: float, times: list[float], reference_times: list[float] | None
) -> Row:
    """Return the row of one implementation and pass, which takes `work` FLOPs.

    The reference times are those of ours, or None if ours failed.
    """
    milliseconds = statistics.median(times)
    row = {**head, "time_ms": milliseconds, "tflops": work / milliseconds / 1e9}
    if reference_times is None:
        return {**row, **dict.fromkeys(RATIOS, OURS_FAILED)}
    ratios = sorted(t / r for t, r in zip(times, reference_times, strict=True))
    return {
        **row,
        "ratio_p50": statistics.median(ratios),
        "ratio_p10": ratios[len(ratios) // 10],
        "ratio_p90": ratios[math.ceil(0.9 * len(ratios)) - 1],
    }


def make_failed_row(head: Row, reason: str) -> Row:
    """Return the row of an implementation that failed for this reason."""
    return {**head, **dict.fromkeys(("time_ms", "tflops", *RATIOS), reason)}


def describe_failure(error: Exception) -> str:
    """Return the start of the error's message, which is short enough for a table."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    return str(error).partition("\n")[0][:60] or type(error).__name__


def prepare_runs(
    every: dict[str, Attention], leaves: tuple[Tensor, ...], grad: Tensor, device: str
) -> tuple[Runs, dict[str, str], dict[str, float]]:
    """Return the runs of each implementation, the failures and the peak memory in MiB."""
    runs: Runs = {}
    failures: dict[str, str] = {}
    peaks: dict[str, float] = {}
    for name, attention in every.items():
        try:
            prepared = passes(name, attention, leaves, grad)
            peaks[name] = peak_extra_bytes(prepared[name, "both"], device) / 2**20
        except FAILURES as error:
            failures[name] = describe_failure(error)
        else:
            runs.update(prepared)
    return runs, failures, peaks


def passes(
    name: str, attention: Attention, leaves: tuple[Tensor, ...], grad: Tensor
) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return the forward pass, the backward pass and both, after one run of each."""
    out = attention(*leaves)
    torch.autograd.grad(out, leaves, grad, retain_graph=True)

    def forward() -> Any:
        with torch.no_grad():
            return attention(*leaves)

    forward()
    return {
        (name, "forward"): forward,
        (name, "backward"): lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
        (name, "both"): lambda: torch.autograd.grad(attention(*leaves), leaves, grad),
    }
