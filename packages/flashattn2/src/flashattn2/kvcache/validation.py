"""Validation of the arguments of `flash_attention_with_kvcache`."""

import functools
import itertools
import numbers
import operator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashattn2.compilation import is_recorded, is_untransformed
from flashattn2.spec import DIM_LIMIT
from flashattn2.validation import DTYPES, check_heads, check_int32, check_matching, check_tensors

if TYPE_CHECKING:
    # The import takes about a second.
    from torch._dynamo.comptime import ComptimeContext


def check_no_derivative(*tensors: Tensor | None) -> None:
    """Raise RuntimeError for a required gradient, forward-mode AD or an active transform.

    In a compiled graph, only gradients are checked.
    """
    needs_gradient = False
    if torch.is_grad_enabled():
        # A loop takes less time than `any` with a generator.
        for x in tensors:
            if isinstance(x, Tensor) and x.requires_grad:
                needs_gradient = True
    if needs_gradient or not (torch.compiler.is_compiling() or is_untransformed()):
        raise RuntimeError(
            "attention over a cache has no gradient; call it under torch.no_grad() and outside of "
            "forward-mode AD and torch.func, or call flash_attention for training"
        )


def count_sequences(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    """Return the number of sequences; raise an error if `cu_seqlens_q` is not a valid tensor."""
    if cu_seqlens_q is None:
        return q.shape[0] if q.dim() else 0
    check_int32("cu_seqlens_q", cu_seqlens_q, ("sequences + 1",), q)
    return len(cu_seqlens_q) - 1


def check_shapes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, is_paged: bool, is_packed: bool, batch: int
) -> None:
    """Raise ValueError unless shapes, dtypes and devices of the queries and caches match."""
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        layout = "(total_q, heads, dim)" if is_packed and x is q else "4-dimensional"
        if x.dim() != (3 if is_packed and x is q else 4):
            raise ValueError(f"expected {name} to be {layout}, got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(
                f"expected {name} to be float64, float32, bfloat16 or float16, got {x.dtype}; "
                "quantized caches need scales, which no kernel here applies: keep the cache in "
                "bfloat16, or convert it with its scale"
            )
    check_matching(q[None] if is_packed else q, k_cache, v_cache, "k_cache", "v_cache")
    if k_cache.shape[1] == 0 or (is_paged and k_cache.shape[2] == 0):
        raise ValueError(
            "expected at least one key head and pages of at least one row, got k_cache of shape "
            f"{tuple(k_cache.shape)}"
        )
    check_heads(q.shape[1], k_cache.shape[1])
    if not is_paged and batch != k_cache.shape[0]:
        raise ValueError(
            f"expected one batch size, got batch {batch} for q and {k_cache.shape[0]} for "
            "k_cache; pass a block_table for a paged cache"
        )


def check_new_rows(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    is_packed: bool,
) -> int:
    """Raise an error unless `k` and `v` fit the caches; return the number of new rows."""
    if (k is None) != (v is None):
        raise ValueError("expected both k and v to append them, or neither, got one of them")
    if k is None or v is None:
        return 0
    if is_recorded():
        raise NotImplementedError(
            "make_fx with new keys is not supported, because the graph would be valid only for "
            "their number in the example; use torch.export or torch.compile"
        )
    if is_packed:
        raise ValueError(
            "expected no k and v with cu_seqlens_q, got new keys; write them into the cache before "
            "the call, such as k_cache[pages, :, rows] = k, and count them in cache_seqlens"
        )
    check_tensors(k=k, v=v)
    new = k.shape[2] if k.dim() == 4 else 0
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        shape = (q.shape[0], cache.shape[1], new, cache.shape[3])
        if tuple(x.shape) != shape or x.dtype != cache.dtype or x.device != cache.device:
            raise ValueError(
                f"expected {name} to be {cache.dtype} of shape (batch {shape[0]}, kv_heads "
                f"{shape[1]}, new, dim {shape[3]}) on {cache.device}, got {x.dtype} of shape "
                f"{tuple(x.shape)} on {x.device}"
            )
    return new


