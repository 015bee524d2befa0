"""The public function `flash_attention_with_kvcache`, in the steps of `flash_attention`."""

from typing import Any

import torch
from torch import Tensor

from flashattn2.autocast import cast_for_autocast
from flashattn2.autograd_functions import apply_sinks
from flashattn2.backends import aten
from flashattn2.compilation import is_untransformed, should_call_operator
from flashattn2.dispatch import BackendChoice, select_backend
from flashattn2.kvcache import validation
from flashattn2.kvcache.operators import append, append_op, attend, decode_op
from flashattn2.plan_cache import Plan, look_up_plan, store_plan
from flashattn2.spec import UNBOUNDED, AttentionSpec, Window, make_spec
from flashattn2.validation import check_int32, check_sinks, check_tensors


def flash_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: int | Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of new queries over the keys of a cache, after appending `k` and `v`.

    The function has no gradient: call it under `torch.no_grad()`.  The Triton kernels do not wait
    for the values of `cache_seqlens`; other backends do.

    Args:
        q: Queries `(batch, heads, seq_q, dim)`, or packed `(total_q, heads, dim)` with
            `cu_seqlens_q`.  The last query of a sequence is at the position of its last key.
        k_cache: Keys `(batch, kv_heads, capacity, dim)`, or `(pages, kv_heads, page_size, dim)`
            with a `block_table`.
        v_cache: Values with the shape of `k_cache`, except for the head dim.
        k: New keys `(batch, kv_heads, new, dim)`, which may be rows of the cache.  They are written
            into the cache in place after the first `cache_seqlens` keys, and queries attend to them
            as well.  Sequences may share full pages.  A new key must not overwrite another key, in
            a shared page or in an expanded cache.
        v: New values, required with `k`.
        cache_seqlens: Number of keys in the cache before `k`: an int for all sequences, or int32
            `(batch,)`.
        block_table: int32 `(batch, max_pages)`.  Key `j` of sequence `b` is row `j % page_size` of
            page `block_table[b, j // page_size]`.
        cu_seqlens_q: Boundaries of packed queries, int32 `(batch + 1,)`, for sequences with
            different numbers of queries (prefill and decode in one call).  The keys of all queries
            must be in the cache already, so `k` and `v` must be None.

    The remaining options are those of `flash_attention`.  The backend "aten" selects torch's CPU
    kernel for each sequence that it supports, and "auto" does so on a CPU.

    Returns:
        The output `(batch, heads, seq_q, dim_v)` and, with `return_lse`, the log-sum-exp
        `(batch, heads, seq_q)`; with `cu_seqlens_q`, `(total_q, heads, dim_v)` and `(heads,
        total_q)`.

    Raises:
        ValueError, TypeError: If an argument is invalid, or the named backend does not support it.
            On a GPU, the Triton backend checks the values of lengths, pages and boundaries with
            device-side assertions instead.
        RuntimeError: If a tensor requires a gradient outside of `torch.no_grad()`, or if
            forward-mode AD or a `torch.func` transform is active.
        NotImplementedError: Inside `torch.jit.trace`, and inside `make_fx` with `k` and `v`.
    """
    is_paged = block_table is not None
    new_rows = _sign_new_rows(k, v)
    packing = None if cu_seqlens_q is None else getattr(cu_seqlens_q, "shape", type(cu_seqlens_q))
    sides = window if isinstance(window, tuple) else (window,)
    options = is_causal, scale, softcap, backend, is_paged, new_rows, packing, type(window), *sides
    signature, plan = look_up_plan(q, k_cache, v_cache, options)
    validation.check_no_derivative(q, k_cache, v_cache, k, v, sinks)
    if plan is not None and plan.is_cpu_kernel and sinks is None:
        # Fast path for a decoded token: at most 15 us of Python with AVX-512, as test_speed.py
        # measures.
        result = _call_cpu_kernel(q, k_cache, v_cache, k, v, cache_seqlens, plan.spec)
        if result is not None:
            out, lse = result
            return (out, lse.reshape(out.shape[:-1]).contiguous()) if return_lse else out

    # Validate.
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    batch = validation.count_sequences(q, cu_seqlens_q)
    if plan is None:
        (q,) = (q,) if q.dtype == k_cache.dtype else cast_for_autocast(q)
        validation.check_shapes(q, k_cache, v_cache, is_paged, cu_seqlens_q is not None, batch)
    if block_table is not None:
        check_int32("block_table", block_table, (batch, "max_pages"), q)
    check_sinks(sinks, q.shape[1], q)
    new = validation.check_new_rows(q, k_cache, v_cache, k, v, is_packed=cu_seqlens_q is not None)

    # Specify the scores and select a backend.
    q = q if cu_seqlens_q is None else q.transpose(0, 1)[None]
    if plan is None:
        spec = make_spec(q.shape[-1], is_causal, scale, window, softcap)
        choice = _choose_backend(q, k_cache, v_cache, spec, backend)
        is_cpu_kernel = (
            not is_paged
            and cu_seqlens_q is None
            and _is_single_query_on_cpu(q, k_cache, v_cache, spec, choice)
        )
        plan = Plan(spec, choice, is_cpu_kernel)
        store_plan(signature, q, plan)

    # Run.
    lengths = validation.make_length_tensor(cache_seqlens, q, batch, new, k_cache, block_table)
    check_lengths = isinstance(cache_seqlens, Tensor)
    as_operator = should_call_operator(*(x for x in (q, k_cache, v_cache, k, v) if x is not None))
    if k is not None and v is not None:
        q = validation.separate_queries(q, k_cache, v_cache, k, v)
        write = append_op if as_operator else append
        write(k_cache, v_cache, k, v, lengths, block_table, plan.choice.backend, check_lengths)
        if not as_operator:
            torch.autograd.graph.increment_version((k_cache, v_cache))
    run = decode_op if as_operator else attend
    out, lse = run(
        q,
        k_cache,
        v_cache,
        lengths,
        block_table,
        cu_seqlens_q,
        *plan.spec.to_scalars(),
        plan.choice.backend,
        new,
        # Appending has checked the lengths and pages.
        check_lengths=check_lengths and k is None,
        check_pages=k is None,
    )
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)

    # Format.
    if cu_seqlens_q is not None:
        out, lse = out[0].transpose(0, 1), lse[0]
    return (out, lse.contiguous()) if return_lse else out


def _choose_backend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, spec: AttentionSpec, backend: str
) -> BackendChoice:
    """Return the choice; on a CPU, "auto" and "aten" select a kernel per sequence in `eager.py`."""
    is_per_sequence = q.device.type == "cpu" and backend in ("auto", "aten")
    requested = "torch" if is_per_sequence else backend
    choice, _ = select_backend(q, k_cache, v_cache, spec, backend=requested, packed=True)
    return choice._replace(backend="aten") if is_per_sequence else choice


def _sign_new_rows(k: Tensor | None, v: Tensor | None) -> Any:
    """Return the part of a call's signature that depends on the new keys and values."""
    if type(k) is Tensor and type(v) is Tensor:
        return k.shape, v.shape, k.dtype, v.dtype, k.layout, v.layout
    return k is None and v is None


