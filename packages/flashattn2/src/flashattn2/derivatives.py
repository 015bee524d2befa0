"""Forward-mode derivatives and the double backward pass, in linear memory.

Both use the directional derivatives of attention.  With tangents t_q, t_k, t_v and
X = f'(S) · scale (t_q kᵀ + q t_kᵀ), where f is the softcap, the tangents of L and O are

    t_L = rowsum(P ∘ X)                     t_O = (P ∘ X) v + P t_v - t_L ∘ O.

The gradients satisfy <t_q, dQ> + <t_k, dK> + <t_v, dV> = <dO, t_O> + <dL, t_L> =: Φ.  Therefore
the double backward pass with cotangents t of (dQ, dK, dV) is the gradient of Φ: t_O for dO, and t_L
for dL.  The gradients of q, k and v follow from dP = dO vᵀ, G = dP - rowsum(dO ∘ O) + dL,
W = X ∘ G - t_L dP + dO t_vᵀ, ω = rowsum(P ∘ W) and

    dΦ/dS = f' ∘ P ∘ (W - ω) + f'' ∘ P ∘ G ∘ scale (t_q kᵀ + q t_kᵀ)     dΦ/dX = P ∘ G.
"""

from dataclasses import replace

import torch
from torch import Tensor

from flashattn2.backends.tiled import Tiles, flatten_heads, group_queries, row_lse, scores
from flashattn2.spec import AttentionSpec


def tangent(
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    t_q: Tensor,
    k: Tensor,
    v: Tensor,
    t_k: Tensor,
    t_v: Tensor,
    *,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Return the tangents of the output and log-sum-exp for the tangents `t_q, t_k, t_v`.

    The arguments of the queries precede those of the keys, as `map_sequences` passes them.
    """
    tiles = Tiles(spec, q.shape[2], k.shape[2])
    q_ = group_queries(q, k) * spec.scale
    k_ = flatten_heads(k)
    v_ = flatten_heads(v)
    tq_ = group_queries(t_q, k) * spec.scale
    tk_ = flatten_heads(t_k)
    tv_ = flatten_heads(t_v)
    out_, lse_ = group_queries(out, k), row_lse(lse, k)
    # Write nothing in place: `torch.func.jacfwd` maps the tangents, but not the inputs.
    t_out = [torch.zeros_like(out_[:, :, :0])]
    t_lse = [torch.zeros_like(lse_[:, :, :0])]
    for rows in tiles.queries():
        q_i, tq_i, o_i, l_i = (x[:, :, rows].flatten(1, 2) for x in (q_, tq_, out_, lse_))
        to_i, tl_i = torch.zeros_like(o_i), torch.zeros_like(l_i)
        for columns, hidden in tiles.keys(rows, q.device):
            p, slope, _ = _probabilities(q_i, k_[:, columns], l_i, spec, hidden)
            px = p * (tq_i @ k_[:, columns].mT + q_i @ tk_[:, columns].mT) * slope
            tl_i = tl_i + px.sum(-1)
            to_i = to_i + px @ v_[:, columns] + p @ tv_[:, columns]
        to_i = to_i - tl_i[..., None] * o_i
        shape = out_.shape[1], rows.stop - rows.start
        t_out.append(to_i.unflatten(1, shape))
        t_lse.append(tl_i.unflatten(1, shape))
    t_out_, t_lse_ = torch.cat(t_out, 2), torch.cat(t_lse, 2)
    return t_out_.reshape(out.shape).to(out.dtype), t_lse_.reshape(lse.shape).to(lse.dtype)


def double_backward(
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
    t_out, t_lse = tangent(q, out, lse, t_q, k, v, t_k, t_v, spec=spec)
    if grad_lse is None:
        grad_lse = torch.zeros_like(lse)
    tiles = Tiles(spec, q.shape[2], k.shape[2])
    q_ = group_queries(q, k) * spec.scale
    k_ = flatten_heads(k)
    v_ = flatten_heads(v)
    tq_ = group_queries(t_q, k) * spec.scale
    tk_ = flatten_heads(t_k)
    tv_ = flatten_heads(t_v)
    do_, lse_ = group_queries(grad_out, k), row_lse(lse, k)
    dl_, tl_ = (x.to(q_.dtype).reshape(lse_.shape) for x in (grad_lse, t_lse))
    delta = torch.linalg.vecdot(do_, group_queries(out, k))
    gq = torch.zeros_like(q_)
    gk = torch.zeros_like(k_)
    gv = torch.zeros_like(v_)
    by_row = (q_, tq_, do_, lse_, dl_, tl_, delta)
    for rows in tiles.queries():
        q_i, tq_i, do_i, l_i, dl_i, tl_i, d_i = (x[:, :, rows].flatten(1, 2) for x in by_row)
        gq_i = torch.zeros_like(q_i)
        # The first pass over the keys accumulates ω, which the second pass needs.
        omega = torch.zeros_like(l_i)
        for last_pass in (False, True):
            for columns, hidden in tiles.keys(rows, q.device):
                k_j = k_[:, columns]
                tk_j = tk_[:, columns]
                v_j = v_[:, columns]
                p, slope, bend = _probabilities(q_i, k_j, l_i, spec, hidden)
                ds = tq_i @ k_j.mT + q_i @ tk_j.mT
                x = slope * ds
                dp = do_i @ v_j.mT
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
    gq *= spec.scale
    return (
        gq.view(q.shape).to(q.dtype),
        t_out.to(grad_out.dtype),
        t_lse.to(grad_lse.dtype),
        gk.view(k.shape).to(k.dtype),
        gv.view(v.shape).to(v.dtype),
    )


def _probabilities(
    q_i: Tensor, k_j: Tensor, l_i: Tensor, spec: AttentionSpec, hidden: Tensor | None
) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """Return one tile of P and the softcap's first and second derivatives at its scores.

    The queries must already be scaled.
    """
    s = scores(q_i, k_j, replace(spec, scale=1.0), None)
    p = torch.exp(s - l_i[..., None])
    if hidden is not None:
        # Do not mask in place: forward-mode AD needs the unmasked exponential for its derivative.
        by_head = p.view(len(p), p.shape[1] // len(hidden), *hidden.shape)
        p = by_head.masked_fill(hidden, 0.0).view_as(p)
    if not spec.softcap:
        return p, 1.0, 0.0
    t = s / spec.softcap
    slope = 1 - t * t
    return p, slope, -2 / spec.softcap * t * slope
