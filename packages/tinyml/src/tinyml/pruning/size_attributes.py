"""Integer attributes of modules that a model's code reads as tensor sizes.

After units are removed, code such as `x.view(b, n, self.num_heads, -1)` needs another number of
heads. An attribute that merely equals the old number, such as `layer_idx` or a window, must not
change. Therefore every integer attribute is replaced by a `_Tagged` integer while the model is
exported. A torch function mode records the sizes of operations that came from these integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

_KEY = "tinyml_sizes"
_SHAPED = ("view", "reshape", "expand")


@dataclass(frozen=True)
class Source:
    """The attribute that an integer was read from."""

    module: str
    name: str
    #: True if the integer is the result of arithmetic with the attribute.
    derived: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}".lstrip(".")


class SizeReads(TorchFunctionMode):
    """A mode that annotates the nodes of the graph whose sizes come from attributes.

    `other_uses` describes, for each attribute, a use that is not a size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.other_uses: dict[Source, str] = {}
        #: All attributes that the code reads, as (module, name).
        self.read: set[tuple[str, str]] = set()

    def tag(self, model: nn.Module) -> None:
        """Replace the integer attributes of `model`, which is a copy made for the export."""
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    module.__dict__[name] = _Tagged.of(value, [Source(path, name)], self)

    def note_other_use(self, sources: Iterable[Source], use: str) -> None:
        """Record that these attributes are used other than as sizes."""
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
        tagged = list(_tagged_in([arguments, options or {}]))
        plain, named = _untagged(arguments), _untagged(dict(options or {}))
        if not tagged:
            return function(*plain, **named)
        name = getattr(function, "__name__", str(function))
        sizes = _sizes(name, arguments, options or {})
        for integer in tagged:
            self.read |= {(source.module, source.name) for source in integer.sources}
            if not any(integer is size for size in sizes.values()):
                self.note_other_use(integer.sources, name)
        with annotate({_KEY: {i: s.sources for i, s in sizes.items() if isinstance(s, _Tagged)}}):
            return function(*plain, **named)


def size_sources(node: fx.Node) -> dict[int, tuple[Source, ...]]:
    """Return the attributes behind the sizes of a node, by dimension of its result.

    For a split the keys are the positions of the pieces; -1 stands for all of them.
    """
    custom = node.meta.get("custom") or {}
    sizes_by_dimension: dict[int, tuple[Source, ...]] = custom.get(_KEY, {})
    return sizes_by_dimension


def _sizes(name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> dict[int, Any]:
    """Return the sizes passed to an operation such as `view`, by the keys of `size_sources`."""
    if len(arguments) < 2 or not isinstance(arguments[0], Tensor):
        return {}
    if name in _SHAPED:
        sizes = arguments[1] if isinstance(arguments[1], tuple | list) else arguments[1:]
        return dict(enumerate(sizes))
    if name == "unflatten" and len(arguments) == 3:
        return dict(enumerate(arguments[2], int(arguments[1]) % arguments[0].dim()))
    if name in ("split", "split_with_sizes"):
        sizes = arguments[1]
        return dict(enumerate(sizes)) if isinstance(sizes, tuple | list) else {-1: sizes}
    return {}


def _tagged_in(value: Any) -> Iterable[_Tagged]:
    if isinstance(value, _Tagged):
        yield value
    for part in _parts(value):
        yield from _tagged_in(part)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, slice):
        return (value.start, value.stop, value.step)
    return ()


def _untagged(value: Any) -> Any:
    """Return `value` with plain integers, or `value` itself if it contains no tagged integer."""
    if isinstance(value, _Tagged):
        return int(value)
    if not any(True for _ in _tagged_in(value)):
        return value
    if isinstance(value, slice):
        return slice(*map(_untagged, _parts(value)))
    if isinstance(value, dict):
        return {key: _untagged(part) for key, part in value.items()}
    parts = [_untagged(part) for part in value]
    return parts if isinstance(value, list) else tuple(parts)


class _Tagged(int):
    """An integer that records the attributes from which it was computed."""

    sources: tuple[Source, ...]
    reads: SizeReads

    @classmethod
    def of(cls, value: int, sources: Iterable[Source], reads: SizeReads) -> _Tagged:
        tagged = cls(value)
        tagged.sources = tuple(dict.fromkeys(sources))
        tagged.reads = reads
        return tagged

    def __deepcopy__(self, _: Any) -> int:
        return self


def _recording(name: str) -> Callable[..., Any]:
    """Return a method that records how an integer is used.

    An integer result records the attributes of its operands. Any other result, such as that of a
    comparison or a division, is recorded as a use that is not a size.
    """
    operation = getattr(int, name)

    def method(self: _Tagged, *others: Any) -> Any:
        result = operation(int(self), *others)
        if type(result) is not int:
            if result is not NotImplemented:
                self.reads.note_other_use(self.sources, name.strip("_"))
            return result
        sources = [s for o in (self, *others) if isinstance(o, _Tagged) for s in o.sources]
        derived = [Source(source.module, source.name, derived=True) for source in sources]
        return _Tagged.of(result, derived, self.reads)

    return method


# `==` is not among them, because code compares sizes only to check them.
_RECORDED = (
    "add radd sub rsub mul rmul floordiv rfloordiv mod rmod neg pow rpow "
    "lt le gt ge truediv rtruediv float"
)
for _name in _RECORDED.split():
    setattr(_Tagged, f"__{_name}__", _recording(f"__{_name}__"))
