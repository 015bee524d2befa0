"""Integer attributes of modules that a model's code reads as tensor sizes.

After units are removed, code such as `x.view(b, n, self.num_heads, -1)` needs another number of
heads. An attribute that merely equals the old number, such as `layer_idx` or a window, must not
change. Therefore every integer attribute is replaced by a `_Tagged` integer while the model is
exported. A torch function mode records which sizes of tensor operations are tagged integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

#: The key of the recorded sizes in the metadata of a node.
_KEY = "tinyml_sizes"
_SHAPE_FUNCTIONS = ("view", "reshape", "expand")


@dataclass(frozen=True)
class Source:
    """The attribute from which an integer was read: its module and its name."""

    module: str
    name: str
    #: True if the integer is the result of arithmetic with the attribute.
    derived: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}".lstrip(".")


class SizeReads(TorchFunctionMode):
    """A mode that annotates the nodes of the graph whose sizes come from attributes."""

    def __init__(self) -> None:
        super().__init__()
        #: A use other than as a size, for each attribute that has one.
        self.other_uses: dict[Source, str] = {}
        #: Attributes passed to tensor operations, compared by order (`<`, `<=`, `>`, `>=`), divided
        #: with `/` or converted to float, as (module, name). Uses such as `range(self.depth)` are
        #: not recorded.
        self.read: set[tuple[str, str]] = set()

    def tag(self, model: nn.Module) -> None:
        """Replace the integer attributes of all modules by tagged integers, in place."""
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    module.__dict__[name] = _Tagged.from_value(value, [Source(path, name)], self)

    def record_other_use(self, sources: Iterable[Source], use: str) -> None:
        """Record that these attributes are used other than as sizes, in the operation `use`."""
        for source in sources:
            self.read.add((source.module, source.name))
            self.other_uses.setdefault(Source(source.module, source.name), use)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _: Any,
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(options or {})
        tagged = _list_tagged([arguments, keywords])
        if not tagged:
            return function(*arguments, **keywords)
        untagged_arguments, untagged_keywords = tree_map(_untag, (arguments, keywords))
        name = getattr(function, "__name__", str(function))
        sizes = _get_sizes_by_key(name, arguments)
        for integer in tagged:
            self.read |= {(source.module, source.name) for source in integer.sources}
            if not any(integer is size for size in sizes.values()):
                self.record_other_use(integer.sources, name)
        with annotate({_KEY: {i: s.sources for i, s in sizes.items() if isinstance(s, _Tagged)}}):
            return function(*untagged_arguments, **untagged_keywords)


def get_size_sources(node: fx.Node) -> dict[int, tuple[Source, ...]]:
    """Return the attributes from which the sizes of a node come, by dimension of its result.

    For a split, the keys are the positions of the pieces, or -1 if all pieces have one size.
    """
    custom = node.meta.get("custom") or {}
    sources: dict[int, tuple[Source, ...]] = custom.get(_KEY, {})
    return sources


def _get_sizes_by_key(name: str, arguments: tuple[Any, ...]) -> dict[int, Any]:
    """Return the sizes passed to the operation `name`, with the keys of `get_size_sources`."""
    if len(arguments) < 2 or not isinstance(arguments[0], Tensor):
        return {}
    if name in _SHAPE_FUNCTIONS:
        sizes = arguments[1] if isinstance(arguments[1], tuple | list) else arguments[1:]
        return dict(enumerate(sizes))
    if name == "unflatten" and len(arguments) == 3:
        return dict(enumerate(arguments[2], int(arguments[1]) % arguments[0].dim()))
    if name in ("split", "split_with_sizes"):
        sizes = arguments[1]
        return dict(enumerate(sizes)) if isinstance(sizes, tuple | list) else {-1: sizes}
    return {}


def _list_tagged(value: Any) -> list[_Tagged]:
    """Return the tagged integers in nested containers, including the bounds of slices."""
    parts: list[Any] = []
    for leaf in tree_leaves(value):
        parts += (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
    return [part for part in parts if isinstance(part, _Tagged)]


def _untag(value: Any) -> Any:
    """Return a tagged integer, or a slice of them, with plain integers; and any other value."""
    if isinstance(value, slice):
        return slice(*map(_untag, (value.start, value.stop, value.step)))
    return int(value) if isinstance(value, _Tagged) else value


class _Tagged(int):
    """An integer that records the attributes from which it was computed."""

    sources: tuple[Source, ...]
    reads: SizeReads

    @classmethod
    def from_value(cls, value: int, sources: Iterable[Source], reads: SizeReads) -> _Tagged:
        tagged = cls(value)
        tagged.sources = tuple(dict.fromkeys(sources))
        tagged.reads = reads
        return tagged

    def __deepcopy__(self, _: Any) -> int:
        return self  # a copied model records in the same `SizeReads`


def _make_recording_method(name: str) -> Callable[..., Any]:
    """Return the method `name` of `int` with recording.

    An integer result is tagged with the attributes of its operands. Any other result, such as that
    of a comparison or a true division, is recorded as a use other than as a size.
    """
    operation = getattr(int, name)

    def record_operation(self: _Tagged, *others: Any) -> Any:
        result = operation(int(self), *others)
        if type(result) is not int:
            if result is not NotImplemented:
                self.reads.record_other_use(self.sources, name.strip("_"))
            return result
        sources = [s for o in (self, *others) if isinstance(o, _Tagged) for s in o.sources]
        derived = [Source(source.module, source.name, derived=True) for source in sources]
        return _Tagged.from_value(result, derived, self.reads)

    return record_operation


# `==` is not recorded, because code compares sizes for equality only to check them.
_RECORDED = (
    "add radd sub rsub mul rmul floordiv rfloordiv mod rmod neg pow rpow "
    "lt le gt ge truediv rtruediv float"
)
for _name in _RECORDED.split():
    setattr(_Tagged, f"__{_name}__", _make_recording_method(f"__{_name}__"))
