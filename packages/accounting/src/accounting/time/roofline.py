"""The roofline model, which shows whether an operation is bound by compute or by memory.

The intensity of an operation is its FLOPs per byte of memory traffic. An operation is bound by
compute if its intensity is at least the ridge, `peak / bandwidth`.
"""

from dataclasses import dataclass

from accounting import checks
from accounting.breakdown import simplify
from accounting.hardware import Hardware, find
from accounting.precision import get_itemsize


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """An operation and its limits on a device."""

    name: str
    flops: float
    bytes: float
    #: FLOP per byte.
    intensity: float
    #: Smallest intensity that is bound by compute on the device.
    ridge: float
    #: `compute` or `memory`.
    bound: str
    #: Upper bound of the FLOP/s at this intensity.
    attainable_flops: float
    #: Lower bound of the time: the larger of compute time and memory traffic time.
    seconds: float

    def explain(self) -> str:
        """Return the derivation, line by line."""
        return (
            f"{self.name}: {self.flops:,} FLOP / {self.bytes:,} B = {self.intensity:.6g} FLOP/B, "
            f"{self.bound}-bound (ridge {self.ridge:.4g})\n"
            f"at most {self.attainable_flops / 1e12:.4g} TFLOP/s, at least {self.seconds:.4g} s"
        )

    __str__ = explain


@checks.validate()
def roofline(
    hardware: str | Hardware,
    *,
    flops: float | None = None,
    bytes: float | None = None,
    shape: tuple[int, int, int] | None = None,
    dtype: str = "fp16",
) -> Roofline:
    """Return the roofline of an operation on a device.

    The operation is described by its `flops` and `bytes`, or by `shape` = (m, k, n): the product of
    an (m, k) and a (k, n) matrix in `dtype`. `dtype` also selects the peak of the device. Raises
    `ValueError` unless exactly one of the two descriptions is passed.
    """
    device = find(hardware)
    if shape is not None:
        if flops is not None or bytes is not None:
            raise ValueError("expected either shape=(m, k, n), or flops and bytes, got both")
        if not isinstance(shape, tuple | list) or len(shape) != 3:
            raise ValueError(f"expected shape=(m, k, n), got {shape}")
        m, k, n = (checks.require_integer("an extent of shape", extent) for extent in shape)
        flops = 2 * m * k * n
        # Each of the three matrices moves through memory once.
        bytes = simplify(get_itemsize(dtype) * (m * k + k * n + m * n))
    if not flops or not bytes:
        raise ValueError(
            f"expected shape=(m, k, n), or flops > 0 and bytes > 0, got {flops=} and {bytes=}"
        )
    checks.require_number("flops", flops)
    checks.require_number("bytes", bytes)
    peak, bandwidth = device.peak(dtype), device.memory_bandwidth
    ratio = flops / bytes
    ridge = peak / bandwidth
    return Roofline(
        name="operation" if shape is None else "x".join(map(str, shape)),
        flops=flops,
        bytes=bytes,
        intensity=ratio,
        ridge=ridge,
        bound="compute" if ratio >= ridge else "memory",
        attainable_flops=min(peak, ratio * bandwidth),
        seconds=max(flops / peak, bytes / bandwidth),
    )
