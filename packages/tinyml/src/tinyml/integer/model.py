"""A network that computes with whole numbers from its first layer to its last.

Notable (Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", 2018):
- there is no ReLU layer: after one the range starts at zero, whose code is the lowest, and clamping
  to int8 is the ReLU. There is no batch normalization either: it is folded into the weights;
- the same integers on every machine: which exact product is fast there is measured, and `to_c`
  writes the network for a machine without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from tinyml.integer import layers as made_of
from tinyml.integer.convolution import Int8Filters
from tinyml.integer.graph import Step, trace
from tinyml.integer.layers import IntegerProduct, Scale
from tinyml.layers import check_bits, some
from tinyml.quantization.grid import Observer, grid_of
from tinyml.whole_state import guarded_loading


class IntegerModel(nn.Module):
    """The int8 form of a float model of images or features, calibrated on batches of inputs.

    The model is traced by `torch.export`, whatever its class. It may hold Conv2d, Linear,
    BatchNorm, sums and products of values, concatenation along channels, pooling by maximum or
    mean, flattening, dropout, and any activation that is a function of one number (as a table).
    `batches` are what the ranges are taken from; the first dimension is the batch. Weights have
    `bits`, values `activation_bits`, in a byte each.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Tensor], *, bits: int = 8,
        activation_bits: int = 8, observer: Observer = "minmax",
    ) -> None:  # fmt: skip
        super().__init__()
        self._build(*calibrated(model, batches, bits, activation_bits, observer))

    @classmethod
    def of(cls, steps: list[Step], scales: list[Scale]) -> IntegerModel:
        """The integers of a graph whose values have these scales."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._build(steps, scales)
        return made

    def _build(self, steps: list[Step], scales: list[Scale]) -> None:
        self.shapes = [step.shape[1:] for step in steps]
        self.shape = self.shapes[0]
        """Of one input, without the batch."""
        self.sources: list[list[int]] = []
        """For each layer, which values it reads: 0 is the input, i + 1 what layer i makes."""
        self.scales = nn.ModuleList(scales)
        self.layers = nn.ModuleList()
        number = {step: i for i, step in enumerate(steps)}
        for step in steps[1:]:
            before = [scales[number[source]] for source in step.sources]
            try:
                self.layers.append(_layer(step, before, scales[number[step]]))
            except ValueError as error:
                raise ValueError(f"{step.name}: {error}") from error
            self.sources.append([number[source] for source in step.sources])
        self._last_use = {i: n for n, sources in enumerate(self.sources) for i in sources}
        guarded_loading(self)

    @property
    def input(self) -> Scale:
        """What the input's codes mean."""
        return cast(Scale, self.scales[0])

    @property
    def output(self) -> Scale:
        """What the output's codes mean."""
        return cast(Scale, self.scales[-1])

    def forward(self, inputs: Tensor) -> Tensor:
        """Float inputs -> float outputs, through whole numbers."""
        codes = self.integers(self.quantize(inputs))
        return (codes.float() - self.output.zero) * self.output.scale

    def quantize(self, inputs: Tensor) -> Tensor:
        """Float inputs as int8; nan is refused, for no code stands for it."""
        if tuple(inputs.shape[1:]) != self.shape:
            raise ValueError(f"inputs are {tuple(inputs.shape)}; (batch, *{self.shape}) is needed")
        if inputs.isnan().any():
            raise ValueError("the inputs hold nan, which no integer stands for")
        return self.input.codes(inputs)

    @torch.no_grad()
    def integers(self, codes: Tensor) -> Tensor:
        """int8 inputs -> int8 outputs; no float in between."""
        if codes.dtype != torch.int8:
            raise TypeError(f"codes are {codes.dtype}; int8, as quantize(inputs) makes them")
        values: dict[int, Tensor] = {0: codes}
        for number, (layer, sources) in enumerate(zip(self.layers, self.sources, strict=True)):
            values[number + 1] = layer(*(values[i] for i in sources))
            for i in set(sources):
                if self._last_use[i] == number:
                    del values[i]
        return values[len(self.layers)].contiguous()

    def explain(self, images: int = 32) -> list[str]:
        """For so many inputs on this machine: each product's way, and the times that say so."""
        lines: list[str] = []

        def note(layer: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
            assert isinstance(layer, IntegerProduct)
            product = layer.prepared()
            given = inputs[0].flatten(0, -2)
            if isinstance(product, Int8Filters):
                given = product.padded(inputs[0], 0)
            lines.append(str(product.choice(given)))

        products = [layer for layer in self.layers if isinstance(layer, IntegerProduct)]
        handles = [layer.register_forward_hook(note) for layer in products]
        try:
            self.integers(torch.zeros((images, *self.shape), dtype=torch.int8))
        finally:
            for handle in handles:
                handle.remove()
        return lines


@torch.no_grad()
def calibrated(
    model: nn.Module, batches: Sequence[Tensor], bits: int, activation_bits: int, observer: Observer
) -> tuple[list[Step], list[Scale]]:
    """The steps of `model`, their weights with a grid, and the scale of every step's value."""
    for each, what in ((bits, "weights have"), (activation_bits, "activations have")):
        check_bits(each, what, least=2)
    values = torch.cat([batch.detach() for batch in some(batches)])
    if not values.numel():
        raise ValueError("the batches hold no inputs to calibrate on")
    steps = trace(model, values)
    values = values if values.is_floating_point() else values.float()  # bytes of an image, say
    made: dict[Step, Tensor] = {steps[0]: values}
    scales: dict[Step, Scale] = {}
    last = {source: step for step in steps for source in step.sources}
    for step in steps:
        try:
            if step.weight is not None:
                step.grid = grid_of(step.weight.double().flatten(1), bits)
            if step.sources:
                made[step] = step.run(*(made[source] for source in step.sources))
            if step.kind in ("largest", "mean", "reshape"):  # the codes mean what they meant
                scales[step] = scales[step.sources[0]]
            else:
                scales[step] = scale_of(made[step], activation_bits, observer)
        except ValueError as error:
            raise ValueError(f"{step.name}: {error}") from error
        for source in set(step.sources):
            if last[source] is step:
                del made[source]
    return steps, [scales[step] for step in steps]


def scale_of(values: Tensor, bits: int, observer: Observer) -> Scale:
    """The scale of codes for these values."""
    grid = grid_of(values.double().reshape(1, -1), bits, symmetric=False, observer=observer)
    return Scale(float(grid.scale), int(grid.zero), bits)


def _layer(step: Step, before: list[Scale], after: Scale) -> nn.Module:
    if step.kind == "product":
        return IntegerProduct(step, before[0], after)
    if step.kind == "sum":
        factors = [s * b.scale / after.scale for s, b in zip(step.signs, before, strict=True)]
        return made_of.IntegerSum(before, factors, after)
    if step.kind == "cat":
        return made_of.IntegerCat(before, [b.scale / after.scale for b in before], after)
    if step.kind == "gate":
        factor = before[0].scale * before[1].scale / after.scale
        return made_of.IntegerGate(before, [factor], after)
    if step.kind == "reshape":
        return made_of.IntegerReshape(step.shape[1:])
    if step.kind == "table":
        codes = torch.arange(-128, 128)
        values = step.run((codes - before[0].zero) * before[0].scale)
        return made_of.IntegerTable(after.codes(values.reshape(-1)))
    assert step.geometry is not None
    return made_of.IntegerPool(step.geometry, step.kind == "largest", before[0])
