"""Size and cost of a model: bytes as stored, multiplications, and time.

Each tensor counts once, even if several layers share it. Bytes include codebooks and scales. A
pruned weight is also counted as a sparse file stores it: a bit per element plus the nonzero
elements.
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import nn

from tinyml.conversion import evaluation_mode
from tinyml.timing import milliseconds

_PASSES = 7
#: The integer type of each size in bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Size:
    """Bytes by tensor. `str()` returns a table."""

    #: Bytes of every parameter and buffer as it is stored.
    by_name: dict[str, int]
    #: The smaller of dense and sparse storage (a bit per element plus the nonzero elements).
    sparse_by_name: dict[str, int]
    #: Elements of the dense weights, independent of their storage.
    parameters: int
    #: The number of these elements that are not zero.
    nonzero: int
    #: Multiply-accumulates of one forward pass on the given inputs.
    macs: int | None = None
    #: The median time of a forward pass on the given inputs.
    milliseconds: float | None = None

    @property
    def bytes(self) -> int:
        """Return the bytes of all tensors as stored."""
        return sum(self.by_name.values())

    @property
    def sparse_bytes(self) -> int:
        """Return the bytes of all tensors, with zeros left out if that is smaller."""
        return sum(self.sparse_by_name.values())

    @property
    def bits_per_parameter(self) -> float:
        """Return the stored bits per parameter, including codebooks and scales."""
        return 8 * self.bytes / max(1, self.parameters)

    def __str__(self) -> str:
        lines = [f"{nbytes:>14,}  {name}" for name, nbytes in self.by_name.items()]
        lines.append(f"{self.bytes:>14,}  bytes, {self.bits_per_parameter:.2f} bits per parameter")
        if self.macs is not None:
            lines.append(f"{self.macs:>14,}  multiplications, {self.milliseconds:.3g} ms")
        return "\n".join(lines)


@torch.no_grad()
def size_of(model: nn.Module, *inputs: Any) -> Size:
    """Return the size of `model`; with example `inputs`, also the cost of `model(*inputs)`.

    Multiplications by pruned (zero) weights count, because the model is dense.
    """
    by_name: dict[str, int] = {}
    sparse: dict[str, int] = {}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        by_name[name] = tensor.nbytes
        sparse[name] = tensor.nbytes
        if tensor.is_floating_point():
            zeroless = -(-tensor.numel() // 8) + int(has_value(tensor).sum()) * tensor.itemsize
            sparse[name] = min(tensor.nbytes, zeroless)
    weights = _weights(model)
    return Size(
        by_name,
        sparse,
        sum(tensor.numel() for tensor in weights),
        sum(int((tensor != 0).sum()) for tensor in weights),  # float8 has no count_nonzero
        _macs(model, inputs) if inputs else None,
        _milliseconds(model, inputs) if inputs else None,
    )


def has_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return True for elements that a sparse file stores: all that have a bit set."""
    return as_integers(tensor.contiguous()) != 0


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor as integers of the same number of bytes."""
    return tensor.view(_BITS[tensor.itemsize])


def _weights(model: nn.Module) -> list[torch.Tensor]:
    from tinyml.integer.layers import IntegerProduct
    from tinyml.quantization.int4 import Int4Linear
    from tinyml.quantization.int8 import Int8Linear

    tensors_by_id: dict[int, torch.Tensor] = {}
    for layer in model.modules():
        if hasattr(layer, "parametrizations"):
            for name, parametrization in layer.parametrizations.items():  # type: ignore[operator, union-attr]
                key = id(parametrization[-1])
                if key not in tensors_by_id:
                    tensors_by_id[key] = getattr(layer, name)
        elif isinstance(layer, Int4Linear | Int8Linear | IntegerProduct):
            tensors_by_id[id(layer)] = (
                layer.weight_codes if isinstance(layer, Int8Linear) else layer.weight
            )
            if layer.bias is not None:
                tensors_by_id[id(layer.bias)] = layer.bias
    for name, parameter in model.named_parameters():
        if "parametrizations." not in name:
            tensors_by_id[id(parameter)] = parameter
    return list(tensors_by_id.values())


def _milliseconds(model: nn.Module, inputs: tuple[Any, ...]) -> float:
    with evaluation_mode(model):
        times = [milliseconds(partial(model, *inputs)) for _ in range(_PASSES + 1)]
    return statistics.median(times[1:])


def _recurrent_flops(inputs: Any, from_input: Any, from_state: Any, *_: Any, **__: Any) -> int:
    return 2 * prod(inputs[:-1]) * (prod(from_input) + prod(from_state))


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


#: Operators that torch's counter counts as zero. Versions after 2.11 count attention on CPUs.
_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten.dot: lambda left, *_, **__: 2 * prod(left),
    torch.ops.aten.mv: lambda matrix, *_, **__: 2 * prod(matrix),
    torch.ops.aten._trilinear: lambda left, weight, *_, **__: 2 * left[0] * prod(weight),
    torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops,
}


def _macs(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    from tinyml.integer.layers import IntegerProduct
    from tinyml.quantization.fastest_linear import FastestLinear

    # Integer layers perform the same number of multiplications as their dense layers.
    model, total = copy.deepcopy(model).eval(), 0
    for layer in model.modules():
        if isinstance(layer, FastestLinear):
            layer.always = "float"

    def count(layer: nn.Module, _: Any, outputs: torch.Tensor) -> None:
        nonlocal total
        total += outputs.numel() * cast(torch.Tensor, layer.weight)[0].numel()

    for layer in [m for m in model.modules() if isinstance(m, IntegerProduct)]:
        layer.register_forward_hook(count)
    fused_attention = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # one operator that nothing counts
        with FlopCounterMode(display=False, custom_mapping=_FLOPS) as counter:
            model(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused_attention)
    return total or int(counter.get_total_flops()) // 2
