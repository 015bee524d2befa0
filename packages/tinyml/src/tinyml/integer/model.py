"""A network that computes with integers from its first layer to its last.

The scheme is that of Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", 2018. The module `graph` describes which layers are folded.
After a folded ReLU, the range starts at zero, whose code is the lowest, so clamping to int8 is the
ReLU. The integers are the same on every machine, and `to_c` writes the network for a machine
without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from tinyml.integer.fixed_point import QuantParams
from tinyml.integer.graph import trace
from tinyml.integer.layers import LAYERS
from tinyml.integer.steps import MatMul, Pool, Reshape, Step
from tinyml.quantization.grid import compute_grid
from tinyml.validation import check_finite, check_strided, require_batches


class IntegerModel(nn.Module):
    """The int8 form of a float model of images or features, calibrated on batches of inputs.

    The model has one input and one output and is traced by `torch.export`. It may contain Conv2d,
    Linear, BatchNorm, sums and products of values, concatenation along channels, maximum and mean
    pooling, and reshapes. Activations become tables or clamps if `tinyml.exported.ELEMENTWISE`
    contains them, such as GELU, powers and `exp`. The same holds for `erf`, `log_sigmoid` and a
    PReLU with one parameter. The ranges of all values are measured on `batches`, whose first
    dimension is the batch. Raises `ValueError` for other operators.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Tensor]) -> None:
        super().__init__()
        steps, scales = _calibrate(model, batches)
        self.shapes = [step.shape[1:] for step in steps]
        #: The shape of one input, without the batch.
        self.shape = self.shapes[0]
        #: The values that each layer reads: 0 is the input, i + 1 is the output of layer i.
        self.sources: list[list[int]] = []
        self.scales = nn.ModuleList(scales)
        self.layers = nn.ModuleList()
        number = {step: i for i, step in enumerate(steps)}
        for step in steps[1:]:
            before = [scales[number[source]] for source in step.sources]
            try:
                self.layers.append(LAYERS[type(step)](step, before, scales[number[step]]))
            except ValueError as error:
                raise ValueError(f"{step.name}: {error}") from error
            self.sources.append([number[source] for source in step.sources])
        #: The last layer that reads each value.
        self.last_use = {i: n for n, sources in enumerate(self.sources) for i in sources}

    @property
    def input(self) -> QuantParams:
        """Return the quantization parameters of the input."""
        return cast(QuantParams, self.scales[0])

    @property
    def output(self) -> QuantParams:
        """Return the quantization parameters of the output."""
        return cast(QuantParams, self.scales[-1])

    def forward(self, inputs: Tensor) -> Tensor:
        """Return float outputs for float inputs, which are rounded to codes for `integers`."""
        codes = self.integers(self.quantize(inputs))
        return (codes.float() - self.output.zero) * self.output.scale

    def quantize(self, inputs: Tensor) -> Tensor:
        """Return float inputs as int8 codes; raise `ValueError` if they contain NaN."""
        self._check_shape(inputs)
        check_strided("inputs", inputs)
        if inputs.isnan().any():
            raise ValueError("expected inputs without nan, which has no code; replace nan first")
        return self.input.compute_codes(inputs)

    @torch.no_grad()
    def integers(self, codes: Tensor) -> Tensor:
        """Return the int8 codes of the outputs for int8 codes of inputs, by integer arithmetic."""
        if codes.dtype != torch.int8:
            raise TypeError(f"expected int8 codes from quantize(inputs), got {codes.dtype}")
        self._check_shape(codes)
        values: dict[int, Tensor] = {0: codes}
        for number, (layer, sources) in enumerate(zip(self.layers, self.sources, strict=True)):
            values[number + 1] = layer(*(values[i] for i in sources))
            for i in set(sources):
                if self.last_use[i] == number:
                    del values[i]
        return values[len(self.layers)].contiguous()

    def _check_shape(self, inputs: Tensor) -> None:
        if tuple(inputs.shape[1:]) != self.shape:
            expected = ", ".join(map(str, ("batch", *self.shape)))
            raise ValueError(f"expected inputs of shape ({expected}), got {tuple(inputs.shape)}")


@torch.no_grad()
def _calibrate(model: nn.Module, batches: Sequence[Tensor]) -> tuple[list[Step], list[QuantParams]]:
    """Return the steps of `model` and the quantization parameters of every step."""
    values = _join_batches(batches)
    steps = trace(model, values)
    # Inputs may be integers, such as the bytes of an image, and the steps compute with floats.
    values_of: dict[Step, Tensor] = {steps[0]: values * 1.0}
    params: dict[Step, QuantParams] = {}
    last_reader = {source: step for step in steps for source in step.sources}
    for step in steps:
        try:
            if isinstance(step, MatMul):
                check_finite("the weight", step.weight)
            if step.sources:
                values_of[step] = step.run(*(values_of[source] for source in step.sources))
            if isinstance(step, Pool | Reshape):  # these layers do not rescale codes
                params[step] = params[step.sources[0]]
            else:
                params[step] = _compute_quant_params(values_of[step])
        except ValueError as error:
            raise ValueError(f"{step.name}: {error}") from error
        for source in set(step.sources):
            if last_reader[source] is step:
                del values_of[source]
    return steps, [params[step] for step in steps]


def _join_batches(batches: Sequence[Tensor]) -> Tensor:
    listed = require_batches(batches)
    for batch in listed:
        if not isinstance(batch, Tensor):
            raise TypeError(
                f"expected tensors as batches, got a {type(batch).__name__}; if batches are pairs "
                "(inputs, targets), pass only the inputs"
            )
    values = torch.cat([batch.detach() for batch in listed])
    if not values.numel():
        raise ValueError("expected at least one input to calibrate on, got empty batches")
    return values


def _compute_quant_params(values: Tensor) -> QuantParams:
    """Return quantization parameters whose codes cover the range of these values."""
    check_finite("the values of a layer on the batches", values)
    grid = compute_grid(values.double().reshape(1, -1), 8, symmetric=False)
    return QuantParams(float(grid.scale), int(grid.zero))
