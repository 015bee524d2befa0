"""Which heads are which: how much attention each head puts where a kind of head would put it.

    previous    on the token before
    duplicate   on earlier occurrences of the current token
    induction   on what followed the earlier occurrences of the current token
    first       on position 0, where heads with nothing to do rest
    current     on the token itself

A score is the mean over the queries that have such a key at all; `chance` is what a head that
spreads its attention evenly over the past would score. Every detector is a mask over (query, key)
made from the tokens once, so all heads of all layers are scored by one contraction, and nothing
that was given is written to.

Olsson et al. 2022, "In-context Learning and Induction Heads".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FoundHead:
    """One head and its score in [0, 1]."""

    kind: str
    layer: int
    head: int
    score: float
    chance: float


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Scores in [0, 1] by kind, each (layers, heads), and the scores of evenly spread attention.

    A kind that no query could show (no token repeats) scores nan.
    """

    scores: Mapping[str, Tensor]
    chance: Mapping[str, float]

    def best(self, kind: str) -> FoundHead:
        """The head that is most of that kind."""
        return self.top(kind, 1)[0]

    def top(self, kind: str, count: int) -> list[FoundHead]:
        """The `count` heads that are most of that kind, best first."""
        if kind not in self.scores:
            raise ValueError(f"kind {kind!r} is not one of {', '.join(self.scores)}")
        scores = self.scores[kind]
        values, indices = scores.flatten().topk(min(count, scores.numel()))
        return [
            FoundHead(kind, i // scores.shape[1], i % scores.shape[1], v, self.chance[kind])
            for v, i in zip(values.tolist(), indices.tolist(), strict=True)
        ]


@torch.no_grad()
def detect_heads(
    patterns: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    tokens: Tensor | None = None,
    *,
    queries: Tensor | slice | None = None,
) -> HeadScores:
    """Score every head from its attention patterns.

    `patterns`: (batch, heads, seq, seq) for each layer, rows summing to 1; `tokens` (batch, seq)
    or (seq,), without which all are taken to differ, so that only the positional kinds have a
    score. `queries` restricts the positions that are averaged over: a slice, or booleans (seq,)
    or (batch, seq).
    """
    layers = list(patterns.values()) if isinstance(patterns, Mapping) else list(patterns)
    if not layers:
        raise ValueError(
            "no attention patterns were given; give (batch, heads, seq, seq) per layer"
        )
    if tokens is None:
        tokens = torch.arange(layers[0].shape[-1], device=layers[0].device)
    tokens = tokens.expand(layers[0].shape[0], -1) if tokens.ndim == 1 else tokens
    _check(layers, tokens)
    batch, length = tokens.shape
    chosen = torch.ones(batch, length, dtype=torch.bool, device=tokens.device)
    if isinstance(queries, slice):
        chosen = torch.zeros_like(chosen)
        chosen[:, queries] = True
    elif queries is not None:
        chosen = queries.to(tokens.device).bool().expand(batch, length)

    # Half precision would lose a mean over thousands of queries.
    dtype = torch.promote_types(layers[0].dtype, torch.float32)
    scores, chance = {}, {}
    evenly = torch.ones(length, length, dtype=dtype, device=tokens.device).tril()
    evenly = evenly / evenly.sum(-1, keepdim=True)
    for kind, mask in targets(tokens).items():
        used = chosen & mask.any(-1)
        # The mean over queries is part of the weights: one contraction a layer.
        weights = (mask & used[..., None]).to(dtype) / used.sum()
        scores[kind] = torch.stack(
            [torch.einsum("bhqk,bqk->h", p.to(dtype), weights.to(p.device)).cpu() for p in layers]
        )
        chance[kind] = float((evenly * weights).sum())
    return HeadScores(scores, chance)


def targets(tokens: Tensor) -> dict[str, Tensor]:
    """The keys that each kind of head looks at: booleans (batch, seq_q, seq_k) by kind."""
    batch, length = tokens.shape
    ones = torch.ones(length, length, dtype=torch.bool, device=tokens.device)
    past = ones.tril(-1)
    same = (tokens[:, :, None] == tokens[:, None, :]) & past
    # Key j is a target if token j - 1 is the query's; j = query itself is one too.
    after = torch.nn.functional.pad(same, (1, 0))[..., :length]
    position_0 = torch.zeros_like(ones)
    position_0[1:, 0] = True
    diagonal = {
        "previous": past & ones.triu(-1),
        "first": position_0,
        "current": ones.tril() & ones.triu(),
    }
    return {
        "previous": diagonal["previous"].expand(batch, -1, -1),
        "duplicate": same,
        "induction": after,
        "first": diagonal["first"].expand(batch, -1, -1),
        "current": diagonal["current"].expand(batch, -1, -1),
    }


def _check(layers: list[Tensor], tokens: Tensor) -> None:
    if tokens.ndim != 2:
        raise ValueError(f"tokens have shape {tuple(tokens.shape)}; give (batch, seq) or (seq,)")
    heads = layers[0].shape[1] if layers[0].ndim == 4 else 0
    expected = (tokens.shape[0], heads, tokens.shape[1], tokens.shape[1])
    for i, pattern in enumerate(layers):
        if pattern.shape != expected or not pattern.dtype.is_floating_point:
            raise ValueError(
                f"the pattern of layer {i} is {pattern.dtype} {tuple(pattern.shape)}; with tokens "
                f"{tuple(tokens.shape)} each layer's must be floating (batch, heads, seq, seq)"
            )
        error = (pattern.float().sum(-1) - 1).abs().max().item()
        if not error <= 0.02:
            raise ValueError(
                f"a row of layer {i}'s pattern is off 1 by {error:.3g}; give it after softmax"
            )
