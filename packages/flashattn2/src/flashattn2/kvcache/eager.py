"""Attention over a cache in eager PyTorch: on a CPU, and on devices without Triton."""

from dataclasses import replace

import torch
from torch import Tensor

from flashattn2 import autocast
from flashattn2.backends import aten, tiled
from flashattn2.spec import UNBOUNDED, AttentionSpec

#: Bytes of the keys and values of a chunk of pages, as large as the L2 cache of a core.
CHUNK_BYTES = 2 * 1024**2
#: The smallest number of rows of a chunk, so that a chunk takes longer than its Python code.
CHUNK_ROWS = 256
#: Sequences of at most this many chunks are copied whole, which took no longer in measurements.
FEW_CHUNKS = 3


def attend_sequences(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    counts: list[int],
    block_table: Tensor | None,
    bounds: list[int] | None,
    spec: AttentionSpec,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp over the first `counts[b]` keys of each sequence `b`.

    If all counts are equal and the cache is contiguous, the sequences run as one batch, otherwise
    one after another.  With `bounds`, the queries are packed and run one sequence after another;
    `bounds[b]` is the index of the first query of sequence `b`.  The backend is "torch" (tiled, for
    every device) or "aten" (torch's CPU kernel if it supports the sequence).
    """
    if autocast.is_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return attend_sequences(q, k_cache, v_cache, counts, block_table, bounds, spec, backend)
    is_one_batch = block_table is None and len(set(counts)) == 1
    if bounds is None and is_one_batch:
        return _attend(q, k_cache[:, :, : counts[0]], v_cache[:, :, : counts[0]], spec, backend)
    outputs = []
    sums = []
    for b, count in enumerate(counts):
        rows = q[b : b + 1] if bounds is None else q[:, :, bounds[b] : bounds[b + 1]]
        result = None
        if block_table is not None and q.is_cpu and _can_omit_mask(rows, spec):
            result = _attend_chunks(rows, k_cache, v_cache, count, block_table[b], spec, backend)
        if result is None:
            keys = _gather_sequence(k_cache, b, count, block_table)
            values = _gather_sequence(v_cache, b, count, block_table)
            result = _attend(rows, keys, values, spec, backend)
        out, lse = result
        outputs.append(out)
        sums.append(lse)
    if not outputs:
        return _attend(q, k_cache[:0], v_cache[:0], spec, "torch")
    dim = 0 if bounds is None else 2
    return torch.cat(outputs, dim), torch.cat(sums, dim)


def scatter_rows(cache: Tensor, rows: Tensor, lengths: Tensor, block_table: Tensor | None) -> None:
    """Write `rows[b]` into the cache after the first `lengths[b]` rows of each sequence `b`."""
    new = torch.arange(rows.shape[2], device=rows.device)
    positions = lengths[:, None].long() + new  # [batch, new]
    if block_table is None:
        first_index = torch.arange(len(rows), device=rows.device)[:, None]
        row_index = positions
    else:
        first_index = block_table.gather(1, positions // cache.shape[2]).long()
        row_index = positions % cache.shape[2]
    cache[first_index, :, row_index] = rows.transpose(1, 2)


def _gather_sequence(cache: Tensor, b: int, count: int, block_table: Tensor | None) -> Tensor:
    """Return the rows of sequence `b` as `(1, kv_heads, count, dim)`."""
    if block_table is None:
        return cache[b : b + 1, :, :count]
    pages = block_table[b, : -(-count // cache.shape[2])]
    if cache.is_cpu and count:
        # Copy each row once; indexing and transposing would copy it twice.
        return torch.cat([cache[page] for page in pages.tolist()], 1)[None, :, :count]
    return cache.index_select(0, pages).transpose(0, 1).flatten(1, 2)[None, :, :count]


def _attend_chunks(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    count: int,
    table: Tensor,
    spec: AttentionSpec,
    backend: str,
) -> tuple[Tensor, Tensor] | None:
    """Return the output and log-sum-exp of a sequence, copying its pages chunk by chunk.

    The copy of a chunk stays in the L2 cache of a core until it is read.  The result is None for a
    sequence of at most `FEW_CHUNKS` chunks, or if a page is larger than a chunk.  It is also None
    if a log-sum-exp is not finite, or is 0, which torch's kernel may return for scores of -inf.
    """
    size = k_cache.shape[2]
    dims = k_cache.shape[3] + v_cache.shape[3]
    row_bytes = k_cache.shape[1] * dims * k_cache.element_size()
    chunk = max(CHUNK_ROWS, CHUNK_BYTES // row_bytes) // size * size
    # With a window, there is one query, at the last key.
    first_key = 0 if spec.left == UNBOUNDED else max(0, count - 1 - spec.left)
    start = first_key // size * size
    if count - start <= FEW_CHUNKS * chunk or chunk == 0:
        return None
    spec = replace(spec, left=UNBOUNDED, right=UNBOUNDED)
    pages = table.tolist()
    buffers = [x.new_empty(x.shape[1], chunk, x.shape[3]) for x in (k_cache, v_cache)]
    outputs = []
    sums = []
    for chunk_start in range(start, count, chunk):
        chunk_stop = min(chunk_start + chunk, count)
        used = pages[chunk_start // size : -(-chunk_stop // size)]
        for cache, buffer in zip((k_cache, v_cache), buffers, strict=True):
            torch.cat([cache[page] for page in used], 1, out=buffer[:, : len(used) * size])
        keys, values = (
            x[None, :, max(first_key - chunk_start, 0) : chunk_stop - chunk_start] for x in buffers
        )
        out, lse = _attend(q, keys, values, spec, backend)
        outputs.append(out)
        sums.append(lse)
    lse = torch.stack(sums)
    if not (lse.isfinite() & (lse != 0)).all():
        return None
    weights = lse.softmax(0)[..., None]
    return (torch.stack(outputs) * weights).sum(0).to(q.dtype), lse.logsumexp(0)


def _can_omit_mask(q: Tensor, spec: AttentionSpec) -> bool:
    """Return True if the mask can be replaced by a slice of the keys."""
    return q.shape[2] == 1 or spec.left == spec.right == UNBOUNDED


def _attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, backend: str
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp for sequences of equal length."""
    batch, heads, seq_q, dim = q.shape
    if seq_q == 1 and spec.left != UNBOUNDED:
        # The query is at the last key, so a window is a slice of the keys.
        k = k[:, :, -spec.left - 1 :]
        v = v[:, :, -spec.left - 1 :]
    run = tiled.forward if backend == "torch" else aten.forward_or_tiled
    if not (heads and _can_omit_mask(q, spec)):
        return run(q, k, v, spec)
    # Without a mask, the query heads of one key head become rows of one head: keys are read once.
    spec = replace(spec, left=UNBOUNDED, right=UNBOUNDED)
    rows = q.reshape(batch, k.shape[1], heads // k.shape[1] * seq_q, dim)
    out, lse = run(rows, k, v, spec)
    return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])
