"""Attention over a cache and appending to a cache as `torch.library` operators.

The operators check the values of lengths and pages, because only operators can read values in a
compiled graph.
"""

import torch
from torch import Tensor

from flashattn2.kvcache import eager
from flashattn2.kvcache.validation import check_memory, check_values, copy_aliased_rows
from flashattn2.operators import get_lse_dtype
from flashattn2.spec import AttentionSpec
from flashattn2.validation import check_boundaries


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    cu_q: Tensor | None,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    backend: str,
    new: int,
    check_lengths: bool,
    check_pages: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp over the first `lengths + new` keys of each sequence.

    The arguments `check_lengths` and `check_pages` are passed to `check_values`.
    """
    on_cpu = _should_check_on_cpu(backend, lengths)
    check_values(lengths, new, k_cache, block_table, on_cpu, check_lengths, check_pages)
    if cu_q is not None:
        check_boundaries("cu_seqlens_q", cu_q, q.shape[2], on_cpu)
    spec = AttentionSpec(scale, left, right, softcap)
    if backend == "triton":
        from flashattn2.kernels import decode

        with torch.cuda.device_of(q):
            return decode.decode(q, k_cache, v_cache, lengths, block_table, cu_q, spec, new)
    counts = [count + new for count in lengths.cpu().tolist()]
    bounds = None if cu_q is None else cu_q.cpu().tolist()
    out, lse = eager.attend_sequences(
        q, k_cache, v_cache, counts, block_table, bounds, spec, backend
    )
    return out.contiguous(), lse.contiguous()


decode_op = torch.library.custom_op("flashattn2::decode", attend, mutates_args=())


@decode_op.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v_cache.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=get_lse_dtype(q))


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    backend: str,
    check_lengths: bool,
) -> None:
    """Write `k` and `v` into the caches after the first `lengths` rows of each sequence."""
    on_cpu = _should_check_on_cpu(backend, lengths)
    check_values(lengths, k.shape[2], k_cache, block_table, on_cpu, check_lengths, True)
    check_memory(k_cache, v_cache, k, v)
    k, v = (copy_aliased_rows(rows, k_cache, v_cache) for rows in (k, v))
    if backend == "triton":
        from flashattn2.kernels import decode

        with torch.cuda.device_of(k):
            decode.append(k_cache, v_cache, k, v, lengths, block_table)
        return
    for cache, rows in ((k_cache, k), (v_cache, v)):
        eager.scatter_rows(cache, rows, lengths, block_table)


append_op = torch.library.custom_op(
    "flashattn2::append", append, mutates_args=("k_cache", "v_cache")
)


@append_op.register_fake
def _(k_cache: Tensor, v_cache: Tensor, *others: object) -> None:
    return None


def _should_check_on_cpu(backend: str, lengths: Tensor) -> bool:
    """Return True if the CPU reads and checks lengths and pages before the kernel starts.

    Otherwise device-side assertions check them, so that the CPU does not wait for the device.
    """
    return backend != "triton" or lengths.device.type == "cpu"
