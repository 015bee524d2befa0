"""The sizes in the configuration of a pruned transformers model.

`from_pretrained` builds a model from its configuration, so a pruned model can be loaded only if the
configuration contains the new sizes. The name of a key does not prove its meaning. Therefore a
model is built from each changed configuration, on the meta device, without memory for weights. The
change is accepted only if this model has exactly the tensors and attributes of the pruned model.
Integer attributes may differ if no recorded operation reads them (see `SizeReads.read`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection
from fractions import Fraction
from typing import Any, cast

import torch
from torch import nn

from tinyml.compressed_weight import is_called_by_save_pretrained

#: Keys of a configuration, each with a new number.
_Sizes = dict[str, int]
#: The largest number of sets of changes that are tried.
_MAX_SETS = 256


def update_config(
    small: nn.Module, dense: nn.Module, read_integers: Collection[tuple[str, str]]
) -> None:
    """Update the configuration of the pruned `small`, which had the sizes of `dense`, in place.

    `read_integers` is `SizeReads.read`. If no configuration describes the pruned model, make
    `save_pretrained` raise an error.
    """
    for name, module in small.named_modules():
        if hasattr(module, "save_pretrained") and hasattr(module, "config"):
            prefix = f"{name}." if name else ""
            read_inside = {
                (path.removeprefix(prefix), key)
                for path, key in read_integers
                if f"{path}.".startswith(prefix)
            }
            _update(module, dense.get_submodule(name), read_inside)
            if name == "":
                return


def _update(small: Any, dense: Any, read_integers: set[tuple[str, str]]) -> None:
    if _get_tensor_shapes(small) == _get_tensor_shapes(dense):
        return
    changes = _find_changes(small, dense, read_integers)
    if changes is None:
        small.register_state_dict_pre_hook(_refuse_save_pretrained)
        return
    sizes, unread = changes
    for (path, key), value in unread.items():
        setattr(small.get_submodule(path), key, value)
    for module in small.modules():
        config = getattr(module, "config", None)
        for key, size in sizes.items():
            if type(config) is type(small.config) and key in vars(config):
                setattr(config, key, size)
    for key, size in sizes.items():
        setattr(small.config, key, size)


def _find_changes(
    small: Any, dense: Any, read_integers: set[tuple[str, str]]
) -> tuple[_Sizes, dict[tuple[str, str], int]] | None:
    """Return the changes of the configuration that describe `small`, or None if there are none.

    The second value contains the integer attributes (module, name) of the model with this
    configuration that differ from those of `small` and that no recorded operation reads.
    """
    head_dim = _find_unstated_head_dim(dense)
    before = _build_with_sizes(dense, head_dim)
    if before is None:
        return None
    # Attributes that do not follow from the configuration, such as the data type of a layer.
    unrelated = _find_differing_keys(_get_attributes(before), _get_attributes(dense))
    options = _list_candidate_changes(before, small, dense, head_dim)
    lengths = [len(options), *range(1, len(options))]
    subsets = itertools.chain.from_iterable(itertools.combinations(options, n) for n in lengths)
    # A subset with two numbers for one key has the same effect as a smaller one.
    distinct = (s for s in subsets if len(s) == len(dict(s)) or len(s) == len(options))
    for subset in itertools.islice(distinct, _MAX_SETS):
        for sizes in (dict(subset), head_dim | dict(subset)) if head_dim else (dict(subset),):
            built = _build_with_sizes(dense, sizes)
            if built is None or _get_tensor_shapes(built) != _get_tensor_shapes(small):
                continue
            wrong = _find_differing_keys(_get_attributes(built), _get_attributes(small)) - unrelated
            unread = {key: value for key, value in _get_attributes(built).items() if key in wrong}
            if wrong == unread.keys() and not any(
                key in read_integers or type(value) is not int for key, value in unread.items()
            ):
                return sizes, unread
    return None


def _list_candidate_changes(
    before: nn.Module, small: nn.Module, dense: Any, head_dim: _Sizes
) -> list[tuple[str, int]]:
    """Return the keys and new numbers that change only tensors whose sizes differ in `small`.

    `before` is the model of the old sizes, whose configuration includes `head_dim`. A number may
    change by the ratio of the new and old size of any dimension that was changed. A key without a
    number may receive any new size. Numbers that are invalid alone are included, because they may
    be valid with other changes.
    """
    new_shapes = _get_tensor_shapes(small)
    changes = set()
    for name, shape in _get_tensor_shapes(dense).items():
        changes |= set(zip(shape, new_shapes[name], strict=True))
    ratios = {Fraction(new, old) for old, new in changes if old != new}
    wrong = _find_differing_keys(_get_tensor_shapes(before), new_shapes)
    options: list[tuple[str, int]] = []
    for key, value in vars(dense.config).items():
        if key.endswith("_token_id"):
            continue  # not a size, and transformers warns of values out of range
        if value is None:
            numbers = {new for old, new in changes if old != new}
        elif type(value) is int:
            numbers = {int(value * r) for r in ratios if (value * r).denominator == 1}
        else:
            continue
        for number in sorted(numbers - {value}):
            built = _build_with_sizes(dense, head_dim | {key: number})
            if built is not None:
                shapes = _get_tensor_shapes(built)
                has_effect = shapes != _get_tensor_shapes(before)
                if not has_effect or not _find_differing_keys(shapes, new_shapes) <= wrong:
                    continue
            options.append((key, number))
    return options


def _find_unstated_head_dim(dense: Any) -> _Sizes:
    """Return {"head_dim": width} if all heads have one width and the configuration has none."""
    widths = {getattr(module, "head_dim", None) for module in dense.modules()} - {None}
    if len(widths) != 1 or getattr(dense.config, "head_dim", None) is not None:
        return {}
    return {"head_dim": cast(int, widths.pop())}


def _build_with_sizes(model: Any, sizes: _Sizes) -> nn.Module | None:
    """Return a model with the changed configuration on the meta device; None if it is invalid."""
    config = copy.deepcopy(model.config)
    try:
        for key, size in sizes.items():
            setattr(config, key, size)
        if hasattr(config, "validate"):
            config.validate()  # save_pretrained does the same
        with torch.device("meta"):
            return cast(nn.Module, type(model)(config))
    except Exception:  # a model's own code may raise anything for an invalid configuration
        return None


def _get_tensor_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in named}


def _get_attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the public numbers, strings and tuples of all modules, by module and name."""
    return {
        (path, key): value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float | str | tuple) and key != "training" and key[0] != "_"
    }


def _find_differing_keys(first: dict[Any, Any], second: dict[Any, Any]) -> set[Any]:
    return {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}


def _refuse_save_pretrained(model: nn.Module, *_: Any) -> None:
    if is_called_by_save_pretrained():
        check_described_by_config(model)


def check_described_by_config(model: nn.Module) -> None:
    """Raise `ValueError` if `model` was pruned to sizes that its configuration cannot express."""
    if _refuse_save_pretrained in model._state_dict_pre_hooks.values():
        raise ValueError(
            "expected a model that its configuration describes, got a pruned model for whose sizes "
            "no configuration was found, so from_pretrained could not load it; prune all layers "
            "alike, to a number of heads that divides the hidden size, exclude the attention with "
            "protect, or save the model with torch.save"
        )
