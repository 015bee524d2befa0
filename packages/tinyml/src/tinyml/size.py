"""What a model takes: bytes as stored, codebooks and scales included, multiplications, time.

Notable: each tensor once, however many layers share it; a pruned weight also by what a sparse file
of it takes, a bit for each weight and the weights that are not zero.
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from tinyml.layers import Replacement, evaluating, with_modules

_PASSES = 7


@dataclass(frozen=True)
class Size:
    """Bytes by tensor. `str()` is a table."""

    by_name: dict[str, int]
    """Bytes of every parameter and buffer as it is stored."""
    sparse_by_name: dict[str, int]
    """The smaller of dense and sparse (one bit for each element, plus the non-zero ones)."""
    parameters: int
    """Elements of the weights as the layers see them, whatever they are stored as."""
    nonzero: int
    """How many of those are not zero."""
    macs: int | None = None
    """Multiply-accumulates of one forward pass on the given inputs."""
    milliseconds: float | None = None
    """The median time of some passes on the given inputs, here and now."""

    @property
    def bytes(self) -> int:
        """All tensors as stored."""
        return sum(self.by_name.values())

    @property
    def sparse_bytes(self) -> int:
        """All tensors with zeros left out where that is smaller."""
        return sum(self.sparse_by_name.values())

    @property
    def bits_per_parameter(self) -> float:
        """Bits as stored, codebooks, scales and whatever else included."""
        return 8 * self.bytes / max(1, self.parameters)

    def __str__(self) -> str:
        lines = [f"{nbytes:>14,}  {name}" for name, nbytes in self.by_name.items()]
        lines.append(f"{self.bytes:>14,}  bytes, {self.bits_per_parameter:.2f} bits a parameter")
        if self.macs is not None:
            lines.append(f"{self.macs:>14,}  multiplications, {self.milliseconds:.3g} ms")
        return "\n".join(lines)


@torch.no_grad()
def size_of(model: nn.Module, *inputs: Any) -> Size:
    """The size of `model`; with example `inputs`, also the cost of `model(*inputs)`.

    Multiplications with pruned (zero) weights count: the model is dense.
    """
    by_name: dict[str, int] = {}
    sparse: dict[str, int] = {}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        by_name[name] = tensor.nbytes
        zeroless = -(-tensor.numel() // 8) + int(tensor.count_nonzero()) * tensor.itemsize
        sparse[name] = min(tensor.nbytes, zeroless) if tensor.is_floating_point() else tensor.nbytes
    weights = _weights(model)
    return Size(
        by_name,
        sparse,
        sum(tensor.numel() for tensor in weights),
        sum(int(tensor.count_nonzero()) for tensor in weights),
        _macs(model, inputs) if inputs else None,
        _milliseconds(model, inputs) if inputs else None,
    )


def _weights(model: nn.Module) -> list[torch.Tensor]:
    from tinyml.integer.layers import IntegerProduct
    from tinyml.quantization.int4 import Int4Linear
    from tinyml.quantization.int8 import Int8Linear

    found: dict[int, torch.Tensor] = {}
    for layer in model.modules():
        if hasattr(layer, "parametrizations"):
            for name, parametrization in layer.parametrizations.items():  # type: ignore[operator, union-attr]
                key = id(parametrization[-1])
                if key not in found:
                    found[key] = getattr(layer, name)
        elif isinstance(layer, Int4Linear | Int8Linear | IntegerProduct):
            found[id(layer)] = layer.weight_codes if isinstance(layer, Int8Linear) else layer.weight
            if layer.bias is not None:
                found[id(layer.bias)] = layer.bias
    for name, parameter in model.named_parameters():
        if "parametrizations." not in name:
            found[id(parameter)] = parameter
    return list(found.values())


def _milliseconds(model: nn.Module, inputs: tuple[Any, ...]) -> float:
    with evaluating(model):
        times = []
        for _ in range(_PASSES + 1):
            start = time.perf_counter()
            model(*inputs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def _macs(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    from tinyml.integer.layers import IntegerProduct
    from tinyml.quantization.fastest import FastestLinear

    # However whole numbers are multiplied here, they are as many as the dense model's.
    model, total = copy.deepcopy(model).eval(), 0
    ours = [module for module in model.modules() if isinstance(module, Replacement)]
    model = with_modules(
        model, {m: m.dense() if isinstance(m, FastestLinear) else m.restored() for m in ours}
    )

    def count(layer: nn.Module, _: Any, outputs: torch.Tensor) -> None:
        nonlocal total
        total += outputs.numel() * cast(torch.Tensor, layer.weight)[0].numel()

    for layer in [m for m in model.modules() if isinstance(m, IntegerProduct)]:
        layer.register_forward_hook(count)
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    return total or int(counter.get_total_flops()) // 2
