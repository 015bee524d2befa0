"""Export of an integer network as an ONNX file of quantized operators (QDQ).

In this form a float operator between `DequantizeLinear` and `QuantizeLinear` represents an integer
operator. The runtime rounds halves to even and computes with float32 scales. Therefore a code of a
layer may differ by one if its exact result is close to the middle between two codes. Later layers
read this code. Use `to_c` for identical bits. This module needs `onnx`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinyml.export.atomic_file import atomic_file
from tinyml.integer import layers
from tinyml.integer.fixed_point import QuantParams
from tinyml.integer.model import IntegerModel

_OPSET, _IR = 17, 10


def to_onnx(model: IntegerModel, path: str | Path) -> None:
    """Write `model`, with int8 codes as "input" and "output" and any batch size."""
    if not isinstance(model, IntegerModel):
        raise TypeError(f"expected an IntegerModel, got {type(model).__name__}")
    try:
        import onnx
    except ImportError as error:
        raise ImportError("to_onnx needs the onnx package: pip install onnx") from error
    writer = _Writer(onnx.helper, onnx.numpy_helper, onnx.TensorProto)
    scales = [scale for scale in model.scales if isinstance(scale, QuantParams)]
    names = ["input"]
    for number, (layer, sources) in enumerate(zip(model.layers, model.sources, strict=True)):
        last = number == len(model.layers) - 1
        inputs = [(names[i], scales[i]) for i in sources]
        names.append(writer.layer(layer, inputs, scales[number + 1], number, last))
    proto, int8 = onnx.helper, onnx.TensorProto.INT8
    graph = proto.make_graph(
        writer.nodes,
        "network",
        [proto.make_tensor_value_info("input", int8, ["batch", *model.shape])],
        [proto.make_tensor_value_info("output", int8, ["batch", *model.shapes[-1]])],
        writer.constants,
    )
    model_proto = proto.make_model(graph, opset_imports=[proto.make_opsetid("", _OPSET)])
    model_proto.ir_version = _IR
    onnx.checker.check_model(model_proto, full_check=True)
    with atomic_file(path) as part:
        part.write_bytes(model_proto.SerializeToString())


class _Writer:
    def __init__(self, helper: Any, arrays: Any, types: Any) -> None:
        self._helper = helper
        self._arrays = arrays
        self._types = types
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def layer(
        self,
        layer: Any,
        inputs: list[tuple[str, QuantParams]],
        after: QuantParams,
        number: int,
        last: bool,
    ) -> str:
        """Add the nodes of one layer and return the name of its codes."""
        out = "output" if last else f"codes_{number}"
        if isinstance(layer, layers.IntegerReshape):
            # 0 keeps the size of the batch.
            shape = self._constant(f"shape_{number}", np.array([0, *layer.shape], np.int64))
            return self._node("Reshape", [inputs[0][0], shape], out)
        if isinstance(layer, layers.IntegerTable):
            table = self._constant(f"table_{number}", layer.table.numpy())
            wide = self._node("Cast", [inputs[0][0]], f"wide_{number}", to=self._types.INT64)
            lowest = self._constant(f"lowest_{number}", np.array(128, np.int64))
            index = self._node("Add", [wide, lowest], f"index_{number}")
            return self._node("Gather", [table, index], out)
        floats = [
            self._dequantize(name, scale, f"{number}_{i}") for i, (name, scale) in enumerate(inputs)
        ]
        result = _FLOAT_NODES[type(layer)](self, layer, floats, number)
        return self._node("QuantizeLinear", [result, *self._scale(after, number)], out)

    def _sum(self, layer: layers.IntegerSum, floats: list[str], number: int) -> str:
        is_sum = bool((layer.multiplier >= 0).all())  # only the second value may be subtracted
        return self._node("Add" if is_sum else "Sub", floats, f"value_{number}")

    def _cat(self, _: layers.IntegerCat, floats: list[str], number: int) -> str:
        return self._node("Concat", floats, f"value_{number}", axis=1)

    def _mul(self, _: layers.IntegerMul, floats: list[str], number: int) -> str:
        return self._node("Mul", floats, f"value_{number}")

    def _pool(self, layer: layers.IntegerPool, floats: list[str], number: int) -> str:
        g = layer.geometry
        window = {
            "kernel_shape": list(g.kernel),
            "strides": list(g.stride),
            "pads": [*g.padding, *g.padding],
        }
        if layer.is_maximum:
            return self._node("MaxPool", floats, f"value_{number}", **window)
        mean = self._node("AveragePool", floats, f"mean_{number}", count_include_pad=1, **window)
        # Means are often halves, which must round up: add a quarter of the smallest step.
        up = np.array(layer.scale.scale / (4 * g.kernel[0] * g.kernel[1]), np.float32)
        return self._node("Add", [mean, self._constant(f"up_{number}", up)], f"value_{number}")

    def _matmul(self, layer: layers.IntegerMatMul, floats: list[str], number: int) -> str:
        before, after = layer.before, layer.after
        # m / 2^s = S_w S_in / S_out. The bias contains -Z sum(w), which this form does not include.
        factor = layer.multiplier.double() * torch.exp2(-layer.shift.double())
        weight_scale = (factor * after.scale / before.scale).float().numpy()
        sums = layer.weight.long().flatten(1).sum(1)
        bias = (layer.bias.long() + before.zero * sums).clamp(-(2**31), 2**31 - 1).int().numpy()
        weight = layer.weight
        axis = 0
        if layer.geometry is None:
            weight, axis = weight.t().contiguous(), 1  # MatMul takes (in, out)
        codes = self._constant(f"weight_{number}", weight.numpy())
        scale = self._constant(f"weight_scale_{number}", weight_scale)
        zero = self._constant(f"weight_zero_{number}", np.zeros(len(weight_scale), np.int8))
        dense = self._node("DequantizeLinear", [codes, scale, zero], f"dense_{number}", axis=axis)
        bias_scale = weight_scale * np.float32(before.scale)
        parts = [
            self._constant(f"bias_{number}", bias),
            self._constant(f"bias_scale_{number}", bias_scale),
            self._constant(f"bias_zero_{number}", np.zeros(len(bias), np.int32)),
        ]
        added = self._node("DequantizeLinear", parts, f"bias_value_{number}", axis=0)
        if layer.geometry is None:
            product = self._node("MatMul", [*floats, dense], f"product_{number}")
            return self._node("Add", [product, added], f"value_{number}")
        g = layer.geometry
        return self._node(
            "Conv",
            [*floats, dense, added],
            f"value_{number}",
            kernel_shape=list(g.kernel),
            strides=list(g.stride),
            pads=[*g.padding, *g.padding],
            dilations=list(g.dilation),
            group=g.groups,
        )

    def _dequantize(self, name: str, scale: QuantParams, label: str) -> str:
        return self._node("DequantizeLinear", [name, *self._scale(scale, label)], f"float_{label}")

    def _scale(self, scale: QuantParams, label: object) -> list[str]:
        number = len(self.constants)
        return [
            self._constant(f"scale_{label}_{number}", np.array(scale.scale, np.float32)),
            self._constant(f"zero_{label}_{number}", np.array(scale.zero, np.int8)),
        ]

    def _constant(self, name: str, value: np.ndarray[Any, Any]) -> str:
        self.constants.append(
            self._arrays.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
        )
        return name

    def _node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(self._helper.make_node(kind, inputs, [output], **attributes))
        return output


#: For each kind of layer between `DequantizeLinear` and `QuantizeLinear`, its float nodes.
_FLOAT_NODES: dict[type, Callable[[_Writer, Any, list[str], int], str]] = {
    layers.IntegerMatMul: _Writer._matmul,
    layers.IntegerSum: _Writer._sum,
    layers.IntegerCat: _Writer._cat,
    layers.IntegerMul: _Writer._mul,
    layers.IntegerPool: _Writer._pool,
}
