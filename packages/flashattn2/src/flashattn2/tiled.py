"""FlashAttention-2 in tiled PyTorch: Algorithms 1 and 2 of Dao (2023), arXiv 2307.08691.

Notable: no score is kept, only the log-sum-exp L of each row, from which the backward pass makes
any tile of P again.  Tiles that the band hides are skipped, tiles that it cuts are masked, all
others pay for no mask.  The query heads of one key head lie one below the other in a tile, so
grouped-query attention is the same matrix products with more rows.  The backward pass departs from
Algorithm 2 where nothing is rounded to half precision: see `row_sums`.

Shapes: n = batch · kv_heads, g = query heads per key head, t and u = rows of a query and key tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashattn2.problem import Score

# Rows and columns of a tile: large enough that a CPU core spends its time in matrix products.
TILE = 256


def forward(q: Tensor, k: Tensor, v: Tensor, score: Score) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 1: ``(batch, heads, seq, dim)`` to the output, its log-sum-exp, row maxima."""
    tiles = Tiles(score, q.shape[2], k.shape[2])
    q_, k_, v_ = grouped(q, k), flat(k), flat(v)
    out = q_.new_zeros(*q_.shape[:-1], v.shape[-1])
    lse = q_.new_full(q_.shape[:-1], -torch.inf)
    maxima = torch.full_like(lse, -torch.inf)
    for rows in tiles.queries():
        q_i = q_[:, :, rows].flatten(1, 2)  # [n, g·t, d]
        o_i = q_i.new_zeros(*q_i.shape[:-1], v.shape[-1])  # [n, g·t, d_v]
        m_i = q_i.new_full(q_i.shape[:2], -torch.inf)  # the row maximum so far
        l_i = torch.zeros_like(m_i)  # the row sum so far, relative to the maximum
        for columns, hidden in tiles.keys(rows, q.device):
            s_ij = scores(q_i, k_[:, columns], score, hidden)  # [n, g·t, u]
            m_new = torch.maximum(m_i, s_ij.amax(-1))
            # Where every key so far is hidden the maximum is -inf, and -inf - -inf is NaN.
            base = m_new.masked_fill(m_new == -torch.inf, 0.0) if hidden is not None else m_new
            p_ij = s_ij.sub_(base[..., None]).exp_()
            rescale = torch.exp(m_i - base)
            l_i = rescale * l_i + p_ij.sum(-1)
            o_i = torch.baddbmm(o_i.mul_(rescale[..., None]), p_ij, v_[:, columns])
            m_i = m_new
        # A row that saw no key has l = 0: its output stays 0 and its log-sum-exp -inf.
        o_i /= l_i.masked_fill(l_i == 0, 1.0)[..., None]
        out[:, :, rows] = o_i.view_as(out[:, :, rows])
        lse[:, :, rows] = (m_i + l_i.log()).view_as(lse[:, :, rows])
        maxima[:, :, rows] = m_i.view_as(maxima[:, :, rows])
    rows_of = q.shape[:-1]
    out = out.view(*rows_of, v.shape[-1]).to(q.dtype)
    return out, lse.view(rows_of), maxima.view(rows_of)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, score: Score,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Algorithm 2: the gradients of q, k and v from the output, L and D = rowsum(dO ∘ O) - dL."""
    tiles = Tiles(score, q.shape[2], k.shape[2])
    q_, k_, v_ = grouped(q, k), flat(k), flat(v)
    do_, lse_ = grouped(grad_out, k), row_lse(lse, k)
    delta = row_delta(out, grad_out, grad_lse, k)
    dl_ = None if grad_lse is None else _rows(grad_lse, k)
    dq, dk, dv = torch.zeros_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
    for rows in tiles.queries():
        q_i, do_i = q_[:, :, rows].flatten(1, 2), do_[:, :, rows].flatten(1, 2)  # [n, g·t, d]
        l_i, d_i = (x[:, :, rows].flatten(1, 2)[..., None] for x in (lse_, delta))
        norm_i = None
        if q.dtype == q_.dtype:
            norm_i, pdp_i = row_sums(q_i, k_, v_, l_i, do_i, tiles, rows)
            d_i = pdp_i if dl_ is None else pdp_i - dl_[:, :, rows].flatten(1, 2)[..., None]
        dq_i = torch.zeros_like(q_i)
        for columns, hidden in tiles.keys(rows, q.device):
            k_j, v_j = k_[:, columns], v_[:, columns]  # [n, u, d]
            s_ij = scores(q_i, k_j, score, hidden)  # [n, g·t, u]
            slope = 1 - (s_ij / score.softcap) ** 2 if score.softcap else None
            p_ij = s_ij.sub_(l_i).exp_()
            if norm_i is not None:
                p_ij *= norm_i
            dv[:, columns] += p_ij.mT @ do_i
            ds_ij = (do_i @ v_j.mT).sub_(d_i).mul_(p_ij)
            if slope is not None:
                ds_ij = torch.where(p_ij == 0, 0.0, ds_ij * slope)
            dq_i.baddbmm_(ds_ij, k_j)
            dk[:, columns] += ds_ij.mT @ q_i
        dq[:, :, rows] = dq_i.view_as(dq[:, :, rows])
    dq, dk = dq.mul_(score.scale), dk.mul_(score.scale)
    return dq.view(q.shape).to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype)


def row_sums(
    q_i: Tensor, k: Tensor, v: Tensor, l_i: Tensor, do_i: Tensor, tiles: "Tiles", rows: slice
) -> tuple[Tensor, Tensor]:
    """What makes each row of P sum to one, and then rowsum(P ∘ dP), both ``[n, g·t, 1]``.

    Two roundings of Algorithm 2 would show beside those of float32 products.  An L above 4 is
    rounded by up to 2.4e-7, and every entry of its row of P errs by that; and dO · O does not err
    as the dP does that it is taken from, of which dS may be the small rest.  Sums over the same P
    and dP know neither, for two more products on five.
    """
    p_i, pdp_i = torch.zeros_like(l_i), torch.zeros_like(l_i)
    for columns, hidden in tiles.keys(rows, q_i.device):
        p_ij = scores(q_i, k[:, columns], tiles.score, hidden).sub_(l_i).exp_()
        p_i += p_ij.sum(-1, keepdim=True)
        pdp_i += p_ij.mul_(do_i @ v[:, columns].mT).sum(-1, keepdim=True)
    # A row that sees no key has P = 0, whatever it is multiplied by.
    norm_i = 1 / p_i.masked_fill(p_i == 0, 1.0)
    return norm_i, norm_i * pdp_i


@dataclass(frozen=True)
class Tiles:
    """The tiles of the score matrix that the band touches."""

    score: Score
    seq_q: int
    seq_k: int

    def queries(self) -> Iterator[slice]:
        """Row ranges, in order."""
        for start in range(0, self.seq_q, TILE):
            yield slice(start, min(start + TILE, self.seq_q))

    def keys(self, rows: slice, device: torch.device) -> Iterator[tuple[slice, Tensor | None]]:
        """Column ranges that these rows see, each with its mask, or None where all is seen."""
        shift = self.seq_k - self.seq_q
        start, all_start, all_stop, stop = self.score.keys_seen(
            rows.start, rows.stop, shift, self.seq_k
        )
        for first in range(start // TILE * TILE, stop, TILE):
            columns = slice(first, min(first + TILE, self.seq_k))
            hidden = None
            if columns.start < all_start or columns.stop > all_stop:
                queries = torch.arange(rows.start, rows.stop, device=device)
                keys = torch.arange(columns.start, columns.stop, device=device)
                hidden = self.score.hidden(queries, keys, shift)
            yield columns, hidden


def scores(q_i: Tensor, k_j: Tensor, score: Score, hidden: Tensor | None) -> Tensor:
    """One tile of scores ``[n, g·t, u]``; -inf where hidden."""
    # Scaled queries would each be rounded once more.
    s_ij = torch.baddbmm(q_i.new_empty(()), q_i, k_j.mT, beta=0, alpha=score.scale)
    if score.softcap:
        s_ij = s_ij.div_(score.softcap).tanh_().mul_(score.softcap)
    if hidden is not None:
        s_ij.view(len(s_ij), s_ij.shape[1] // len(hidden), *hidden.shape).masked_fill_(
            hidden, -torch.inf
        )
    return s_ij


def row_lse(lse: Tensor, k: Tensor) -> Tensor:
    """L as ``[n, g, seq]``; +inf in rows that see no key, so that ``exp(s - L)`` is 0 there."""
    rows = _rows(lse, k)
    return rows.masked_fill(rows == -torch.inf, torch.inf)


def row_delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, k: Tensor) -> Tensor:
    """D = rowsum(dO · O) - dL as ``[n, g, seq]``: what softmax takes off every entry of dP."""
    delta = torch.linalg.vecdot(wide(grad_out), wide(out))
    if grad_lse is not None:
        delta = delta - grad_lse
    return _rows(delta, k)


def grouped(q: Tensor, k: Tensor) -> Tensor:
    """``[batch, heads, seq, d]`` as ``[n, g, seq, d]``, in the precision that is summed in."""
    return wide(q).reshape(k.shape[0] * k.shape[1], q.shape[1] // max(k.shape[1], 1), *q.shape[2:])


def flat(k: Tensor) -> Tensor:
    """``[batch, kv_heads, seq, d]`` as ``[n, seq, d]``, in the precision that is summed in."""
    return wide(k).reshape(k.shape[0] * k.shape[1], *k.shape[2:])


def wide(x: Tensor) -> Tensor:
    """Half precision is stored, never summed in."""
    return x if x.dtype == torch.float64 else x.float()


def _rows(x: Tensor, k: Tensor) -> Tensor:
    return x.reshape(k.shape[0] * k.shape[1], x.shape[1] // max(k.shape[1], 1), x.shape[2])
