"""Pruning of single weights: the least important ones are set to zero.

Exactly the requested number of weights is removed, even among ties, which a threshold would remove
together. Importance is the magnitude, or, if the norms of the inputs are given, Wanda's criterion
(Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", 2023). The model
stays dense; `size_of` reports the size of a sparse file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tinyml.conversion import (
    evaluation_mode,
    make_dense,
    plain_copy,
    warn_of_dense_weights,
)
from tinyml.layers import (
    PRUNABLE,
    is_instance_of,
    layers_of,
    named_layers,
    outputs_first,
    protected_modules,
    setting_per_layer,
    weight_identity,
    weight_of,
)
from tinyml.quantization.calibration import watch_inputs
from tinyml.validation import check_finite, first_names, require_batches


class Masks(dict[str, Tensor]):
    """The remaining weights: a bool tensor per parameter name, True for weights that remain."""

    @property
    def sparsity(self) -> float:
        """Return the fraction of zeros in all masked weights."""
        removed = sum(int((~mask).sum()) for mask in self.values())
        return removed / max(1, sum(mask.numel() for mask in self.values()))

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Zero the pruned weights in place, after validating all names and shapes."""
        for parameter, mask in self._fitting(model):
            parameter.masked_fill_(~mask.to(parameter.device), 0)  # a product would leave -0.0

    def _fitting(self, model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if missing := sorted(self.keys() - parameters.keys()):
            raise ValueError(
                f"expected a model with the dense weights of the masks, got one without "
                f"{first_names(missing)}; apply the masks to the result of prune"
            )
        pairs = [(parameters[name], mask) for name, mask in self.items()]
        for name, (parameter, mask) in zip(self, pairs, strict=True):
            if parameter.shape != mask.shape:
                raise ValueError(
                    f"the mask of {name} is {tuple(mask.shape)}, the parameter "
                    f"{tuple(parameter.shape)}; these are masks of another model"
                )
        return pairs

    def keep(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Apply the masks after every step of `optimizer`, for fine-tuning.

        Raise `ValueError` if `optimizer` trains none of the masked weights.
        """
        pairs = self._fitting(model)
        masked = {parameter for parameter, _ in pairs}
        if masked.isdisjoint(p for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "expected an optimizer of the pruned model, which is a copy, got one that trains "
                "none of the masked weights; create it from model.parameters() after prune"
            )
        devices = [parameter.device for parameter, _ in pairs]
        moved = Masks({n: m.to(d) for (n, m), d in zip(self.items(), devices, strict=True)})
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
    scope: Literal["layer", "global"] = "layer",
    pattern: str | None = None,
    input_norms: Mapping[str, Tensor] | None = None,
    layers: Sequence[type[nn.Module]] = PRUNABLE,
    protect: Sequence[str] = (),
) -> Pruned:
    """Return a copy of `model` with the least important weights set to zero, and the masks.

    `sparsity` is the fraction to remove from every layer, or a mapping from layer names to
    fractions; other layers are unchanged. With scope="global" it is the fraction of all weights
    together. `pattern="2:4"` keeps 2 of every 4 neighboring input features, or input channels of a
    convolution; `sparsity` is then the fraction that the pattern removes, here 0.5. `input_norms`
    (see `input_norms`) turns magnitude into Wanda's importance |W| * ||x||; it ranks all weights of
    a layer, while the paper ranks the weights of each output. Layers of the types in `layers` are
    pruned, except those that `protect` names. Biases are never pruned.
    """
    model = plain_copy(model)
    chosen = layers_of(model, layers, protect)
    if isinstance(sparsity, Mapping):
        chosen = named_layers(sparsity, chosen, model)
    for name, layer in chosen.items():
        make_dense(model, layer)
        check_finite(f"{name}.weight".lstrip("."), weight_of(layer))
    input_norms = input_norms or {}
    if scope == "global" and input_norms and (missing := sorted(chosen.keys() - input_norms)):
        raise ValueError(
            f"expected input norms of all layers for scope='global', which compares their weights, "
            f"got none of {missing}; pass layers=(nn.Linear,), or protect these layers"
        )
    for name in named_layers(input_norms, layers_of(model, layers), model):
        check_finite(f"the input norm of {name}", input_norms[name])
    scores = {
        name: importance(outputs_first(layer, weight_of(layer)), input_norms.get(name))
        for name, layer in chosen.items()
    }
    if scope not in ("layer", "global"):
        raise ValueError(f"expected scope 'layer' or 'global', got {scope!r}")
    if scope == "global" and pattern is None:
        if isinstance(sparsity, Mapping):
            raise ValueError("scope='global' takes one sparsity for all layers, not one for each")
        keep = _smallest_of_all(scores, sparsity)
    else:
        fractions = setting_per_layer(sparsity, chosen, model)
        keep = {
            name: smallest_mask(score, fractions[name])
            if pattern is None
            else pattern_mask(score, pattern, fractions[name])
            for name, score in scores.items()
        }
    masks = Masks(
        {
            f"{name}.weight".lstrip("."): outputs_first(chosen[name], mask)
            for name, mask in keep.items()
        }
    )
    masks.apply(model)
    if not isinstance(sparsity, Mapping):
        warn_of_dense_weights(model, protected_modules(model, protect))
    return Pruned(model, masks)


def importance(weight: Tensor, input_norm: Tensor | None = None) -> Tensor:
    """Return |W|, multiplied by the norm of each input if given (last dimension of the weight)."""
    return weight.abs() if input_norm is None else weight.abs() * input_norm


def smallest_mask(score: Tensor, sparsity: float) -> Tensor:
    """Return False for the round(sparsity * n) smallest scores; ties are removed in order."""
    if not 0 <= sparsity <= 1:
        raise ValueError(f"expected 0 <= sparsity <= 1, got {sparsity}")
    order = score.flatten().argsort(stable=True)
    mask = torch.ones(score.numel(), dtype=torch.bool, device=score.device)
    mask[order[: round(sparsity * score.numel())]] = False
    return mask.view_as(score)


def _smallest_of_all(scores: Mapping[str, Tensor], sparsity: float) -> dict[str, Tensor]:
    """Return the masks of `smallest_mask`, applied to the scores of all layers together."""
    flat = smallest_mask(torch.cat([s.float().flatten() for s in scores.values()]), sparsity)
    parts = torch.split(flat, [score.numel() for score in scores.values()])
    pairs = zip(scores.items(), parts, strict=True)
    return {name: part.view_as(score) for (name, score), part in pairs}


def pattern_mask(score: Tensor, pattern: str, sparsity: float) -> Tensor:
    """Return the mask of an "n:m" pattern: True for the n largest of m neighbors of dimension 1.

    These are the input features of a linear layer and the input channels of a convolution.
    Raise `ValueError` unless `sparsity` is the fraction that the pattern removes.
    """
    if not (match := re.fullmatch(r"(\d+):(\d+)", pattern)):
        raise ValueError(f"expected a pattern n:m such as '2:4', got {pattern!r}")
    count, group = int(match[1]), int(match[2])
    width = score.shape[1]
    if not 0 < count <= group or width % group:
        raise ValueError(
            f"pattern {pattern} does not fit {width} inputs; m has to divide them, so protect the "
            "layers that it does not fit"
        )
    if abs(sparsity - (1 - count / group)) > 1e-3:
        raise ValueError(
            f"expected a sparsity of {1 - count / group:.4g}, the fraction that pattern {pattern} "
            f"removes, got {sparsity}"
        )
    inputs_last = score.movedim(1, -1)
    groups = inputs_last.reshape(-1, group)
    order = groups.argsort(dim=1, descending=True, stable=True)
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order[:, :count], True)
    return mask.view_as(inputs_last).movedim(-1, 1)


def input_norms(model: nn.Module, batches: Sequence[Any]) -> dict[str, Tensor]:
    """Return the 2-norm of every input of every linear layer over `batches`, for Wanda.

    A batch is the argument of the model, or a mapping of keyword arguments. Layers that receive no
    tokens are left out, such as experts that are never chosen; `prune` uses their magnitudes.
    """
    squares: dict[str, Tensor] = {}
    listed = {weight_identity(m): name for name, m in layers_of(model, (nn.Linear,)).items()}
    # A weight that several layers share is pruned once, by the inputs of all of them.
    layers = {}
    for name, module in model.named_modules():
        if is_instance_of(module, (nn.Linear,)) and weight_identity(module) in listed:
            layers[name] = module

    def add_squares(name: str, inputs: Tensor) -> None:
        # Without tokens, all norms would be zero, and the first rows would be removed.
        if len(inputs):
            key = listed[weight_identity(layers[name])]
            squares[key] = squares.get(key, 0) + inputs.float().square().sum(0)

    with evaluation_mode(model):
        watch_inputs(model, require_batches(batches), layers, add_squares)
    return {name: square.sqrt() for name, square in squares.items()}
