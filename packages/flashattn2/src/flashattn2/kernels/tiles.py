"""Functions that the kernels share: loads and stores of tiles, exponentials and the band's ranges.

A tensor is passed as a TMA descriptor (TMA) or as a pointer with its strides; only `load_tile`
distinguishes the two.  A tile is `[ROWS, BLOCK_D]`, where BLOCK_D is the head dim rounded up to a
power of two; the excess columns are read as zeros.

Scores are `raw · score_scale`.  Without a softcap, raw is q·k and score_scale the scale; with a
softcap, raw is tanh(q·k · softcap_scale) and score_scale the softcap.  The factor log2(e) is folded
into score_scale, so that scores are exponents of 2, which saves a multiplication.  EXACT marks
float32 products without matrix units.  Their error is so small that the rounding of this factor and
of L would be measurable. Therefore scores remain exponents of e, and P is divided by its sum
(`row_sums.py`).

The kernels receive plain tuples: `strides` has three strides per tensor, `sequence_bounds` is
(cu_q, cu_k) for packed sequences, `sizes` differs per kernel, `factors` is (scale, softcap_scale,
score_scale, left, right), and `meta` is a `launch.Meta`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def locate_program(tiles, heads, LAST_FIRST: tl.constexpr):
    """Return the tile index, batch, head, `batch_head` and `batch_heads` of the program.

    The number of heads in all batch entries is `batch_heads`, and `batch_head` is the head's index
    among them.

    LAST_FIRST reverses the order of the tiles: with a causal mask the last queries see the most
    keys, and the longest programs should start first.
    """
    tile, batch_head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    batch_heads = tl.num_programs(0) // tiles
    return tile, batch_head // heads, batch_head % heads, batch_head, batch_heads


@triton.jit
def locate_tile(
    tile_index, tiles, sequence_bounds, lengths,
    BLOCK: tl.constexpr, BY_KEY: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return the tile's first row in its sequence, the sequence's offsets, lengths and number.

    The `sequence_bounds` are (cu_q, cu_k) and the `lengths` the total numbers of queries and keys.
    With BY_KEY the tiles are tiles of keys.  The last tile of a sequence may be partly filled.  The
    tiles of sequence n therefore start at index `cu[n] // BLOCK + n`, which leaves room for any
    lengths.  The first row is negative if the index belongs to no tile.
    """
    seq_q, seq_k = lengths
    first = tile_index * BLOCK
    sequence = 0
    q_begin = 0
    k_begin = 0
    if PACKED:
        cu_q, cu_k = sequence_bounds
        cu = cu_k if BY_KEY else cu_q
        total = seq_k if BY_KEY else seq_q
        # Adding a run-time number makes both values loop-carried variables of one type.
        sequence, end = tile_index * 0, tile_index * 0 + tiles - total // BLOCK
        while end - sequence > 1:
            middle = (sequence + end) // 2
            before = tl.load(cu + middle) // BLOCK + middle <= tile_index
            sequence, end = tl.where(before, middle, sequence), tl.where(before, end, middle)
        begin = tl.load(cu + sequence)
        first = (tile_index - begin // BLOCK - sequence) * BLOCK
        first = tl.where(first < tl.load(cu + sequence + 1) - begin, first, -1)
        q_begin, k_begin = tl.load(cu_q + sequence), tl.load(cu_k + sequence)
        seq_q = tl.load(cu_q + sequence + 1) - q_begin
        seq_k = tl.load(cu_k + sequence + 1) - k_begin
    return first, q_begin, k_begin, seq_q, seq_k, sequence


@triton.jit
def load_tile(
    source, strides, sequence, start, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr = False, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Load ROWS rows of a sequence `(batch, head, offset, length)`, beginning at row `start`.

    Rows outside of the sequence are zeros.  WHOLE omits this mask: the caller must ensure that all
    rows are inside.
    """
    batch, head, begin, length = sequence
    if TMA:
        tile = source.load([batch, head, begin + start, 0]).reshape(ROWS, BLOCK_D)
    else:
        base = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
        base += tl.cast(begin + start, tl.int64) * strides[2]
        rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        cells = source + base + rows[:, None] * strides[2] + columns[None, :]
        if WHOLE and D == BLOCK_D:
            tile = tl.load(cells)
        elif WHOLE:
            tile = tl.load(cells, mask=(columns < D)[None, :], other=0.0)
        elif D == BLOCK_D:
            tile = tl.load(cells, mask=(start + rows < length)[:, None], other=0.0)
        else:
            inside = (start + rows < length)[:, None] & (columns < D)[None, :]
            tile = tl.load(cells, mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(target, strides, sequence, start, tile, D: tl.constexpr):
    """Store the rows of `tile` that are inside of the sequence."""
    batch, head, begin, length = sequence
    base = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    base += tl.cast(begin + start, tl.int64) * strides[2]
    rows, columns = tl.arange(0, tile.shape[0]), tl.arange(0, tile.shape[1])
    inside = (start + rows < length)[:, None] & (columns < D)[None, :]
    offsets = rows[:, None] * strides[2] + columns[None, :]
    tl.store(target + base + offsets, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def exponential(x, EXACT: tl.constexpr):
    """Return 2 to the power x, or, with EXACT, e to the power x.

    With EXACT, the integral power of 2 is a separate factor, because x · log2(e) would have a large
    rounding error.
    """
    if EXACT:
        # Clamp x: the result is 0 below -150 anyway, and -inf minus -inf would be NaN.
        x = tl.where(x < -150.0, -150.0, x)
        whole = tl.floor(x * 1.4426950408889634)
        # ln 2 is split in two terms, so that the product with the first term is exact.
        remainder = (x - whole * 0.693359375) + whole * 2.12194440e-4
        y = tl.exp2(remainder * 1.4426950408889634) * tl.exp2(whole)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def tanh(x):
    """Return tanh(x) from exp2, or from its series near zero, where 1 - exp(-2x) cancels."""
    x2 = x * x
    series = x * (1.0 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    return tl.where(x2 < 0.0625, series, tl.where(x < 0.0, -far, far))


@triton.jit
def load_row_statistics(statistics, offset, row_ids, seq_q, EXACT: tl.constexpr):
    """Return L in units of the scores, D and, with EXACT, 1 / rowsum(P).

    The `offset` is the index of the sequence's first row in these arrays.  L is +inf, so that P is
    0, for rows that do not exist or see no key.  Without EXACT, the third result is not used.
    """
    lse, delta, norm = statistics
    x = tl.load(lse + offset + row_ids, row_ids < seq_q, other=float("inf"))
    d = tl.load(delta + offset + row_ids, row_ids < seq_q, other=0.0)
    n = tl.load(norm + offset + row_ids, row_ids < seq_q, other=0.0) if EXACT else d
    return tl.where(x == float("-inf"), float("inf"), x if EXACT else x * 1.4426950408889634), d, n


@triton.jit
def is_visible(
    positions, keys, seq_k, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr
):  # fmt: skip
    """Return a mask that is True for visible keys; positions and keys broadcast to the tile."""
    visible = keys < seq_k
    if RIGHT:
        visible = visible & (keys <= positions + right)
    if LEFT:
        visible = visible & (keys >= positions - left)
    return visible


@triton.jit
def key_ranges(
    first, last, seq_q, seq_k, left, right, split,
    BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return `lo, all_lo, all_hi, hi` of the keys that the queries first to last see.

    No query sees a key outside of [lo, hi).  All queries see the keys in [all_lo, all_hi), whose
    bounds are multiples of BLOCK.  The result is limited to the part of one split.
    """
    nearest, furthest = first + seq_k - seq_q, last + seq_k - seq_q
    lo = 0
    all_lo = 0
    hi = seq_k
    all_hi = seq_k
    if LEFT:
        lo = tl.maximum(nearest - left, 0) // BLOCK * BLOCK
        all_lo = tl.cdiv(tl.maximum(furthest - left, 0), BLOCK) * BLOCK
    if RIGHT:
        hi = tl.maximum(tl.minimum(seq_k, furthest + right + 1), 0)
        all_hi = tl.maximum(tl.minimum(seq_k, nearest + right + 1), 0)
    all_hi = all_hi // BLOCK * BLOCK
    return split_range(lo, all_lo, all_hi, hi, split, BLOCK, SPLITS)


@triton.jit
def query_ranges(
    first, last, seq_q, seq_k, left, right, split,
    BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return `lo, all_lo, all_hi, hi` of the queries that see the keys first to last.

    The bounds are as in `key_ranges`, except that all_hi may be hi.  Queries after the end of the
    sequence count as seeing all keys.
    """
    shift = seq_k - seq_q
    lo = 0
    all_lo = 0
    hi = seq_q
    all_hi = tl.cdiv(seq_q, BLOCK) * BLOCK
    if RIGHT:
        lo = tl.maximum(first - right - shift, 0) // BLOCK * BLOCK
        all_lo = tl.cdiv(tl.maximum(last - right - shift, 0), BLOCK) * BLOCK
    if LEFT:
        hi = tl.maximum(tl.minimum(seq_q, last + left - shift + 1), 0)
        all_hi = tl.maximum(tl.minimum(seq_q, first + left - shift + 1), 0) // BLOCK * BLOCK
    # The last tile of keys may exceed the sequence: then every tile of queries is masked.
    if last >= seq_k:
        all_lo = hi
    return split_range(lo, all_lo, all_hi, hi, split, BLOCK, SPLITS)


@triton.jit
def split_range(lo, all_lo, all_hi, hi, split, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Return the bounds, limited to part number `split` of the SPLITS parts of [lo, hi).

    Each part has the same number of tiles, except that the last parts may be shorter or empty.
    """
    if SPLITS > 1:
        part = tl.cdiv(tl.cdiv(hi - lo, BLOCK), SPLITS) * BLOCK
        lo = lo + split * part
        hi = tl.minimum(hi, lo + part)
    hi = tl.maximum(hi, lo)
    all_lo = tl.minimum(tl.maximum(all_lo, lo), hi)
    all_hi = tl.maximum(tl.minimum(all_hi, hi), all_lo)
    return lo, all_lo, all_hi, hi


@triton.jit
def select_region(lo, all_lo, all_hi, hi, REGION: tl.constexpr):
    """Return the bounds of region 0, 1 or 2: before, inside or after [all_lo, all_hi)."""
    start, stop = all_hi, hi
    if REGION == 0:
        start, stop = lo, all_lo
    if REGION == 1:
        start, stop = all_lo, all_hi
    return start, stop
