"""Remove whole channels, hidden units and attention heads: a smaller dense model, faster anywhere.

Notable: what comes out is the model with the weights that read the removed units set to zero, but
small, and this is checked on the example before it is returned. `units` says what goes together.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tinyml.adapters.lora import LoRA
from tinyml.exported import tensors_in
from tinyml.layers import (
    check_finite,
    dense_copy,
    evaluating,
    guarded,
    is_conv1d,
    nearest,
)
from tinyml.pruning.units import Group, Walk


def prune_channels(
    model: nn.Module,
    sparsity: float | Mapping[str, float],
    *inputs: Any,
    protect: Sequence[str] = (),
) -> nn.Module:
    """A smaller copy of `model` without the least important channels, hidden units and heads.

    `sparsity` is the share to remove from every group that can lose some, or by the name of a layer
    that writes the group. `inputs` are an example for `model(*inputs)`. A unit matters by the norm
    of what its readers multiply it with. At least one stays. No tensor of a layer that `protect`
    names, or that lies within one, changes its size.
    """
    model = _dense_copy(model)
    walk, held = Walk(model, inputs), guarded(model, protect)
    groups = _removable(walk, model)
    shares = sparsity if isinstance(sparsity, Mapping) else {}
    writers = sorted({name for group in groups for name in group.writers})
    for name in shares:
        if name not in writers:
            why = next((f" ({g.stays})" for g in walk.groups() if name in g.writers), "")
            raise ValueError(
                f"channels of [{name!r}] cannot go{why}; those of {writers} can"
                f"{nearest(name, writers)}"
            )
    for share in shares.values() if isinstance(sparsity, Mapping) else [sparsity]:
        if not 0 <= share < 1:
            raise ValueError(f"sparsity is {share}; it is a share from 0 to below 1")
    keep = {}
    for group in groups:
        share = max((shares[n] for n in group.writers if n in shares), default=0.0)
        share = share if isinstance(sparsity, Mapping) else sparsity
        if held & {each.layer for each in group.slices}:
            share = 0.0
        kept = max(1, group.size - round(share * group.size))
        order = channel_importance(model, group).argsort(descending=True, stable=True)
        keep[group] = order[:kept].sort().values
    return _selected(model, walk, keep, inputs)


def sort_channels(model: nn.Module, *inputs: Any) -> nn.Module:
    """A copy that computes the same function with every group's units by falling importance."""
    model = _dense_copy(model)
    walk = Walk(model, inputs)
    keep = {
        group: channel_importance(model, group).argsort(descending=True, stable=True)
        for group in _removable(walk, model)
    }
    return _selected(model, walk, keep, inputs)


def channel_groups(model: nn.Module, *inputs: Any) -> list[Group]:
    """The groups of units that can be removed, in the order in which they are written."""
    return _removable(Walk(_dense_copy(model), inputs), model)


@torch.no_grad()
def channel_importance(model: nn.Module, group: Group) -> Tensor:
    """The 2-norm, over all readers, of the weights that multiply each unit."""
    total = torch.zeros(group.size, dtype=torch.float64)
    for each in group.slices:
        if each.role == "reader":
            weight = _tensor(model, each.tensor).detach().double().cpu()
            check_finite(each.tensor, weight)
            read = weight.narrow(each.axis, each.start, each.width * group.size)
            rows = read.transpose(0, each.axis).reshape(group.size, -1)
            total += rows.square().sum(1)
    return total.sqrt()


def _removable(walk: Walk, model: nn.Module) -> list[Group]:
    found = walk.groups()
    groups = [g for g in found if not g.stays and g.writers and g.layers("reader") and g.size > 1]
    if not groups:
        why = "; ".join(f"{g.writers[0]}: {g.stays}" for g in found if g.writers and g.stays)
        raise ValueError(
            f"{type(model).__name__} has no channels between two layers to remove"
            f"{why and '; ' + why}"
        )
    return groups


