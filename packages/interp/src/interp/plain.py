"""Transformer circuits in one file: QK, OV, composition, the logit lens, ablation.

A two-layer attention-only transformer is read as the paper reads it (Elhage et al. 2021): every
head is two matrices on the residual stream, one that says where it looks (W_QK), one that says
what it moves (W_OV), and all that heads do is added to the stream.

    stream   x_0 = W_E[t] + W_pos
    head     A = softmax(x W_QK x^T / sqrt(d_head)),  adds A x W_OV^T
    logits   W_U x_2

Columns, as on paper: W_QK scores query x and key y by x^T W_QK y, W_OV maps x to W_OV x. This is
the specification: what the package computes by thin factors is here computed whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """W_Q, W_K, W_V are (layers, heads, d_head, d_model), W_O (layers, heads, d_model, d_head)."""

    embed: Tensor  # (vocabulary, d_model)
    position: Tensor  # (context, d_model)
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    unembed: Tensor  # (vocabulary, d_model)


def qk_circuits(w: Weights) -> Tensor:
    """W_QK = W_Q^T W_K of every head, (layers, heads, d_model, d_model), of rank d_head at most."""
    return w.q.mT @ w.k


def ov_circuits(w: Weights) -> Tensor:
    """W_OV = W_O W_V of every head, (layers, heads, d_model, d_model)."""
    return w.o @ w.v


def pattern(x: Tensor, w_qk: Tensor, d_head: int) -> Tensor:
    """Where a head looks: (seq, seq), rows sum to 1, nothing looks ahead. `x` is (seq, d_model)."""
    scores = x @ w_qk @ x.T / d_head**0.5
    future = torch.ones_like(scores).triu(1).bool()
    looks: Tensor = scores.masked_fill(future, float("-inf")).softmax(-1)
    return looks


def streams(
    w: Weights, tokens: Tensor, ablated: frozenset[tuple[int, int]] = frozenset()
) -> list[Tensor]:
    """The residual stream (seq, d_model) before the first layer and after each one.

    `ablated` heads, (layer, head), add nothing: what changes without them is what they do.
    """
    qk, ov, d_head = qk_circuits(w), ov_circuits(w), w.q.shape[-2]
    x = w.embed[tokens] + w.position[: len(tokens)]
    history = [x]
    for layer in range(len(qk)):
        # Heads of a layer read the same stream and add: their order does not matter.
        added = torch.zeros_like(x)
        for head in range(len(qk[layer])):
            if (layer, head) not in ablated:
                added += pattern(x, qk[layer, head], d_head) @ x @ ov[layer, head].T
        x = x + added
        history.append(x)
    return history


def logits(w: Weights, tokens: Tensor, ablated: frozenset[tuple[int, int]] = frozenset()) -> Tensor:
    """What follows each token, (seq, vocabulary)."""
    return streams(w, tokens, ablated)[-1] @ w.unembed.T


def lens(w: Weights, tokens: Tensor) -> Tensor:
    """The logit lens: what each layer's stream would say already, (layers + 1, seq, vocabulary)."""
    return torch.stack([x @ w.unembed.T for x in streams(w, tokens)])


def composition(w: Weights, kind: str) -> Tensor:
    """||W_2 W_1|| / (||W_2|| ||W_1||) of each head 1 of layer 0 and head 2 of layer 1.

    Head 2 reads what head 1 wrote as its queries ("q"), its keys ("k") or its values ("v").
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
    """sum(l) / sum(|l|) of the eigenvalues l of W_U W_OV W_E: 1 for a head that copies tokens."""
    values = torch.linalg.eigvals(w.unembed @ ov_circuits(w) @ w.embed.T)
    score: Tensor = values.sum(-1).real / values.abs().sum(-1)
    return score


def ablations(w: Weights, tokens: Tensor) -> Tensor:
    """How much the loss of the next token rises without each head, (layers, heads), in nats."""

    def loss(ablated: frozenset[tuple[int, int]]) -> Tensor:
        predicted = logits(w, tokens, ablated)[:-1]
        return torch.nn.functional.cross_entropy(predicted, tokens[1:])

    layers, heads = w.q.shape[:2]
    rises = [
        loss(frozenset({(i, h)})) - loss(frozenset()) for i in range(layers) for h in range(heads)
    ]
    return torch.stack(rises).reshape(layers, heads)
