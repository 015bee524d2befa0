"""The double backward pass, in linear memory.

It uses the directional derivatives of attention.  With cotangents t_q, t_k, t_v of dQ, dK, dV and
X = f'(S) · scale (t_q kᵀ + q t_kᵀ), where f is the softcap, the derivatives of L and O are

    t_L = rowsum(P ∘ X)                     t_O = (P ∘ X) v + P t_v - t_L ∘ O.

The gradients satisfy <t_q, dQ> + <t_k, dK> + <t_v, dV> = <dO, t_O> + <dL, t_L> =: Φ.  Therefore
the double backward pass is the gradient of Φ: t_O for dO, t_L for dL, and (P ∘ (X - t_L))ᵀ dO for
v.  The gradients of q and k follow from dP = dO vᵀ, G = dP - rowsum(dO ∘ O) + dL,
Y = X ∘ G + dO t_vᵀ, W = Y - t_L dP, ω = rowsum(P ∘ W) and

    dΦ/dS = f' ∘ P ∘ (W - ω) + f'' ∘ P ∘ G ∘ scale (t_q kᵀ + q t_kᵀ)     dΦ/dX = P ∘ G.
"""

from dataclasses import replace

import torch
from torch import Tensor

from flashattn2.backends.tiled import (
    Tiles,
    compute_row_lse,
    compute_scores,
    flatten_heads,
    group_queries,
)
from flashattn2.spec import AttentionSpec


def compute_double_backward(
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    t_q: Tensor,
    k: Tensor,
    v: Tensor,
    t_k: Tensor,
    t_v: Tensor,
    *,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, dO, dL, k and v for the cotangents `t_q, t_k, t_v` of dQ, dK, dV.

    The arguments and results of the queries precede those of the keys, as `map_sequences` passes
    them.  Names are as in the module docstring; `_i` marks a tile of queries, `_j` a tile of keys.
    """
    if grad_lse is None:
        grad_lse = torch.zeros_like(lse)
    tiles = Tiles(spec, q.shape[2], k.shape[2])
    q_ = group_queries(q, k) * spec.scale
    k_ = flatten_heads(k)
    v_ = flatten_heads(v)
    tq_ = group_queries(t_q, k) * spec.scale
    tk_ = flatten_heads(t_k)
    tv_ = flatten_heads(t_v)
    out_, lse_ = group_queries(out, k), compute_row_lse(lse, k)
    do_, dl_ = group_queries(grad_out, k), grad_lse.to(q_.dtype).reshape(lse_.shape)
    delta = torch.linalg.vecdot(do_, out_)
    gq = torch.zeros_like(q_)
    gk = torch.zeros_like(k_)
    gv = torch.zeros_like(v_)
    t_out = torch.zeros_like(out_)
    t_lse = torch.zeros_like(lse_)
    by_row = (q_, tq_, out_, do_, lse_, dl_, delta)
    for rows in tiles.iter_queries():
        q_i, tq_i, o_i, do_i, l_i, dl_i, d_i = (x[:, :, rows].flatten(1, 2) for x in by_row)
        gq_i, to_i = torch.zeros_like(q_i), torch.zeros_like(o_i)
        # The first pass over the keys accumulates these row sums, which the second pass needs.
        tl_i, py_i, pdp_i = (torch.zeros_like(l_i) for _ in range(3))
        for last_pass in (False, True):
            for columns, hidden in tiles.iter_keys(rows, q.device):
                k_j, v_j, tk_j, tv_j = (x[:, columns] for x in (k_, v_, tk_, tv_))
                p, slope, bend = _compute_probabilities(q_i, k_j, l_i, spec, hidden)
                ds = tq_i @ k_j.mT + q_i @ tk_j.mT
                x = slope * ds
                dp = do_i @ v_j.mT
                g = dp - (d_i - dl_i)[..., None]
                y = x * g + do_i @ tv_j.mT
                if not last_pass:
                    px = p * x
                    tl_i += px.sum(-1)
                    to_i += px @ v_j + p @ tv_j
                    py_i += (p * y).sum(-1)
                    pdp_i += (p * dp).sum(-1)
                    continue
                w = y - tl_i[..., None] * dp
                omega = py_i - tl_i * pdp_i
                a = p * (slope * (w - omega[..., None]) + bend * g * ds)
                b = p * slope * g
                gq_i += a @ k_j + b @ tk_j
                gk[:, columns] += a.mT @ q_i + b.mT @ tq_i
                gv[:, columns] += (p * (x - tl_i[..., None])).mT @ do_i
        to_i -= tl_i[..., None] * o_i
        for whole, part in ((gq, gq_i), (t_out, to_i), (t_lse, tl_i)):
            whole[:, :, rows] = part.view_as(whole[:, :, rows])
    gq *= spec.scale
    return (
        gq.view(q.shape).to(q.dtype),
        t_out.view(out.shape).to(grad_out.dtype),
        t_lse.view(lse.shape).to(grad_lse.dtype),
        gk.view(k.shape).to(k.dtype),
        gv.view(v.shape).to(v.dtype),
    )


def _compute_probabilities(
    q_i: Tensor, k_j: Tensor, l_i: Tensor, spec: AttentionSpec, hidden: Tensor | None
) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """Return one tile of P and the softcap's first and second derivatives at its scores.

    The queries must already be scaled.
    """
    s = compute_scores(q_i, k_j, replace(spec, scale=1.0), None)
    p = torch.exp(s - l_i[..., None])
    if hidden is not None:
        p.view(len(p), p.shape[1] // len(hidden), *hidden.shape).masked_fill_(hidden, 0.0)
    if not spec.softcap:
        return p, 1.0, 0.0
    t = s / spec.softcap
    slope = 1 - t * t
    return p, slope, -2 / spec.softcap * t * slope
