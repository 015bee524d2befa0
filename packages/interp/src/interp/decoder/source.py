"""The link from a description to the model whose weights it shares.

Most weights of a `Decoder` are views of the model's weights and follow their changes. Others are
copies: weights with a constant folded in (the norms and embedding of Gemma, Granite's multipliers),
and queries, keys and values that the checkpoint interleaves (GPT-NeoX). If the original of a copy
changes, an error is raised.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model, and the corrections of routers, which are buffers."""
    weights: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            weights[name] = buffer
    return weights


class Source:
    """The weights and modules of a described model, as they were when it was described."""

    def __init__(
        self, model: nn.Module, tensors: Mapping[str, Tensor], copied: Collection[str]
    ) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.tensors = dict(tensors)
        self.storages = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self.fingerprints = {name: _fingerprint(tensors[name]) for name in sorted(copied)}

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A pickled or deep-copied description has separate weights and therefore no source.
        return type(None), ()

    def all_copied(self) -> Source:
        """Return the source of a description whose weights are all copies."""
        self.require_fresh()
        return Source(self.model, self.tensors, self.tensors)

    def require_fresh(self) -> None:
        """Raise RuntimeError if weights or modules of the model have changed.

        Changes of weights that the description does not copy are changes of the description too.
        """
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for name in self.modules.keys() | modules.keys():
            if modules.get(name) is not self.modules.get(name):
                raise RuntimeError(
                    f"the module {name} was added, replaced or removed after the model was "
                    "described; describe() the model again"
                )
        current = weights_of(self.model)
        for name, tensor in self.tensors.items():
            if current.get(name) is not tensor or tensor.data_ptr() != self.storages[name]:
                raise RuntimeError(
                    f"{name} was replaced, moved or converted after the model was described; "
                    "describe() the model again"
                )
        for name, before in self.fingerprints.items():
            after = _fingerprint(self.tensors[name])
            if any(not torch.equal(old, new) for old, new in zip(before, after, strict=True)):
                raise RuntimeError(
                    f"{name} was changed in place, and the description has a copy of it; "
                    "describe() the model again"
                )


def _fingerprint(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the bits of a vector, or exact sums of the bits along two dimensions of a matrix."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().view(integers[tensor.element_size()])
    return (bits.clone(),) if bits.ndim < 2 else (bits.sum(0), bits.sum(-1))
