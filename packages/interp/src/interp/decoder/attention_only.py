"""The attention-only transformer of Elhage et al. 2021, without MLPs and norms.

Learned positions may be added to the inputs of queries and keys only. The stream then contains
tokens only, and induction heads form in fewer steps.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from interp.decoder.decoder import Decoder
from interp.decoder.modules.settings import Settings
from interp.decoder.rotary import Rotary

Positions = Literal["stream", "attention"]


class AttentionOnly(Decoder):
    """A trainable transformer of attention layers only.

    It maps tokens (batch, seq) to logits (batch, seq, vocabulary), with `seq` at most `context`.

    `context` is the number of learned positions, and `heads` the number of heads per layer. The
    size of queries, keys and values, `d_head`, is `d_model / heads` by default. `scale` multiplies
    the scores, by default by 1 / sqrt(d_head). `positions="stream"` adds the positions to the
    stream, and "attention" adds them to the inputs of queries and keys only.

    Raises ValueError for unknown `positions`, and if `heads` does not divide `d_model` and `d_head`
    is not passed.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        context: int,
        d_model: int,
        layers: int,
        heads: int,
        d_head: int | None = None,
        positions: Positions = "stream",
        scale: float | None = None,
    ) -> None:
        if positions not in ("stream", "attention"):
            raise ValueError(f"expected positions 'stream' or 'attention', got {positions!r}")
        if d_head is None and d_model % heads:
            raise ValueError(f"d_model {d_model} is not a multiple of {heads} heads; pass d_head=")
        d_head = d_head or d_model // heads
        shapes = {"embed": (vocabulary, d_model), "position": (context, d_model)}
        for i in range(layers):
            shapes |= {f"blocks.{i}.attention.{part}": (heads * d_head, d_model) for part in "qkv"}
            shapes[f"blocks.{i}.attention.o"] = (d_model, heads * d_head)
        shapes["unembed"] = (vocabulary, d_model)
        settings = Settings(
            heads=heads,
            d_head=d_head,
            scale=d_head**-0.5 if scale is None else scale,
            rotary=(Rotary(),) * layers,
            windows=(None,) * layers,
            positions_in_attention=positions == "attention",
        )
        super().__init__(
            {f"{k}.weight": torch.empty(shape) for k, shape in shapes.items()}, settings
        )
        for parameter in self.train().requires_grad_(True).parameters():
            nn.init.normal_(parameter, std=0.5 * d_model**-0.5)
