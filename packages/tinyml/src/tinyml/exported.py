"""The graph of a model as `torch.export` returns it: tensors and ATen operators.

The graph is independent of how the model's code is written: modules, functions and operators are
treated alike. In-place operations, including those on views, are rewritten as functional operators.
Only output tensors in tuples, lists, mappings and dataclasses are included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves

from tinyml.conversion import make_plain_copy
from tinyml.pruning.size_attributes import SizeReads
from tinyml.validation import check_strided

_MODEL = "model."
#: Elementwise operators whose only tensor argument is the input.
ELEMENTWISE = {
    "relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "hardswish", "hardsigmoid",
    "sigmoid", "tanh", "silu", "gelu", "elu", "leaky_relu", "softplus", "neg", "abs", "exp",
    "square", "mish", "selu", "celu", "sqrt", "rsub", "pow",
}  # fmt: skip
#: Operators that torch defines in terms of others (composite operators), and that this package
#: supports directly. Only graphs with other composite operators, or with operators that write to a
#: tensor, are decomposed, because the decomposition takes most of the export time.
COMPOSITE = {
    "__and__", "adaptive_avg_pool2d", "batch_norm", "chunk", "conv2d", "conv_transpose2d",
    "dropout", "flatten", "group_norm", "layer_norm", "linear", "matmul", "max_pool2d", "pad",
    "prelu", "relu6", "reshape", "rms_norm", "scaled_dot_product_attention", "selu", "softmax",
    "square", "to", "unflatten",
}  # fmt: skip


class Exported:
    """An exported graph and the values of its parameters, buffers and constants."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        signature = program.graph_signature
        self.module: fx.GraphModule = program.graph_module
        stored = {**program.state_dict, **program.constants}
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self.nodes: list[fx.Node] = list(program.graph.nodes)
        #: The name in the model of each parameter and buffer, by the name of its placeholder.
        self.names = {node: name.removeprefix(_MODEL) for node, name in names.items()}
        names |= signature.inputs_to_lifted_tensor_constants
        #: The value of each placeholder that is not an input, by the placeholder's name.
        self.constants: dict[str, Tensor] = {node: stored[name] for node, name in names.items()}

    def list_arguments(self, inputs: tuple[Any, ...]) -> list[Any]:
        """Return the values of all placeholders, in order, to run `module` on `inputs`."""
        leaves = iter(tree_leaves(inputs))
        names = [node.name for node in self.nodes if node.op == "placeholder"]
        return [self.constants[n] if n in self.constants else next(leaves) for n in names]


def export_graph(
    model: nn.Module, inputs: tuple[Any, ...], reads: SizeReads | None = None
) -> Exported:
    """Return the graph of `model(*inputs)` in evaluation mode.

    `reads` records which sizes in the graph come from attributes of modules. Raise `ValueError` if
    the model cannot be exported.
    """
    check_strided("inputs", *list_tensors(inputs))
    wrapped = _TensorsOnly(make_plain_copy(model), reads).eval()
    try:
        with torch.no_grad(), preserve_node_meta(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(wrapped, inputs)
            _erase_nodes_without_effect(program.graph)
            if any(map(_should_decompose, program.graph.nodes)):
                program = program.run_decompositions({})
    except Exception as error:  # the model's own code may raise anything
        remedy = "pass a submodule that takes and returns only tensors"
        if any(isinstance(value, Mapping) for value in inputs):
            remedy = "inputs are positional; pass the values of a mapping in the order of `forward`"
        raise ValueError(
            f"{type(model).__name__} cannot be exported ({error}); {remedy}"
        ) from error
    graph = Exported(program)
    for node in graph.nodes:
        if "dropout" in get_operator(node) and node.args[2:3] == (True,):
            raise ValueError(
                f"{describe_node(node)} drops values in evaluation mode too; pass "
                "training=self.training to the dropout function, or remove it"
            )
    return graph


def _should_decompose(node: fx.Node) -> bool:
    """Return True if a node writes to a tensor or calls an operator that must be decomposed."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return True
    if get_operator(node) == "batch_norm":  # (x, weight, bias, mean, variance, training, ...)
        return bool(node.args[5])
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return get_operator(node) not in COMPOSITE and target.has_kernel_for_dispatch_key(composite)


def _erase_nodes_without_effect(graph: fx.Graph) -> None:
    """Erase nodes that compute nothing: checks of metadata, and `detach_` of tensors.

    `torch.export` inserts checks of dtype and device before conversions. Each check would count as
    a consumer of the converted tensor. It also inserts `detach_` after tensors that the code
    creates from numbers, as every model of transformers does. The graph would be decomposed,
    because `detach_` writes to a tensor.
    """
    for node in list(graph.nodes):
        name = get_operator(node)
        if name == "detach_" and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(node.all_input_nodes[0])
        if name == "_assert_tensor_metadata" or (name == "detach_" and not node.users):
            graph.erase_node(node)


class _TensorsOnly(nn.Module):
    def __init__(self, model: nn.Module, reads: SizeReads | None) -> None:
        super().__init__()
        self.model = model
        self.reads = reads
        if reads is not None:
            reads.tag(model)

    def forward(self, *inputs: Any) -> list[Tensor]:
        with self.reads or contextlib.nullcontext():
            tensors = list_tensors(self.model(*inputs))
        if not tensors:
            raise TypeError("its outputs contain no tensors in tuples, mappings or dataclasses")
        return tensors


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    elif dataclasses.is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in list_tensors(part)]
    return []


def get_operator(node: fx.Node) -> str:
    """Return "conv2d" for a call of `aten.conv2d.default`, and the name of other nodes."""
    return str(node.target).split(".")[1] if "." in str(node.target) else node.name


def get_shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's value, or () if it is not a tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def get_module_name(node: fx.Node) -> str:
    """Return the name of the innermost module whose code created the node."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()] or [""]
    # The name of the exported model itself is "model", so a path looks like "model.head".
    return paths[-1].removeprefix(_MODEL[:-1]).removeprefix(".")


def describe_node(node: fx.Node) -> str:
    """Return a node's name, operator and module, for error messages."""
    module = get_module_name(node)
    return f"{node.name} ({node.target}{f' in {module}' if module else ''})"
