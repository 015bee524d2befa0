"""Removal of whole channels, hidden units and attention heads: a smaller dense model.

The module `units` finds the units that layers share, `importance` ranks them, `size_attributes`
finds the attributes that contain their number, and `equality` checks the result.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tinyml.adapters.insertion import require_no_adapters
from tinyml.conversion import make_dense_copy
from tinyml.layers import find_protected, is_conv1d
from tinyml.pruning.config_sizes import update_config
from tinyml.pruning.equality import check_equal
from tinyml.pruning.groups import Group, SizeUse
from tinyml.pruning.importance import Criterion, Loss, check_criterion, get_tensor, rank_units
from tinyml.pruning.rules import RULES
from tinyml.pruning.units import Walk
from tinyml.validation import check_number, suggest_name


def prune_channels(
    model: nn.Module,
    sparsity: float | Mapping[str, float],
    *inputs: Any,
    criterion: Criterion = "wanda",
    scope: Literal["group", "global"] = "group",
    loss: Loss | None = None,
    protect: Sequence[str] = (),
) -> nn.Module:
    """Return a smaller copy of `model` without the least important channels, units and heads.

    `sparsity` is the fraction of the units to remove from every group of units. It may be a mapping
    from the name of a layer that writes a group to the group's fraction; other groups are then
    unchanged. At least one unit of each group stays. Layers that `protect` names, and all layers
    inside them, keep their sizes.

    With scope="global", `sparsity` is the fraction of all units. They are ranked by the square root
    of their importance, divided by the mean of the nonzero roots in their group.

    `inputs` are a typical example for `model(*inputs)`. By default, a unit's importance is the sum
    of w^2 E[x^2] over the weights w that read it and their inputs x. The mean is that of the
    example, which should be a batch such as 256 images. `tinyml.pruning.importance` describes the
    other criteria. For "taylor", `loss` is a function of the model that returns the loss on typical
    data. Units that are always zero are removed first.

    The configuration of a transformers model receives the new sizes. If it cannot express them,
    `save_pretrained` raises an error.

    The result is compared with a dense model in which the weights that read the removed units are
    zero. The outputs are compared at several batch sizes and lengths, and with a cache if a model
    of tokens has one. If the model does not run in float64 on a CPU, the outputs are compared for
    `inputs` only. Raises `ValueError` if outputs differ, if no channels can be removed, or if an
    attribute is read both as a number of units and as something else.
    """
    check_criterion(criterion, loss)
    if scope not in ("group", "global"):
        raise ValueError(f"expected scope 'group' or 'global', got {scope!r}")
    if scope == "global" and isinstance(sparsity, Mapping):
        raise ValueError(
            "expected one sparsity for scope='global', got a mapping of layers; pass a number"
        )
    fractions, default = (sparsity, 0.0) if isinstance(sparsity, Mapping) else ({}, sparsity)
    for fraction in (default, *fractions.values()):
        check_number("sparsity", fraction)
        if not 0 <= fraction < 1:
            raise ValueError(f"expected 0 <= sparsity < 1, got {fraction}")
    model, walk, groups = _make_ranked_copy(model, inputs, criterion, loss)
    protected = find_protected(model, protect)
    chosen = [g for g in groups if not protected & {piece.layer for piece in g.slices}]
    _check_names(fractions, walk, chosen)
    if criterion == "bn_scale":
        chosen = _find_normalized_groups(chosen, fractions)
    new_sizes: dict[Group, int] = {}
    for group in chosen:
        fraction = float(max(fractions.get(name, default) for name in group.writers))
        new_sizes[group] = max(1, group.size - round(fraction * group.size))
    if scope == "global":
        new_sizes = _compute_global_sizes(chosen, default)
    keep = {g: g.order[: new_sizes.get(g, g.size)].sort().values for g in groups}
    return _select_units(model, walk, keep, inputs)


def _check_names(names: Collection[str], walk: Walk, chosen: Sequence[Group]) -> None:
    """Raise `ValueError` unless each name is that of a layer that writes a group in `chosen`."""
    writers = sorted({name for group in chosen for name in group.writers})
    for name in names:
        if name not in writers:
            reason = _explain_refusal(name, walk)
            raise ValueError(
                f"expected names among {writers}, got {name!r}"
                f"{reason and f', whose channels cannot be removed: {reason}'}"
                f"{suggest_name(name, writers)}"
            )


def _explain_refusal(name: str, walk: Walk) -> str:
    """Return why the channels of a layer cannot be removed; empty if `name` has no channels."""
    group = next((group for group in walk.list_groups() if name in group.writers), None)
    if group is None:
        return walk.layers_without_units.get(name, "")
    if group.blocked_by:
        return group.blocked_by
    if group.size == 1:
        return "only one unit is left"
    if not group.list_layers("reader"):
        return "no layer reads them"
    return "they are shared with a layer in protect"


def _find_normalized_groups(groups: Sequence[Group], fractions: Mapping[str, float]) -> list[Group]:
    """Return the groups with a batch normalization whose scales are not all zero."""
    chosen = [group for group in groups if (group.scores > 0).any()]
    others = {name for group in groups if group not in chosen for name in group.writers}
    without_norm = sorted(others & fractions.keys())
    if not chosen or without_norm:
        raise ValueError(
            "expected a batch normalization with nonzero scales for criterion='bn_scale' after "
            f"{without_norm or 'some layer'}, got none; choose another criterion"
        )
    return chosen


def _compute_global_sizes(groups: Sequence[Group], sparsity: float) -> dict[Group, int]:
    """Return the number of units that remain in each group if all units are ranked together."""
    sizes = {group: group.size for group in groups}
    ranked: list[tuple[float, int]] = []
    for number, group in enumerate(groups):
        nonzero = group.scores[group.scores > 0].sqrt()
        mean = float(nonzero.mean()) if len(nonzero) else 1.0
        relative = group.scores.clamp(min=0).sqrt() / mean
        # Units that are always zero have the score -1 and come first.
        ranked += [(float(score), number) for score in relative.where(group.scores >= 0, -1.0)]
    num_to_remove = round(float(sparsity) * len(ranked))
    for _, number in sorted(ranked):
        if num_to_remove and sizes[groups[number]] > 1:
            sizes[groups[number]] -= 1
            num_to_remove -= 1
    return sizes


def sort_channels(model: nn.Module, *inputs: Any) -> nn.Module:
    """Return a copy with the same function, whose units are sorted by importance in each group."""
    model, walk, groups = _make_ranked_copy(model, inputs)
    return _select_units(model, walk, {group: group.order for group in groups}, inputs)


def _make_ranked_copy(
    model: nn.Module,
    inputs: tuple[Any, ...],
    criterion: Criterion = "wanda",
    loss: Loss | None = None,
) -> tuple[nn.Module, Walk, list[Group]]:
    """Return a dense copy, its walk, and the groups whose units can be removed, with scores."""
    model = make_dense_copy(model)
    require_no_adapters(model)  # their rank would change
    walk = Walk(model, inputs, RULES)
    written = [group for group in walk.list_groups() if group.writers]
    groups = [g for g in written if not g.blocked_by and g.list_layers("reader") and g.size > 1]
    if not groups:
        reasons = {group.writers[0]: group.blocked_by for group in written if group.blocked_by}
        reasons |= walk.layers_without_units
        listed = "; ".join(f"{name or 'the model'}: {why}" for name, why in reasons.items())
        raise ValueError(
            f"expected channels between two layers that can be removed, got none in "
            f"{type(model).__name__}{listed and f' ({listed})'}"
        )
    rank_units(walk, groups, model, inputs, criterion, loss)
    return model, walk, groups


@torch.no_grad()
def _select_units(
    model: nn.Module, walk: Walk, keep: Mapping[Group, Tensor], inputs: tuple[Any, ...]
) -> nn.Module:
    """Reduce `model` in place to the units in `keep`, in this order; return the checked result."""
    attributes = _compute_new_sizes(model, walk, keep)
    zeroed = copy.deepcopy(model)
    chosen = _choose_elements(keep, zeroed)
    for (name, axis), pieces in chosen.items():
        _select(model, name, axis, pieces)
    old_sizes = [getattr(model.get_submodule(path), key) for path, key in attributes]
    for (path, key), size in attributes.items():
        setattr(model.get_submodule(path), key, size)
    update_config(model, zeroed, walk.reads.read)
    check_equal(model, zeroed, inputs, old_sizes)
    return model


def _choose_elements(
    keep: Mapping[Group, Tensor], zeroed: nn.Module
) -> dict[tuple[str, int], list[tuple[int, int, Tensor]]]:
    """Return the elements to keep of each tensor and axis as a list of (start, stop, indices).

    Also set the weights in `zeroed` that read removed units to zero.
    """
    chosen: dict[tuple[str, int], list[tuple[int, int, Tensor]]] = {}
    for group, index in keep.items():
        removed = torch.ones(group.size, dtype=torch.bool, device="cpu")
        removed[index] = False
        for piece in group.slices:
            size = piece.width * group.size
            offsets = torch.arange(piece.width, device="cpu")
            elements = (index[:, None] * piece.width + offsets).flatten()
            pieces = chosen.setdefault((piece.tensor, piece.axis), [])
            pieces.append((piece.start, piece.start + size, elements + piece.start))
            if piece.role == "reader":
                read = get_tensor(zeroed, piece.tensor).narrow(piece.axis, piece.start, size)
                is_removed = removed.repeat_interleave(piece.width).to(read.device)
                read.index_fill_(piece.axis, is_removed.nonzero().flatten(), 0)
    return chosen


def _select(
    model: nn.Module, name: str, axis: int, pieces: Sequence[tuple[int, int, Tensor]]
) -> None:
    """Keep the chosen elements of each piece of a tensor, and all elements between the pieces."""
    tensor = get_tensor(model, name)
    end = 0
    parts: list[Tensor] = []
    for start, stop, elements in sorted(pieces, key=lambda piece: piece[:2]):
        parts.extend((torch.arange(end, start, device="cpu"), elements))
        end = stop
    index = torch.cat([*parts, torch.arange(end, tensor.shape[axis], device="cpu")])
    layer, _, key = name.rpartition(".")
    _replace(model.get_submodule(layer), key, tensor.index_select(axis, index.to(tensor.device)))


def _compute_new_sizes(
    model: nn.Module, walk: Walk, keep: Mapping[Group, Tensor]
) -> dict[tuple[str, str], int]:
    """Return the attributes (module, name) that count units, with their new numbers of units."""
    new_sizes: dict[tuple[str, str], int] = {}
    for source, uses in walk.size_uses.items():
        old_size: int = getattr(model.get_submodule(source.module), source.name)
        sizes = {use: _compute_new_size(use, old_size, walk, keep) for use in uses}
        changed = next((use for use, size in sizes.items() if size != old_size), None)
        if changed is None:
            continue
        for use, size in sizes.items():
            if size != sizes[changed]:
                raise ValueError(
                    f"expected one new size for {source} = {old_size}, got {sizes[changed]} in "
                    f"{changed.node} and {size} in {use.node}; read the two sizes from two "
                    "attributes, or from the shape of a tensor"
                )
        new_sizes[source.module, source.name] = sizes[changed]
    return new_sizes


def _compute_new_size(use: SizeUse, old_size: int, walk: Walk, keep: Mapping[Group, Tensor]) -> int:
    """Return the size after the removal, or `old_size` if it does not count units."""
    if not use.parts:
        return old_size
    new_size = 0
    for part, extent in use.parts:
        group = walk.find(part)
        num_kept = len(keep[group]) if group in keep else group.size
        new_size += extent // group.size * num_kept
    return new_size


def _replace(layer: Any, key: str, tensor: Tensor) -> None:
    """Replace a tensor of a layer and update the layer's attributes that contain its sizes."""
    old = getattr(layer, key)
    if isinstance(old, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
    setattr(layer, key, tensor)
    if getattr(layer, "num_features", None) == len(old):
        layer.num_features = len(tensor)
    if isinstance(layer, nn.GroupNorm):
        layer.num_groups = layer.num_groups * len(tensor) // layer.num_channels
        layer.num_channels = len(tensor)
    if key == "weight":
        _update_sizes(layer, *tensor.shape[:2])


def _update_sizes(layer: Any, first: int, second: int = 0) -> None:
    """Update the attributes of a layer whose weight has `first` rows and `second` columns."""
    if is_conv1d(layer):
        layer.nx, layer.nf = first, second
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = first, second
    elif isinstance(layer, nn.modules.conv._ConvTransposeNd):
        if layer.groups > 1:
            layer.groups = first * layer.groups // layer.in_channels
        layer.in_channels, layer.out_channels = first, second * layer.groups
    elif isinstance(layer, nn.modules.conv._ConvNd):
        if layer.groups > 1:
            layer.groups = first * layer.groups // layer.out_channels
        layer.out_channels, layer.in_channels = first, second * layer.groups
