"""The smallest batch at which a sharded MLP on a mesh computes for longer than it communicates.

FSDP over X devices gathers weights, tensor parallelism over Y devices gathers activations; each may
use several axes (M_X, M_Y) of the torus. Per layer, with B tokens, widths D and F, C FLOP/s and W
bytes/s an axis,

    T_math = 4 B D F / (N C),   T_fsdp = 4 D F / (Y W M_X),   T_tp = 4 B D / (X W M_Y)

(Austin et al. 2025, How to Scale Your Model, "Training"). With alpha = C / W the batch per device
must exceed

    summed      alpha F / (Y M_X (F - alpha Y / M_Y))   where FSDP and TP take turns on the links
    overlapped  alpha / (Y M_X)                         where both run at once, if Y < F M_Y / alpha

The closed form 4 alpha^2 / (M_X M_Y F) is the least of the first over X; it holds at that X alone.
"""

from dataclasses import dataclass
from typing import Any, Literal

from accounting import checks
from accounting.hardware import Hardware, find


@dataclass(frozen=True, kw_only=True)
class MeshBatch:
    """The batch from which on a mesh is compute-bound, in tokens."""

    comms: Literal["summed", "overlapped"]
    fsdp: float
    """X, which need not be whole at the optimum."""
    tensor: float
    """Y."""
    alpha: float
    """FLOP a byte of link: C / W."""
    per_device: float
    """Tokens a device."""
    per_fsdp_shard: float
    """Tokens a row of the mesh, B / X: the figure that is easily taken for the one above."""

    @property
    def tokens(self) -> float:
        """The whole batch."""
        return self.per_device * self.fsdp * self.tensor

    def explain(self) -> str:
        """One line that says what was assumed."""
        return (
            f"X={self.fsdp:g} by Y={self.tensor:g}, comms {self.comms}, "
            f"alpha={self.alpha:.6g}: "
            f"{self.per_device:.6g} tokens/device, {self.tokens:.6g} in all"
        )

    __str__ = explain


_SPEEDS = ("hardware", "flops_per_second", "axis_bytes_per_second")


@checks.entry(*_SPEEDS)
def compute_bound_batch(
    *,
    fsdp: int,
    tensor: int,
    d_ff: int,
    fsdp_axes: int = 1,
    tensor_axes: int = 1,
    comms: Literal["summed", "overlapped"] = "summed",
    **speeds: Any,
) -> MeshBatch:
    """The least batch at X = `fsdp` and Y = `tensor`; `ValueError` where no batch suffices.

    `speeds` are `hardware`, or `flops_per_second` and `axis_bytes_per_second`, or both.
    """
    return _mesh(fsdp, tensor, d_ff, (fsdp_axes, tensor_axes), comms, _alpha(**speeds))


@checks.entry(*_SPEEDS)
def best_mesh(
    devices: int, *, d_ff: int, fsdp_axes: int = 1, tensor_axes: int = 1, **speeds: Any
) -> MeshBatch:
    """The least batch over all X with X Y = `devices`, comms summed: Y = M_Y F / (2 alpha).

    There T_fsdp = T_tp, and the batch per device is 4 alpha^2 / (M_X M_Y F). `speeds` as above.
    """
    alpha = _alpha(**speeds)
    tensor = min(max(1.0, tensor_axes * d_ff / (2 * alpha)), float(devices))
    return _mesh(devices / tensor, tensor, d_ff, (fsdp_axes, tensor_axes), "summed", alpha)


def _mesh(
    fsdp: float,
    tensor: float,
    d_ff: int,
    axes: tuple[int, int],
    comms: Literal["summed", "overlapped"],
    alpha: float,
) -> MeshBatch:
    # The share of the arithmetic's time that tensor parallelism takes, whatever the batch.
    share = alpha * tensor / (axes[1] * d_ff)
    if share >= 1:
        raise ValueError(
            f"tensor is {tensor:g}; at this width no batch is compute-bound from "
            f"{d_ff * axes[1] / alpha:.4g} on (d_ff * tensor_axes / alpha)"
        )
    per_device = alpha / (tensor * axes[0])
    if comms == "summed":
        per_device /= 1 - share
    found = {"fsdp": fsdp, "tensor": tensor, "alpha": alpha, "per_device": per_device}
    return MeshBatch(comms=comms, per_fsdp_shard=per_device * tensor, **found)


def _alpha(
    hardware: str | Hardware | None = None,
    flops_per_second: float | None = None,
    axis_bytes_per_second: float | None = None,
) -> float:
    if hardware is not None:
        device = find(hardware)
        flops_per_second = flops_per_second or device.peak("bf16")
        axis_bytes_per_second = axis_bytes_per_second or device.node_link.bandwidth
    if not flops_per_second or not axis_bytes_per_second:
        raise ValueError("give hardware, or flops_per_second and axis_bytes_per_second")
    rate = checks.number("flops_per_second", flops_per_second)
    return rate / checks.number("axis_bytes_per_second", axis_bytes_per_second)
