"""Remove whole channels: a smaller dense model, faster with any kernel.

Notable:
- a channel that one layer makes is read by others, through normalization, pooling, flattening and
  residual sums. The traced graph (torch.fx) says which layers share their channels; those lose the
  same ones, together;
- what comes out is the model with those channels' weights at their readers set to zero, but small;
- where the graph does something unknown, the channels that enter it stay.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tinyml.layers import check_finite, evaluating

_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_POOL = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.ELU,
    nn.Dropout, nn.Dropout2d, nn.Identity,
)  # fmt: skip
_ELEMENTWISE_CALLS = {
    torch.relu, F.relu, F.gelu, F.silu, F.leaky_relu, F.dropout, torch.tanh, torch.sigmoid,
    F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, "relu", "tanh", "sigmoid", "contiguous",
}  # fmt: skip
_SUMS = {
    operator.add,
    operator.iadd,
    operator.sub,
    operator.mul,
    torch.add,
    torch.mul,
    "add",
    "mul",
}
_FLATTENS = {torch.flatten, "flatten"}


@dataclass(eq=False)
class Group:
    """Channels that several layers share, so that they go together."""

    size: int
    fixed: bool = False
    writers: list[str] = field(default_factory=list)
    """Layers whose output channels they are (first dimension of the weight)."""
    passers: list[str] = field(default_factory=list)
    """Layers with a parameter for each: normalization, depthwise convolution."""
    readers: list[tuple[str, int]] = field(default_factory=list)
    """Layers whose inputs they are, and how many inputs each channel is."""


@dataclass(frozen=True)
class _Channels:
    group: Group
    repeat: int  # elements of the channel dimension for each channel
    last: bool = False  # the channel dimension is the last one, not the second


def prune_channels(
    model: nn.Module, sparsity: float | Mapping[str, float], *inputs: Any
) -> nn.Module:
    """A smaller copy of `model` without the least important channels.

    `sparsity` is the share of channels to remove from every group that can lose some, or by the
    name of a layer that writes the group. `inputs` are an example for `model(*inputs)`. A channel
    matters by the norm of what its readers multiply it with. At least one channel stays.
    """
    groups = channel_groups(model, *inputs)
    if isinstance(sparsity, Mapping):
        writers = {name for group in groups for name in group.writers}
        if unknown := sparsity.keys() - writers:
            raise ValueError(
                f"channels of {sorted(unknown)} cannot go; those of {sorted(writers)} can"
            )
    keep = {}
    for group in groups:
        share = sparsity if not isinstance(sparsity, Mapping) else _share(group, sparsity)
        if not 0 <= share < 1:
            raise ValueError(f"sparsity is {share}; it is a share from 0 to below 1")
        kept = max(1, group.size - round(share * group.size))
        order = channel_importance(model, group).argsort(descending=True, stable=True)
        keep[group] = order[:kept].sort().values
    return _checked(_select(copy.deepcopy(model), keep), model, inputs)


def sort_channels(model: nn.Module, *inputs: Any) -> nn.Module:
    """A copy that computes the same function with every group's channels by falling importance."""
    keep = {
        group: channel_importance(model, group).argsort(descending=True, stable=True)
        for group in channel_groups(model, *inputs)
    }
    return _checked(_select(copy.deepcopy(model), keep), model, inputs)


@torch.no_grad()
def channel_importance(model: nn.Module, group: Group) -> Tensor:
    """The 2-norm, over all readers, of the weights that multiply each channel."""
    total = torch.zeros(group.size, dtype=torch.float64)
    for name, repeat in group.readers:
        weight = model.get_submodule(name).get_parameter("weight").double().cpu()
        check_finite(f"{name}.weight", weight)
        weight = weight.transpose(0, 1).reshape(group.size, repeat, -1)
        total += weight.square().sum((1, 2))
    return total.sqrt()


def channel_groups(model: nn.Module, *inputs: Any) -> list[Group]:
    """The groups of channels that can be removed, in the order in which they are written.

    A model that cannot be traced whole, as most decoders, is taken apart: the largest parts that
    can be are traced by themselves, on what they are given when the model runs. Channels inside of
    a part, such as the hidden units of a feed-forward block, are found all the same.
    """
    try:
        found = _groups_of(model, inputs)
    except _NotTraceable as error:
        found = _groups_of_parts(model, inputs)
        if not found:
            raise ValueError(
                f"{type(model).__name__} cannot be traced ({error}), and no part of it that can be "
                "has channels to remove"
            ) from error
    if not found:
        raise ValueError(f"{type(model).__name__} has no channels between two layers to remove")
    return found


