"""Derivatives beyond the gradient, in linear memory: forward mode and the double backward.

Notable: both follow from one pass of directional derivatives.  With tangents t_q, t_k, t_v and
X = f'(S) · scale (t_q kᵀ + q t_kᵀ), where f is the softcap,

    t_L = rowsum(P ∘ X)                     t_O = (P ∘ X) v + P t_v - t_L ∘ O.

The gradients satisfy <t_q, dQ> + <t_k, dK> + <t_v, dV> = <dO, t_O> + <dL, t_L> =: Φ.  So the
double backward with cotangents t of (dQ, dK, dV) is the gradient of Φ: t_O for dO, t_L for dL,
and with dP = dO vᵀ, G = dP - rowsum(dO ∘ O) + dL, W = X ∘ G - t_L dP + dO t_vᵀ,
ω = rowsum(P ∘ W),

    dΦ/dS = f' ∘ P ∘ (W - ω) + f'' ∘ P ∘ G ∘ scale (t_q kᵀ + q t_kᵀ)     dΦ/dX = P ∘ G.
"""

from dataclasses import replace

import torch
from torch import Tensor

from flashattn2.problem import Score
from flashattn2.tiled import Tiles, flat, grouped, row_lse, scores


def tangent(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, t_q: Tensor, t_k: Tensor,
    t_v: Tensor, score: Score,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Forward mode: how output and log-sum-exp move as q, k, v move along ``t_q, t_k, t_v``."""
    tiles = Tiles(score, q.shape[2], k.shape[2])
    q_, k_, v_ = grouped(q, k) * score.scale, flat(k), flat(v)
    tq_, tk_, tv_ = grouped(t_q, k) * score.scale, flat(t_k), flat(t_v)
    out_, lse_ = grouped(out, k), row_lse(lse, k)
    t_out, t_lse = torch.zeros_like(out_), torch.zeros_like(lse_)
    for rows in tiles.queries():
        q_i, tq_i, o_i, l_i = (x[:, :, rows].flatten(1, 2) for x in (q_, tq_, out_, lse_))
        to_i, tl_i = torch.zeros_like(o_i), torch.zeros_like(l_i)
        for columns, hidden in tiles.keys(rows, q.device):
            p, slope, _ = _probabilities(q_i, k_[:, columns], l_i, score, hidden)
            px = p * (tq_i @ k_[:, columns].mT + q_i @ tk_[:, columns].mT) * slope
            tl_i += px.sum(-1)
            to_i += px @ v_[:, columns] + p @ tv_[:, columns]
        to_i -= tl_i[..., None] * o_i
        t_out[:, :, rows] = to_i.view_as(t_out[:, :, rows])
        t_lse[:, :, rows] = tl_i.view_as(t_lse[:, :, rows])
    return t_out.view(out.shape).to(out.dtype), t_lse.view(lse.shape).to(lse.dtype)


def double_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, t_q: Tensor, t_k: Tensor, t_v: Tensor, score: Score,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, dO and dL from the cotangents ``t_q, t_k, t_v`` of dQ, dK, dV."""
    t_out, t_lse = tangent(q, k, v, out, lse, t_q, t_k, t_v, score)
    if grad_lse is None:
        grad_lse = torch.zeros_like(lse)
    tiles = Tiles(score, q.shape[2], k.shape[2])
    q_, k_, v_ = grouped(q, k) * score.scale, flat(k), flat(v)
    tq_, tk_, tv_ = grouped(t_q, k) * score.scale, flat(t_k), flat(t_v)
    do_, lse_ = grouped(grad_out, k), row_lse(lse, k)
    dl_, tl_ = (x.to(q_.dtype).reshape(lse_.shape) for x in (grad_lse, t_lse))
    delta = torch.linalg.vecdot(do_, grouped(out, k))
    gq, gk, gv = torch.zeros_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
    rows_of = (q_, tq_, do_, lse_, dl_, tl_, delta)
    for rows in tiles.queries():
        q_i, tq_i, do_i, l_i, dl_i, tl_i, d_i = (x[:, :, rows].flatten(1, 2) for x in rows_of)
        gq_i = torch.zeros_like(q_i)
        # The first pass over the keys sums ω, the second needs it.
        omega = torch.zeros_like(l_i)
        for last_pass in (False, True):
            for columns, hidden in tiles.keys(rows, q.device):
                k_j, tk_j, v_j = k_[:, columns], tk_[:, columns], v_[:, columns]
                p, slope, bend = _probabilities(q_i, k_j, l_i, score, hidden)
                ds = tq_i @ k_j.mT + q_i @ tk_j.mT
                x, dp = slope * ds, do_i @ v_j.mT
                g = dp - (d_i - dl_i)[..., None]
                w = x * g - tl_i[..., None] * dp + do_i @ tv_[:, columns].mT
                if not last_pass:
                    omega += (p * w).sum(-1)
                    continue
                a = p * (slope * (w - omega[..., None]) + bend * g * ds)
                b = p * slope * g
                gq_i += a @ k_j + b @ tk_j
                gk[:, columns] += a.mT @ q_i + b.mT @ tq_i
                gv[:, columns] += (p * (x - tl_i[..., None])).mT @ do_i
        gq[:, :, rows] = gq_i.view_as(gq[:, :, rows])
    gq *= score.scale
    return (
        gq.view(q.shape).to(q.dtype),
        gk.view(k.shape).to(k.dtype),
        gv.view(v.shape).to(v.dtype),
        t_out.to(grad_out.dtype),
        t_lse.to(grad_lse.dtype),
    )


def _probabilities(
    q_i: Tensor, k_j: Tensor, l_i: Tensor, score: Score, hidden: Tensor | None
) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """One tile of P, and the softcap's first and second derivative at its scores.

    The queries are scaled already.
    """
    s = scores(q_i, k_j, replace(score, scale=1.0), None)
    p = torch.exp(s - l_i[..., None])
    if hidden is not None:
        # Not in place: forward mode may itself be differentiated, and that needs the exponential.
        by_head = p.view(len(p), p.shape[1] // len(hidden), *hidden.shape)
        p = by_head.masked_fill(hidden, 0.0).view_as(p)
    if not score.softcap:
        return p, 1.0, 0.0
    t = s / score.softcap
    slope = 1 - t * t
    return p, slope, -2 / score.softcap * t * slope
