"""Which parameters are averaged, and a look, cheap enough for every step, at whether they changed.

Models change after they are wrapped: layers are unfrozen, `load_state_dict(assign=True)` puts new
parameters in the place of old ones, heads are added, `half()` changes what a parameter holds. None
of that passes by the wrapper, so it looks: at identities and three attributes, at C's speed.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
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
        self._seen = self._look()
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
        now = self._look()
        if now == self._seen:
            return False
        if not all(isinstance(p, nn.Parameter) for p in now[0]):
            return False  # torch.func.functional_call puts tensors there, for one call
        known = {id(p): p for p in chain(self.dense.values(), self.sparse.values())}
        kinds_before = dict(zip(map(id, self._seen[0]), self._seen[2], strict=True))
        owned = {id(p) for p in now[0]}
        grown = any(
            parameter.requires_grad and name not in self._ignored and id(parameter) not in known
            for name, parameter in self._module.named_parameters()
        )
        kinds = zip(map(id, now[0]), now[2], strict=True)
        other_kind = any(i in known and kinds_before.get(i) != kind for i, kind in kinds)
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

    def _look(self) -> tuple[_Identities, list[bool], list[object], _Identities]:
        # Keeping the tensors keeps their ids from being given to others.
        owned = _Identities(p for d in self._owned for p in d.values() if p is not None)
        children = _Identities(chain.from_iterable(d.values() for d in self._children))
        kinds: list[object] = [(p.dtype, p.device) for p in owned]
        return owned, [p.requires_grad for p in owned], kinds, children


class _Identities(list[Any]):
    """A list that equals another where it holds the very same objects."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and list(map(id, self)) == list(map(id, other))
