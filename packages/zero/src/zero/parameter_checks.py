"""Checks of parameters that would be sharded wrongly."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def check_shardable(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if the parameters cannot be laid end to end and trained."""
    # torch's optimizers refuse anything else.
    parameters = [entry for entry in named if isinstance(entry[1], Tensor)]
    for name, parameter in parameters:
        shape = tuple(parameter.shape)
        if parameter.layout != torch.strided:
            raise ValueError(
                f"expected dense parameters, got {name} of shape {shape} with layout "
                f"{parameter.layout}: use a dense layout"
            )
        if type(parameter.data) is not Tensor:
            raise ValueError(
                f"expected plain tensors, got a {type(parameter.data).__name__} for parameter "
                f"{name} of shape {shape}, which sharding would turn into a plain tensor: convert "
                "it first, or use torch's fully_shard"
            )
        if parameter.requires_grad and parameter.itemsize < 2:
            raise ValueError(
                f"expected a dtype with arithmetic for parameter {name}, got {parameter.dtype}: "
                "pass requires_grad=False, or use a wider dtype"
            )
        # The attribute exists since torch 2.10.
        grad_dtype = getattr(parameter, "grad_dtype", parameter.dtype)
        if parameter.requires_grad and grad_dtype != parameter.dtype:
            raise ValueError(
                f"expected gradients of parameter {name} in its dtype {parameter.dtype}, got "
                f"grad_dtype={grad_dtype}: leave grad_dtype unset, and keep the parameter in the "
                "dtype of the gradients with FSDP(module, compute_dtype)"
            )
    _check_separate_memory(parameters)


def _check_separate_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if two parameters share memory, because sharding would separate them.

    A parameter that several modules have is tied, and is not an error.
    """
    ranges: list[tuple[str, int, int, str, Tensor]] = []
    for name, parameter in named:
        if parameter.is_meta or not parameter.numel():
            continue
        start = parameter.data_ptr()
        # A non-contiguous tensor may leave elements out, so only its first element counts.
        size = parameter.nbytes if parameter.is_contiguous() else parameter.itemsize
        ranges.append((str(parameter.device), start, start + size, name, parameter))
    ranges.sort(key=lambda entry: entry[:3])
    last: tuple[str, int, int, str, Tensor] | None = None
    for entry in ranges:
        device, start, _, name, parameter = entry
        if last is None or device != last[0] or start >= last[2]:
            last = entry
        elif parameter is not last[4]:
            raise ValueError(
                f"parameters {last[3]} and {name} share memory, which sharding would separate: "
                "assign one parameter to both modules, as in second.weight = first.weight"
            )
