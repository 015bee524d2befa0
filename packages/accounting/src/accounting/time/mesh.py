"""The smallest batch for which a sharded MLP on a mesh is compute-bound.

FSDP over X devices gathers weights, and tensor parallelism over Y devices gathers activations. Each
may use several axes (M_X, M_Y) of a torus. Per layer, with B tokens, widths D and F, N = X Y
devices, C FLOP/s per device and W bytes/s per axis,

    T_math = 4 B D F / (N C),   T_fsdp = 4 D F / (Y W M_X),   T_tp = 4 B D / (X W M_Y)

(Austin et al. 2025, How to Scale Your Model, "Training"). With alpha = C / W the batch per device
must exceed

    summed      alpha F / (Y M_X (F - alpha Y / M_Y))   if FSDP and TP use the links in sequence
    overlapped  alpha / (Y M_X)                         if both run at once and Y < F M_Y / alpha

The closed form 4 alpha^2 / (M_X M_Y F) is the minimum of `summed` over Y and holds only there.
"""

from dataclasses import dataclass
from typing import Literal

from accounting import checks


@dataclass(frozen=True, kw_only=True)
class MeshBatch:
    """The smallest compute-bound batch on a mesh, in tokens."""

    #: Ratio C / W of operations per second to bytes per second of one axis.
    alpha: float
    #: Tokens per device.
    per_device: float
    #: Tokens of the whole batch.
    tokens: float


@checks.validate()
def compute_bound_batch(
    *,
    fsdp: int,
    tensor: int,
    d_ff: int,
    flops_per_second: float,
    axis_bytes_per_second: float,
    fsdp_axes: int = 1,
    tensor_axes: int = 1,
    comms: Literal["summed", "overlapped"] = "summed",
) -> MeshBatch:
    """Return the smallest compute-bound batch for X = `fsdp` and Y = `tensor` devices.

    `d_ff` is the width F, `flops_per_second` the peak C of a device, and `axis_bytes_per_second`
    the bandwidth W of one axis. `comms` is `overlapped` if the traffic of FSDP and that of tensor
    parallelism run at once. Raises `ValueError` if no batch is compute-bound.
    """
    alpha = flops_per_second / axis_bytes_per_second
    # Ratio of tensor-parallel time to compute time, which does not depend on the batch size.
    tensor_fraction = alpha * tensor / (tensor_axes * d_ff)
    if tensor_fraction >= 1:
        raise ValueError(
            f"expected tensor < {d_ff * tensor_axes / alpha:.4g} (d_ff * tensor_axes / alpha), "
            f"got {tensor:g}; no batch is compute-bound at this degree"
        )
    per_device = alpha / (tensor * fsdp_axes)
    if comms == "summed":
        per_device /= 1 - tensor_fraction
    return MeshBatch(alpha=alpha, per_device=per_device, tokens=per_device * fsdp * tensor)
