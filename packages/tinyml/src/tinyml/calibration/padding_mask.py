"""Removal of padding from the inputs of a layer, by the attention mask of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn


def _find_padding_mask(model: nn.Module, batch: Any) -> Tensor | None:
    """Return a mask (batch, seq) that is True for tokens that are not padding, or None.

    Masks without two dimensions are ignored. Raise `ValueError` if a mask has other values than 0
    and 1, or only zeros. Also raise it for padding of an encoder-decoder model, whose layers
    receive the tokens of two sequences.
    """
    if not isinstance(batch, Mapping):
        return None
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = batch.get(name)
        if mask is None or mask.dim() != 2:
            continue
        if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any()):
            raise ValueError(
                f"expected {name} to be 1 at tokens and 0 at padding, got values from "
                f"{float(mask.min()):.3g} to {float(mask.max()):.3g}; convert an additive mask "
                "with (mask == 0).long()"
            )
        if not is_encoder_decoder:
            return cast(Tensor, mask.bool())
        if not bool(mask.all()):
            raise ValueError(
                f"expected batches without padding for an encoder-decoder model, got {name} with "
                "zeros; calibrate with sequences of one length"
            )
    return None


def remove_padding(inputs: Tensor, model: nn.Module, batch: Any) -> Tensor:
    """Return inputs (..., width) as (tokens, width), without padding if the batch's mask fits.

    Raise `ValueError` if the tokens may be in two orders, by sequence or by position.
    """
    flat = inputs.reshape(-1, inputs.shape[-1])
    mask = _find_padding_mask(model, batch)
    if mask is None:
        return flat
    # Blocks of experts join the sequences before their layers.
    is_joined = inputs.shape[:-1] == (mask.numel(),)
    # Layers with batch_first=False receive (seq, batch, width).
    fitting = [m.flatten() for m in (mask, mask.t()) if is_joined or inputs.shape[:-1] == m.shape]
    if not fitting:
        return flat
    is_sequence_first = not all(getattr(m, "batch_first", True) for m in model.modules())
    if is_sequence_first and not torch.equal(fitting[0], fitting[-1]):
        raise ValueError(
            "expected inputs whose axes show the order of their tokens, because the model has "
            f"layers with batch_first=False, got inputs of shape {tuple(inputs.shape)} for a mask "
            f"of shape {tuple(mask.shape)} with padding; pass batches without padding, or with "
            "another number of sequences than their length"
        )
    return flat[fitting[0]]
