"""Checks that reject parameters and modules that cannot be sharded."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from zero.diagnostics import check_descriptions_match
from zero.fsdp.shard import find_sharded, replaced_parameters
from zero.process_groups import Communicator, as_bytes, check_separate_elements


def is_trainable_dtype(dtype: torch.dtype) -> bool:
    """Return True if gradients of this dtype can be summed and divided."""
    # torch cannot divide complex32 on a CPU, and has no arithmetic for 8-bit floats.
    has_arithmetic = dtype.itemsize > 1 and dtype != torch.complex32
    return has_arithmetic and (dtype.is_floating_point or dtype.is_complex)


def check_shardable(
    named: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]] = ()
) -> None:
    """Raise ValueError if memory ranges of parameters overlap, or if they cannot be trained.

    buffers: the named buffers of the module, whose memory must not overlap with that of trained
        parameters.
    """
    # Entries that are not tensors are refused by torch's optimizers.
    parameters = [entry for entry in named if isinstance(entry[1], Tensor)]
    for name, parameter in parameters:
        is_trained = parameter.requires_grad
        has_no_arithmetic = is_trained and not is_trainable_dtype(parameter.dtype)
        grad_dtype = parameter.grad_dtype if is_trained else parameter.dtype
        properties = {
            f"the layout {parameter.layout}": parameter.layout != torch.strided,
            f"a {type(parameter.data).__name__}": type(parameter.data) is not Tensor,
            f"the dtype {parameter.dtype}, which has no arithmetic": has_no_arithmetic,
            f"grad_dtype={grad_dtype} and dtype {parameter.dtype}": grad_dtype != parameter.dtype,
        }
        for received, is_refused in properties.items():
            if is_refused:
                raise ValueError(
                    f"expected a plain dense tensor, with gradients of its dtype if it is trained, "
                    f"as parameter {name} of shape {tuple(parameter.shape)}, got {received}: "
                    "convert or freeze it before sharding, or use torch's fully_shard"
                )
        if is_trained:
            check_separate_elements(f"parameter {name}", parameter)
    described = [(f"parameter {name}", parameter) for name, parameter in parameters]
    _check_separate_memory(described)
    # A buffer that shares the memory of a frozen parameter keeps equal values.
    trained = [(name, parameter) for name, parameter in described if parameter.requires_grad]
    _check_separate_memory(trained, [(f"buffer {name}", buffer) for name, buffer in buffers])


def _check_separate_memory(
    parameters: Sequence[tuple[str, Tensor]], buffers: Sequence[tuple[str, Tensor]] = ()
) -> None:
    """Raise ValueError if the memory ranges of a parameter and of another tensor overlap.

    Sharding would separate the two tensors. Tensors that alternate in one range, such as column
    halves of one matrix, are refused too. One parameter object in several modules (a tied
    parameter) is not an error, and two buffers may share memory.
    """
    name_of: dict[Tensor, str] = {}
    for name, tensor in (*parameters, *buffers):
        if not tensor.is_meta and tensor.layout == torch.strided and tensor.numel():
            name_of.setdefault(tensor, name)
    parameter_set = {parameter for _, parameter in parameters}
    # The tensor, and the parameter, whose memory reaches furthest so far.
    furthest: Tensor | None = None
    furthest_parameter: Tensor | None = None
    for tensor in sorted(name_of, key=lambda tensor: (str(tensor.device), tensor.data_ptr())):
        is_parameter = tensor in parameter_set
        earlier = furthest if is_parameter else furthest_parameter
        if earlier is not None and _reaches(earlier, tensor.device, tensor.data_ptr()):
            first, second = sorted((earlier, tensor), key=lambda t: t not in parameter_set)
            raise ValueError(
                f"{name_of[first]} and {name_of[second]} share memory, or alternate in one range "
                "of it, which sharding would separate: assign one parameter to both modules to tie "
                "them, as in second.weight = first.weight, or clone one of the tensors"
            )
        end = _compute_memory_end(tensor)
        if furthest is None or not _reaches(furthest, tensor.device, end):
            furthest = tensor
        if is_parameter and (
            furthest_parameter is None or not _reaches(furthest_parameter, tensor.device, end)
        ):
            furthest_parameter = tensor


def _reaches(tensor: Tensor, device: torch.device, address: int) -> bool:
    """Return True if the memory of a tensor ends after an address of a device."""
    return tensor.device == device and _compute_memory_end(tensor) > address


def _compute_memory_end(tensor: Tensor) -> int:
    """Return the address after the last element of a tensor that is not empty."""
    last = sum((size - 1) * s for size, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def check_module(module: nn.Module, adopted: set[nn.Parameter]) -> None:
    """Raise ValueError if a buffer cannot be synchronized, or a parameter is sharded already.

    adopted: the shards of inner modules, which are allowed.
    """
    for name, buffer in module.named_buffers():
        check_separate_elements(f"buffer {name}", buffer)
    for name, parameter in module.named_parameters():
        if find_sharded(parameter) is not None and parameter not in adopted:
            raise ValueError(
                f"parameter {name} is sharded already: call FSDP once, with shard=(...) for layers "
                "that are gathered separately, or fully_shard on inner modules before outer ones"
            )
        if parameter in replaced_parameters:
            raise ValueError(
                f"{name} is tied to a parameter that an earlier FSDP or fully_shard has sharded: "
                "pass one module that contains both modules instead"
            )


def check_parameters(
    named: Sequence[tuple[str, nn.Parameter]],
    buffers: Iterable[tuple[str, Tensor]],
    communicator: Communicator,
) -> None:
    """Raise ValueError if parameters differ between ranks, cannot be sharded, or have hooks.

    Every rank must call this function.
    """
    described = [
        (name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
        for name, parameter in named
    ]
    check_descriptions_match(communicator.gather_objects(described))
    check_shardable(named, buffers)
    for name, parameter in named:
        if _has_hooks(parameter):
            raise ValueError(
                f"parameter {name} has hooks, which FSDP's parameters would not have: register "
                "them on the parameters of FSDP(module)"
            )


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Return True if a parameter has hooks other than those of a ShardedOptimizer."""
    hooks = {**(parameter._backward_hooks or {}), **(parameter._post_accumulate_grad_hooks or {})}
    modules = [getattr(hook, "__module__", None) or "" for hook in hooks.values()]
    return any(not module.startswith("zero.optimizer.") for module in modules)


