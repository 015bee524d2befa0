"""Constants that a model applies in addition to its weights, such as a scale of the embedding.

`Decoder` has no modules for constants, so they are folded into the weights. Scaled and shifted
weights are copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interp.decoder.names import assign_roles, is_norm_role

#: OPT's position table has two rows before position 0, for padding.
_OPT_OFFSET = 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Constants:
    """Constants that are folded into the weights of a `Decoder`."""

    #: An offset that is added to the gains of norms (Gemma).
    gain_offset: float = 0.0
    #: The scale of the embedding (Gemma, Granite).
    embed_scale: Tensor | None = None
    #: The scale of the outputs that are added to the stream (Granite).
    residual_scale: float = 1.0
    #: The scale of the logits (Cohere, Granite).
    logit_scale: float = 1.0
    #: The number of rows of the position table before position 0 (OPT).
    skipped_positions: int = 0

    def fold_into(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint or model with the constants folded in.

        If the embedding or the logits are scaled, a tied unembedding becomes a separate tensor.
        """
        roles = assign_roles(tensors)
        folded = dict(tensors)
        for name, role in roles.items():
            folded[name] = self._fold(role, tensors[name])
        is_scaled = self.embed_scale is not None or self.logit_scale != 1
        if is_scaled and "unembed.weight" not in roles.values():
            embed = next(name for name, role in roles.items() if role == "embed.weight")
            folded["lm_head.weight"] = tensors[embed] * self.logit_scale
        return folded

    def _fold(self, role: str, tensor: Tensor) -> Tensor:
        if self.gain_offset and is_norm_role(role):
            return tensor + self.gain_offset
        if self.embed_scale is not None and role == "embed.weight":
            return tensor * self.embed_scale.to(tensor)
        if self.residual_scale != 1 and (".attention.o." in role or ".down." in role):
            return tensor * self.residual_scale
        if self.logit_scale != 1 and role.startswith("unembed."):
            return tensor * self.logit_scale
        if self.skipped_positions and role == "position.weight":
            return tensor[self.skipped_positions :]
        return tensor


def build_constants(model: nn.Module | None, config: Mapping[str, Any]) -> Constants:
    """Return the constants of a model, or, if it is None, of a checkpoint with `config`."""
    name = str(config.get("model_type"))
    if name.startswith("gemma"):
        scale = torch.tensor(config["hidden_size"] ** 0.5, dtype=torch.float32, device="cpu")
        if model is not None:
            # In half precision, the model scales its embedding by a rounded buffer.
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("embed_scale"):
                    scale = buffer
        return Constants(gain_offset=1.0, embed_scale=scale)
    if name == "granite":
        multiplier = float(config.get("embedding_multiplier", 1.0))
        return Constants(
            embed_scale=torch.tensor(multiplier, dtype=torch.float32, device="cpu"),
            residual_scale=float(config.get("residual_multiplier", 1.0)),
            logit_scale=1 / float(config.get("logits_scaling", 1.0)),
        )
    if name in ("cohere", "cohere2"):
        return Constants(logit_scale=float(config.get("logit_scale", 0.0625)))
    if name == "opt":
        return Constants(skipped_positions=_OPT_OFFSET)
    return Constants()
