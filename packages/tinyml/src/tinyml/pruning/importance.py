"""Scores of the importance of units, by one of several criteria.

    wanda      sum of w^2 E[x^2] over the weights that read the unit, with their input x
    magnitude  sum of w^2 over the weights that write or read the unit
    bn_scale   sum of w^2 over the scales of batch normalizations ("Network Slimming", Liu et al.,
               2017); groups without a batch normalization are not pruned
    taylor     (sum of w dL/dw)^2 over the weights that write the unit ("Importance Estimation for
               Neural Network Pruning", Molchanov et al., 2019)

By every criterion, a unit that is always zero is dead and ranks last. This is checked on the
example and on noise in place of the inputs of every product, because an example may not excite
every unit. The root mean square of the noise is up to 100 times that of these inputs, or up to 100
if theirs is below 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from tinyml.conversion import evaluation_mode
from tinyml.pruning.groups import Group, Slice
from tinyml.pruning.units import Walk
from tinyml.validation import check_finite

#: The minimum number of noise samples per unit. With fewer, units that are rarely active look dead.
_MIN_SAMPLES = 64
#: The magnitudes of the noise, relative to the root mean square of the input.
_NOISE_SCALES = (0.1, 1.0, 10.0, 100.0)
#: A magnitude that a normal number exceeds once in 500 million draws.
_LARGEST_NORMAL = 6.0

Criterion = Literal["wanda", "magnitude", "bn_scale", "taylor"]
Loss = Callable[[nn.Module], Tensor]


def check_criterion(criterion: str, loss: Loss | None) -> None:
    """Raise `ValueError` for an unknown criterion, and if `loss` does not fit the criterion."""
    if criterion not in ("wanda", "magnitude", "bn_scale", "taylor"):
        raise ValueError(
            f"expected criterion 'wanda', 'magnitude', 'bn_scale' or 'taylor', got {criterion!r}"
        )
    if (criterion == "taylor") != (loss is not None):
        raise ValueError(
            "expected loss, a function of the model, for criterion='taylor' and no other, got "
            f"{loss} for {criterion!r}"
        )


def rank_units(
    walk: Walk,
    groups: Sequence[Group],
    model: nn.Module,
    inputs: Any,
    criterion: Criterion = "wanda",
    loss: Loss | None = None,
) -> None:
    """Set the `scores` and the `order` of each group.

    Raise `ValueError` for weights not of `FLOAT_TYPES`, and for infinite or NaN weights and scores.
    """
    for group in groups:
        for piece in group.slices:
            if piece.role != "passer":
                check_finite(piece.tensor, get_tensor(model, piece.tensor))
    gradients = {} if loss is None else _compute_gradients(model, loss)
    with torch.no_grad():
        _rank_by_example(walk, groups, model, inputs)
        if criterion == "wanda":
            return
        for group in groups:
            scores = torch.zeros(group.size, dtype=torch.float64, device="cpu")
            for piece in group.slices:
                scores += _score(piece, group.size, model, criterion, gradients)
            if criterion == "taylor":
                scores = scores.square()
            _set_order(group, scores, group.scores < 0, scores)


def _score(
    piece: Slice, size: int, model: nn.Module, criterion: Criterion, gradients: dict[str, Tensor]
) -> Tensor:
    """Return the contribution of a slice to the score of each unit, (size,) in float64."""
    # The squares of large 16-bit numbers overflow, and those of small ones round to zero.
    weight = get_tensor(model, piece.tensor).detach().double()
    values = weight.square()
    is_counted = piece.role != "passer"
    if criterion == "bn_scale":
        layer = model.get_submodule(piece.layer)
        is_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        is_counted = is_norm and piece.tensor.endswith("weight")
    if criterion == "taylor":
        values = weight * gradients.get(piece.tensor, torch.zeros_like(weight)).double()
        is_counted = piece.role == "writer"
    if not is_counted:
        return torch.zeros(size, dtype=torch.float64, device="cpu")
    part = values.cpu().narrow(piece.axis, piece.start, piece.width * size)
    return part.movedim(piece.axis, 0).reshape(size, -1).sum(1)


def _compute_gradients(model: nn.Module, loss: Loss) -> dict[str, Tensor]:
    """Return the gradient of `loss(model)` for every parameter that it depends on."""
    named = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
    trained = [parameter.requires_grad for parameter in named.values()]
    with torch.enable_grad(), evaluation_mode(model):
        for parameter in named.values():
            parameter.requires_grad_()
        gradients = torch.autograd.grad(loss(model), list(named.values()), allow_unused=True)
    for parameter, requires_grad in zip(named.values(), trained, strict=True):
        parameter.requires_grad_(requires_grad)
    pairs = zip(named, gradients, strict=True)
    return {name: gradient for name, gradient in pairs if gradient is not None}


def _rank_by_example(walk: Walk, groups: Sequence[Group], model: nn.Module, inputs: Any) -> None:
    """Find the dead units and rank the others by the criterion "wanda"."""
    arguments = walk.graph.list_arguments(inputs)
    probe = _Probe(walk)
    probe.run(*arguments)
    probe.noise = torch.Generator().manual_seed(0)
    for _ in range(max(2, math.ceil(_MIN_SAMPLES / probe.min_samples))):
        if all(bool(largest.all()) for largest in probe.largest.values()):
            break  # no unit can be dead, and the noise determines nothing else
        probe.run(*arguments)
    for group in groups:
        _rank_by_probe(group, model, probe)


def _rank_by_probe(group: Group, model: nn.Module, probe: _Probe) -> None:
    norms, scores = torch.zeros(2, group.size, dtype=torch.float64, device="cpu")
    dead = torch.ones(group.size, dtype=torch.bool, device="cpu")
    for piece in group.slices:
        if piece.role != "reader":
            continue
        elements = piece.width * group.size
        weight = get_tensor(model, piece.tensor).detach().double().cpu()
        rows = weight.narrow(piece.axis, piece.start, elements).movedim(piece.axis, 0).flatten(1)
        power = rows.square().sum(1)
        elements_read = slice(piece.start, piece.start + elements)
        norms += power.view(group.size, -1).sum(1)
        scores += (power * probe.squares[piece.tensor][elements_read]).view(group.size, -1).sum(1)
        is_zero = probe.largest[piece.tensor][elements_read] == 0
        dead &= is_zero.view(group.size, -1).all(1)
    # Units that are zero on the example but not dead are ranked by the weights that read them.
    _set_order(group, scores, dead, norms)


def _set_order(group: Group, scores: Tensor, dead: Tensor, ties: Tensor) -> None:
    """Order units by descending score, units of equal score by `ties`, and dead units last."""
    check_finite("the scores of units", scores)  # the loss of "taylor" may be NaN
    group.scores = scores.masked_fill(dead, -1.0)
    order = ties.argsort(descending=True, stable=True)
    group.order = order[group.scores[order].argsort(descending=True, stable=True)]


def get_tensor(model: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer called `name`."""
    layer, _, key = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(layer), key)
    return tensor


