"""Assertions on the figures that READMEs state: ratios of times, seconds and sizes.

A figure is measured on one machine. A quiet machine with another processor may miss it by `MARGIN`.
`make test-timing` ends with a list of every figure, as it is stated and as it was measured.
"""

from __future__ import annotations

import platform
from pathlib import Path

#: The fraction by which a measurement may miss its figure on another processor.
MARGIN = 0.15

#: A line per figure that this process has measured.
measured_figures: list[str] = []


def read_cpu_model() -> str:
    """Return the name of the processor as Linux reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def select_by_avx512(with_avx512: float, without_avx512: float) -> float:
    """Return the figure for processors with AVX-512, or the one for processors without it."""
    import torch

    return with_avx512 if "AVX512" in torch.backends.cpu.get_cpu_capability() else without_avx512


def assert_at_least(
    figure: str, expected: float, measured: float, unit: str = "x", margin: float = MARGIN
) -> None:
    """Fail if a measurement is more than the margin below its figure. A larger value is better."""
    report = _record(figure, ">=", expected, measured, unit)
    assert measured >= expected * (1 - margin), report


def assert_at_most(
    figure: str, expected: float, measured: float, unit: str = "x", margin: float = MARGIN
) -> None:
    """Fail if a measurement is more than the margin above its figure. A smaller value is better."""
    report = _record(figure, "<=", expected, measured, unit)
    assert measured <= expected * (1 + margin), report


def _record(figure: str, relation: str, expected: float, measured: float, unit: str) -> str:
    """Return the line that states both values, after storing it for the list at the end."""
    space = "" if unit in ("", "x") else " "
    line = f"{figure}: expected {relation} {expected:g}{space}{unit}, "
    line += f"measured {measured:.3g}{space}{unit} on {read_cpu_model()}"
    measured_figures.append(line)
    return line
