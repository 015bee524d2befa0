"""The link from a decoder to the described model, whose weights the decoder shares.

Most weights of a `Decoder` are views of the model's weights and follow their changes. The README of
the package lists the weights that are copies. If the original of a copy changes, or a constant of
the model such as the epsilon of a norm, calls of the decoder raise RuntimeError.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: Names of numbers that do not change the function of a model in evaluation mode.
_TRAINING_ONLY = re.compile(r"drop|initializer|coef")


def collect_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model by name, and the router corrections, which are buffers."""
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
        self.fingerprints = {name: _compute_fingerprint(tensors[name]) for name in sorted(copied)}
        self.constants = _collect_constants(model)
        buffers = _collect_fixed_buffers(model, tensors)
        self.buffers = {name: _compute_fingerprint(x) for name, x in buffers.items()}

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A pickled or deep-copied decoder has separate weights and therefore no source.
        return type(None), ()

    def derive_with_copies(self, parameters: Iterable[Tensor] = ()) -> Source:
        """Return the source of a decoder that shares `parameters` and copies all other weights."""
        shared = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        storages = {name: x.untyped_storage().data_ptr() for name, x in self.tensors.items()}
        # Other weights may be shared from the storage of a weight that is known to be copied.
        copied = [n for n, s in storages.items() if n in self.fingerprints or s not in shared]
        return Source(self.model, self.tensors, copied)

    def require_fresh(self) -> None:
        """Raise RuntimeError if weights, modules or constants of the model have changed.

        Weights that the decoder shares may change in place, because the decoder changes with them.
        Hooks, integer attributes and integer buffers, in which models may count calls, are ignored.
        """
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for name in self.modules.keys() | modules.keys():
            if modules.get(name) is not self.modules.get(name):
                raise RuntimeError(
                    f"the module {name} was added, replaced or removed after the model was "
                    "described; describe() the model again"
                )
        current = collect_weights(self.model)
        for name, tensor in self.tensors.items():
            if current.get(name) is not tensor or tensor.data_ptr() != self.storages[name]:
                raise RuntimeError(
                    f"{name} was replaced, moved or converted after the model was described; "
                    "describe() the model again"
                )
        self._require_same_constants()
        for name, before in self.fingerprints.items():
            if not _are_equal(before, _compute_fingerprint(self.tensors[name])):
                raise RuntimeError(
                    f"{name} was changed in place, and the description has a copy of it; "
                    "describe() the model again"
                )

    def _require_same_constants(self) -> None:
        constants = _collect_constants(self.model)
        buffers = _collect_fixed_buffers(self.model, self.tensors)
        changed = []
        for name in self.constants.keys() | constants.keys():
            before, after = self.constants.get(name), constants.get(name)
            # An attribute that is nan does not equal itself.
            if before is not after and before != after:
                changed.append(name)
        changed += self.buffers.keys() ^ buffers.keys()
        for name in self.buffers.keys() & buffers.keys():
            if not _are_equal(self.buffers[name], _compute_fingerprint(buffers[name])):
                changed.append(name)
        if changed:
            raise RuntimeError(
                f"{min(changed)} was changed after the model was described; describe() the model "
                "again"
            )


def _collect_constants(model: nn.Module) -> dict[str, Any]:
    """Return the floats of the configuration and the modules, and replaced `forward` methods."""
    constants = {}
    owners = [("config", getattr(model, "config", None)), *model.named_modules()]
    for path, owner in owners:
        if isinstance(owner, nn.Dropout):
            continue
        for name, value in getattr(owner, "__dict__", {}).items():
            is_constant = type(value) is float and not _TRAINING_ONLY.search(name)
            if is_constant or name == "forward":
                constants[f"{path}.{name}".lstrip(".")] = value
    return constants


def _collect_fixed_buffers(model: nn.Module, weights: Collection[str]) -> dict[str, Tensor]:
    """Return the floating-point buffers that are not weights and that no call changes."""
    buffers = {}
    for path, module in model.named_modules():
        # Dynamic and LongRoPE scaling set the frequencies of each text, depending on its length.
        kinds = str(vars(module).get("rope_type", ""))
        if not module._buffers or "dynamic" in kinds or "longrope" in kinds:
            continue
        for name, buffer in module.named_buffers(path, recurse=False):
            if buffer.is_floating_point() and name not in weights:
                buffers[name] = buffer
    return buffers


def _are_equal(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> bool:
    """Return True if two fingerprints are equal, also in dtype and device."""
    if len(before) != len(after):
        return False
    return all(
        old.dtype == new.dtype and old.device == new.device and torch.equal(old, new)
        for old, new in zip(before, after, strict=True)
    )


def _compute_fingerprint(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the bits of a vector, or exact sums of the bits along two dimensions of a matrix."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().view(integers[tensor.element_size()])
    return (bits.clone(),) if bits.ndim < 2 else (bits.sum(0), bits.sum(-1))