class _Probe(fx.Interpreter):
    """An interpreter that records statistics of each product's input, by the name of the weight."""

    def __init__(self, walk: Walk) -> None:
        super().__init__(walk.graph.module)
        self._products = {product.node: (name, product) for name, product in walk.products.items()}
        #: The generator of the noise that replaces the inputs of products, or None for no noise.
        self.noise: torch.Generator | None = None
        #: The mean square of each input of the product on the example, in the run without noise.
        self.squares: dict[str, Tensor] = {}
        #: The largest magnitude of each input of the product in all runs.
        self.largest: dict[str, Tensor] = {}
        #: The least number of samples of an input, at most `_MIN_SAMPLES`.
        self.min_samples = _MIN_SAMPLES

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; the inputs of products are replaced by noise if there is a generator."""
        if n not in self._products:
            return super().run_node(n)
        name, product = self._products[n]
        value = self.env[product.source]
        by_element = value.detach().movedim(product.dim, 0).reshape(value.shape[product.dim], -1)
        self._record(name, by_element.cpu().double())
        if self.noise is None:
            return super().run_node(n)
        scale = self._compute_noise_scale(name, value)
        self.env[product.source] = self._draw_noise(value, product.dim, scale)
        result = super().run_node(n)
        self.env[product.source] = value
        return result

    def _record(self, name: str, values: Tensor) -> None:
        if self.noise is None:
            self.min_samples = min(self.min_samples, max(1, values.shape[1]))
            self.squares[name] = values.square().mean(1)
        largest = values.abs().amax(1)
        self.largest[name] = torch.maximum(largest, self.largest.get(name, largest))

    def _compute_noise_scale(self, name: str, value: Tensor) -> float:
        """Return the scale of the noise that replaces an input of a product.

        The scale is the root mean square of the example's input, but at least 1. It is limited, in
        float16 to 0.43, so that the squares of the largest noise do not overflow.
        """
        limit = torch.finfo(value.dtype).max ** 0.5 / (_NOISE_SCALES[-1] * _LARGEST_NORMAL)
        return min(limit, max(1.0, float(self.squares[name].mean().sqrt())))

    def _draw_noise(self, value: Tensor, dim: int, scale: float) -> Tensor:
        """Return normal numbers, each sample times `scale` and a random one of `_NOISE_SCALES`."""
        noise = torch.randn(value.shape, generator=self.noise, device="cpu")
        sample_shape = [1 if d == dim else length for d, length in enumerate(value.shape)]
        scales = scale * torch.tensor(_NOISE_SCALES, device="cpu")
        choice = torch.randint(len(scales), sample_shape, generator=self.noise, device="cpu")
        return (noise * scales[choice]).to(value)