def check_memory(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for expanded or overlapping caches, where new rows would overwrite others.

    The operator calls this function, because tensors outside of an operator have no memory while a
    graph is compiled.  The fast path of a decoded token also calls it, so every additional
    statement slows decoding.
    """
    for cache in (k_cache, v_cache):
        if _has_overlapping_elements(cache.shape, cache.stride()):
            raise ValueError(
                "expected separate memory for each row of the caches, got rows that share memory "
                f"in a tensor with strides {cache.stride()}: new rows would overwrite each other; "
                "pass a copy made by contiguous()"
            )
    distance = v_cache.data_ptr() - k_cache.data_ptr()
    if v.data_ptr() - k.data_ptr() == distance and _are_rows_aligned(k_cache, v_cache, k, v):
        return
    first = k_cache if distance >= 0 else v_cache
    strides = first.stride()
    extent = sum(map(operator.mul, strides, first.shape)) - sum(strides) + 1
    is_apart = abs(distance) >= extent * first.element_size() or not k.numel()
    if not is_apart and np.shares_memory(_map_addresses(k_cache), _map_addresses(v_cache)):
        raise ValueError(
            "expected separate memory for k_cache and v_cache, got caches that overlap: new values "
            "would overwrite keys; allocate the caches separately, or as parts of one tensor such "
            "as kv[0] and kv[1]"
        )


@functools.lru_cache(1024)
def _has_overlapping_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if two elements of a tensor may have the same address.

    This is the case if the elements along the dimensions of smaller stride extend beyond the next
    stride, as in expanded and overlapping tensors.
    """
    extent = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += stride * max(0, size - 1)
    return False


def _are_rows_aligned(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if values overlap their keys identically in the caches and in the new rows.

    In latent attention the values are a part of the keys, so writing both writes the same numbers.
    The caller has compared the distances between keys and values, which is not sufficient if their
    strides differ.
    """
    column = k_cache.stride(3)
    row_bytes = max(k_cache.shape[3], v_cache.shape[3]) * column * k_cache.element_size()
    return (
        k_cache.stride() == v_cache.stride()
        and k.stride() == v.stride()
        and k.stride(3) == column
        and abs(v.data_ptr() - k.data_ptr()) < row_bytes
    )


def separate_queries(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return q, copied if it shares storage with a cache, as `copy_aliased_rows` does.

    In a compiled graph, a ValueError is raised instead, and also if inputs of the graph overlap in
    the memory of a cache.  If a graph of torch 2.11 to 2.15 writes to one of several overlapping
    inputs, it assumes the storage offsets of its first call.  With other offsets it would read and
    write other memory, without an error.  Slices that the graph itself makes have the right
    offsets.  However, the graph would read such a slice as q after the new rows are written.
    """
    if not is_dynamo_compiling():
        return copy_aliased_rows(q, k_cache, v_cache)
    from torch._dynamo.comptime import comptime

    # The compiler calls this function with access to the variables of the current frame.
    comptime(_check_graph_inputs)
    return q


def _check_graph_inputs(context: "ComptimeContext") -> None:
    """Run the check of `separate_queries` in the compiler."""
    nodes = {node: node.meta.get("example_value") for node in context.graph().nodes}
    caches = []
    for name in ("k_cache", "v_cache", "k", "v"):
        variable: Any = context.get_local(name)
        # The graph does not contain the node of an input that was not used before.
        nodes[variable.as_proxy().node] = fake = variable.as_fake()
        if name.endswith("cache"):
            caches.append(fake)
    storages = [x.untyped_storage()._cdata for x in caches]
    inputs = [
        x
        for node, x in nodes.items()
        if node.op == "placeholder"
        and isinstance(x, Tensor)
        and x.untyped_storage()._cdata in storages
    ]
    q: Any = context.get_local("q").as_fake()
    pairs = [*itertools.combinations(inputs, 2), *((q, cache) for cache in caches)]
    if any(_can_overlap(x, y) for x, y in pairs):
        raise ValueError(
            "expected no overlapping views of a cache among the inputs of a compiled graph, whose "
            "storage offsets would be those of the first call; pass the tensor that contains them, "
            "and slice it inside of the compiled function; clone queries that are a part of it"
        )


def _can_overlap(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors share storage and their ranges of addresses overlap."""
    if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    starts, ends = [], []
    for tensor in (x, y):
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        starts.append(tensor.storage_offset() * tensor.element_size())
        ends.append(starts[-1] + extent * tensor.element_size())
    return bool(starts[0] < ends[1] and starts[1] < ends[0])


def copy_aliased_rows(rows: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """Return queries or new rows, copied if they share storage with a cache.

    Without the copy, a row that is also a row of the cache could be overwritten before it is read.
    """
    # This function takes less time than a comparison of two `untyped_storage()`.
    shares_storage = torch._C._is_alias_of  # type: ignore[attr-defined]
    if shares_storage(rows, k_cache) or shares_storage(rows, v_cache):
        return rows.clone()
    return rows


def _map_addresses(x: Tensor) -> np.ndarray:
    """Return an array over the memory of `x`, on any device; its values must not be read."""
    size = x.element_size()
    interface = {
        "version": 3,
        "shape": tuple(x.shape),
        "strides": tuple(stride * size for stride in x.stride()),
        "typestr": f"|V{size}",
        "data": (x.data_ptr(), True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def make_length_tensor(
    cache_seqlens: int | Tensor,
    q: Tensor,
    batch: int,
    new: int,
    cache: Tensor,
    table: Tensor | None,
) -> Tensor:
    """Return the lengths as int32 `(batch,)`, without waiting for a GPU.

    Raise an error for an int outside of the capacity, a tensor of another dtype, shape or device,
    and other types.  `check_values` checks the values of a tensor.
    """
    # NumPy's integers are not subclasses of int.
    if isinstance(cache_seqlens, numbers.Integral) and not isinstance(cache_seqlens, bool):
        length = int(cache_seqlens)
        if not 0 <= length <= _compute_capacity(cache, table) - new:
            raise ValueError(f"{_describe_length_rule(new, cache, table)}, got {length}")
        return torch.full((batch,), length, dtype=torch.int32, device=q.device)
    if not isinstance(cache_seqlens, Tensor):
        kind = type(cache_seqlens).__name__
        raise TypeError(
            f"expected cache_seqlens to be an int or an int32 tensor, got {kind}: pass one int for "
            "all sequences, or torch.tensor(lengths, dtype=torch.int32, device=q.device)"
        )
    check_int32("cache_seqlens", cache_seqlens, (batch,), q)
    return cache_seqlens


def check_values(
    lengths: Tensor,
    new: int,
    cache: Tensor,
    table: Tensor | None,
    on_cpu: bool,
    check_lengths: bool,
    check_pages: bool,
) -> None:
    """Raise ValueError for lengths outside of the capacity, and for wrong pages.

    A page in use must exist, and none of the `new` keys may overwrite another key.

    Each check is a device-side assertion unless `on_cpu` is True.  A check launches several
    kernels, so `check_lengths` and `check_pages` are False for values that were checked before.
    """
    if on_cpu:
        lengths, table = lengths.cpu(), None if table is None else table.cpu()

    def require(is_valid: Tensor, rule: str, name: str, values: Tensor) -> None:
        if not on_cpu:
            torch._assert_async(is_valid.all(), rule)
        elif not is_valid.all():
            raise ValueError(f"{rule}, got {name} {values[~is_valid][0]}")

    if check_lengths:
        # `clamp` would accept a negative length if there are more new rows than the capacity.
        is_valid = (lengths >= 0) & (lengths <= _compute_capacity(cache, table) - new)
        require(is_valid, _describe_length_rule(new, cache, table), "length", lengths)
    if table is not None and check_pages:
        first_rows = torch.arange(table.shape[1], device=table.device) * cache.shape[2]
        is_used = first_rows < (lengths + new)[:, None]
        is_valid = ~is_used | ((table >= 0) & (table < len(cache)))
        require(is_valid, f"block_table must name pages 0 to {len(cache) - 1}", "page", table)
        if new:
            has_new_keys = is_used & (first_rows + cache.shape[2] > lengths[:, None])
            is_valid = ~has_new_keys | (_count_uses(table, is_used, len(cache)) == 1)
            require(is_valid, _SHARED_PAGE_RULE, "page", table)


#: Each sequence appends directly after its own keys.  If two entries of the table name a page that
#: receives new keys, the new keys of one entry are in rows that the other entry uses.
_SHARED_PAGE_RULE = (
    "a page that receives new keys must belong to one sequence, because the new keys would "
    "overwrite those of another; copy a shared page before a sequence appends to it"
)


def _count_uses(table: Tensor, is_used: Tensor, pages: int) -> Tensor:
    """Return, for each entry of the table, the number of used entries that name its page."""
    # Unused entries may contain any number; each adds 0 to the count of some page.
    index = table.long().clamp(0, pages - 1).flatten()
    counts = index.new_zeros(pages).scatter_add(0, index, is_used.long().flatten())
    return counts[index].view_as(table)


def _compute_capacity(cache: Tensor, table: Tensor | None) -> int:
    """Return the maximum number of rows per sequence, limited so that positions fit in int32."""
    pages_per_sequence = 1 if table is None else table.shape[1]
    return min(cache.shape[2] * pages_per_sequence, DIM_LIMIT - 1)


def _describe_length_rule(new: int, cache: Tensor, table: Tensor | None) -> str:
    """Return the rule that lengths must follow, for error messages."""
    capacity = _compute_capacity(cache, table)
    rows = f"{capacity} rows" if table is None else f"{capacity} rows in the pages of block_table"
    return (
        f"cache_seqlens must be from 0 to {capacity - new}: a sequence has {rows}, and {new} rows "
        "are new"
    )
