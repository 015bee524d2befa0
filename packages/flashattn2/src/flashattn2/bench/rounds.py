"""Times of several implementations of one shape, measured in interleaved rounds.

A `ratio_p50` is the median ratio of an implementation's time to our time in the same round.
Therefore changes of the machine's speed do not affect it.  The rows of an implementation that fails
contain the reason instead of times.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Row = dict[str, float | int | str]


class Rate(NamedTuple):
    """The column with the work per second of a run, such as "tflops"."""

    name: str
    #: The work of one run, in units for which work per millisecond is the value of the column.
    work: float


def attempt(functions: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Call each function once; return the results, and the error messages of failed calls."""
    results = {}
    failures = {}
    for name, function in functions.items():
        try:
            results[name] = function()
        except (RuntimeError, TypeError, ValueError) as error:
            # A table has room for the start of the message.
            failures[name] = str(error).partition("\n")[0][:60] or type(error).__name__
    return results, failures


def measure_rows(
    labels: Row,
    runs: Mapping[str, Callable[[], Any]],
    failures: Mapping[str, str],
    rate: Rate,
    rounds: int,
    timer: Callable[[Callable[[], Any]], float],
) -> Iterator[Row]:
    """Time all `runs` in interleaved rounds, and yield one row per run and per failure.

    Args:
        labels: the first columns of every row.
        runs: functions by the name of the implementation; ratios are relative to "ours".
        failures: the reason why an implementation cannot run, by its name.
        rate: the column with the work per second.
        rounds: number of times that each function is timed.
        timer: calls a function and returns its time in milliseconds.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timer(run))
    for name, milliseconds in times.items():
        median = statistics.median(milliseconds)
        ratio: float | str = "ours failed"
        if "ours" in times:
            ratios = (t / r for t, r in zip(milliseconds, times["ours"], strict=True))
            ratio = statistics.median(ratios)
        figures = {"time_ms": median, rate.name: rate.work / median, "ratio_p50": ratio}
        yield {**labels, "impl": name, **figures}
    for name, reason in failures.items():
        yield {**labels, "impl": name, **dict.fromkeys(("time_ms", rate.name, "ratio_p50"), reason)}
