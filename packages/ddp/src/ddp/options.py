"""The options of `DDP`, and validation of its arguments."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.bucket import Allocate
from ddp.process_group import AllReduce

#: Arguments of torch's DDP that have no effect here: the accepted values, and the reason for
#: refusing other values.
RESTRICTED_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "mixed_precision": ((None,), "torch.autocast and gradient_dtype replace it"),
    "dim": ((0,), "inputs are not scattered, because each process has one device"),
    "check_reduction": ((False, True), "it must be a boolean"),
    "skip_all_reduce_unused_params": ((False, True), "it must be a boolean"),
    "batched_grad_copy": ((False, True), "it must be a boolean"),
    "lazy_bucket_allocation": ((False, True), "it must be a boolean"),
    "delay_all_reduce_named_params": ((None,), "no reduction can be delayed"),
    "param_to_hook_all_reduce": ((None,), "no reduction can be delayed"),
}

DEFAULT_SIZE_MB = 25.0
FIRST_SIZE_MB = 1.0


class BucketSize(Enum):
    """The default of `bucket_size_mb`. It cannot be None, which selects one bucket per gradient."""

    DEFAULT = DEFAULT_SIZE_MB


@dataclass(frozen=True)
class Options:
    """The options of one `DDP`; see its arguments."""

    #: Sizes of the buckets in units of 2**20 bytes; later buckets have the last size. Empty for one
    #: gradient per bucket.
    bucket_size_mb: tuple[float, ...]
    all_reduce: AllReduce | None
    allocate: Allocate | None
    gradient_dtype: torch.dtype | None
    find_unused_parameters: bool
    sync_buffers: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    #: Device that inputs are moved to, if any.
    device: torch.device | None

    def __post_init__(self) -> None:
        if not all(size > 0 for size in self.bucket_size_mb):
            raise ValueError(
                f"expected bucket_size_mb > 0, got {', '.join(map(str, self.bucket_size_mb))}; "
                "pass None to reduce each gradient separately"
            )
        dtype = self.gradient_dtype
        is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and not (is_float and dtype.itemsize > 1):
            raise ValueError(
                f"expected gradient_dtype to be a floating-point dtype of at least 16 bits, got "
                f"{dtype!r}; pass torch.bfloat16"
            )

    @property
    def bucket_bytes(self) -> tuple[float, ...]:
        """Bucket size limits in bytes; 0 puts each parameter in its own bucket."""
        return tuple(size * 2**20 for size in self.bucket_size_mb) or (0.0,)

    def compute_bucket_bytes(self, parameters: Iterable[nn.Parameter]) -> tuple[float, ...]:
        """Return the bucket size limits for a model, in bytes.

        With the default size, the first bucket is small if the model is larger than one bucket. As
        in torch's DDP, its reduction then starts early in the backward pass. For a smaller model,
        the additional reduction would cost more time than it hides.
        """
        total_bytes = sum(parameter.nbytes for parameter in parameters)
        if total_bytes > DEFAULT_SIZE_MB * 2**20 and self.bucket_size_mb == (DEFAULT_SIZE_MB,):
            return (FIRST_SIZE_MB * 2**20, *self.bucket_bytes)
        return self.bucket_bytes

    @property
    def shared(self) -> dict[str, object]:
        """The options that must be the same on every rank, by name."""
        local = ("all_reduce", "allocate", "gradient_as_bucket_view", "device")
        return {name: value for name, value in vars(self).items() if name not in local}


def check_restricted_arguments(arguments: dict[str, Any]) -> None:
    """Raise `TypeError` for unknown names, and `ValueError` for values that are not supported."""
    for name, value in arguments.items():
        if name not in RESTRICTED_ARGUMENTS:
            raise TypeError(
                f"expected arguments of DDP or of torch's DDP, got {name!r}; remove it or correct "
                "its name"
            )
        allowed, reason = RESTRICTED_ARGUMENTS[name]
        if not any(value is choice or value == choice for choice in allowed):
            # The value may contain tensors with millions of elements.
            received = reprlib.repr(value)
            raise ValueError(f"{name}={received} is not supported: {reason}; leave it out")


def select_bucket_size(
    bucket_size_mb: float | BucketSize | None, cap: float | None, caps: Sequence[float] | None
) -> tuple[float, ...]:
    """Return the value of `Options.bucket_size_mb`.

    As in torch, `caps` overrides `cap`. Raises `ValueError` if `bucket_size_mb` is passed too and
    differs.
    """
    if not caps and cap is not None:
        caps = [cap]
    if isinstance(bucket_size_mb, BucketSize):
        return tuple(caps or [DEFAULT_SIZE_MB])
    sizes = () if bucket_size_mb is None else (bucket_size_mb,)
    if caps and tuple(caps) != sizes:
        raise ValueError(
            f"expected one bucket size, got bucket_size_mb={bucket_size_mb} and {tuple(caps)} MiB "
            "in bucket_cap_mb or bucket_cap_mb_list; pass one of them"
        )
    return sizes


def select_group(
    group: dist.ProcessGroup | None, process_group: dist.ProcessGroup | None, device_mesh: Any
) -> dist.ProcessGroup | None:
    """Return the group that one of the arguments specifies, or None if all of them are None.

    Raises `RuntimeError` if two arguments are passed, or if the mesh has several dimensions.
    """
    if device_mesh is not None and process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if group is not None and (process_group is not None or device_mesh is not None):
        raise RuntimeError("expected one of group, process_group and device_mesh, got two of them")
    if device_mesh is None:
        return group or process_group
    if device_mesh.ndim != 1:
        raise RuntimeError(
            f"Only 1D device mesh is supported, got {device_mesh.ndim} dimensions; pass one of "
            'them, such as mesh["data"]'
        )
    mesh_group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return mesh_group


def select_buffer_synchronization(
    sync_buffers: bool | None, forward_sync_buffers: bool | None, broadcast_buffers: bool | None
) -> tuple[bool, bool]:
    """Return whether each step copies the buffers of rank 0, and whether the constructor does.

    The last two arguments are torch's names of the first. As in torch, `forward_sync_buffers` takes
    precedence over `broadcast_buffers`. Raises `ValueError` if the argument that takes precedence
    contradicts `sync_buffers`.
    """
    if broadcast_buffers is not None:
        warnings.warn(
            "since torch 2.13, broadcast_buffers is called forward_sync_buffers, and this name "
            "takes precedence if both are passed; pass sync_buffers instead",
            FutureWarning,
            stacklevel=3,
        )
    name = "broadcast_buffers" if forward_sync_buffers is None else "forward_sync_buffers"
    synonym = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
    if None not in (sync_buffers, synonym) and sync_buffers != synonym:
        raise ValueError(
            f"expected one value for the synchronization of buffers, got sync_buffers="
            f"{sync_buffers} and {name}={synonym}; pass one of them"
        )
    copies_in_steps = False not in (sync_buffers, synonym)
    copies_in_constructor = broadcast_buffers is not False or forward_sync_buffers is not None
    return copies_in_steps, copies_in_constructor


def check_module(module: nn.Module, ignored: set[str], *, copies_buffers: bool) -> None:
    """Raise `ValueError` or `RuntimeError` if a module cannot be replicated."""
    for name, child in module.named_modules():
        if isinstance(child, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"expected a module without wrappers, got {name or 'the module'!r} of type "
                f"{type(child).__name__}; wrap its .module instead"
            )
    parameters = [(n, p) for n, p in module.named_parameters() if n not in ignored]
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise RuntimeError(
            "expected a module with a parameter that requires a gradient, got none; unfreeze the "
            "parameters to train before wrapping the module"
        )
    for name, parameter in parameters:
        _check_parameter(name, parameter)
    _check_can_be_copied(parameters)
    if copies_buffers:
        _check_can_be_copied((n, b) for n, b in module.named_buffers() if n not in ignored)
    device_types = {parameter.device.type for _, parameter in parameters}
    if len(device_types) > 1:
        raise ValueError(
            f"expected all parameters on one type of device, got {sorted(device_types)}; move the "
            "module to one of them"
        )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Raise `RuntimeError` or `ValueError` if a parameter cannot be replicated."""
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise RuntimeError(
            f"parameter {name!r} is uninitialized; run a forward pass before wrapping the "
            "module, so that lazy modules infer their shapes"
        )
    if parameter.requires_grad and parameter.grad_dtype != parameter.dtype:
        raise ValueError(
            f"expected a gradient of {name!r} in the parameter's dtype {parameter.dtype}, got "
            f"grad_dtype={parameter.grad_dtype}; pass gradient_dtype to send it in another dtype"
        )
    if parameter.is_meta:
        raise ValueError(f"parameter {name!r} is on the meta device; call module.to_empty first")
    if hasattr(parameter, "device_mesh"):
        raise ValueError(
            f"expected plain tensors, got DTensor parameter {name!r}; replace it with a plain "
            "tensor, or use torch's fully_shard"
        )


