"""Direct logit attribution by neuron."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder
from interp.decoder.modules.mlp import DecoderMLP
from interp.lens import probe_norm, read_direction
from interp.prompts import Prompt, forward
from interp.tap import record


@torch.no_grad()
def neuron_attribution(
    model: Decoder, prompt: Prompt, targets: Tensor, *, against: Tensor | None = None
) -> list[Tensor]:
    """Return each neuron's term of the logit of `targets`, (batch, seq, neurons) per layer.

    `targets` and `against` are the same as in `attribution`. The terms of a layer and the term of
    its bias sum to the MLP's term in `attribution`. Raises ValueError for blocks with a mixture of
    experts or without an MLP, and if a norm follows the MLP.
    """
    for i, block in enumerate(model.layers):
        if not isinstance(block.mlp, DecoderMLP) or not isinstance(block.mlp_out, nn.Identity):
            raise ValueError(
                f"the output of the MLP in layer {i} is not a sum over neurons (experts, a norm, "
                "or no MLP); use attribution() with its whole output"
            )
    with record(model, "norm:input", "blocks.*.mlp.down:input") as recorded:
        forward(model, prompt)
    stream = recorded["norm:input"]
    gain, _, is_centered = probe_norm(model.norm, stream)
    direction = gain * read_direction(model.unembed.weight, stream, targets, against)
    if is_centered:
        direction = direction - direction.mean(-1, keepdim=True)
    terms = []
    for i, block in enumerate(model.layers):
        assert isinstance(block.mlp, DecoderMLP)
        terms.append(recorded[f"blocks.{i}.mlp.down:input"] * (direction @ block.mlp.down.weight))
    return terms
