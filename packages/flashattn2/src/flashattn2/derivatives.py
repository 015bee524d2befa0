"""The double backward pass, in linear memory.

The gradients of k and v are sums over tiles of queries, and a gradient of q belongs to one tile.
Therefore torch differentiates the gradients of one tile at a time.  Only the scores of this tile
are stored.
"""

from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from flashattn2.backends.tiled import Tiles, to_accumulation_dtype
from flashattn2.reference import attend
from flashattn2.spec import AttentionSpec

#: The error of a double backward pass inside of hooks on saved tensors. The error that torch.func
#: would raise there does not name the remedy.
_HOOKS_MESSAGE = (
    "the double backward pass of attention is not supported inside of "
    "torch.autograd.graph.saved_tensors_hooks and save_on_cpu; leave the context before the double "
    "backward pass"
)


@torch.autograd.graph.disable_saved_tensors_hooks(_HOOKS_MESSAGE)
def compute_double_backward(
    q: Tensor,
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

    The arguments and results of the queries precede those of the keys: see `map_sequences`.

    Raises RuntimeError inside of `saved_tensors_hooks` and `save_on_cpu`.
    """
    if grad_lse is None:
        grad_lse = to_accumulation_dtype(q.new_zeros(q.shape[:-1]))
    query_side = [to_accumulation_dtype(x) for x in (q, grad_out, grad_lse, t_q)]
    key_side = [to_accumulation_dtype(x) for x in (k, v, t_k, t_v)]
    results = [torch.zeros_like(x) for x in (*query_side[:3], *key_side[:2])]
    shift = k.shape[2] - q.shape[2]
    for rows in Tiles(spec, q.shape[2], k.shape[2]).iter_queries():
        start, _, _, stop = spec.compute_key_ranges(rows.start, rows.stop, shift, k.shape[2])
        keys = slice(start, max(start, stop))
        hidden = spec.make_hidden_mask(
            torch.arange(rows.start, rows.stop, device=q.device),
            torch.arange(keys.start, keys.stop, device=q.device),
            shift,
        )
        tile = _differentiate_gradients(
            [x[:, :, rows] for x in query_side], [x[:, :, keys] for x in key_side], spec, hidden
        )
        for whole, part in zip(results[:3], tile[:3], strict=True):
            whole[:, :, rows] = part
        for whole, part in zip(results[3:], tile[3:], strict=True):
            whole[:, :, keys] += part
    dtypes = q.dtype, grad_out.dtype, grad_lse.dtype, k.dtype, v.dtype
    g_q, g_out, g_lse, g_k, g_v = (x.to(d) for x, d in zip(results, dtypes, strict=True))
    return g_q, g_out, g_lse, g_k, g_v


def _differentiate_gradients(
    query_side: list[Tensor], key_side: list[Tensor], spec: AttentionSpec, hidden: Tensor
) -> tuple[Tensor, ...]:
    """Return the results of `compute_double_backward` for one tile of queries and its keys."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, spec, hidden)

    def compute_gradients(
        q: Tensor, grad_out: Tensor, grad_lse: Tensor, k: Tensor, v: Tensor
    ) -> Any:
        pull_back: Any = vjp(run, q, k, v)[1]
        return pull_back((grad_out, grad_lse))

    *inputs, t_q = query_side
    k, v, t_k, t_v = key_side
    pull_back: Any = vjp(compute_gradients, *inputs, k, v)[1]
    results: tuple[Tensor, ...] = pull_back((t_q, t_k, t_v))
    return results
