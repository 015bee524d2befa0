"""A minimal implementation of transformer circuits: QK, OV, composition, logit lens, ablation.

In a two-layer attention-only transformer (Elhage et al. 2021), a head is two matrices on the
residual stream. W_QK determines the attention pattern, and W_OV determines the vectors that the
head moves. The outputs of all heads are added to the stream.

    stream   x_0 = W_E[t] + W_pos
    head     A = softmax(x W_QK x^T / sqrt(d_head)),  adds A x W_OV^T
    logits   W_U x_2

Vectors are columns, as in the paper: W_QK scores query x and key y by x^T W_QK y, and W_OV maps x
to W_OV x. This file multiplies dense matrices; the rest of the package uses their thin factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """The weights of an attention-only transformer."""

    embed: Tensor  # (vocabulary, d_model)
    position: Tensor  # (context, d_model)
    q: Tensor  # (layers, heads, d_head, d_model)
    k: Tensor  # (layers, heads, d_head, d_model)
    v: Tensor  # (layers, heads, d_head, d_model)
    o: Tensor  # (layers, heads, d_model, d_head)
    unembed: Tensor  # (vocabulary, d_model)


def qk_circuits(w: Weights) -> Tensor:
    """Return W_QK = W_Q^T W_K of every head, (layers, heads, d_model, d_model)."""
    return w.q.mT @ w.k


def ov_circuits(w: Weights) -> Tensor:
    """Return W_OV = W_O W_V of every head, (layers, heads, d_model, d_model)."""
    return w.o @ w.v


def pattern(x: Tensor, w_qk: Tensor, d_head: int) -> Tensor:
    """Return the causal attention pattern (seq, seq) of a head for a stream `x` (seq, d_model)."""
    scores = x @ w_qk @ x.T / d_head**0.5
    future = torch.ones_like(scores).triu(1).bool()
    weights: Tensor = scores.masked_fill(future, float("-inf")).softmax(-1)
    return weights


def streams(
    w: Weights, tokens: Tensor, ablated: frozenset[tuple[int, int]] = frozenset()
) -> list[Tensor]:
    """Return the residual stream (seq, d_model) before the first layer and after each layer.

    Heads in `ablated`, given as (layer, head), add nothing.
    """
    qk, ov = qk_circuits(w), ov_circuits(w)
    d_head = w.q.shape[-2]
    x = w.embed[tokens] + w.position[: len(tokens)]
    history = [x]
    for layer in range(len(qk)):
        # All heads of a layer read the same stream.
        added = torch.zeros_like(x)
        for head in range(len(qk[layer])):
            if (layer, head) not in ablated:
                added += pattern(x, qk[layer, head], d_head) @ x @ ov[layer, head].T
        x = x + added
        history.append(x)
    return history


def logits(w: Weights, tokens: Tensor, ablated: frozenset[tuple[int, int]] = frozenset()) -> Tensor:
    """Return the next-token logits at each position, (seq, vocabulary)."""
    return streams(w, tokens, ablated)[-1] @ w.unembed.T


def lens(w: Weights, tokens: Tensor) -> Tensor:
    """Return the logits of each stream in `streams`, (layers + 1, seq, vocabulary)."""
    return torch.stack([x @ w.unembed.T for x in streams(w, tokens)])


def composition(w: Weights, kind: str) -> Tensor:
    """Return ||W_2 W_1|| / (||W_2|| ||W_1||), (heads 1 of layer 0, heads 2 of layer 1).

    Head 2 reads the output of head 1 in its queries ("q"), its keys ("k") or its values ("v").
    """
    qk, ov = qk_circuits(w)[1], ov_circuits(w)
    second = {"q": qk.mT, "k": qk, "v": ov[1]}[kind]
    norm = torch.linalg.matrix_norm
    return torch.stack(
        [
            torch.stack([norm(w_2 @ w_1) / (norm(w_2) * norm(w_1)) for w_2 in second])
            for w_1 in ov[0]
        ]
    )


def copying(w: Weights) -> Tensor:
    """Return sum(l) / sum(|l|) of the eigenvalues l of W_U W_OV W_E; 1 for pure copying."""
    values = torch.linalg.eigvals(w.unembed @ ov_circuits(w) @ w.embed.T)
    score: Tensor = values.sum(-1).real / values.abs().sum(-1)
    return score


def ablations(w: Weights, tokens: Tensor) -> Tensor:
    """Return the increase in loss (nats) from ablating each head, (layers, heads)."""

    def loss(ablated: frozenset[tuple[int, int]]) -> Tensor:
        predicted = logits(w, tokens, ablated)[:-1]
        return torch.nn.functional.cross_entropy(predicted, tokens[1:])

    layers, heads = w.q.shape[:2]
    increases = [
        loss(frozenset({(i, h)})) - loss(frozenset()) for i in range(layers) for h in range(heads)
    ]
    return torch.stack(increases).reshape(layers, heads)
