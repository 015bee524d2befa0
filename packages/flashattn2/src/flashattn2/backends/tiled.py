"""FlashAttention-2 in tiled PyTorch: Algorithms 1 and 2 of Dao (2023), arXiv 2307.08691.

The forward pass stores no scores, only the log-sum-exp L of each row; the backward pass recomputes
each tile of P from L.  Tiles outside the band are skipped, tiles on its edge are masked, and the
other tiles need no mask.  The query heads of one key head are rows of the same tile, so
grouped-query attention uses the same matrix products with more rows.  For float32 and float64
inputs the backward pass differs from Algorithm 2: see `compute_row_sums`.

Shapes: n = batch · kv_heads, g = query heads per key head, t and u = rows of a query and key tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashattn2.spec import AttentionSpec

#: Rows and columns of a tile, large enough that matrix products take most of a CPU core's time.
TILE = 256


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of `(batch, heads, seq, dim)`: Algorithm 1."""
    tiles = Tiles(spec, q.shape[2], k.shape[2])
    q_ = group_queries(q, k)
    k_ = flatten_heads(k)
    v_ = flatten_heads(v)
    # Return no views: autograd forbids in-place changes of a view among several results.
    out = q_.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q_.new_full(q.shape[:-1], -torch.inf)
    out_ = out.view(*q_.shape[:-1], v.shape[-1])
    lse_ = lse.view(q_.shape[:-1])
    for rows in tiles.iter_queries():
        q_i = q_[:, :, rows].flatten(1, 2)  # [n, g·t, d]
        o_i = q_i.new_zeros(*q_i.shape[:-1], v.shape[-1])  # [n, g·t, d_v]
        m_i = q_i.new_full(q_i.shape[:2], -torch.inf)  # the row maximum so far
        l_i = torch.zeros_like(m_i)  # the row sum so far, relative to the maximum
        for columns, hidden in tiles.iter_keys(rows, q.device):
            s_ij = compute_scores(q_i, k_[:, columns], spec, hidden)  # [n, g·t, u]
            m_new = torch.maximum(m_i, s_ij.amax(-1))
            # The maximum is -inf while all scores are, and -inf - -inf would be NaN.
            finite_max = m_new.masked_fill(m_new == -torch.inf, 0.0)
            p_ij = s_ij.sub_(finite_max[..., None]).exp_()
            rescale = torch.exp(m_i - finite_max)
            l_i = rescale * l_i + p_ij.sum(-1)
            o_i = torch.baddbmm(o_i.mul_(rescale[..., None]), p_ij, v_[:, columns])
            m_i = m_new
        # A row that sees no key has l = 0: its output stays 0 and its log-sum-exp -inf.
        o_i /= l_i.masked_fill(l_i == 0, 1.0)[..., None]
        out_[:, :, rows] = o_i.view_as(out_[:, :, rows])
        lse_[:, :, rows] = (m_i + l_i.log()).view_as(lse_[:, :, rows])
    return out.to(q.dtype), lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v: Algorithm 2, with D = rowsum(dO ∘ O) - dL.

    For float32 and float64, P is divided by its row sum, and D = rowsum(P ∘ dP) - dL.
    """
    tiles = Tiles(spec, q.shape[2], k.shape[2])
    q_ = group_queries(q, k)
    k_ = flatten_heads(k)
    v_ = flatten_heads(v)
    do_ = group_queries(grad_out, k)
    lse_ = compute_row_lse(lse, k)
    delta = compute_row_delta(out, grad_out, grad_lse, k)
    dl_ = None if grad_lse is None else _group_rows(grad_lse, k)
    # Gradients are contiguous, as in the operator's fake kernel; `zeros_like` would keep strides.
    dq = q_.new_zeros(q_.shape)
    dk = k_.new_zeros(k_.shape)
    dv = v_.new_zeros(v_.shape)
    for rows in tiles.iter_queries():
        q_i, do_i = q_[:, :, rows].flatten(1, 2), do_[:, :, rows].flatten(1, 2)  # [n, g·t, d]
        l_i, d_i = (x[:, :, rows].flatten(1, 2)[..., None] for x in (lse_, delta))
        norm_i = None
        if q.dtype == q_.dtype:
            norm_i, pdp_i = compute_row_sums(q_i, k_, v_, l_i, do_i, tiles, rows)
            d_i = pdp_i if dl_ is None else pdp_i - dl_[:, :, rows].flatten(1, 2)[..., None]
        dq_i = torch.zeros_like(q_i)
        for columns, hidden in tiles.iter_keys(rows, q.device):
            k_j, v_j = k_[:, columns], v_[:, columns]  # [n, u, d]
            s_ij = compute_scores(q_i, k_j, spec, hidden)  # [n, g·t, u]
            slope = 1 - (s_ij / spec.softcap) ** 2 if spec.softcap else None
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
    dq, dk = dq.mul_(spec.scale), dk.mul_(spec.scale)
    return dq.view(q.shape).to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype)


def compute_row_sums(
    q_i: Tensor, k: Tensor, v: Tensor, l_i: Tensor, do_i: Tensor, tiles: "Tiles", rows: slice
) -> tuple[Tensor, Tensor]:
    """Return 1 / rowsum(P) and the normalized rowsum(P ∘ dP), both `[n, g·t, 1]`.

    These sums avoid two rounding errors of Algorithm 2 that are larger than those of float32
    products.  First, a float32 L from 4 to 8 is rounded by up to 2.4e-7, and a larger L by more.
    This is a relative error of every entry in its row of P.  Second, D = dO · O is subtracted from
    dP, but the two have different rounding errors, which matters if their difference is small.  The
    cost is two matrix products in addition to the five of Algorithm 2.
    """
    p_i, pdp_i = torch.zeros_like(l_i), torch.zeros_like(l_i)
    for columns, hidden in tiles.iter_keys(rows, q_i.device):
        p_ij = compute_scores(q_i, k[:, columns], tiles.spec, hidden).sub_(l_i).exp_()
        p_i += p_ij.sum(-1, keepdim=True)
        pdp_i += p_ij.mul_(do_i @ v[:, columns].mT).sum(-1, keepdim=True)
    # A row that sees no key has P = 0, so any finite factor is valid.
    norm_i = 1 / p_i.masked_fill(p_i == 0, 1.0)
    return norm_i, norm_i * pdp_i


@dataclass(frozen=True)
class Tiles:
    """The tiles of the score matrix that overlap the band."""

    spec: AttentionSpec
    seq_q: int
    seq_k: int

    def iter_queries(self) -> Iterator[slice]:
        """Yield the row range of each tile of queries, in order."""
        for start in range(0, self.seq_q, TILE):
            yield slice(start, min(start + TILE, self.seq_q))

    def iter_keys(self, rows: slice, device: torch.device) -> Iterator[tuple[slice, Tensor | None]]:
        """Yield each tile of keys that the rows see and its mask of hidden keys.

        The mask is None if every row sees all keys of the tile.
        """
        shift = self.seq_k - self.seq_q
        start, all_start, all_stop, stop = self.spec.compute_key_ranges(
            rows.start, rows.stop, shift, self.seq_k
        )
        for first in range(start // TILE * TILE, stop, TILE):
            columns = slice(first, min(first + TILE, self.seq_k))
            hidden = None
            if columns.start < all_start or columns.stop > all_stop:
                queries = torch.arange(rows.start, rows.stop, device=device)
                keys = torch.arange(columns.start, columns.stop, device=device)
                hidden = self.spec.make_hidden_mask(queries, keys, shift)
            yield columns, hidden


def compute_scores(q_i: Tensor, k_j: Tensor, spec: AttentionSpec, hidden: Tensor | None) -> Tensor:
    """Return one tile of scores `[n, g·t, u]` with -inf for hidden keys."""
    # Scale the product: scaling the queries instead would round them once more.
    s_ij = torch.baddbmm(q_i.new_empty(()), q_i, k_j.mT, beta=0, alpha=spec.scale)
    if spec.softcap:
        s_ij = s_ij.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if hidden is not None:
        s_ij.view(len(s_ij), s_ij.shape[1] // len(hidden), *hidden.shape).masked_fill_(
            hidden, -torch.inf
        )
    return s_ij


def compute_row_lse(lse: Tensor, k: Tensor) -> Tensor:
    """Return L as `[n, g, seq]`, with +inf in rows that see no key so that exp(s - L) is 0."""
    rows = _group_rows(lse, k)
    return rows.masked_fill(rows == -torch.inf, torch.inf)


def compute_row_delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, k: Tensor) -> Tensor:
    """Return D = rowsum(dO ∘ O) - dL as `[n, g, seq]`."""
    delta = torch.linalg.vecdot(to_accumulation_dtype(grad_out), to_accumulation_dtype(out))
    if grad_lse is not None:
        delta = delta - grad_lse
    return _group_rows(delta, k)


def group_queries(q: Tensor, k: Tensor) -> Tensor:
    """Return `[batch, heads, seq, d]` as `[n, g, seq, d]` in the accumulation dtype."""
    return to_accumulation_dtype(q).reshape(
        k.shape[0] * k.shape[1], q.shape[1] // max(k.shape[1], 1), *q.shape[2:]
    )


def flatten_heads(k: Tensor) -> Tensor:
    """Return `[batch, kv_heads, seq, d]` as `[n, seq, d]` in the accumulation dtype."""
    return to_accumulation_dtype(k).reshape(k.shape[0] * k.shape[1], *k.shape[2:])


def to_accumulation_dtype(x: Tensor) -> Tensor:
    """Convert `x` to float32, in which sums are accumulated; return float64 unchanged."""
    return x if x.dtype == torch.float64 else x.float()


def _group_rows(x: Tensor, k: Tensor) -> Tensor:
    """Return `[batch, heads, seq]` as `[n, g, seq]`."""
    return x.reshape(k.shape[0] * k.shape[1], x.shape[1] // max(k.shape[1], 1), x.shape[2])
