"""Compressed weights: parametrizations that compute a dense weight from its stored form."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

#: Packages whose `from_pretrained` fills missing weights with random numbers.
_RANDOM_IF_MISSING = ("transformers", "diffusers")


def is_called_by_save_pretrained() -> bool:
    """Return True if `save_pretrained` of transformers or diffusers is on the call stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_name == "save_pretrained" and package in _RANDOM_IF_MISSING:
            return True
        frame = frame.f_back
    return False


def refuse_save_pretrained(*_: Any) -> None:
    """Raise `ValueError` if `save_pretrained` requests the state dict.

    The tensors in it do not have the names of the uncompressed model. `from_pretrained` would build
    that model, ignore the unknown names and fill the missing weights with random numbers.
    """
    if is_called_by_save_pretrained():
        raise ValueError(
            "expected an uncompressed model without adapters for save_pretrained, got adapters or "
            "compressed weights, which from_pretrained would replace with random weights; call "
            "tinyml.merge_and_unload(model) first, save the adapters with tinyml.save_lora, or "
            "save a compressed model with tinyml.save"
        )


class CompressedWeight(nn.Module):
    """A parametrization that stores a compressed weight and computes the dense weight.

    `forward` receives the trainable tensor. Code that reads `layer.weight` receives the dense
    weight, so any layer with a parameter `weight` can be compressed (see
    `torch.nn.utils.parametrize`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_registering = False
        cast(Any, self).register_state_dict_pre_hook(refuse_save_pretrained)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the trainable tensor when the parametrization is registered.

        torch also calls this method if a tensor is assigned to the layer's weight. Raise
        `RuntimeError` then, because the assignment would not change the codes.
        """
        if not self._is_registering:
            raise RuntimeError(
                "expected no assignment to a compressed weight, whose codes would not change; "
                "compress the layer after the assignment"
            )
        return self.make_trainable_tensor(weight)

    def make_trainable_tensor(self, weight: Tensor) -> Tensor:
        """Return the tensor to train in place of `weight`; it is empty if nothing is trained."""
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    def format(self) -> list[int]:
        """Return the integers that are needed to interpret the stored codes."""
        raise NotImplementedError

    def get_extra_state(self) -> Tensor:
        """Return the format, so that a state dict contains everything needed to read the codes."""
        return torch.tensor(self.format(), dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Raise `RuntimeError` if the format in a loaded state dict differs from this format."""
        if state.tolist() != self.format():
            raise RuntimeError(
                f"expected a state dict of a weight with the format {self.format()}, got "
                f"{state.tolist()}; compress the model in the same way as the saved one"
            )


def compress_layer(layer: nn.Module, compressed: CompressedWeight) -> None:
    """Make `compressed` compute the weight of a dense layer, in place.

    Raise `ValueError` if the layer has a parametrization. torch generates a class for a
    parametrized layer. Copies of the layer share this class, so a second parametrization would
    change the original layer as well.
    """
    if parametrize.is_parametrized(layer):
        names = list(cast(Any, layer).parametrizations)
        raise ValueError(
            f"expected a layer without parametrizations, got a {type(layer).__name__} with one of "
            f"{names}; remove it, or exclude the layer with protect"
        )
    compressed._is_registering = True
    parametrize.register_parametrization(layer, "weight", compressed, unsafe=True)
    compressed._is_registering = False
    if isinstance(layer, nn.Embedding):
        layer.sparse = False  # the trainable tensor has a dense gradient


def get_compressed_weight(layer: nn.Module) -> CompressedWeight | None:
    """Return the compressed weight of a layer, or None if it does not have one."""
    if "parametrizations" not in layer._modules or not parametrize.is_parametrized(layer, "weight"):
        return None
    last = cast(Any, layer).parametrizations.weight[-1]
    return last if isinstance(last, CompressedWeight) else None