def check_equal_on_all_ranks(written: Sequence[nn.Parameter], communicator: Communicator) -> None:
    """Raise RuntimeError if the checksum of a parameter in `written` differs between ranks.

    Every rank must call this function.
    """
    checksums = []
    for parameter in written:
        values = as_bytes(parameter.detach().cpu().contiguous())
        checksums.append(zlib.crc32(values.numpy().tobytes()))
    checksums_of_ranks = communicator.gather_objects(checksums)
    for index, parameter in enumerate(written):
        if len({gathered[index] for gathered in checksums_of_ranks}) > 1:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} was written to since the last "
                "step and differs between ranks: make the same changes on every rank (a forward "
                "pass that writes to a weight, as nn.Embedding(max_norm=...) does, writes values "
                "that depend on the rank's batch)"
            )


def has_same_elements(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors at one address with equal strides have the same elements."""
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first.is_conj() == second.is_conj()
        and first.is_neg() == second.is_neg()
    )


def check_dense(gradient: Tensor | None) -> None:
    """Raise TypeError for a sparse gradient, because its indices differ between ranks."""
    if gradient is not None and gradient.layout != torch.strided:
        raise TypeError(
            f"expected dense gradients, got a gradient with layout {gradient.layout} for a "
            f"parameter of shape {tuple(gradient.shape)}: use nn.Embedding(..., sparse=False)"
        )


def hide_from_ddp(module: nn.Module) -> None:
    """Hide a sharded module's parameters from torch's DDP, so that DDP refuses to wrap it.

    DDP would wait for gradients that autograd never computes, and would copy rank 0's shards to the
    other ranks.
    """
    names = [name for name, _ in module.named_parameters()]
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = names
