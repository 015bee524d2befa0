"""Which parameters are averaged, and a look, cheap enough for every step, at whether they changed.

Models change after they are wrapped: layers are unfrozen, `load_state_dict(assign=True)` puts new
parameters in the place of old ones, heads are added, `half()` changes what a parameter holds. None
of that passes by the wrapper, so it looks: at identities and three attributes, at C's speed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn


class Inventory:
    """The parameters of `module` that are trained, by name, without those in `ignored`."""

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module, self._ignored = module, ignored
        self.take()

    def take(self) -> None:
        """Write down what is there now."""
        modules = list(self._module.modules())
        self._children = [module._modules for module in modules]
        self._owned = [module._parameters for module in modules]
        self._buffers = [module._buffers for module in modules]
        self._seen = self._found()
        # Sparse gradients cannot lie in a flat buffer: they are sent by themselves.
        sparse = {
            layer.weight
            for layer in modules
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        }
        self.trained = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and name not in self._ignored
        }
        self.dense = {name: p for name, p in self.trained.items() if p not in sparse}
        self.sparse = {name: p for name, p in self.trained.items() if p in sparse}

    def changed(self) -> bool:
        """Whether other parameters are to be averaged than when they were last written down.

        Parameters that were frozen since stay: they count as unused, on every rank, so that a
        training loop may freeze and unfreeze them at every step at no cost.
        """
        now = self._found()
        if self._seen.is_still(now):
            return False
        if not all(isinstance(p, nn.Parameter) for p in now.owned):
            return False  # torch.func.functional_call puts tensors there, for one call
        known = {id(p): p for p in chain(self.dense.values(), self.sparse.values())}
        seen = self._seen
        kinds_before = {
            id(p): kind[1:] for p, kind in zip(seen.owned, seen.attributes, strict=True)
        }
        owned = {id(p) for p in now.owned}
        grown = any(
            parameter.requires_grad and name not in self._ignored and id(parameter) not in known
            for name, parameter in self._module.named_parameters()
        )
        other_kind = any(
            id(p) in known and kinds_before.get(id(p)) != kind[1:]
            for p, kind in zip(now.owned, now.attributes, strict=True)
        )
        if grown or other_kind or not known.keys() <= owned:
            return True
        self._seen = now
        return False

    @property
    def all(self) -> list[nn.Parameter]:
        """What is averaged."""
        return [*self.dense.values(), *self.sparse.values()]

    def named_buffers(self) -> dict[str, Tensor]:
        """The buffers to keep equal: looked up anew, because modules replace them."""
        if not any(self._buffers):
            return {}
        named = self._module.named_buffers()
        return {name: b for name, b in named if name not in self._ignored and b.numel()}

    def _found(self) -> _Seen:
        # Keeping the tensors keeps their ids from being given to others.
        owned = [p for p in chain.from_iterable(map(dict.values, self._owned)) if p is not None]
        children = list(chain.from_iterable(map(dict.values, self._children)))
        return _Seen(owned, list(map(_attributes, owned)), children)


_attributes = attrgetter("requires_grad", "dtype", "device")


@dataclass(frozen=True)
class _Seen:
    """What was there: parameters, their attributes, and the modules that hold them."""

    owned: list[Any]
    attributes: list[Any]
    children: list[Any]

    def is_still(self, now: _Seen) -> bool:
        """Whether `now` holds the very same objects, as they were."""
        return (
            _same(self.owned, now.owned)
            and self.attributes == now.attributes
            and _same(self.children, now.children)
        )


def _same(these: list[Any], those: list[Any]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))