def _is_single_query_on_cpu(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, spec: AttentionSpec, choice: BackendChoice
) -> bool:
    """Return True if one call of torch's CPU kernel suffices; the cache must not be paged."""
    if choice.backend != "aten" or spec.softcap:
        return False
    is_single_query = q.shape[2] == 1 and min(*q.shape, *k_cache.shape) > 0
    return is_single_query and aten.is_kernel_sufficient(q, v_cache)


def _call_cpu_kernel(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: int | Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor] | None:
    """Append the new rows and return the output and log-sum-exp of torch's CPU kernel.

    If the call needs the general path, return None and write nothing.  The log-sum-exp has the
    shape `(batch, kv_heads, heads // kv_heads)`.  Reshaping it takes a copy, so the caller does so
    only if the log-sum-exp is requested.
    """
    if type(cache_seqlens) is not int:
        return None
    new = 0
    if k is not None and v is not None:
        if not (type(k) is Tensor and type(v) is Tensor and k.is_cpu and v.is_cpu):
            return None
        new = k.shape[2]
    elif k is not v:
        return None
    stop = cache_seqlens + new
    start = 0 if spec.left == UNBOUNDED else max(0, stop - 1 - spec.left)
    # With fewer keys the kernel may lose NaN: see Note [Lost NaN] in aten.py.
    is_supported = stop - start >= aten.VECTOR and is_untransformed()
    if not (is_supported and cache_seqlens >= 0 and stop <= k_cache.shape[2]):
        return None
    if not q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1:
        return None
    if k is not None and v is not None:
        validation.check_memory(k_cache, v_cache, k, v)
        q = validation.copy_aliased_rows(q, k_cache, v_cache)
        k = validation.copy_aliased_rows(k, k_cache, v_cache)
        v = validation.copy_aliased_rows(v, k_cache, v_cache)
        k_cache.narrow(2, cache_seqlens, new).copy_(k)
        v_cache.narrow(2, cache_seqlens, new).copy_(v)
    # The query is at the last key, so a window is a slice of the keys.
    keys = k_cache.narrow(2, start, stop - start)
    values = v_cache.narrow(2, start, stop - start)
    batch, heads, _, dim = q.shape
    kv_heads = keys.shape[1]
    if heads == kv_heads:
        return aten.run_kernel(q, keys, values, False, spec.scale)
    # The query heads of one key head become rows of one head, so each key is read once.
    rows = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    out, lse = aten.run_kernel(rows, keys, values, False, spec.scale)
    return out.reshape(q.shape), lse
