"""Which of the two ceilings an operation hits: the arithmetic or the memory.

Intensity is operations a byte moved; above `peak / bandwidth`, the ridge, an operation can be
compute-bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from accounting import checks
from accounting.hardware import Hardware, find
from accounting.precision import bytes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """An operation under a device's roof."""

    name: str
    flops: float
    bytes: float | Fraction
    intensity: float
    """FLOP a byte."""
    ridge: float
    """Intensity from which on the device can be compute-bound."""
    bound: str
    """`compute` or `memory`."""
    attainable_flops: float
    """The roof at this intensity, in FLOP/s."""
    seconds: float
    """The least time: the larger of arithmetic and traffic."""

    def explain(self) -> str:
        """The derivation, line by line."""
        return (
            f"{self.name}: {self.flops:,} FLOP / {self.bytes:,} B = {self.intensity:.6g} FLOP/B, "
            f"{self.bound}-bound (ridge {self.ridge:.4g})\n"
            f"at most {self.attainable_flops / 1e12:.4g} TFLOP/s, at least {self.seconds:.4g} s"
        )

    __str__ = explain


@checks.entry()
def matmul(m: int, k: int, n: int, *, dtype: str = "fp16") -> tuple[int, int | Fraction]:
    """Operations and least traffic of (m, k) @ (k, n): 2mkn, and each matrix moved once."""
    moved = bytes_of(dtype) * (m * k + k * n + m * n)
    return 2 * m * k * n, moved.numerator if moved.denominator == 1 else moved


@checks.entry()
def intensity(m: int, k: int, n: int, *, dtype: str = "fp16") -> float:
    """Arithmetic intensity of (m, k) @ (k, n), in FLOP a byte."""
    flops, moved = matmul(m, k, n, dtype=dtype)
    return float(flops / moved)


@checks.entry()
def roofline(
    hardware: str | Hardware,
    *,
    flops: float | None = None,
    bytes: float | Fraction | None = None,
    shape: tuple[int, int, int] | None = None,
    dtype: str = "fp16",
    name: str | None = None,
) -> Roofline:
    """Place an operation, given by its counts or as a matmul's `shape` (m, k, n)."""
    device = find(hardware)
    if shape is not None:
        if flops is not None or bytes is not None:
            raise ValueError("give either shape=(m, k, n), or flops and bytes")
        if not isinstance(shape, tuple | list) or len(shape) != 3:
            raise ValueError(f"shape is {shape}; it must be (m, k, n)")
        flops, bytes = matmul(*shape, dtype=dtype)
        name = name or "x".join(map(str, shape))
    if not flops or not bytes:
        raise ValueError("give shape=(m, k, n), or flops and bytes, all above 0")
    checks.number("flops", flops)
    checks.number("bytes", bytes)
    peak, bandwidth = device.peak(dtype), device.memory_bandwidth
    ratio = flops / bytes
    ridge = peak / bandwidth
    return Roofline(
        name=name or "operation",
        flops=flops,
        bytes=bytes,
        intensity=float(ratio),
        ridge=ridge,
        bound="compute" if ratio >= ridge else "memory",
        attainable_flops=min(peak, float(ratio) * bandwidth),
        seconds=max(flops / peak, float(bytes) / bandwidth),
    )


@checks.entry()
def plot(
    operations: Sequence[Roofline],
    hardware: str | Hardware,
    *,
    dtype: str = "fp16",
    axes: Axes | None = None,
) -> Axes:
    """Draw the roof of a device and the operations under it; needs matplotlib."""
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        told = 'this needs matplotlib, which is not installed: pip install "accounting[plot]"'
        raise ModuleNotFoundError(told, name=error.name) from error

    device = find(hardware)
    checks.instance("operations", operations, (list, tuple), "a list of Roofline")
    for operation in operations:
        checks.instance("one of operations", operation, Roofline, "a Roofline")
    if axes is None:
        axes = pyplot.figure(figsize=(6, 4), layout="constrained").add_subplot()
    peak, ridge = device.peak(dtype), device.peak(dtype) / device.memory_bandwidth
    ends = [min([ridge, *(o.intensity for o in operations)]) / 4, ridge]
    ends.append(max([ridge, *(o.intensity for o in operations)]) * 4)
    axes.loglog(ends, [min(peak, x * device.memory_bandwidth) for x in ends], color="black")
    for operation in operations:
        axes.plot(operation.intensity, operation.attainable_flops, "o", label=operation.name)
    axes.set_xlabel("arithmetic intensity (FLOP/B)")
    axes.set_ylabel(f"{dtype} FLOP/s")
    axes.set_title(device.name)
    if operations:
        axes.legend(fontsize="small")
    return axes