class _NotTraceable(Exception):
    """The forward of a module depends on values, or on what a trace does not show."""


def _groups_of(model: nn.Module, inputs: tuple[Any, ...]) -> list[Group]:
    from torch.fx.passes.shape_prop import ShapeProp  # it brings sympy

    try:
        traced = fx.GraphModule(model, fx.Tracer().trace(model))
        with torch.no_grad(), evaluating(traced):
            ShapeProp(traced).propagate(*inputs)
    except Exception as error:  # tracing runs the model's own code, which may raise anything
        raise _NotTraceable(error) from error
    walk = _Walk(model)
    for node in traced.graph.nodes:
        walk.visit(node)
    groups = dict.fromkeys(walk.find(group) for group in walk.made)
    return [g for g in groups if not g.fixed and g.writers and g.readers and g.size > 1]


def _groups_of_parts(model: nn.Module, inputs: tuple[Any, ...]) -> list[Group]:
    given: dict[nn.Module, tuple[Any, ...] | None] = {}

    def note(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        # What runs twice may be given other things each time; None: not to be traced alone.
        given[module] = None if module in given or options else arguments

    parts = [module for module in model.modules() if module is not model]
    handles = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
    try:
        with torch.no_grad(), evaluating(model):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    users: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), set()).add(name)
    found: list[Group] = []

    def search(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            full = f"{prefix}{name}"
            arguments = given.get(child)
            try:
                groups = _groups_of(child, arguments) if arguments else None
            except _NotTraceable:
                groups = None
            if groups is None:
                search(child, f"{full}.")
                continue
            for group in groups:
                _rename(group, f"{full}.")
                layers = [*group.writers, *group.passers, *(name for name, _ in group.readers)]
                owned = [p for layer in layers for p in model.get_submodule(layer).parameters()]
                if all(len(users[id(parameter)]) == 1 for parameter in owned):
                    found.append(group)

    search(model, "")
    return found


def _rename(group: Group, prefix: str) -> None:
    group.writers = [prefix + name for name in group.writers]
    group.passers = [prefix + name for name in group.passers]
    group.readers = [(prefix + name, repeat) for name, repeat in group.readers]


class _Walk:
    """Follows channels through a graph, merging the groups that meet."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._merged: dict[Group, Group] = {}
        self._at: dict[fx.Node, _Channels | None] = {}
        self._seen: set[str] = set()
        self.made: list[Group] = []

    def find(self, group: Group) -> Group:
        while group in self._merged:
            group = self._merged[group]
        return group

    def visit(self, node: fx.Node) -> None:
        self._at[node] = self._channels_of(node)

    def _channels_of(self, node: fx.Node) -> _Channels | None:
        sources = [self._at[n] for n in node.all_input_nodes]
        known = [s for s in sources if s is not None]
        if node.op == "call_module" and len(sources) == 1:
            return self._module(str(node.target), sources[0], node)
        if node.op in ("call_function", "call_method"):
            target, first = node.target, node.all_input_nodes[0] if node.all_input_nodes else None
            if target in _ELEMENTWISE_CALLS and len(known) == 1:
                return known[0]
            if target in _SUMS and first is not None:
                return self._sum(node, sources)
            if target in _FLATTENS and len(known) == 1 and first is not None:
                return self._flatten(node, first, known[0])
            if target in {torch.mean, "mean"} and len(known) == 1 and first is not None:
                shape = _shape(first)
                if not known[0].last and len(shape) > 2 and _shape(node)[:2] == shape[:2]:
                    return known[0]
        for source in known:
            self.find(source.group).fixed = True
        if node.op == "placeholder" and len(_shape(node)) > 1:
            return _Channels(self._new(_shape(node)[1], fixed=True), 1)
        return None

    def _module(self, name: str, source: _Channels | None, node: fx.Node) -> _Channels | None:
        layer = self._model.get_submodule(name)
        last = isinstance(layer, nn.Linear)
        if source is None or (
            source.repeat == 1 and source.last != last and self.find(source.group).fixed
        ):
            # What comes in stays as it is, wherever its channels are.
            width = _shape(node.all_input_nodes[0])[-1 if last else 1 :][:1] or (1,)
            source = _Channels(self._new(width[0], fixed=True), 1, last)
        group = self.find(source.group)
        if isinstance(layer, _ELEMENTWISE + _POOL):
            return source
        if isinstance(layer, nn.Flatten):
            return self._flatten(node, node.all_input_nodes[0], source)
        flat = isinstance(layer, nn.Linear) and (source.last or len(_shape(node)) == 2)
        again = name in self._seen
        self._seen.add(name)
        second = not source.last or len(_shape(node)) == 2
        if not again and isinstance(layer, _NORM) and source.repeat == 1 and second:
            group.passers.append(name)
            return source
        if not again and isinstance(layer, _CONV) and source.repeat == 1 and not source.last:
            if layer.groups == 1:
                group.readers.append((name, 1))
                return self._written(name, layer.out_channels)
            if layer.groups == layer.in_channels == layer.out_channels:
                group.passers.append(name)
                return source
        if not again and flat:
            assert isinstance(layer, nn.Linear)
            group.readers.append((name, source.repeat))
            return self._written(name, layer.out_features, last=True)
        group.fixed = True
        if again:  # one weight read at two places: whatever it writes stays too
            for made in self.made:
                if name in self.find(made).writers:
                    self.find(made).fixed = True
        return None

    def _sum(self, node: fx.Node, sources: list[_Channels | None]) -> _Channels | None:
        known = [s for s in sources if s is not None]
        if len(sources) == 1:
            return known[0] if known else None
        same = {_shape(n) for n in node.all_input_nodes} == {_shape(node)}
        alike = len({(s.repeat, s.last) for s in known}) == 1
        if len(known) < len(sources) or not same or not alike:
            for source in known:
                self.find(source.group).fixed = True
            return None
        first = self.find(known[0].group)
        for source in known[1:]:
            other = self.find(source.group)
            if other is not first:
                first.fixed |= other.fixed
                first.writers += other.writers
                first.passers += other.passers
                first.readers += other.readers
                self._merged[other] = first
        return known[0]

    def _flatten(self, node: fx.Node, first: fx.Node, source: _Channels) -> _Channels | None:
        before, after = _shape(first), _shape(node)
        if len(after) == 2 and after[0] == before[0] and (len(before) == 2 or not source.last):
            return _Channels(source.group, source.repeat * (after[1] // before[1]), last=True)
        self.find(source.group).fixed = True
        return None

    def _written(self, name: str, size: int, last: bool = False) -> _Channels:
        group = self._new(size)
        group.writers.append(name)
        return _Channels(group, 1, last)

    def _new(self, size: int, fixed: bool = False) -> Group:
        self.made.append(Group(size, fixed))
        return self.made[-1]


@torch.no_grad()
def _select(model: nn.Module, keep: Mapping[Group, Tensor]) -> nn.Module:
    for group, index in keep.items():
        for name in (*group.writers, *group.passers):
            layer: Any = model.get_submodule(name)
            for key, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
                if tensor.dim():
                    _replace(layer, key, tensor.index_select(0, index.to(tensor.device)))
            for key in ("out_channels", "out_features", "num_features"):
                if hasattr(layer, key):
                    setattr(layer, key, len(index))
            if name in group.passers and isinstance(layer, _CONV):
                layer.in_channels = layer.groups = len(index)
        for name, repeat in group.readers:
            layer = model.get_submodule(name)
            inputs = (index[:, None] * repeat + torch.arange(repeat)).flatten()
            weight = layer.get_parameter("weight")
            _replace(layer, "weight", weight.index_select(1, inputs.to(weight.device)))
            key = "in_features" if isinstance(layer, nn.Linear) else "in_channels"
            setattr(layer, key, len(inputs))
    return model


def _replace(layer: nn.Module, key: str, tensor: Tensor) -> None:
    old = getattr(layer, key)
    if isinstance(old, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
    setattr(layer, key, tensor)


@torch.no_grad()
def _checked(small: nn.Module, model: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
    try:
        with evaluating(small):
            small(*inputs)
    except RuntimeError as error:
        raise ValueError(
            f"{type(model).__name__} has a size written into its forward ({error}); "
            "take it from the tensor's shape"
        ) from error
    return small


def _share(group: Group, sparsity: Mapping[str, float]) -> float:
    return max((sparsity[name] for name in group.writers if name in sparsity), default=0.0)


def _shape(node: fx.Node) -> tuple[int, ...]:
    meta: Any = node.meta.get("tensor_meta")
    return tuple(meta.shape) if hasattr(meta, "shape") else ()
