"""A float network as a list of steps, independent of how its forward is written.

Everything that does not depend on the input, such as the lookup of a palette, is computed while the
graph is traced. If nothing else reads a product, the batch normalization after it becomes a part of
its weight and bias; otherwise the normalization becomes a product. If nothing else reads a step,
an activation after it that only clamps, such as ReLU and ReLU6, is folded into the step, because
the integers of the step are clamped anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from tinyml.exported import ELEMENTWISE, Exported, describe_node, export_graph, get_operator
from tinyml.integer.steps import (
    Concatenation,
    Geometry,
    Input,
    MatMul,
    Mul,
    Pool,
    Reshape,
    Step,
    Sum,
    Table,
)

#: The number of samples with which a model is traced. Other sizes in a model rarely equal it.
_TRACED_SAMPLES = 23


def trace(model: nn.Module, example: Tensor) -> list[Step]:
    """Return the steps of `model`, from the input to the output.

    Raise `ValueError` with the name of an operator that has no integer form. Also raise it if the
    model's code contains a number of samples, as in `x.view(2, -1)`, unless this is the number with
    which the model is traced.
    """
    example = example[:1].repeat(_TRACED_SAMPLES, *[1] * (example.dim() - 1))
    return _Tracer(export_graph(model, (example,)), len(example)).steps


class _Tracer:
    """A walk through an exported graph that turns every node into a step or a constant."""

    def __init__(self, graph: Exported, batch: int) -> None:
        self._constants = graph.constants
        self._batch = batch
        #: The step of each node that depends on the input, and the value of each other node.
        self._values: dict[fx.Node, Any] = {}
        self.steps: list[Step] = []
        for node in graph.nodes:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if node.name in self._constants:
                self._values[node] = self._constants[node.name].detach()
            elif not self.steps:
                self._values[node] = self._add_step(Input, node, [])
            else:
                raise ValueError(f"expected a model with one input, got another input {node.name}")
        elif node.op == "output":
            self._select_output(list(node.args[0]))  # type: ignore[arg-type]
        elif node.target is operator.getitem:
            # A step is the first result of its operator. The other results, such as the indices of
            # a maximum, have no integer form.
            value = self._values[node.args[0]]  # type: ignore[index]
            if isinstance(value, Step) and node.args[1] and node.users:
                raise self._make_error(node, "only the first result of its operator is supported")
            self._values[node] = value if isinstance(value, Step) else value[node.args[1]]
        elif node.op == "call_function" and not node.name.startswith("_assert"):
            self._values[node] = self._convert_call(node)

    def _select_output(self, outputs: list[fx.Node]) -> None:
        """Remove unneeded steps. Raise `ValueError` unless one output depends on the input."""
        if len(outputs) != 1:
            raise ValueError(f"expected a model that returns one value, got {len(outputs)}")
        if not isinstance(output := self._values[outputs[0]], Step):
            raise ValueError("expected an output that depends on the input, got a constant output")
        needed = {output}
        for step in reversed(self.steps):
            if step in needed:
                needed.update(step.sources)
        self.steps = [step for step in self.steps if step in needed]

    def _convert_call(self, node: fx.Node) -> Any:
        inputs = [n for n in node.all_input_nodes if isinstance(self._values[n], Step)]
        arguments = fx.node.map_arg(node.args, lambda n: self._values[n])
        options = fx.node.map_arg(node.kwargs, lambda n: self._values[n])
        if not inputs:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise self._make_error(node, "it returns random numbers")
            return node.target(*arguments, **options)  # type: ignore[operator]
        name = get_operator(node)
        result_like = node.meta.get("val")
        if isinstance(result_like, Tensor) and not result_like.is_floating_point():
            raise self._make_error(node, f"its result is {result_like.dtype}, not a float type")
        rule, names = _RULES.get(name, (None, ""))
        has_tensor = any(_has_several_elements(argument) for argument in arguments)
        is_unary = len(inputs) == 1 and not has_tensor
        if name in _ELEMENTWISE and is_unary and isinstance(arguments[0], Step):

            def function(x: Tensor) -> Any:
                return node.target(x, *arguments[1:], **options)

            return self._convert_activation(node, arguments[0], function)
        if rule is None:
            raise self._make_error(node)
        try:
            result: Step = rule(self, node, *self._read_arguments(node, arguments, options, names))
        except (TypeError, AttributeError) as error:  # an argument that no rule supports
            raise self._make_error(node, "its arguments are not supported") from error
        return result

    def _read_arguments(self, node: fx.Node, arguments: Any, options: Any, names: str) -> list[Any]:
        """Return the arguments with these names; None for names that the operator does not have.

        Raise `ValueError` if an argument with another name differs from its default. A rule without
        names supports all arguments and reads the first.
        """
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        if not names:
            return [arguments[0]]
        defaults = {a.name: a.default_value for a in schema}
        explicit = dict(zip(defaults, arguments, strict=False)) | options
        for key, value in explicit.items():
            if key not in names.split() and value != defaults[key]:
                raise self._make_error(node, f"{key}={value!r} is not supported")
        return [(defaults | explicit).get(key) for key in names.split()]

    def _make_error(self, node: fx.Node, why: str = "") -> ValueError:
        return ValueError(
            f"{describe_node(node)} has no integer form{why and ': ' + why}; help(IntegerModel) "
            "lists the supported operators"
        )

    def _add_step(
        self, kind: Callable[..., Step], node: fx.Node, sources: Sequence[Step], *fields: Any
    ) -> Step:
        """Add a step that computes the value of `node`; `fields` are the other fields of `kind`."""
        shape = tuple(_get_fake_result(node).shape)
        if not shape or shape[0] != self._batch:
            raise self._make_error(node, f"its first dimension is not the batch: {shape}")
        step = kind(node.name, list(sources), shape, *fields)
        self.steps.append(step)
        return step

    def _convert_conv2d(self, node: fx.Node, x: Any, weight: Any, bias: Any, *window: Any) -> Step:
        if not isinstance(weight, Tensor) or not isinstance(x, Step) or len(x.shape) != 4:
            raise self._make_error(node, "only images and a constant weight are supported")
        stride, padding, dilation, groups = window
        kernel, dilation = (weight.shape[2], weight.shape[3]), as_pair(dilation)
        if isinstance(padding, str):
            sides = zip(dilation, kernel, strict=True)
            total = [d * (k - 1) if padding == "same" else 0 for d, k in sides]
            if any(t % 2 for t in total):
                raise self._make_error(node, "padding='same' of an even kernel is not symmetric")
            padding = [t // 2 for t in total]
        geometry = Geometry(kernel, as_pair(stride), as_pair(padding), dilation, groups)
        return self._add_step(MatMul, node, [x], weight, bias, geometry)

    def _convert_linear(self, node: fx.Node, x: Any, weight: Any, bias: Any = None) -> Step:
        if not isinstance(weight, Tensor) or not isinstance(x, Step):
            raise self._make_error(node, "the weight depends on the input")
        return self._add_step(MatMul, node, [x], weight, bias)

    def _convert_matmul(self, node: fx.Node, x: Any, weight: Any) -> Step:
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise self._make_error(node, "only x w with a constant matrix w is supported")
        return self._convert_linear(node, x, weight.t())

    def _convert_batch_norm(
        self, node: fx.Node, x: Step, weight: Any, bias: Any, mean: Any, *options: Any
    ) -> Step:
        variance, is_training, eps, *_ = options
        if not isinstance(mean, Tensor) or not isinstance(variance, Tensor) or is_training:
            raise self._make_error(node, "it has no running statistics")
        factor = (variance.double() + eps).rsqrt() * (1 if weight is None else weight.double())
        shift = (0 if bias is None else bias.double()) - mean.double() * factor
        return self._convert_affine(node, x, factor, shift)

    def _convert_activation(
        self, node: fx.Node, x: Step, function: Callable[[Tensor], Tensor]
    ) -> Step:
        """Add a table, or fold a clamp into `x`.

        A clamp is folded if its range contains 0 and nothing else reads `x`.
        """
        is_clamp = get_operator(node) in _CLAMPS
        if is_clamp and isinstance(x, _CLAMPED) and self._is_only_reader(node):
            low, high = function(torch.tensor([-1e30, 1e30], device="cpu")).tolist()
            if low <= 0 <= high:
                x.clamps.append(function)
                return x
        return self._add_step(Table, node, [x], function)

    def _convert_affine(self, node: fx.Node, x: Step, factor: Tensor, shift: Tensor) -> Step:
        """Fold factor * x + shift (float64, per channel) into the product `x`, or add a product."""
        if len(x.shape) not in (2, 4):
            raise self._make_error(node, "only 2 or 4 dimensions are supported")
        dtype = _get_fake_result(node).dtype
        # A linear layer's channels are its last dimension; those of an image are dimension 1.
        is_foldable = isinstance(x, MatMul) and (x.geometry is None) == (len(x.shape) == 2)
        if is_foldable and not x.clamps and self._is_only_reader(node):
            product = cast(MatMul, x)
            weight, bias = product.weight, product.bias
            per_row = factor.view(-1, *[1] * (weight.dim() - 1))
            product.weight = (weight.double() * per_row).to(weight.dtype)
            bias = shift if bias is None else bias.double() * factor + shift
            product.bias = bias.to(weight.dtype)
            return product
        weight, geometry = factor.diag(), None
        if len(x.shape) == 4:  # a depthwise 1x1 convolution
            weight, geometry = factor.view(-1, 1, 1, 1), Geometry((1, 1), groups=len(factor))
        return self._add_step(MatMul, node, [x], weight.to(dtype), shift.to(dtype), geometry)

    def _is_only_reader(self, node: fx.Node) -> bool:
        """Return True if only `node` reads its step, even through nodes that do not change it."""
        source: Any = next(n for n in node.all_input_nodes if isinstance(self._values[n], Step))
        step = self._values[source]
        while len(source.users) == 1:
            earlier = [n for n in source.all_input_nodes if self._values[n] is step]
            if not earlier:
                return True
            source = earlier[0]
        return False

    def _get_channel_constant(self, node: fx.Node, x: Step, constant: Any) -> Tensor:
        """Return a constant per channel, (channels,); raise `ValueError` for other constants."""
        device = _get_fake_result(node).device
        value = torch.as_tensor(constant, dtype=torch.float64, device=device)
        shape = (1,) * (len(x.shape) - value.dim()) + tuple(value.shape)
        has_channels = len(shape) == len(x.shape) and shape[1] in (1, x.shape[1])
        if not has_channels or any(n > 1 for i, n in enumerate(shape) if i != 1):
            raise self._make_error(node, "the constant is not one number per channel")
        return value.reshape(-1).expand(x.shape[1])

    def _convert_add(self, node: fx.Node, a: Any, b: Any, sign: float = 1.0) -> Step:
        if isinstance(a, Step) and isinstance(b, Step):
            if a.shape != b.shape:
                raise self._make_error(node, f"shapes {a.shape} and {b.shape} differ")
            return self._add_step(Sum, node, [a, b], (1.0, sign))
        value, constant = (a, b) if isinstance(a, Step) else (b, a)
        value_sign, constant_sign = (1.0, sign) if value is a else (sign, 1.0)
        if _has_several_elements(constant):
            shift = constant_sign * self._get_channel_constant(node, value, constant)
            return self._convert_affine(node, value, torch.full_like(shift, value_sign), shift)
        shift = constant_sign * constant
        return self._add_step(Table, node, [value], lambda x: value_sign * x + shift)

    def _convert_mul(self, node: fx.Node, a: Any, b: Any) -> Step:
        if isinstance(a, Step) and isinstance(b, Step):
            if len(a.shape) != len(b.shape):
                raise self._make_error(
                    node, f"shapes {a.shape} and {b.shape} differ in their number of dimensions"
                )
            return self._add_step(Mul, node, [a, b])
        value, constant = (a, b) if isinstance(a, Step) else (b, a)
        if _has_several_elements(constant):
            factor = self._get_channel_constant(node, value, constant)
            return self._convert_affine(node, value, factor, torch.zeros_like(factor))
        return self._add_step(Table, node, [value], lambda x: constant * x)

    def _convert_div(self, node: fx.Node, a: Any, b: Any) -> Step:
        if not isinstance(a, Step) or isinstance(b, Step):
            raise self._make_error(node, "only division by a constant is supported")
        return self._convert_mul(node, a, 1 / b)

    def _convert_cat(self, node: fx.Node, parts: Sequence[Any], dim: int) -> Step:
        if not all(isinstance(part, Step) for part in parts):
            raise self._make_error(node, "a part of it does not depend on the input")
        if dim not in (1, 1 - len(parts[0].shape)):
            raise self._make_error(
                node, f"it concatenates along dimension {dim}; only 1 is supported"
            )
        return self._add_step(Concatenation, node, parts)

    def _convert_avg_pool2d(self, node: fx.Node, x: Step, *options: Any) -> Step:
        *window, counts_padding = options
        if not counts_padding and as_pair(window[-1]) != (0, 0):
            raise self._make_error(node, "only count_include_pad=True is supported")
        return self._convert_pool(node, x, *window)

    def _convert_pool(
        self, node: fx.Node, x: Step, kernel: Any, stride: Any, padding: Any, maximum: bool = False
    ) -> Step:
        if len(x.shape) != 4:
            raise self._make_error(node, "only a batch of images is supported")
        geometry = Geometry(as_pair(kernel), as_pair(stride or kernel), as_pair(padding))
        return self._add_step(Pool, node, [x], geometry, maximum)

    def _convert_adaptive_avg_pool2d(self, node: fx.Node, x: Step, size: Any) -> Step:
        height, width = as_pair(size)
        if len(x.shape) != 4 or x.shape[2] % height or x.shape[3] % width:
            raise self._make_error(node, f"{x.shape[2:]} does not divide into {height, width}")
        kernel = x.shape[2] // height, x.shape[3] // width
        return self._add_step(Pool, node, [x], Geometry(kernel, kernel), False)

    def _convert_mean(self, node: fx.Node, x: Step, dims: Any, keepdim: Any) -> Step:
        if len(x.shape) != 4 or sorted(d % 4 for d in dims or ()) != [2, 3]:
            raise self._make_error(node, "only the mean over rows and columns is supported")
        geometry = Geometry((x.shape[2], x.shape[3]))
        mean = Pool(node.name, [x], (*x.shape[:2], 1, 1), geometry, False)
        self.steps.append(mean)
        return mean if keepdim else self._convert_reshape(node, mean)

    def _convert_reshape(self, node: fx.Node, x: Step) -> Step:
        return self._add_step(Reshape, node, [x])

    def _convert_identity(self, node: fx.Node, x: Step) -> Step:
        return x


_NORM = "input weight bias running_mean running_var training eps momentum cudnn_enabled"
_WINDOW = "self kernel_size stride padding"
_convert_max_pool = partial(_Tracer._convert_pool, maximum=True)
#: For each operator, its rule and the names of the arguments that the rule reads. The rule is
#: called with the tracer, the node and these arguments.
_RULES: dict[str, tuple[Callable[..., Step], str]] = {
    operator: (rule, names)
    for rule, operators, names in (
        (_Tracer._convert_conv2d, "conv2d", "input weight bias stride padding dilation groups"),
        (_Tracer._convert_linear, "linear", "input weight bias"),
        (_Tracer._convert_matmul, "matmul", "self other"),
        (_Tracer._convert_matmul, "mm", "self mat2"),
        (_Tracer._convert_batch_norm, "batch_norm _native_batch_norm_legit", _NORM),
        (_Tracer._convert_batch_norm, "_native_batch_norm_legit_no_training", _NORM),
        (_Tracer._convert_add, "add", "self other"),
        (partial(_Tracer._convert_add, sign=-1.0), "sub", "self other"),
        (_Tracer._convert_mul, "mul", "self other"),
        (_Tracer._convert_div, "div", "self other"),
        (_Tracer._convert_cat, "cat concat concatenate", "tensors dim"),
        (_convert_max_pool, "max_pool2d max_pool2d_with_indices", _WINDOW),
        (_Tracer._convert_avg_pool2d, "avg_pool2d", f"{_WINDOW} count_include_pad"),
        (_Tracer._convert_adaptive_avg_pool2d, "adaptive_avg_pool2d", "self output_size"),
        (_Tracer._convert_mean, "mean", "self dim keepdim"),
        (_Tracer._convert_reshape, "reshape flatten view _unsafe_view squeeze unsqueeze", ""),
        (_Tracer._convert_identity, "dropout feature_dropout native_dropout alpha_dropout", ""),
        (_Tracer._convert_identity, "clone contiguous alias detach _to_copy to", ""),
    )
    for operator in operators.split()
}
_CLAMPS = {"relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max"}
#: The steps whose results are clamped to int8, and so also to the range of an activation.
_CLAMPED = (MatMul, Sum, Concatenation, Mul)
_ELEMENTWISE = ELEMENTWISE | {"log_sigmoid", "erf", "prelu"}


def _get_fake_result(node: fx.Node) -> Tensor:
    """Return the fake tensor of a node's first result."""
    value: Any = node.meta["val"]
    return cast(Tensor, value[0] if isinstance(value, tuple | list) else value)


def _has_several_elements(constant: Any) -> bool:
    return isinstance(constant, Tensor) and constant.numel() > 1


def as_pair(value: int | Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) from one integer or two."""
    if isinstance(value, int):
        return value, value
    return (operator.index(value[0]), operator.index(value[-1]))
