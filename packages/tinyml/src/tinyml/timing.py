"""Selection of the faster of two implementations of a function on this machine.

Both are timed in interleaved rounds. The other implementation replaces the reference only if it is
clearly faster in most rounds, with its weights in the cache and out of it. Long calls are timed in
one state only. The measurement ends as early as possible, because a call may take seconds.
Decisions are stored in a file per user, so that other processes on the same machine reuse them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyml.export.atomic_file import atomic_file

#: The required speedup. On a virtual machine, the times of one matmul with two copies of the same
#: weight may differ by a factor of 1.45, depending on where the copies are in physical memory.
MARGIN = 1.5
#: The fraction of rounds that an implementation must win.
WIN_FRACTION = 2 / 3
ROUNDS = 15
#: The largest number of tokens in the first calls on a CPU.
TRIAL_TOKENS = 32
_LEAST_ROUNDS = 5
_SECONDS = 0.25  # after this time, no further rounds are started
_CACHE_BYTES = 64 * 2**20
_LONG_MS = 10.0  # calls that take longer than filling the cache are timed in one state only
_LEAST_SECONDS = 5e-4  # shorter calls are repeated and averaged
_WARM_UP = 4  # calls before the timed ones, so that the cache contains the weights
_FIRST_MARGIN = 1.2  # the speedup in the first calls must reach this ratio

Implementation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Timing:
    """The selected implementation and the milliseconds of all implementations."""

    selected: str
    #: Medians over the rounds. If no round timed an implementation, this is the time of its first
    #: calls, which is extrapolated on a CPU from at most `TRIAL_TOKENS` tokens.
    milliseconds: dict[str, float]
    #: Medians with the weights out of the cache; empty if they were not measured.
    out_of_cache: dict[str, float]

    def __str__(self) -> str:
        times = format_times(self.milliseconds)
        if self.out_of_cache:
            times += f"; weights out of the cache: {format_times(self.out_of_cache)}"
        return f"{self.selected} ({times})"


def format_times(times: Mapping[str, float]) -> str:
    """Return names and milliseconds as text, the fastest first."""
    ordered = sorted(times.items(), key=lambda item: item[1])
    return ", ".join(f"{name} {ms:.3g} ms" for name, ms in ordered)


def measure(
    implementations: Mapping[str, Implementation],
    inputs: Tensor,
    is_correct: Callable[[], bool],
    reference: str,
) -> Timing:
    """Return the faster of two implementations for `inputs`: `reference`, or a clearly faster one.

    The other implementation is not selected if it is not supported, or if `is_correct()` is False.
    `is_correct` is called only if the other implementation is clearly faster. `inputs` has the
    shape (tokens, width).
    """
    timing = _select_faster(implementations, inputs, reference)
    if timing.selected != reference and not is_correct():
        return replace(timing, selected=reference)
    return timing


def _select_faster(
    implementations: Mapping[str, Implementation], inputs: Tensor, reference: str
) -> Timing:
    (other,) = implementations.keys() - {reference}
    first = _measure_first_calls(implementations, inputs, reference)
    # An implementation that is hardly faster for a few tokens is not clearly faster for many.
    if other not in first or first[other] > first[reference] / _FIRST_MARGIN:
        return Timing(reference, first, {})
    calls = {name: partial(implementations[name], inputs) for name in (reference, other)}
    warm, cold = _measure_rounds(calls, reference, other, is_long=min(first.values()) > _LONG_MS)
    selected = other
    for times in (warm, cold):
        wins = len(times[other]) - _count_losses(times[other], times[reference])
        if wins < WIN_FRACTION * len(times[other]):
            selected = reference
    median = {name: statistics.median(times) for name, times in warm.items()}
    cold_median = {name: statistics.median(times) for name, times in cold.items() if times}
    return Timing(selected, median, cold_median)


def _measure_first_calls(
    implementations: Mapping[str, Implementation], inputs: Tensor, reference: str
) -> dict[str, float]:
    """Return the milliseconds of the best of a few calls of each supported implementation.

    On a CPU, the calls receive at most `TRIAL_TOKENS` tokens, and the time is extrapolated to all
    tokens. A GPU needs many tokens to be busy, so the calls on a GPU receive all tokens. An error
    of `reference` is raised.
    """
    trial = inputs[:TRIAL_TOKENS] if inputs.device.type == "cpu" else inputs
    first: dict[str, float] = {}
    for name, implementation in implementations.items():
        call = partial(implementation, trial)
        try:  # the first call prepares the weights of an implementation
            single = measure_ms(call)
            repeats = 1 if single > _LONG_MS else 3
            best = min(single, *(measure_ms(call) for _ in range(repeats)))
            first[name] = best * len(inputs) / len(trial)
        except (RuntimeError, AttributeError):
            if name == reference:
                raise
    return first


def _measure_rounds(
    calls: Mapping[str, Callable[[], Tensor]], reference: str, other: str, *, is_long: bool
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the milliseconds of interleaved calls, with the weights in the cache and out of it.

    If `is_long`, the lists out of the cache are empty. The rounds end early if `other` can no
    longer replace `reference`. They also end once both five rounds and a quarter of a second have
    passed.
    """
    fill_the_cache = torch.ones(0 if is_long else _CACHE_BYTES // 4).sum
    warm: dict[str, list[float]] = {name: [] for name in calls}
    cold: dict[str, list[float]] = {name: [] for name in calls}
    max_rounds = ROUNDS // 2 if is_long else ROUNDS
    max_losses = (1 - WIN_FRACTION) * max_rounds
    start = time.perf_counter()
    for number in range(max_rounds):
        if number >= _LEAST_ROUNDS and time.perf_counter() - start > _SECONDS:
            break
        for name, call in calls.items():
            warm[name].append(measure_ms(call) if is_long else _measure_in_cache(call))
            if not is_long:
                cold[name].append(_measure_after(fill_the_cache, call))
        if max(_count_losses(t[other], t[reference]) for t in (warm, cold)) > max_losses:
            break
    return warm, cold


def _count_losses(ours: Sequence[float], others: Sequence[float]) -> int:
    """Return the number of times in `ours` that do not beat all of `others` by a factor `MARGIN`.

    This number never decreases when rounds are added.
    """
    return sum(MARGIN * time_ms > min(others) for time_ms in ours)


def is_captured() -> bool:
    """Return True inside `torch.compile`, `torch.export` and `torch.jit.trace`.

    Times measured while they record operations are meaningless, and tensors must not be cached.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def measure_ms(call: Callable[[], object], least_seconds: float = 0.0) -> float:
    """Return the mean milliseconds of calls, which are repeated until `least_seconds` have passed.

    Without a GPU, a single thread is timed by processor time, which excludes other programs.
    """
    uses_gpu = torch.cuda.is_initialized()
    is_single_thread = torch.get_num_threads() == 1 and not uses_gpu
    clock = time.thread_time if is_single_thread else time.perf_counter
    if uses_gpu:
        torch.cuda.synchronize()
    start = clock()
    num_calls = 0
    seconds = 0.0
    while not num_calls or seconds < least_seconds:
        call()
        if uses_gpu:
            torch.cuda.synchronize()
        num_calls += 1
        seconds = clock() - start
    return seconds * 1e3 / num_calls


def _measure_in_cache(call: Callable[[], object]) -> float:
    for _ in range(_WARM_UP):
        call()
    return measure_ms(call, _LEAST_SECONDS)


def _measure_after(preparation: Callable[[], object], call: Callable[[], object]) -> float:
    preparation()
    return measure_ms(call)


def find_stored_timing(key: str) -> Timing | None:
    """Return the timing that an earlier process on this machine stored under `key`, or None."""
    try:
        return Timing(**_read_stored()[_describe_machine()][key])
    except (KeyError, TypeError):
        return None


def store_timing(key: str, timing: Timing) -> None:
    """Store a timing under `key` for later processes; ignore errors in writing the file."""
    stored = _read_stored()
    stored.setdefault(_describe_machine(), {})[key] = asdict(timing)
    try:
        path = get_timing_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as part:
            part.write_text(json.dumps(stored, indent=1) + "\n")
    except OSError:
        pass  # a home directory may be read-only; the next process measures again


def get_timing_path() -> Path:
    """Return the path of the stored timings in `$XDG_CACHE_HOME` or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tinyml/timings.json"


def _read_stored() -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(get_timing_path().read_text())
    except (OSError, ValueError):
        return {}
    is_valid = isinstance(content, dict) and all(isinstance(v, dict) for v in content.values())
    return content if is_valid else {}


@cache
def _describe_machine() -> str:
    """Return the CPU model, the number of cores, the instruction sets and torch's version.

    The instructions decide whether int8 products are exact, and virtual machines with one model
    name may have different ones. They are part of the result as a digest.
    """
    model = platform.processor()
    flags = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(": ")[2] for line in lines if "model name" in line), model)
        flags = next((line.partition(": ")[2] for line in lines if line.startswith("flags")), "")
    capability = torch.backends.cpu.get_cpu_capability()
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
    limits = [os.environ.get(name, "") for name in names]
    digest = hashlib.sha256(flags.encode()).hexdigest()[:8]
    facts = [model, f"{os.cpu_count()} cores", capability, digest, *limits, torch.__version__]
    return " ".join(facts)
