"""The short measurement behind algorithm="auto", which fits the cost model of a collective.

It runs once per collective, set of hosts and numbers of ranks, in the first automatic call. Later
groups of the process reuse it. The algorithms run in interleaved rounds. A round counts the time of
the slowest rank, and the result is the median over the rounds. An algorithm replaces gloo's own
collective only if it won at least `MIN_WINS` of the rounds.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from collectives.algorithms import tree
from collectives.algorithms.point_to_point import PointToPoint
from collectives.choice.cost import NATIVE, CostModel, Sample, list_candidates

# Number of calls per algorithm and round, by size in bytes.
CALLS_PER_ROUND = {1 << 10: 12, 16 << 10: 8, 64 << 10: 4, 256 << 10: 3, 1 << 20: 2, 8 << 20: 1}
MAX_ROUNDS = 25
# Time per size after which no further round starts.
SECONDS_PER_SIZE = 0.3
# For a group with a short timeout, the time per size is limited to this fraction of the timeout.
TIMEOUT_FRACTION = 1 / 40


def tune(
    kind: str,
    call: Callable[[str, int], object],
    ranks_per_host: Sequence[int],
    point_to_point: PointToPoint,
    broadcast: Callable[[str], bytes],
    *,
    native: bool,
) -> CostModel:
    """Time a collective and return a cost model fitted to the times, identical on all ranks.

    Args:
        kind: the name of the collective.
        call: runs the collective as call(algorithm, size in bytes).
        broadcast: returns rank 0's text on every rank.
        native: True if gloo's own collective can run.
    """
    algorithms = list_candidates(kind, ranks_per_host, shared=False)
    if native:
        algorithms = (*algorithms, NATIVE)
    samples = []
    for size, calls in CALLS_PER_ROUND.items():
        functions = [partial(call, name, size) for name in algorithms]
        seconds = _measure_rounds(functions, calls, point_to_point)
        slowest = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        tree.all_reduce(point_to_point, slowest.view(-1), "MAX")
        # The first round includes the time to connect.
        rounds = slowest[min(1, len(slowest) - 1) :]
        medians = rounds.median(0).values.tolist()
        # The last algorithm is gloo's own if it can run.
        wins = _compute_win_rates(rounds) if native else [1.0] * len(algorithms)
        for algorithm, median, won in zip(algorithms, medians, wins, strict=True):
            samples.append(Sample(kind, algorithm, size, tuple(ranks_per_host), median, won))
    model = replace(CostModel.fit(samples), samples=tuple(samples))
    return CostModel.from_json(broadcast(model.to_json() if point_to_point.rank == 0 else ""))


def _measure_rounds(
    functions: Sequence[Callable[[], object]], calls: int, point_to_point: PointToPoint
) -> list[list[float]]:
    """Return the seconds per call of each function, by round: seconds[round][function]."""
    max_seconds = min(SECONDS_PER_SIZE, point_to_point.seconds_left * TIMEOUT_FRACTION)
    start_time = time.perf_counter()
    seconds: list[list[float]] = []
    is_finished = False
    while not is_finished:
        seconds.append([_measure_calls(function, calls, point_to_point) for function in functions])
        is_late = time.perf_counter() > start_time + max_seconds
        is_finished = _is_any_set(point_to_point, is_late or len(seconds) >= MAX_ROUNDS)
        # The timeout detects ranks that do not respond; it does not limit the measurement.
        point_to_point.restart_deadline()
    return seconds


def _compute_win_rates(rounds: torch.Tensor) -> list[float]:
    """Return the fraction of rounds in which each algorithm was faster than the last one.

    rounds[i, j] is the time of algorithm j in round i, in seconds.
    """
    return [float(fraction) for fraction in (rounds < rounds[:, -1:]).double().mean(0)]


def _measure_calls(
    function: Callable[[], object], calls: int, point_to_point: PointToPoint
) -> float:
    """Return the seconds per call."""
    # The first call is not timed: the previous algorithm has changed caches and threads.
    function()
    _is_any_set(point_to_point, False)
    start_time = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start_time) / calls


def _is_any_set(point_to_point: PointToPoint, flag: bool) -> bool:
    """Return True if any rank passes True. This synchronizes all ranks."""
    flags = torch.tensor([flag], dtype=torch.uint8, device="cpu")
    tree.all_reduce(point_to_point, flags, "MAX")
    return bool(flags)