def _check_can_be_copied(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `ValueError` for a tensor into which the values of rank 0 cannot be copied."""
    for name, tensor in named:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"expected {name!r} to be a dense tensor, got {tensor.layout}; convert it with "
                "to_dense(), or store it in an attribute that is not a buffer"
            )
        strides = tensor.stride()
        if any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, strides, strict=True)):
            raise ValueError(
                f"elements of {name!r} share memory: it has the shape {tuple(tensor.shape)} and "
                f"the strides {strides}; replace the result of expand() with its clone()"
            )


def select_device(
    device_ids: Sequence[Any] | None, output_device: Any, module: nn.Module
) -> torch.device | None:
    """Return the device that inputs are moved to, or None if no device was passed.

    Raises `ValueError` if several devices were passed, or if a device was passed for a module that
    is not on one GPU.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"expected at most one entry in device_ids, got {device_ids}; pass the device of this "
            "process"
        )
    devices = {parameter.device for parameter in module.parameters()}
    if not device_ids and output_device is None:
        return None
    device_types = {device.type for device in devices}
    if "cpu" in device_types or len(devices) > 1 or not device_ids:
        raise ValueError(
            f"device_ids {device_ids} and output_device {output_device} need a module on one GPU, "
            f"got a module on {sorted(str(device) for device in devices)}; leave them out"
        )
    device_id = device_ids[0]
    if isinstance(device_id, int):
        return torch.device(next(iter(device_types)), device_id)
    return torch.device(device_id)
