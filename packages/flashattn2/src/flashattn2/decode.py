"""Attention of new queries over a cache of keys and values, contiguous or in pages.

Notable: the caches are ``(batch, kv_heads, capacity, dim)``, or with a block table ``(pages,
kv_heads, page_size, dim)``, of any strides.  The query heads of a key head lie one below the other
in a tile, so every key is read once, and a sequence's keys are split among processors.
"""

import torch
from torch import Tensor

from flashattn2 import aten, autocast, tiled
from flashattn2.autocast import lowered
from flashattn2.dispatch import choose
from flashattn2.function import with_sinks
from flashattn2.operators import scalars
from flashattn2.problem import UNBOUNDED, Score, Window, check_sinks, check_tensors, make_score


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
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    _check_shapes(q, k_cache, v_cache, block_table)
    given = [x for x in (q, k_cache, v_cache, k, v) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        raise RuntimeError(
            "attention over a cache has no gradient; call it under torch.no_grad(), or "
            "flash_attention for training"
        )
    check_sinks(sinks, q.shape[1], q)
    new = _check_new(q, k_cache, v_cache, k, v)
    paged = block_table is not None
    capacity = k_cache.shape[2] * (block_table.shape[1] if block_table is not None else 1)
    lengths = _lengths(cache_seqlens, q, capacity, new)
    if q.device.type == "cpu" and paged and not torch.compiler.is_compiling():
        _check_table(block_table, lengths + new, k_cache)  # type: ignore[arg-type]
    if k is not None and v is not None:
        for cache, rows in ((k_cache, k), (v_cache, v)):
            _append(cache, rows, lengths, block_table)
        lengths = lengths + new
    (q,) = lowered(q) if q.dtype != k_cache.dtype else (q,)
    score = make_score(q.shape[-1], is_causal, scale, window, softcap)
    # What runs follows from a sequence as long as the cache.
    method, _ = choose(
        q, k_cache, v_cache, score, backend="auto" if backend == "aten" else backend,
        precision=precision, packed=True, split_size=split_size,
    )  # fmt: skip
    # Where nothing but values is asked for, an operator around torch's takes longer than a token.
    plain = type(q) is Tensor and q.is_cpu and method.backend != "triton"
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        plain = False
    if plain:
        out, lse = _by_sequence(q, k_cache, v_cache, lengths, block_table, score)
    else:
        out, lse = decode_op(
            q, k_cache, v_cache, lengths, block_table, *scalars(score),
            method.backend, method.precision, method.split_size,
        )  # fmt: skip
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


@torch.library.custom_op("flashattn2::decode", mutates_args=())
def decode_op(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None,
    scale: float, left: int, right: int, softcap: float, backend: str, precision: str,
    split_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp over the first ``lengths`` keys of each sequence."""
    score = Score(scale, left, right, softcap)
    if backend == "triton":
        from flashattn2.kernels import decode

        with torch.cuda.device_of(q):
            return decode.decode(
                q, k_cache, v_cache, lengths, block_table, score, precision, split_size
            )
    return _by_sequence(q, k_cache, v_cache, lengths, block_table, score)


@decode_op.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(*q.shape[:-1], v_cache.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=dtype)


def _by_sequence(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor]:
    """On the CPU: all sequences at once where they are of one length, else one by one."""
    if autocast.is_on("cpu"):
        with autocast.off(q):
            return _by_sequence(q, k_cache, v_cache, lengths, block_table, score)
    counts = lengths.tolist()
    if block_table is None and len(set(counts)) == 1:
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
    seq_k = k.shape[2]
    if seq_q == 1:
        # One query stands at the last key: its window is a slice.
        if score.left != UNBOUNDED:
            k, v = k[:, :, -score.left - 1 :], v[:, :, -score.left - 1 :]
        score = Score(score.scale, softcap=score.softcap)
    if score.left == score.right == UNBOUNDED and heads:
        rows = q.reshape(batch, k.shape[1], -1, dim)
        run = tiled.forward if aten.why_not(rows, k, score) else aten.forward
        out, lse = run(rows, k, v, score)[:2]
        return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])
    if score.right == 0 and seq_q == seq_k and score.left == UNBOUNDED:
        return aten.forward_or_tiled(q, k, v, score)
    if score.softcap or q.numel() == 0 or seq_k < seq_q or k.shape[-1] != v.shape[-1]:
        return tiled.forward(q, k, v, score)[:2]
    queries, keys = (torch.arange(n) for n in (seq_q, seq_k))
    hidden = score.hidden(queries, keys, seq_k - seq_q)
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
    return aten.forward(q, k, v, Score(score.scale), mask)


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


def _check_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> None:
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
    if block_table is None:
        if q.shape[0] != k_cache.shape[0]:
            raise ValueError(
                f"q has batch {q.shape[0]} and k_cache {k_cache.shape[0]}; they must be the same, "
                "or a block_table say which pages belong to which sequence"
            )
        return
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


def _lengths(given: int | Tensor, q: Tensor, capacity: int, new: int) -> Tensor:
    if isinstance(given, int) and not isinstance(given, bool):
        lengths = torch.full((len(q),), given, dtype=torch.int32, device=q.device)
    elif isinstance(given, Tensor):
        lengths = given
    else:
        raise TypeError(f"cache_seqlens is {type(given).__name__}; give an int or an int32 tensor")
    if lengths.dtype != torch.int32 or lengths.shape != (len(q),) or lengths.device != q.device:
        raise ValueError(
            f"cache_seqlens is {lengths.dtype} of shape {tuple(lengths.shape)} on "
            f"{lengths.device}; give int32 of shape ({len(q)},) on {q.device}"
        )
    if torch.compiler.is_compiling() or lengths.device.type == "meta":
        return lengths
    rule = f"each of cache_seqlens must be from 0 to {capacity - new}: {capacity} rows, {new} new"
    good = ((lengths >= 0) & (lengths <= capacity - new)).all()
    if lengths.device.type == "cpu":
        if not good:
            raise ValueError(f"cache_seqlens is {lengths.tolist()}; {rule}")
    else:
        torch._assert_async(good, rule)
    return lengths


def _check_table(table: Tensor, lengths: Tensor, cache: Tensor) -> None:
    used = torch.arange(table.shape[1]) < -(-lengths // cache.shape[2])[:, None]
    wrong = table[used & ((table < 0) | (table >= len(cache)))]
    if len(wrong):
        raise ValueError(
            f"block_table names page {wrong[0]}; there are pages 0 to {len(cache) - 1}"
        )
