"""Export of an integer network as an ONNX file of quantized operators (QDQ).

In this form, a float operator between `DequantizeLinear` and `QuantizeLinear` represents an integer
operator. The runtime rounds halves to even and computes with float32 scales. Therefore a code may
differ by one if the exact result is close to the middle between two codes, and later layers read
this code. Use `to_c` for identical bits. `to_onnx` needs the onnx package.
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
#: The name of the int8 codes of a value, and their parameters.
_Codes = tuple[str, QuantParams]


def to_onnx(model: IntegerModel, path: str | Path) -> None:
    """Write `model` to `path`, with int8 codes as "input" and "output" and any batch size."""
    if not isinstance(model, IntegerModel):
        raise TypeError(f"expected an IntegerModel, got {type(model).__name__}")
    try:
        import onnx
    except ImportError as error:
        raise ImportError("to_onnx needs the onnx package: pip install onnx") from error
    writer = _Writer(onnx.helper, onnx.numpy_helper, onnx.TensorProto)
    params = [params for params in model.scales if isinstance(params, QuantParams)]
    names = ["input"]
    for number, (layer, sources) in enumerate(zip(model.layers, model.sources, strict=True)):
        output = "output" if number == len(model.layers) - 1 else f"codes_{number}"
        inputs = [(names[i], params[i]) for i in sources]
        writer.add_layer(layer, inputs, params[number + 1], number, output)
        names.append(output)
    if not model.layers:  # the model returns its input
        writer.add_identity()
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

    def add_identity(self) -> None:
        """Add the node of a network without layers, because a graph cannot return its input."""
        self._add_node("Identity", ["input"], "output")

    def add_layer(
        self, layer: Any, inputs: list[_Codes], after: QuantParams, number: int, output: str
    ) -> None:
        """Add the nodes of one layer, whose int8 codes have the name `output`."""
        if isinstance(layer, layers.IntegerReshape):
            # 0 keeps the size of the batch.
            shape = self._add_constant(f"shape_{number}", np.array([0, *layer.shape], np.int64))
            self._add_node("Reshape", [inputs[0][0], shape], output)
        elif isinstance(layer, layers.IntegerTable):
            table = self._add_constant(f"table_{number}", layer.table.numpy())
            wide = self._add_node("Cast", [inputs[0][0]], f"wide_{number}", to=self._types.INT64)
            offset = self._add_constant(f"lowest_{number}", np.array(128, np.int64))
            index = self._add_node("Add", [wide, offset], f"index_{number}")
            self._add_node("Gather", [table, index], output)
        else:
            floats = []
            for i, (name, params) in enumerate(inputs):
                label = f"{number}_{i}"
                codes = [name, *self._add_params(params, label)]
                floats.append(self._add_node("DequantizeLinear", codes, f"float_{label}"))
            result = _FLOAT_NODES[type(layer)](self, layer, floats, number)
            self._add_node("QuantizeLinear", [result, *self._add_params(after, number)], output)

    def _add_sum(self, layer: layers.IntegerSum, floats: list[str], number: int) -> str:
        is_sum = bool((layer.multiplier >= 0).all())  # only the second value may be subtracted
        return self._add_node("Add" if is_sum else "Sub", floats, f"value_{number}")

    def _add_cat(self, _: layers.IntegerCat, floats: list[str], number: int) -> str:
        return self._add_node("Concat", floats, f"value_{number}", axis=1)

    def _add_mul(self, _: layers.IntegerMul, floats: list[str], number: int) -> str:
        return self._add_node("Mul", floats, f"value_{number}")

    def _add_pool(self, layer: layers.IntegerPool, floats: list[str], number: int) -> str:
        g = layer.geometry
        window = {
            "kernel_shape": list(g.kernel),
            "strides": list(g.stride),
            "pads": [*g.padding, *g.padding],
        }
        if layer.is_maximum:
            return self._add_node("MaxPool", floats, f"value_{number}", **window)
        mean = self._add_node(
            "AveragePool", floats, f"mean_{number}", count_include_pad=1, **window
        )
        # Means are multiples of 1 / (kernel area) of a quantization step. Half steps must round up,
        # so a quarter of this spacing is added, which does not change how other means are rounded.
        up = np.array(layer.scale.scale / (4 * g.kernel[0] * g.kernel[1]), np.float32)
        return self._add_node(
            "Add", [mean, self._add_constant(f"up_{number}", up)], f"value_{number}"
        )

    def _add_matmul(self, layer: layers.IntegerMatMul, floats: list[str], number: int) -> str:
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
        if layer.geometry is None and not layer.has_int32_sums:
            # onnxruntime would multiply codes by a kernel whose int32 sums overflow. Float weights
            # are multiplied in float32.
            dense = self._add_constant(f"dense_{number}", weight.float().numpy() * weight_scale)
        else:
            codes = self._add_constant(f"weight_{number}", weight.numpy())
            scale = self._add_constant(f"weight_scale_{number}", weight_scale)
            zero = self._add_constant(f"weight_zero_{number}", np.zeros(len(weight_scale), np.int8))
            dense = self._add_node(
                "DequantizeLinear", [codes, scale, zero], f"dense_{number}", axis=axis
            )
        bias_scale = weight_scale * np.float32(before.scale)
        parts = [
            self._add_constant(f"bias_{number}", bias),
            self._add_constant(f"bias_scale_{number}", bias_scale),
            self._add_constant(f"bias_zero_{number}", np.zeros(len(bias), np.int32)),
        ]
        float_bias = self._add_node("DequantizeLinear", parts, f"bias_value_{number}", axis=0)
        if layer.geometry is None:
            product = self._add_node("MatMul", [*floats, dense], f"product_{number}")
            total = self._add_node("Add", [product, float_bias], f"total_{number}")
            return self._limit_sums(layer, total, bias_scale, number)
        g = layer.geometry
        total = self._add_node(
            "Conv",
            [*floats, dense, float_bias],
            f"total_{number}",
            kernel_shape=list(g.kernel),
            strides=list(g.stride),
            pads=[*g.padding, *g.padding],
            dilations=list(g.dilation),
            group=g.groups,
        )
        return self._limit_sums(layer, total, bias_scale[:, None, None], number)

    def _limit_sums(
        self, layer: layers.IntegerMatMul, total: str, unit: np.ndarray[Any, Any], number: int
    ) -> str:
        """Limit sums, in multiples of `unit`, to int32 if they can exceed it, as the model does."""
        if layer.has_int32_sums:
            return total
        low = self._add_constant(f"low_{number}", unit * np.float32(-(2**31)))
        high = self._add_constant(f"high_{number}", unit * np.float32(2**31 - 1))
        limited = self._add_node("Max", [total, low], f"limited_{number}")
        return self._add_node("Min", [limited, high], f"value_{number}")

    def _add_params(self, params: QuantParams, label: object) -> list[str]:
        number = len(self.constants)
        return [
            self._add_constant(f"scale_{label}_{number}", np.array(params.scale, np.float32)),
            self._add_constant(f"zero_{label}_{number}", np.array(params.zero, np.int8)),
        ]

    def _add_constant(self, name: str, value: np.ndarray[Any, Any]) -> str:
        array = np.ascontiguousarray(value).reshape(value.shape)  # keeps a scalar's shape ()
        self.constants.append(self._arrays.from_array(array, name))
        return name

    def _add_node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(self._helper.make_node(kind, inputs, [output], **attributes))
        return output


#: For each kind of layer between `DequantizeLinear` and `QuantizeLinear`, its float nodes.
_FLOAT_NODES: dict[type, Callable[[_Writer, Any, list[str], int], str]] = {
    layers.IntegerMatMul: _Writer._add_matmul,
    layers.IntegerSum: _Writer._add_sum,
    layers.IntegerCat: _Writer._add_cat,
    layers.IntegerMul: _Writer._add_mul,
    layers.IntegerPool: _Writer._add_pool,
}
