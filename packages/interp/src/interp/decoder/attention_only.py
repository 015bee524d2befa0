"""Attention with every intermediate value at a named module, and the attention-only transformer.

Notable: queries, keys and values are separate `nn.Linear`s, so that circuits are read off the
weights; the attention pattern passes through the module `pattern` and each head's result arrives
at `o:input`, so that `record` and `patch` reach them; positions may go into queries and keys
alone ("attention"), which leaves the residual stream to the tokens and makes induction heads form
in fewer steps.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

from interp.circuits.heads import attention_pattern
from interp.circuits.low_rank import LowRank, ov_circuit, qk_circuit

Positions = Literal["stream", "attention"]


class Attention(nn.Module):
    """Causal multi-head attention on (batch, seq, d_model); tap points `pattern`, `o:input`."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_head: int,
        *,
        bias: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.q = nn.Linear(d_model, heads * d_head, bias=bias)
        self.k = nn.Linear(d_model, heads * d_head, bias=bias)
        self.v = nn.Linear(d_model, heads * d_head, bias=bias)
        self.pattern = nn.Identity()
        self.o = nn.Linear(heads * d_head, d_model, bias=bias)

    def forward(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """Attend; `position` (seq, d_model) is what queries and keys alone see on top of `x`."""
        located = x if position is None else x + position
        q, k, v = (
            cast(Tensor, project(value)).reshape(*x.shape[:-1], self.heads, -1).transpose(1, 2)
            for project, value in ((self.q, located), (self.k, located), (self.v, x))
        )
        pattern = self.pattern(attention_pattern(q, k, scale=self.scale))
        mixed: Tensor = self.o((pattern @ v).transpose(1, 2).flatten(-2))
        return mixed

    def qk(self) -> LowRank:
        """W_QK of the heads, batch (heads,)."""
        return qk_circuit(self.q.weight, self.k.weight, heads=self.heads)

    def ov(self) -> LowRank:
        """W_OV of the heads, batch (heads,)."""
        return ov_circuit(self.v.weight, self.o.weight, heads=self.heads)


class Block(nn.Module):
    """A layer of attention added to the residual stream."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """Map the stream (batch, seq, d_model) to the stream."""
        out: Tensor = x + self.attention(x, position)
        return out


class AttentionOnly(nn.Module):
    """A transformer of attention layers alone, without norms: tokens (batch, seq) to logits.

    `positions="stream"` adds learned positions to the stream, `"attention"` only to queries and
    keys.
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
        super().__init__()
        if positions not in ("stream", "attention"):
            raise ValueError(f"positions {positions!r} is not one of 'stream', 'attention'")
        if d_head is None and d_model % heads:
            raise ValueError(f"d_model {d_model} is no multiple of {heads} heads; give d_head=")
        d_head = d_head or d_model // heads
        self.positions = positions
        self.embed = nn.Embedding(vocabulary, d_model)
        self.position = nn.Embedding(context, d_model)
        self.blocks = nn.ModuleList(
            Block(Attention(d_model, heads, d_head, scale=scale)) for _ in range(layers)
        )
        self.unembed = nn.Linear(d_model, vocabulary, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5 * d_model**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, seq, vocabulary) of the tokens (batch, seq)."""
        if tokens.shape[-1] > self.position.num_embeddings:
            raise ValueError(
                f"{tokens.shape[-1]} tokens do not fit {self.position.num_embeddings} positions"
            )
        position = self.position(torch.arange(tokens.shape[-1], device=tokens.device))
        x = self.embed(tokens)
        if self.positions == "stream":
            x, position = x + position, None
        for block in self.blocks:
            x = block(x, position)
        logits: Tensor = self.unembed(x)
        return logits

    @property
    def layers(self) -> list[Block]:
        """The blocks under their own type."""
        return cast(list[Block], list(self.blocks))

    def qk(self) -> LowRank:
        """W_QK of every head, batch (layers, heads)."""
        return stacked([block.attention.qk() for block in self.layers])

    def ov(self) -> LowRank:
        """W_OV of every head, batch (layers, heads)."""
        return stacked([block.attention.ov() for block in self.layers])


def stacked(layers: list[LowRank]) -> LowRank:
    """The circuits of all layers as one, batch (layers, heads)."""
    return LowRank(torch.stack([c.a for c in layers]), torch.stack([c.b for c in layers]))
