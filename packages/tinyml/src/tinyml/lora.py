"""Low-rank adapters: y = W x + (alpha / r) B (A x), with W frozen.

Notable (Hu et al., "LoRA", 2021; names and initialisation are those of the peft library):
- A (r, in) starts uniform, B (out, r) starts at zero, so the function starts unchanged. Both zero
  is a point where both gradients vanish; neither zero would change the function from the start;
- `merge` keeps the merged-into weight, so `unmerge` gives back every bit: adding and then
  subtracting a product does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized


class LoRA(nn.Module):
    """A frozen linear layer or embedding with a trainable update of rank `rank` beside it."""

    def __init__(
        self,
        base: nn.Linear | nn.Embedding,
        rank: int = 8,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not isinstance(base, nn.Linear | nn.Embedding):
            raise TypeError(f"LoRA adapts nn.Linear and nn.Embedding, not {type(base).__name__}")
        outputs, inputs = base.weight.shape
        if isinstance(base, nn.Embedding):
            inputs, outputs = outputs, inputs
        if not 1 <= rank <= min(inputs, outputs):
            raise ValueError(
                f"rank is {rank}; between 1 and {min(inputs, outputs)}, the smaller side of W"
            )
        self.base = base.requires_grad_(False)
        self.rank = rank
        self.scaling = (rank if alpha is None else alpha) / rank
        self.dropout = nn.Dropout(dropout)
        self.lora_A = nn.Parameter(base.weight.new_empty(rank, inputs))
        self.lora_B = nn.Parameter(base.weight.new_zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        if isinstance(base, nn.Embedding):
            # One column of A is read at a time: A starts at zero and B does not.
            nn.init.zeros_(self.lora_A)
            nn.init.normal_(self.lora_B)
        self._before: Tensor | None = None

    @property
    def merged(self) -> bool:
        """Whether the update is in the base weight."""
        return self._before is not None

    @property
    def update(self) -> Tensor:
        """The update of the base weight, in its shape."""
        delta = self.scaling * (self.lora_B @ self.lora_A)
        return delta.t() if isinstance(self.base, nn.Embedding) else delta

    @property
    def weight(self) -> Tensor:
        """The weight that the layer acts with."""
        return self.base.weight if self.merged else self.base.weight + self.update

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) -> (..., out), or indices -> (..., out) for an embedding."""
        outputs: Tensor = self.base(inputs)
        if self.merged:
            return outputs
        if isinstance(self.base, nn.Embedding):
            rows = F.embedding(inputs, self.lora_A.t(), self.base.padding_idx)
            return outputs + self.scaling * (rows @ self.lora_B.t())
        low = F.linear(self.dropout(inputs), self.lora_A)
        return outputs + self.scaling * F.linear(low, self.lora_B)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the update to the base weight; nothing if it is there."""
        if is_parametrized(self.base, "weight"):
            raise RuntimeError(
                "the base weight is compressed and cannot take the update; leave the adapter "
                "beside it, or compress after merging"
            )
        if not self.merged:
            before = self.base.weight.detach().clone()
            self.base.weight += self.update
            self._before = before

    @torch.no_grad()
    def unmerge(self) -> None:
        """Give the base weight back, bit for bit; nothing if it was not merged."""
        if self._before is not None:
            self.base.weight.copy_(self._before)
            self._before = None


def add_lora(
    model: nn.Module,
    rank: int = 8,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Iterable[str] | None = None,
    kinds: Sequence[type[nn.Module]] = (nn.Linear,),
) -> nn.Module:
    """Freeze `model` and put an adapter at every layer of `kinds`, in place; return the model.

    `targets` keeps those layers whose name is one of them or ends with one after a dot, as
    "q_proj" does for "blocks.0.q_proj".
    """
    wanted = None if targets is None else tuple(targets)
    model.requires_grad_(False)
    found = False
    for parent_name, parent in list(model.named_modules()):
        if isinstance(parent, LoRA):
            raise ValueError(f"{parent_name or 'the model'} has an adapter already; merge it first")
        for name, child in list(parent.named_children()):
            full = f"{parent_name}.{name}" if parent_name else name
            if isinstance(child, tuple(kinds)) and _is_target(full, wanted):
                setattr(parent, name, LoRA(child, rank, alpha=alpha, dropout=dropout))  # type: ignore[arg-type]
                found = True
    if not found and wanted is None:
        named = [k.__name__ for k in kinds]
        raise ValueError(f"{type(model).__name__} has no layer of {named} to adapt")
    if not found:
        raise ValueError(f"no layer of {[k.__name__ for k in kinds]} has a name like {wanted}")
    return model


def merge(model: nn.Module) -> nn.Module:
    """Merge every adapter of `model`, in place; it then runs at the speed of the base."""
    for adapter in _adapters(model).values():
        adapter.merge()
    return model


def unmerge(model: nn.Module) -> nn.Module:
    """Undo `merge`, bit for bit."""
    for adapter in _adapters(model).values():
        adapter.unmerge()
    return model


def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The adapters alone: what there is to save of a fine-tuned model."""
    return {
        f"{name}.{key}" if name else key: getattr(adapter, key).detach()
        for name, adapter in _adapters(model).items()
        for key in ("lora_A", "lora_B")
    }


def _adapters(model: nn.Module) -> dict[str, LoRA]:
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRA)}
    if not found:
        raise ValueError("the model has no adapter; add_lora(model) puts them in")
    return found


def _is_target(name: str, targets: tuple[str, ...] | None) -> bool:
    return targets is None or any(name == t or name.endswith(f".{t}") for t in targets)
