"""Checks that reject parameters and modules that cannot be sharded."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import gcd

import torch
from torch import Tensor, nn

from zero.diagnostics import check_descriptions_match
from zero.fsdp.shard import find_sharded, replaced_parameters
from zero.process_groups import Communicator, check_separate_elements


def is_trainable_dtype(dtype: torch.dtype) -> bool:
    """Return True if gradients of this dtype can be summed and divided."""
    # torch cannot divide complex32 on a CPU, and has no arithmetic for 8-bit floats.
    has_arithmetic = dtype.itemsize > 1 and dtype != torch.complex32
    return has_arithmetic and (dtype.is_floating_point or dtype.is_complex)


def check_shardable(
    named: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]] = ()
) -> None:
    """Raise ValueError if parameters share memory, or cannot be flattened and trained.

    buffers: the named buffers of the module, which must not share memory with trained parameters.
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
    """Raise ValueError if a parameter shares memory, which sharding would separate.

    One parameter object in several modules (a tied parameter) is not an error.
    """
    name_of: dict[Tensor, str] = {}
    for name, tensor in (*parameters, *buffers):
        if not tensor.is_meta and tensor.layout == torch.strided and tensor.numel():
            name_of.setdefault(tensor, name)
    parameter_set = {parameter for _, parameter in parameters}
    ordered = sorted(name_of, key=lambda p: (str(p.device), p.data_ptr()))
    # Each cluster's memory ranges overlap. Usually every cluster has one tensor.
    cluster: list[Tensor] = []
    cluster_end = 0
    for parameter in ordered:
        is_separate = parameter.data_ptr() >= cluster_end
        if not cluster or is_separate or parameter.device != cluster[0].device:
            _check_cluster(cluster, name_of, parameter_set)
            cluster, cluster_end = [], 0
        cluster.append(parameter)
        cluster_end = max(cluster_end, _compute_memory_end(parameter))
    _check_cluster(cluster, name_of, parameter_set)


def _check_cluster(
    cluster: Sequence[Tensor], name_of: Mapping[Tensor, str], parameter_set: Collection[Tensor]
) -> None:
    """Raise ValueError if a parameter shares bytes with another tensor of the cluster.

    Two buffers may share bytes. The tensors are sorted by address.
    """
    if len(cluster) < 2:
        return
    start = cluster[0].data_ptr()
    # One flag stands for the largest number of bytes that divides all offsets and sizes.
    flag_bytes = gcd(*(size for p in cluster for size in (p.itemsize, p.data_ptr() - start)))
    num_flags = (max(map(_compute_memory_end, cluster)) - start) // flag_bytes
    is_used = torch.zeros(num_flags, dtype=torch.bool, device="cpu")
    ordered = sorted(cluster, key=lambda tensor: tensor not in parameter_set)
    for second in ordered:
        flags = _view_flags(second, is_used, start, flag_bytes)
        if flags.any():
            is_used.zero_()
            flags.fill_(True)
            first = next(p for p in ordered if _view_flags(p, is_used, start, flag_bytes).any())
            raise ValueError(
                f"{name_of[first]} and {name_of[second]} share memory, which sharding would "
                "separate: assign one parameter to both modules, as in second.weight = "
                "first.weight, or clone one of the tensors"
            )
        flags.fill_(second in parameter_set)


def _compute_memory_end(tensor: Tensor) -> int:
    """Return the address after the last element of a tensor that is not empty."""
    last = sum((size - 1) * s for size, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def _view_flags(tensor: Tensor, flags: Tensor, start: int, flag_bytes: int) -> Tensor:
    """Return a view of the flags of a tensor's bytes; `flags[0]` is the flag of address `start`."""
    # Elements of a dimension with stride 0 have the same bytes.
    sizes = [size if s else 1 for size, s in zip(tensor.shape, tensor.stride(), strict=True)]
    strides = [s * tensor.itemsize // flag_bytes for s in tensor.stride()]
    return flags.as_strided(
        (*sizes, tensor.itemsize // flag_bytes),
        (*strides, 1),
        storage_offset=(tensor.data_ptr() - start) // flag_bytes,
    )


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
    everyone = communicator.gather_objects([_compute_checksum(p) for p in written])
    for index, parameter in enumerate(written):
        if len({checksums[index] for checksums in everyone}) > 1:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} was written to since the last "
                "step and differs between ranks: make the same changes on every rank (a forward "
                "pass that writes to a weight, as nn.Embedding(max_norm=...) does, writes values "
                "that depend on the rank's batch)"
            )


def _compute_checksum(parameter: Tensor) -> int:
    values = parameter.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())


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
