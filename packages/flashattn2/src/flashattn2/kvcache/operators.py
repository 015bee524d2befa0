"""Attention over a cache and appending to a cache as `torch.library` operators.

The operators check the values of lengths and pages, because a compiled graph has values only there.
"""

import torch
from torch import Tensor

from flashattn2.kvcache import eager
from flashattn2.kvcache.validation import check_values
from flashattn2.spec import AttentionSpec


@torch.library.custom_op("flashattn2::decode", mutates_args=())
def decode_op(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    backend: str,
    precision: str,
    split_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp over the first `lengths` keys of each sequence."""
    check_values(lengths, 0, k_cache, block_table)
    spec = AttentionSpec(scale, left, right, softcap)
    if backend == "triton":
        from flashattn2.kernels import decode

        with torch.cuda.device_of(q):
            return decode.decode(
                q, k_cache, v_cache, lengths, block_table, spec, precision, split_size
            )
    return eager.attend_sequences(q, k_cache, v_cache, lengths.tolist(), block_table, spec)


@decode_op.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(*q.shape[:-1], v_cache.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=dtype)


@torch.library.custom_op("flashattn2::append", mutates_args=("k_cache", "v_cache"))
def append_op(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    backend: str,
) -> None:
    """Write the new rows after the first `lengths` rows of each sequence."""
    check_values(lengths, k.shape[2], k_cache, block_table)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        if backend == "triton":
            from flashattn2.kernels import decode

            with torch.cuda.device_of(k):
                decode.append(cache, rows, lengths, block_table)
        else:
            eager.scatter_rows(cache, rows, lengths, block_table)


@append_op.register_fake
def _(k_cache: Tensor, v_cache: Tensor, *others: object) -> None:
    return None