@torch.no_grad()
def _selected(
    model: nn.Module, walk: Walk, keep: Mapping[Group, Tensor], inputs: tuple[Any, ...]
) -> nn.Module:
    """The units that are kept, in that order; checked against the model with the rest at zero."""
    zeroed, small = copy.deepcopy(model), model
    chosen: dict[tuple[str, int], list[tuple[int, int, Tensor]]] = {}
    for group, index in keep.items():
        gone = torch.ones(group.size, dtype=torch.bool).index_fill(0, index, False)
        for each in group.slices:
            size = each.width * group.size
            inside = (index[:, None] * each.width + torch.arange(each.width)).flatten()
            places = chosen.setdefault((each.tensor, each.axis), [])
            places.append((each.start, each.start + size, inside + each.start))
            if each.role == "reader":
                read = _tensor(zeroed, each.tensor).narrow(each.axis, each.start, size)
                lost = gone.repeat_interleave(each.width).to(read.device)
                read.index_fill_(each.axis, lost.nonzero().flatten(), 0)
    for (name, axis), places in chosen.items():
        whole, end = _tensor(small, name), 0
        parts: list[Tensor] = []
        for start, stop, inside in sorted(places, key=lambda place: place[:2]):
            parts.extend((torch.arange(end, start), inside))
            end = stop
        index = torch.cat([*parts, torch.arange(end, whole.shape[axis])])
        layer, _, key = name.rpartition(".")
        _replace(small.get_submodule(layer), key, whole.index_select(axis, index.to(whole.device)))
    for place, was, group in walk.sizes:
        if (left := keep.get(walk.find(group))) is not None:
            _rewrite(small.get_submodule(place), was, was // walk.find(group).size * len(left))
    return _checked(small, zeroed, inputs)


def _tensor(model: nn.Module, name: str) -> Tensor:
    layer, _, key = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(layer), key)
    return tensor


def _replace(layer: Any, key: str, tensor: Tensor) -> None:
    """Another tensor, and the layer's attributes that say its sizes."""
    old = getattr(layer, key)
    if isinstance(old, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
    setattr(layer, key, tensor)
    if hasattr(layer, "num_features"):
        layer.num_features = len(tensor)
    if key != "weight":
        return
    first, second, *_ = (*tensor.shape, 0)
    if is_conv1d(layer):
        layer.nx, layer.nf = first, second
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = first, second
    elif isinstance(layer, nn.modules.conv._ConvTransposeNd):
        layer.in_channels, layer.out_channels = first, second
    elif isinstance(layer, nn.modules.conv._ConvNd):
        if layer.groups > 1:
            layer.groups = first * layer.groups // layer.out_channels
        layer.out_channels, layer.in_channels = first, second * layer.groups


def _rewrite(module: nn.Module, was: int, now: int) -> None:
    """A number of heads, or the size of a part, that a module keeps as an attribute."""
    for key, value in vars(module).items():
        if type(value) is int and value == was and not key.endswith(("dim", "dims", "hidden_size")):
            setattr(module, key, now)


def _checked(small: nn.Module, zeroed: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
    try:
        with evaluating(small), evaluating(zeroed):
            pairs = zip(tensors_in(small(*inputs)), tensors_in(zeroed(*inputs)), strict=True)
            for ours, exact in pairs:
                if exact.is_floating_point():
                    least = 1e-3 if torch.finfo(exact.dtype).bits > 16 else 0.1
                    if not (ours - exact).norm() <= least * exact.norm() + 1e-6:
                        raise RuntimeError("the outputs are not those of the model with zeros")
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(
            f"{type(small).__name__} has a size written into its forward ({error}); take it from "
            "the tensor's shape, or take out what is computed and not returned"
        ) from error
    return small


def _dense_copy(model: nn.Module) -> nn.Module:
    model = dense_copy(model)
    if any(isinstance(module, LoRA) for module in model.modules()):
        raise ValueError(
            "the model has adapters, whose rank would change; merge them, or prune first"
        )
    return model
