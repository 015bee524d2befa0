"""Magnitude pruning: the weights with the smallest magnitudes are set to zero.

Exactly round(sparsity * n) of the n weights of a layer become zero, even if some magnitudes are
equal. Weights are stored as dense tensors; `size_of` reports the size of a sparse file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tinyml.conversion import make_dense, make_plain_copy, warn_of_dense_weights
from tinyml.layers import (
    PRUNABLE,
    check_weights,
    find_layers,
    find_protected,
    get_weight,
    match_settings,
)
from tinyml.validation import check_number, format_names


class Masks(dict[str, Tensor]):
    """A dictionary from parameter names to bool masks, which are True for remaining weights.

    `torch.load` reads the file of `torch.save(dict(masks), path)`; pass its result to `Masks`.
    """

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Zero the pruned weights in place, after validating all names and shapes."""
        for parameter, mask in self._match_parameters(model):
            parameter.masked_fill_(~mask.to(parameter.device), 0)  # a product would leave -0.0

    def _match_parameters(self, model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters with their masks; raise `ValueError` if the masks do not fit."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if missing := sorted(self.keys() - parameters.keys()):
            raise ValueError(
                f"expected a model with the dense weights of the masks, got one without "
                f"{format_names(missing)}; apply the masks to the result of prune"
            )
        pairs = [(parameters[name], mask) for name, mask in self.items()]
        for name, (parameter, mask) in zip(self, pairs, strict=True):
            if parameter.shape != mask.shape:
                raise ValueError(
                    f"expected a mask of shape {tuple(parameter.shape)} for {name}, got "
                    f"{tuple(mask.shape)}; apply the masks to the result of prune"
                )
        return pairs

    def keep(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Register a hook that applies the masks after every step of `optimizer`, for fine-tuning.

        Raise `ValueError` if `optimizer` trains none of the masked weights.
        """
        pairs = self._match_parameters(model)
        masked = {parameter for parameter, _ in pairs}
        if masked.isdisjoint(p for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "expected an optimizer of the pruned model, which is a copy, got one that trains "
                "none of the masked weights; create it from model.parameters() after prune"
            )
        moved = Masks((name, m.to(p.device)) for name, (p, m) in zip(self, pairs, strict=True))
        optimizer.register_step_post_hook(lambda *_: moved.apply(model))


class Pruned(NamedTuple):
    """A pruned copy of a model, and its masks."""

    model: nn.Module
    masks: Masks


@torch.no_grad()
def prune(
    model: nn.Module,
    sparsity: float | Mapping[str, float],
    *,
    layers: Sequence[type[nn.Module]] | type[nn.Module] = PRUNABLE,
    protect: Sequence[str] = (),
) -> Pruned:
    """Return a copy of `model` with the weights of smallest magnitude set to zero, and the masks.

    `sparsity` is the fraction to remove from every layer, or a mapping from layer names to
    fractions; other layers are unchanged. Layers of the types in `layers` are pruned, except those
    that `protect` names. Biases are never pruned.
    """
    model = make_plain_copy(model)
    fractions = match_settings(sparsity, find_layers(model, layers, protect))
    chosen = {name: model.get_submodule(name) for name in fractions}
    check_weights(chosen)
    masks = Masks()
    for name, layer in chosen.items():
        make_dense(model, layer)
        key = f"{name}.weight".lstrip(".")
        masks[key] = mask_smallest(get_weight(layer).abs(), fractions[name])
    masks.apply(model)
    if not isinstance(sparsity, Mapping):
        warn_of_dense_weights(model, find_protected(model, protect))
    return Pruned(model, masks)


def mask_smallest(score: Tensor, sparsity: float) -> Tensor:
    """Return a mask that is False for the round(sparsity * n) smallest of the n scores.

    Of equal scores, the first ones are masked. Raise `ValueError` unless 0 <= sparsity <= 1.
    """
    check_number("sparsity", sparsity)
    if not 0 <= sparsity <= 1:
        raise ValueError(f"expected 0 <= sparsity <= 1, got {sparsity}")
    order = score.flatten().argsort(stable=True)
    mask = torch.ones(score.numel(), dtype=torch.bool, device=score.device)
    num_masked = round(float(sparsity) * score.numel())  # a tensor has no `__round__`
    mask[order[:num_masked]] = False
    return mask.view_as(score)
