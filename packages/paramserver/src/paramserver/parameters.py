"""The module parameters that servers store, and checks of their memory, set and shapes."""

import itertools
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def get_trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name. Servers store these parameters.

    Raises:
        ValueError: parameters or elements share memory, a parameter has gaps between its elements,
            or a parameter is on the meta device.
        TypeError: `module` is not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected module to be an nn.Module, got {module!r:.60}")
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    _require_separate_memory(parameters)
    return parameters


def require_names(parameters: object) -> None:
    """Raise `TypeError` unless `parameters` is a mapping; its names and tensors are not checked."""
    if not isinstance(parameters, Mapping):
        raise TypeError(
            "expected parameters by name, such as dict(module.named_parameters()), got a "
            f"{type(parameters).__name__}"
        )


def _require_separate_memory(parameters: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` unless each parameter has values in its own memory without gaps.

    The servers store every element separately. If two elements shared memory, only the element that
    a pull writes last would keep its update.
    """
    ranges = []
    for name, parameter in parameters.items():
        tensor = get_local_part(parameter.detach())
        if tensor.is_meta:
            raise ValueError(
                f"expected parameters with values, got {name} on the meta device; materialize the "
                "module first, such as by module.to_empty(device='cpu')"
            )
        if not tensor.numel():
            continue
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        if not tensor.permute(order).is_contiguous():
            raise ValueError(
                f"expected parameters whose elements have their own memory without gaps, got "
                f"{name} with strides {tuple(tensor.stride())}; set parameter.data = "
                "parameter.data.contiguous() before creating the worker"
            )
        ranges.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name))
    for (_, stop, first), (start, _, second) in itertools.pairwise(sorted(ranges)):
        if start < stop:
            raise ValueError(
                f"expected parameters that have their own memory, but {first} and {second} share "
                "memory, and the servers would train them separately; assign the same "
                "nn.Parameter to both modules, or copy one: parameter.data = parameter.data.clone()"
            )


def require_unchanged(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    shapes: Mapping[str, torch.Size],
    rank: int,
) -> None:
    """Raise `ValueError` if the trainable parameters have changed since the worker was created.

    A parameter has changed if it is frozen or has another shape. An added, replaced or unfrozen
    parameter raises the error only if it has a gradient. `parameters` and `shapes` are from the
    creation of the worker.
    """
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    if frozen:
        raise ValueError(
            f"expected parameters that require a gradient, as when worker {rank} was created, got "
            f"frozen {', '.join(frozen)}, which momentum or weight decay of the servers' optimizer "
            "would still change; freeze parameters before the servers and workers are created"
        )
    for name, parameter in parameters.items():
        if parameter.shape != shapes[name]:
            raise ValueError(
                f"expected {name} to have the shape {tuple(shapes[name])} as when worker {rank} "
                f"was created, got {tuple(parameter.shape)}; create the servers and workers after "
                "such changes"
            )
    stored = {id(parameter) for parameter in parameters.values()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and id(parameter) not in stored:
            raise ValueError(
                f"expected gradients of the parameters that the module had when worker {rank} was "
                f"created, got one of {name}, which was added, replaced or unfrozen since; create "
                "the servers and workers after such changes, or set its gradient to None if it is "
                "not trained here"
            )


def get_local_part(tensor: T) -> T:
    """Return this rank's part of a `DTensor`, or any other tensor unchanged."""
    if not hasattr(tensor, "to_local"):
        return tensor
    local: T = tensor.to_local()
    return local
