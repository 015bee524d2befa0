"""The arguments of torch's DDP: the same names and meaning, or a refusal that names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.average import Average, check_average
from ddp.bucket import Allocate
from ddp.collective import AllReduce
from ddp.compression.mixed_precision import MixedPrecision, check_mixed_precision, travels_as
from ddp.compression.ways import Cast, Compression, Uncompressed

# What torch's DDP also takes, with why it is not taken here. They may be given with these values.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "dim": ((0,), "inputs are not scattered: each process has one device"),
    "check_reduction": ((False, True), ""),
    "skip_all_reduce_unused_params": ((False, True), ""),
    "batched_grad_copy": ((False, True), ""),
    "lazy_bucket_allocation": ((False, True), ""),
    "delay_all_reduce_named_params": ((None,), "every gradient is sent when it is ready"),
    "param_to_hook_all_reduce": ((None,), "every gradient is sent when it is ready"),
}

DEFAULT_SIZE_MB, FIRST_SIZE_MB = 25.0, 1.0


@dataclass(frozen=True)
class Options:
    """How a module is replicated; see `DDP`."""

    bucket_size_mb: float | tuple[float, ...] | None
    all_reduce: AllReduce | None
    allocate: Allocate | None
    gradient_dtype: torch.dtype | None
    compression: Compression | None
    average: Average
    find_unused_parameters: bool
    check_nan: bool
    broadcast_buffers: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    mixed_precision: MixedPrecision | None
    device: torch.device | None

    def __post_init__(self) -> None:
        check_average(self.average)
        if not all(size > 0 for size in self._sizes):
            raise ValueError(
                f"bucket_size_mb is {self.bucket_size_mb}; it must be above zero, or None to send "
                "each parameter by itself"
            )
        if self.mixed_precision is not None:
            check_mixed_precision(self.mixed_precision)
        ways = {
            "gradient_dtype": self.gradient_dtype,
            "compression": self.compression,
            "mixed_precision": travels_as(self.mixed_precision),
        }
        given = [f"{name} {value!r}" for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)} are two ways to send the same gradients; pass one"
            )

    @property
    def way_to_send(self) -> Compression:
        """How a bucket is summed."""
        if dtype := self.gradient_dtype or travels_as(self.mixed_precision):
            return Cast(dtype)
        return self.compression or Uncompressed()

    @property
    def bucket_bytes(self) -> tuple[float, ...]:
        """The largest bucket, or that of each; 0 for one a parameter."""
        return tuple(size * 2**20 for size in self._sizes) or (0.0,)

    def bucket_bytes_of(self, parameters: Iterable[nn.Parameter]) -> tuple[float, ...]:
        """The same for a model: of several buckets the first is small where no size was chosen."""
        # As in torch's DDP, so that the link has work soon after the backward pass begins. A model
        # that fits in one bucket keeps one: a second costs more than what it hides.
        several = sum(parameter.nbytes for parameter in parameters) > DEFAULT_SIZE_MB * 2**20
        if several and self._sizes == (DEFAULT_SIZE_MB,):
            return (FIRST_SIZE_MB * 2**20, *self.bucket_bytes)
        return self.bucket_bytes

    @property
    def _sizes(self) -> tuple[float, ...]:
        if self.bucket_size_mb is None:
            return ()
        return (
            self.bucket_size_mb
            if isinstance(self.bucket_size_mb, tuple)
            else (self.bucket_size_mb,)
        )

    @property
    def to_agree_on(self) -> dict[str, object]:
        """What must be the same on every rank."""
        names = (
            "bucket_size_mb",
            "gradient_dtype",
            "compression",
            "find_unused_parameters",
            "check_nan",
            "broadcast_buffers",
            "static_graph",
            "mixed_precision",
        )
        average = self.average if isinstance(self.average, str) else "by weight"
        return {name: getattr(self, name) for name in names} | {"average": average}


def refuse(given: dict[str, Any]) -> None:
    """Raise TypeError for unknown names, ValueError for torch's that have no meaning here."""
    for name, value in given.items():
        if name not in REFUSED:
            raise TypeError(f"DDP has no argument {name!r}")
        allowed, why = REFUSED[name]
        if not any(value is one or value == one for one in allowed):
            raise ValueError(f"{name}={value!r} is not supported: {why}")


def size_of(
    bucket_size_mb: float | None, cap: float | None, caps: Sequence[float] | None
) -> float | tuple[float, ...] | None:
    """The size of all buckets, or of each: as in torch, the list goes before the number."""
    return tuple(caps) if caps else bucket_size_mb if cap is None else cap


def group_of(
    group: dist.ProcessGroup | None, process_group: dist.ProcessGroup | None, device_mesh: Any
) -> dist.ProcessGroup | None:
    """The one group that is named in one of three ways."""
    if device_mesh is not None and (group or process_group) is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if group is not None and process_group is not None:
        raise RuntimeError("group and process_group are two names of one: pass one")
    if device_mesh is None:
        return group or process_group
    if device_mesh.ndim != 1:
        raise RuntimeError(
            f"Only 1D device mesh is supported, not one of {device_mesh.ndim} dimensions; pass "
            'mesh["data"] or the like'
        )
    found: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return found


def check_module(module: nn.Module, ignored: set[str]) -> None:
    """Raise ValueError or RuntimeError for a module that cannot be replicated."""
    parameters = [(n, p) for n, p in module.named_parameters() if n not in ignored]
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise RuntimeError(
            "no parameter of the module requires a gradient, so there is nothing to average; "
            "unfreeze what is to be trained before wrapping"
        )
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"parameter {name!r} is uninitialized; run a forward pass before wrapping, so that "
                "lazy modules find their shapes"
            )
        if parameter.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device; use module.to_empty first")
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"parameter {name!r} is a DTensor, sharded already; DDP replicates plain tensors"
            )
    kinds = {parameter.device.type for _, parameter in parameters}
    if len(kinds) > 1:
        raise ValueError(f"the parameters lie on several types of devices, {sorted(kinds)}")


def device_of(device_ids: Sequence[Any] | None, output_device: Any, module: nn.Module) -> Any:
    """The one device that inputs are moved to, or None."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids is {device_ids}; one process has one device, so pass one")
    devices = {parameter.device for parameter in module.parameters()}
    if not device_ids and output_device is None:
        return None
    kinds = {device.type for device in devices}
    if "cpu" in kinds or len(devices) > 1 or not device_ids:
        raise ValueError(
            f"device_ids {device_ids} and output_device {output_device} are for a module on one "
            f"GPU; this one is on {sorted(map(str, devices))}: leave them out"
        )
    one = device_ids[0]
    return torch.device(next(iter(kinds)), one) if isinstance(one, int) else torch.device(one)
