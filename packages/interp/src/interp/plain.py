"""A minimal implementation of transformer circuits: QK, OV, composition, logit lens, ablation.

In an attention-only transformer (Elhage et al. 2021), a head consists of two matrices that act on
the residual stream. W_QK determines the attention pattern, and W_OV determines the vectors that the
head moves between positions. The outputs of all heads are added to the stream.

    stream   x_0 = W_E[t] + W_pos
    head     A = softmax(x W_QK x^T / sqrt(d_head)),  adds A x W_OV^T
    logits   x_L W_U^T, after L layers

The rows of a stream are positions. The circuits act on columns, as in the paper: W_QK scores query
x and key y by x^T W_QK y, and W_OV maps x to W_OV x. This file multiplies dense matrices; the rest
of the package uses their thin factors.
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


def compute_qk_circuits(w: Weights) -> Tensor:
    """Return W_QK = W_Q^T W_K of every head, (layers, heads, d_model, d_model)."""
    return w.q.mT @ w.k


def compute_ov_circuits(w: Weights) -> Tensor:
    """Return W_OV = W_O W_V of every head, (layers, heads, d_model, d_model)."""
    return w.o @ w.v


def compute_attention_pattern(x: Tensor, w_qk: Tensor, d_head: int) -> Tensor:
    """Return the causal attention pattern (seq, seq) of a head for a stream `x` (seq, d_model)."""
    scores = x @ w_qk @ x.T / d_head**0.5
    future = torch.ones_like(scores).triu(1).bool()
    probabilities: Tensor = scores.masked_fill(future, float("-inf")).softmax(-1)
    return probabilities


def compute_residual_streams(
    w: Weights, tokens: Tensor, ablated: frozenset[tuple[int, int]] = frozenset()
) -> list[Tensor]:
    """Return the residual stream (seq, d_model) before the first layer and after each layer.

    Heads in `ablated`, given as (layer, head), add nothing.
    """
    qk, ov = compute_qk_circuits(w), compute_ov_circuits(w)
    streams = [w.embed[tokens] + w.position[: len(tokens)]]
    for layer in range(len(qk)):
        x = streams[-1]  # All heads of a layer read the same stream.
        added = torch.zeros_like(x)
        for head in range(len(qk[layer])):
            if (layer, head) not in ablated:
                pattern = compute_attention_pattern(x, qk[layer, head], w.q.shape[-2])
                added += pattern @ x @ ov[layer, head].T
        streams.append(x + added)
    return streams


def compute_logits(
    w: Weights, tokens: Tensor, ablated: frozenset[tuple[int, int]] = frozenset()
) -> Tensor:
    """Return the next-token logits at each position, (seq, vocabulary)."""
    return compute_residual_streams(w, tokens, ablated)[-1] @ w.unembed.T


def logit_lens(w: Weights, tokens: Tensor) -> Tensor:
    """Return the logits of each of the residual streams, (layers + 1, seq, vocabulary)."""
    return torch.stack([x @ w.unembed.T for x in compute_residual_streams(w, tokens)])


def composition_scores(w: Weights, kind: str) -> Tensor:
    """Return ||W_2 W_1|| / (||W_2|| ||W_1||) of the heads of a two-layer model, (heads, heads).

    W_1 is W_OV of a head in layer 0. A head in layer 1 reads the output of the first head through
    W_2, for queries (kind "q"), keys ("k") or values ("v").
    """
    qk, ov = compute_qk_circuits(w)[1], compute_ov_circuits(w)
    readers = {"q": qk.mT, "k": qk, "v": ov[1]}[kind]
    norm = torch.linalg.matrix_norm
    writers = ov[0][:, None]  # (heads of layer 0, 1, d_model, d_model)
    return norm(readers @ writers) / (norm(readers) * norm(writers))


def copying_scores(w: Weights) -> Tensor:
    """Return sum(l) / sum(|l|) over eigenvalues l of W_U W_OV W_E^T, (layers, heads)."""
    eigenvalues = torch.linalg.eigvals(w.unembed @ compute_ov_circuits(w) @ w.embed.T)
    score: Tensor = eigenvalues.sum(-1).real / eigenvalues.abs().sum(-1)
    return score


def compute_ablation_effects(w: Weights, tokens: Tensor) -> Tensor:
    """Return the increase of the mean loss (nats) if a head is ablated, (layers, heads)."""

    def compute_loss(ablated: frozenset[tuple[int, int]]) -> Tensor:
        predicted = compute_logits(w, tokens, ablated)[:-1]
        return torch.nn.functional.cross_entropy(predicted, tokens[1:])

    baseline = compute_loss(frozenset())
    increases = baseline.new_empty(w.q.shape[:2])
    for layer in range(len(increases)):
        for head in range(len(increases[layer])):
            increases[layer, head] = compute_loss(frozenset({(layer, head)})) - baseline
    return increases
