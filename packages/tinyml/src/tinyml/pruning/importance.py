"""The importance of units: the magnitude of what they contribute to their readers.

A unit's score is the root of the sum, over the weights that read it, of `|w|^2 E[x^2]`, where x is
the input of that weight on the example. A unit that never changes is dead and ranks last: its
constant can be added to the biases of its readers. This is checked on noise in place of the inputs
of every product, because an example may not excite every unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from tinyml.layers import is_instance_of
from tinyml.pruning.units import Group, Product, Walk
from tinyml.validation import check_finite

#: The least number of noise samples per unit, enough for any ReLU that can be active.
_SAMPLES = 64
_SCALES = (0.1, 1.0, 10.0, 100.0)


@torch.no_grad()
def rank_units(walk: Walk, groups: Sequence[Group], model: nn.Module, inputs: Any) -> None:
    """Set the `order` and the `constants` of each group."""
    arguments = walk.graph.arguments(inputs)
    example = _Probe(walk, None)
    example.run(*arguments)
    noise = torch.Generator().manual_seed(0)
    probe = _Probe(walk, noise)
    for _ in range(max(2, math.ceil(_SAMPLES / example.least_samples))):
        probe.run(*arguments)
    for group in groups:
        _rank(group, walk, model, example, probe)


def _rank(group: Group, walk: Walk, model: nn.Module, example: _Probe, probe: _Probe) -> None:
    norms, scores = torch.zeros(2, group.size, dtype=torch.float64)
    dead = torch.ones(group.size, dtype=torch.bool)
    values: dict[str, Tensor] = {}
    for piece in group.slices:
        if piece.role != "reader":
            continue
        product, elements = walk.products[piece.tensor], piece.width * group.size
        weight = parameter_of(model, piece.tensor).detach().double().cpu()
        check_finite(piece.tensor, weight)
        rows = weight.narrow(piece.axis, piece.start, elements).movedim(piece.axis, 0).flatten(1)
        power = rows.square().sum(1)
        elements_read = slice(piece.start, piece.start + elements)
        norms += power.view(group.size, -1).sum(1)
        scores += (power * example.squares[piece.tensor][elements_read]).view(group.size, -1).sum(1)
        low, high = probe.low[piece.tensor][elements_read], probe.high[piece.tensor][elements_read]
        fixed = high - low <= 1e-6 * torch.maximum(low.abs(), high.abs())
        if not _has_room(model, piece.tensor, product):
            fixed &= (low == 0) & (high == 0)
        values[piece.tensor] = torch.where(fixed, (low + high) / 2, torch.nan).view(group.size, -1)
        dead &= fixed.view(group.size, -1).all(1)
    # Units that the example never excites, but that are not dead, differ by their readers alone.
    order = norms.argsort(descending=True, stable=True)
    order = order[scores[order].argsort(descending=True, stable=True)]
    group.order = torch.cat([order[~dead[order]], order[dead[order]]])
    for value in values.values():
        value[~dead] = torch.nan
    group.constants = values


def add_constants(model: nn.Module, walk: Walk, group: Group, gone: Tensor) -> list[str]:
    """Add the constants of the units that go to their readers' biases; return the new biases.

    The result is exact except at the borders of a convolution that pads with zeros.
    """
    added = []
    for piece in group.slices:
        if piece.role != "reader":
            continue
        constant = group.constants[piece.tensor][gone].nan_to_num(0.0)
        if not constant.any():
            continue
        product, name = walk.products[piece.tensor], piece.tensor
        weight = parameter_of(model, name)
        units = weight.detach().narrow(piece.axis, piece.start, piece.width * group.size)
        units = units.movedim(piece.axis, 0).unflatten(0, (group.size, piece.width))[gone]
        outputs = product.axes[1] - (product.axes[1] > product.axes[0])
        units = units.double().movedim(2 + outputs, 2)
        units = units.reshape(*units.shape[:3], -1).sum(3)  # over the kernel
        change = torch.einsum("uw,uwo->o", constant.to(units), units)
        layer = model.get_submodule(piece.layer)
        bias = layer._parameters.get("bias")
        if bias is None:
            bias = nn.Parameter(weight.new_zeros(len(change)), requires_grad=weight.requires_grad)
            layer.bias = bias
            added.append(f"{piece.layer}.bias")
        bias.copy_((bias.double() + change).to(bias))
    return added


def parameter_of(model: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer of this name."""
    layer, _, key = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(layer), key)
    return tensor


def _has_room(model: nn.Module, name: str, product: Product) -> bool:
    """Return True if the layer's bias can absorb a constant."""
    layer, _, key = name.rpartition(".")
    module = model.get_submodule(layer)
    if key != "weight" or not is_instance_of(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    if product.has_bias:
        return product.bias == f"{layer}.bias".lstrip(".")
    # Only the layer's own forward is known to use a bias that is added to it.
    return module._parameters.get("bias", 0) is None and product.module == layer


class _Probe(fx.Interpreter):
    """Runs the graph and records the input of each product, by the name of its weight."""

    def __init__(self, walk: Walk, noise: torch.Generator | None) -> None:
        super().__init__(walk.graph.module)
        self._products = {product.node: (name, product) for name, product in walk.products.items()}
        self._noise = noise
        self.squares: dict[str, Tensor] = {}
        self.low: dict[str, Tensor] = {}
        self.high: dict[str, Tensor] = {}
        self.least_samples = _SAMPLES

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; the inputs of products are replaced by noise if a generator was given."""
        if n not in self._products:
            return super().run_node(n)
        name, product = self._products[n]
        value = self.env[product.source]
        self._record(name, value.detach().movedim(product.dim, 0).flatten(1).cpu().double())
        if self._noise is None:
            return super().run_node(n)
        self.env[product.source] = self._noise_like(value, product.dim)
        result = super().run_node(n)
        self.env[product.source] = value
        return result

    def _record(self, name: str, values: Tensor) -> None:
        self.least_samples = min(self.least_samples, max(1, values.shape[1]))
        self.squares[name] = values.square().mean(1)
        low, high = values.amin(1), values.amax(1)
        self.low[name] = torch.minimum(low, self.low.get(name, low))
        self.high[name] = torch.maximum(high, self.high.get(name, high))

    def _noise_like(self, value: Tensor, dim: int) -> Tensor:
        """Return normal numbers of several magnitudes, one magnitude per sample."""
        noise = torch.randn(value.shape, generator=self._noise)
        sample_shape = [1 if d == dim else size for d, size in enumerate(value.shape)]
        scales = torch.tensor(_SCALES)
        return (noise * scales[torch.randint(len(scales), sample_shape, generator=self._noise)]).to(
            value
        )
