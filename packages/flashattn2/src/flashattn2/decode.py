"""Attention of new queries over a cache of keys and values, contiguous or in pages.

Notable: the caches are ``(batch, kv_heads, capacity, dim)``, or with a block table ``(pages,
kv_heads, page_size, dim)``, of any strides.  The query heads of a key head lie one below the other
in a tile, so every key is read once, and a sequence's keys are split among processors.
"""

from dataclasses import replace

import torch
from torch import Tensor, is_grad_enabled

from flashattn2 import aten, autocast, tiled
from flashattn2.attention import Plan, recall, remember
from flashattn2.autocast import lowered
from flashattn2.dispatch import OF_TRITON, choose
from flashattn2.function import is_first_order, with_sinks
from flashattn2.operators import scalars
from flashattn2.problem import (
    MOST_ROWS,
    UNBOUNDED,
    Score,
    Window,
    check_sinks,
    check_tensors,
    make_score,
)


def flash_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: int | Tensor,
    block_table: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    precision: str | None = None,
    split_size: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ``q (batch, heads, seq_q, dim)`` over the first keys of a cache.

    ``k_cache`` and ``v_cache`` are ``(batch, kv_heads, capacity, dim)``; with a ``block_table`` of
    int32 ``(batch, most_pages)`` they are ``(pages, kv_heads, page_size, dim)``, and key ``j`` of
    sequence ``b`` is row ``j % page_size`` of page ``block_table[b, j // page_size]``.
    ``cache_seqlens`` says how many keys each sequence has: one int, or int32 ``(batch,)``.

    ``k`` and ``v``, ``(batch, kv_heads, new, dim)``, are first written into the caches, in place,
    behind those keys, and are attended to as well.  The last query stands at the last key.

    The other options are those of `flash_attention`.  It has no gradient: call it under
    ``torch.no_grad()``.  On a GPU nothing waits for the values of ``cache_seqlens``.
    """
    paged = block_table is not None
    options = (
        is_causal, scale, window, type(window), softcap, backend, precision, split_size, paged,
        (k.shape, v.shape, k.dtype, v.dtype, k.layout, v.layout)
        if type(k) is type(v) is Tensor
        else k is v is None,
    )  # fmt: skip
    key, plan = recall(q, k_cache, v_cache, options)
    if is_grad_enabled():
        _check_no_gradient(q, k_cache, v_cache, k, v)
    if plan is not None and plan.kernel and type(cache_seqlens) is int and sinks is None:
        new = 0
        ready = k is v is None
        if type(k) is type(v) is Tensor:
            new, ready = k.shape[2], k.is_cpu and v.is_cpu
        count = cache_seqlens + new
        seen = count if plan.score.left == UNBOUNDED else min(count, plan.score.left + 1)
        # Fewer keys may lose NaN: see Note [Lost NaN] in aten.py.
        ready = ready and seen >= aten.VECTOR and is_first_order()
        ready = ready and cache_seqlens >= 0 and count <= k_cache.shape[2]
        if ready and q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1:
            return _one_query(q, k_cache, v_cache, k, v, count, new, plan.score, return_lse)
    if plan is None:
        check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
        _check_shapes(q, k_cache, v_cache, paged)
    if block_table is not None:
        _check_table(block_table, q)
    check_sinks(sinks, q.shape[1], q)
    new = 0 if k is v is None else _check_new(q, k_cache, v_cache, k, v)
    if plan is None:
        (q,) = lowered(q) if q.dtype != k_cache.dtype else (q,)
        score = make_score(q.shape[-1], is_causal, scale, window, softcap)
        # What runs follows from a sequence as long as the cache.
        method, _ = choose(
            q, k_cache, v_cache, score, backend="auto" if backend == "aten" else backend,
            precision=precision, packed=True, split_size=split_size,
        )  # fmt: skip
        one_query = q.is_cpu and not paged and q.shape[2] == 1 and min(*q.shape, *k_cache.shape) > 0
        one_query = one_query and not (softcap or method.backend in OF_TRITON)
        plan = remember(key, q, Plan(score, method, one_query and aten.is_all(q, v_cache)))
    score, method, _ = plan
    # Where nothing but values is asked for, an operator around torch's takes longer than a token.
    plain = type(q) is Tensor and q.is_cpu and method.backend != "triton"
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        plain = False
    if plain:
        if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
            counts = [cache_seqlens] * len(q)
        else:
            counts = _check_lengths(cache_seqlens, q).tolist()
        _check_counts(counts, new, k_cache, block_table)
        if k is not None and v is not None:
            _append_all(k_cache, v_cache, k, v, counts, block_table)
            counts = [count + new for count in counts]
        out, lse = _by_sequence(q, k_cache, v_cache, counts, block_table, score)
    else:
        # The operators check values when they run: a compiled graph checks nothing else.
        lengths = _lengths(cache_seqlens, q)
        if k is not None and v is not None:
            append_op(k_cache, v_cache, k, v, lengths, block_table, method.backend)
            lengths = lengths + new
        out, lse = decode_op(
            q, k_cache, v_cache, lengths, block_table, *scalars(score),
            method.backend, method.precision, method.split_size,
        )  # fmt: skip
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return (out, lse.contiguous()) if return_lse else out


def _one_query(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, count: int,
    new: int, score: Score, return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """A copy of each new row, a view of each cache and torch's kernel: a token of any chat."""
    if k is not None and v is not None:
        k_cache.narrow(2, count - new, new).copy_(k)
        v_cache.narrow(2, count - new, new).copy_(v)
    # The query stands at the last key: its window is a slice.
    first = 0 if score.left == UNBOUNDED else max(0, count - 1 - score.left)
    keys, values = k_cache.narrow(2, first, count - first), v_cache.narrow(2, first, count - first)
    batch, heads, _, dim = q.shape
    kv_heads = keys.shape[1]
    if heads == kv_heads:
        out, lse = aten.kernel(q, keys, values, 0.0, False, scale=score.scale)
    else:
        # The query heads of a key head as rows of one: every key is read once.
        rows = q.reshape(batch, kv_heads, heads // kv_heads, dim)
        out, lse = aten.kernel(rows, keys, values, 0.0, False, scale=score.scale)
        out, lse = out.reshape(batch, heads, 1, dim), lse.reshape(batch, heads, 1)
    return (out, lse.contiguous()) if return_lse else out


@torch.library.custom_op("flashattn2::decode", mutates_args=())
def decode_op(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None,
    scale: float, left: int, right: int, softcap: float, backend: str, precision: str,
    split_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp over the first ``lengths`` keys of each sequence."""
    _check_values(lengths, 0, k_cache, block_table)
    score = Score(scale, left, right, softcap)
    if backend == "triton":
        from flashattn2.kernels import decode

        with torch.cuda.device_of(q):
            return decode.decode(
                q, k_cache, v_cache, lengths, block_table, score, precision, split_size
            )
    return _by_sequence(q, k_cache, v_cache, lengths.tolist(), block_table, score)


@torch.library.custom_op("flashattn2::append", mutates_args=("k_cache", "v_cache"))
def append_op(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor,
    block_table: Tensor | None, backend: str,
) -> None:  # fmt: skip
    """Write the new rows behind the first ``lengths`` rows of each sequence."""
    _check_values(lengths, k.shape[2], k_cache, block_table)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        if backend == "triton":
            from flashattn2.kernels import decode

            with torch.cuda.device_of(k):
                decode.append(cache, rows, lengths, block_table)
        else:
            _append(cache, rows, lengths, block_table)


@append_op.register_fake
def _(k_cache: Tensor, v_cache: Tensor, *others: object) -> None:
    return None


@decode_op.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(*q.shape[:-1], v_cache.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=dtype)


def _by_sequence(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    counts: list[int],
    block_table: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor]:
    """On the CPU: all sequences at once where they are of one length, else one by one."""
    if autocast.is_on("cpu"):
        with autocast.off(q):
            return _by_sequence(q, k_cache, v_cache, counts, block_table, score)
    if block_table is None and counts and counts.count(counts[0]) == len(counts):
        return _attend(q, k_cache[:, :, : counts[0]], v_cache[:, :, : counts[0]], score)
    outs, sums = [], []
    for b, count in enumerate(counts):
        keys, values = (_sequence(cache, b, count, block_table) for cache in (k_cache, v_cache))
        out, lse = _attend(q[b : b + 1], keys, values, score)
        outs.append(out)
        sums.append(lse)
    if not outs:
        return _attend(q, k_cache[:0], v_cache[:0], score)
    return torch.cat(outs), torch.cat(sums)


def _sequence(cache: Tensor, b: int, count: int, block_table: Tensor | None) -> Tensor:
    """One sequence's rows, ``(1, kv_heads, count, dim)``."""
    if block_table is None:
        return cache[b : b + 1, :, :count]
    pages = cache[block_table[b, : -(-count // cache.shape[2])].long()]
    return pages.transpose(0, 1).flatten(1, 2)[None, :, :count]


def _attend(q: Tensor, k: Tensor, v: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    """On the CPU: a key head's query heads as rows of one, where no mask tells rows apart."""
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_k = k.shape[1:3]
    if seq_q == 1 and score.left != UNBOUNDED:
        # One query stands at the last key: its window is a slice.
        k, v = k[:, :, -score.left - 1 :], v[:, :, -score.left - 1 :]
    if heads and (seq_q == 1 or score.left == score.right == UNBOUNDED):
        rows = q if heads == kv_heads else q.reshape(batch, kv_heads, -1, dim)
        if score.softcap or q.numel() == 0 or k.numel() == 0:
            out, lse, _ = tiled.forward(rows, k, v, replace(score, left=UNBOUNDED, right=UNBOUNDED))
        else:
            out, lse = aten.forward(rows, k, v, score.scale, False)
        if rows is q:
            return out, lse
        return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])
    if score.right == 0 and seq_q == seq_k and score.left == UNBOUNDED:
        return aten.forward_or_tiled(q, k, v, score)
    if score.softcap or q.numel() == 0 or seq_k < seq_q or k.shape[-1] != v.shape[-1]:
        return tiled.forward(q, k, v, score)[:2]
    queries, keys = (torch.arange(n) for n in (seq_q, seq_k))
    hidden = score.hidden(queries, keys, seq_k - seq_q)
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
    return aten.forward(q, k, v, score.scale, False, mask)


def _append_all(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, counts: list[int],
    block_table: Tensor | None,
) -> None:  # fmt: skip
    """On the CPU: one slice where all sequences are of one length and contiguous."""
    lengths = None
    for cache, rows in ((k_cache, k), (v_cache, v)):
        if block_table is None and counts and counts.count(counts[0]) == len(counts):
            cache[:, :, counts[0] : counts[0] + rows.shape[2]] = rows
            continue
        if lengths is None:
            lengths = torch.tensor(counts, dtype=torch.int32)
        _append(cache, rows, lengths, block_table)


def _append(cache: Tensor, rows: Tensor, lengths: Tensor, block_table: Tensor | None) -> None:
    """Write the new rows behind those that are there."""
    place = lengths[:, None].long() + torch.arange(rows.shape[2], device=rows.device)  # [b, new]
    if block_table is None:
        first = torch.arange(len(rows), device=rows.device)[:, None]
        offset = place
    else:
        first = block_table.gather(1, place // cache.shape[2]).long()
        offset = place % cache.shape[2]
    cache[first, :, offset] = rows.transpose(1, 2)


def _check_no_gradient(*given: Tensor | None) -> None:
    if any(isinstance(x, Tensor) and x.requires_grad for x in given):
        raise RuntimeError(
            "attention over a cache has no gradient; call it under torch.no_grad(), or "
            "flash_attention for training"
        )


def _check_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor, paged: bool) -> None:
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; give four dimensions")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; move one of them")
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(f"k_cache is {k_cache.dtype} and v_cache {v_cache.dtype}; make them alike")
    if q.dtype != k_cache.dtype and not torch.is_autocast_enabled(q.device.type):
        raise ValueError(f"q is {q.dtype} and k_cache {k_cache.dtype}; convert q")
    if k_cache.shape[:-1] != v_cache.shape[:-1] or q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)} and v_cache "
            f"{tuple(v_cache.shape)} do not belong together: k_cache has the head dim of q, and "
            "v_cache all else of k_cache"
        )
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide among {kv_heads} key heads")
    if not paged and q.shape[0] != k_cache.shape[0]:
        raise ValueError(
            f"q has batch {q.shape[0]} and k_cache {k_cache.shape[0]}; they must be the same, "
            "or a block_table say which pages belong to which sequence"
        )


def _check_table(block_table: Tensor, q: Tensor) -> None:
    check_tensors(block_table=block_table)
    if block_table.dtype != torch.int32 or block_table.dim() != 2 or len(block_table) != len(q):
        raise ValueError(
            f"block_table is {block_table.dtype} of shape {tuple(block_table.shape)}; "
            f"give int32 of shape ({len(q)}, pages of the longest sequence)"
        )
    if block_table.device != q.device:
        raise ValueError(f"block_table is on {block_table.device} and q on {q.device}; move one")


def _check_new(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None
) -> int:
    """How many new keys each sequence gets."""
    if (k is None) != (v is None):
        raise ValueError("k and v go together: give both to append them, or neither")
    if k is None or v is None:
        return 0
    check_tensors(k=k, v=v)
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (q.shape[0], cache.shape[1], k.shape[-2], cache.shape[3])
        if tuple(x.shape) != wanted or x.dtype != cache.dtype or x.device != cache.device:
            raise ValueError(
                f"{name} is {x.dtype} of shape {tuple(x.shape)} on {x.device}; to append to "
                f"{name}_cache give {cache.dtype} of shape (batch {wanted[0]}, kv_heads "
                f"{wanted[1]}, new, dim {wanted[3]}) on {cache.device}"
            )
    return k.shape[2]


def _lengths(given: int | Tensor, q: Tensor) -> Tensor:
    """Return the lengths as a tensor, without a wait for their values."""
    if isinstance(given, int) and not isinstance(given, bool):
        return torch.full((len(q),), given, dtype=torch.int32, device=q.device)
    return _check_lengths(given, q)


def _check_lengths(given: object, q: Tensor) -> Tensor:
    if not isinstance(given, Tensor):
        raise TypeError(f"cache_seqlens is {type(given).__name__}; give an int or an int32 tensor")
    if given.dtype != torch.int32 or given.shape != (len(q),) or given.device != q.device:
        raise ValueError(
            f"cache_seqlens is {given.dtype} of shape {tuple(given.shape)} on "
            f"{given.device}; give int32 of shape ({len(q)},) on {q.device}"
        )
    return given


def _capacity(cache: Tensor, table: Tensor | None) -> int:
    """Return how many rows a sequence may have; positions are summed as int32 in the kernels."""
    return min(cache.shape[2] * (1 if table is None else table.shape[1]), MOST_ROWS - 1)


def _rule(new: int, cache: Tensor, table: Tensor | None) -> str:
    capacity = _capacity(cache, table)
    where = f"{capacity} rows" if table is None else f"{capacity} rows in the pages of block_table"
    return f"each of cache_seqlens must be from 0 to {capacity - new}: {where}, {new} new"


def _check_values(lengths: Tensor, new: int, cache: Tensor, table: Tensor | None) -> None:
    """Check lengths and the pages in use: on a CPU raise ValueError, on a GPU assert it there."""
    if lengths.device.type == "cpu":
        _check_counts(lengths.tolist(), new, cache, table)
    elif lengths.device.type != "meta":
        _assert_values(lengths, new, cache, table)


def _assert_values(lengths: Tensor, new: int, cache: Tensor, table: Tensor | None) -> None:
    """Assert on the device, without a wait, that lengths fit and that the pages in use exist."""
    good = ((lengths >= 0) & (lengths <= _capacity(cache, table) - new)).all()
    torch._assert_async(good, _rule(new, cache, table))
    if table is not None:
        first_rows = torch.arange(table.shape[1], device=table.device) * cache.shape[2]
        is_unused = first_rows >= (lengths + new)[:, None]
        good = (is_unused | ((table >= 0) & (table < len(cache)))).all()
        torch._assert_async(good, f"block_table must name pages 0 to {len(cache) - 1}")


def _check_counts(counts: list[int], new: int, cache: Tensor, table: Tensor | None) -> None:
    """Raise ValueError for lengths beyond the capacity, or for pages in use that do not exist."""
    if counts and not (min(counts) >= 0 and max(counts) <= _capacity(cache, table) - new):
        raise ValueError(f"cache_seqlens is {counts}; {_rule(new, cache, table)}")
    if table is None:
        return
    pages = -(-(torch.tensor(counts, dtype=torch.int32) + new) // cache.shape[2])
    used = torch.arange(table.shape[1]) < pages[:, None]
    wrong = table[used & ((table < 0) | (table >= len(cache)))]
    if len(wrong):
        raise ValueError(
            f"block_table names page {wrong[0]}; there are pages 0 to {len(cache) - 1}"
        )
