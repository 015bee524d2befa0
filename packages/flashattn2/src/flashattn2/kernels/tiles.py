"""What the kernels share: loading and storing a tile, scores, and the band's ranges.

Notable: a tensor arrives as a TMA descriptor (TMA) or as a pointer with its strides; the rest of
each kernel does not know which.  A tile is ``[ROWS, BLOCK_D]`` where BLOCK_D is the head dim
rounded up to a power of two, the excess read as zeros.

Scores are ``raw · outer``: raw is q·k and outer the scale, or raw is tanh(q·k · inner) and outer
the softcap.  log2(e) is folded into outer and they are exponents of 2, which saves a
multiplication.  EXACT are products of whole float32 numbers, without matrix units: there each of
these roundings would show, scores stay exponents of e, and P is divided by its sum (`rows.py`).

What the kernels are given comes in bundles: the ``strides`` of the tensors, three of each; the
``cuts`` of packed sequences, cu_q and cu_k; ``sizes``; of a ``score`` its scale, inner, outer, left
and right; and what is compiled in, `launch.Meta`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def program(tiles, heads, LAST_FIRST: tl.constexpr):
    """This program's tile, batch, head, line of ``batch · heads``, and how many such lines are.

    LAST_FIRST are queries' tiles: in a causal problem the last ones see the most keys, and what
    takes longest starts first.
    """
    tile, line = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, line // heads, line % heads, line, tl.num_programs(0) // tiles


@triton.jit
def locate_tile(
    tile, tiles, cuts, lengths, BLOCK: tl.constexpr, BY_KEY: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """The tile's first row in its sequence, where that begins, and its length in queries and keys.

    ``cuts`` are cu_q and cu_k, ``lengths`` how many queries and keys there are, of which BY_KEY
    says that the tiles are of keys.  A sequence may leave a tile partly filled, so that of number n
    begins at place ``cu[n] // BLOCK + n``: there are enough for any lengths.  The first row is
    negative at a place that is left over.
    """
    seq_q, seq_k = lengths
    first, q_begin, k_begin = tile * BLOCK, 0, 0
    if PACKED:
        cu_q, cu_k = cuts
        cu = cu_k if BY_KEY else cu_q
        total = seq_k if BY_KEY else seq_q
        # Sums with a number that is not known when this is compiled: so a loop may carry them.
        sequence, end = tile * 0, tile * 0 + tiles - total // BLOCK
        while end - sequence > 1:
            middle = (sequence + end) // 2
            before = tl.load(cu + middle) // BLOCK + middle <= tile
            sequence, end = tl.where(before, middle, sequence), tl.where(before, end, middle)
        begin = tl.load(cu + sequence)
        first = (tile - begin // BLOCK - sequence) * BLOCK
        first = tl.where(first < tl.load(cu + sequence + 1) - begin, first, -1)
        q_begin, k_begin = tl.load(cu_q + sequence), tl.load(cu_k + sequence)
        seq_q = tl.load(cu_q + sequence + 1) - q_begin
        seq_k = tl.load(cu_k + sequence + 1) - k_begin
    return first, q_begin, k_begin, seq_q, seq_k


@triton.jit
def load_tile(
    source, strides, sequence, start, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr = False, WHOLE: tl.constexpr = False, PACKED: tl.constexpr = False,
):  # fmt: skip
    """Rows ``start ..`` of a sequence: batch, head, the row where it begins, its length.

    Zeros outside; WHOLE promises that all of them are inside.
    """
    batch, head, begin, length = sequence
    if TMA:
        tile = source.load([batch, head, begin + start, 0]).reshape(ROWS, BLOCK_D)
        if PACKED and not WHOLE:
            # After a sequence comes the next one, whatever is in it; zeros only after the last.
            tile = tl.where((start + tl.arange(0, ROWS) < length)[:, None], tile, 0.0)
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
    """Write those rows of ``tile`` that exist."""
    batch, head, begin, length = sequence
    base = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    base += tl.cast(begin + start, tl.int64) * strides[2]
    rows, columns = tl.arange(0, tile.shape[0]), tl.arange(0, tile.shape[1])
    inside = (start + rows < length)[:, None] & (columns < D)[None, :]
    offsets = rows[:, None] * strides[2] + columns[None, :]
    tl.store(target + base + offsets, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def exponential(x, EXACT: tl.constexpr):
    """e or 2 to the x; for e, x · log2(e) is not rounded: the whole powers of 2 are taken off."""
    if EXACT:
        # Below this every float32 is 0; -inf would be taken off itself.
        x = tl.where(x < -150.0, -150.0, x)
        whole = tl.floor(x * 1.4426950408889634)
        # ln 2 in two parts, of which a product with the first is exact.
        rest = (x - whole * 0.693359375) + whole * 2.12194440e-4
        y = tl.exp2(rest * 1.4426950408889634) * tl.exp2(whole)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def tanh(x):
    """tanh(x) from exp2, and from its series near zero, where 1 - exp(-2x) cancels."""
    x2 = x * x
    series = x * (1.0 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    return tl.where(x2 < 0.0625, series, tl.where(x < 0.0, -far, far))


@triton.jit
def load_row_statistics(sums, line, lines, seq_q, EXACT: tl.constexpr):
    """Of ``sums`` L in the units of the scores, D, and if EXACT what makes a row of P sum to one.

    L is +inf, so P is 0, where there is no row or key.
    """
    lse, delta, norm = sums
    x = tl.load(lse + line + lines, lines < seq_q, other=float("inf"))
    d = tl.load(delta + line + lines, lines < seq_q, other=0.0)
    n = tl.load(norm + line + lines, lines < seq_q, other=0.0) if EXACT else d
    return tl.where(x == float("-inf"), float("inf"), x if EXACT else x * 1.4426950408889634), d, n


@triton.jit
def is_visible(
    positions, keys, seq_k, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr
):  # fmt: skip
    """Whether the query at each position sees each key, both shaped to broadcast to the tile."""
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
    """``lo, all_lo, all_hi, hi`` of the keys that the queries first..last see.

    None of them sees a key outside [lo, hi), all see those in [all_lo, all_hi), whose bounds are
    multiples of BLOCK.  A split takes its share of [lo, hi).
    """
    nearest, furthest = first + seq_k - seq_q, last + seq_k - seq_q
    lo, all_lo, hi, all_hi = 0, 0, seq_k, seq_k
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
    """The same for the queries that see keys first..last; queries past the end count as seeing."""
    shift = seq_k - seq_q
    lo, all_lo, hi, all_hi = 0, 0, seq_q, tl.cdiv(seq_q, BLOCK) * BLOCK
    if RIGHT:
        lo = tl.maximum(first - right - shift, 0) // BLOCK * BLOCK
        all_lo = tl.cdiv(tl.maximum(last - right - shift, 0), BLOCK) * BLOCK
    if LEFT:
        hi = tl.maximum(tl.minimum(seq_q, last + left - shift + 1), 0)
        all_hi = tl.maximum(tl.minimum(seq_q, first + left - shift + 1), 0) // BLOCK * BLOCK
    # The last tile of keys may reach past the end: all of its tiles are masked.
    if last >= seq_k:
        all_lo = hi
    return split_range(lo, all_lo, all_hi, hi, split, BLOCK, SPLITS)


@triton.jit
def split_range(lo, all_lo, all_hi, hi, split, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """One split's part of a range, its inner bounds in order.

    SPLITS above 0 divides the range evenly; below 0 each split has the keys of one range of that
    many, wherever the band is, so that a row is summed alike whatever rows stand beside it.
    """
    if SPLITS > 1:
        part = tl.cdiv(tl.cdiv(hi - lo, BLOCK), SPLITS) * BLOCK
        lo = lo + split * part
        hi = tl.minimum(hi, lo + part)
    if SPLITS < 0:
        hi = tl.minimum(hi, (split + 1) * -SPLITS)
        lo = tl.maximum(lo, split * -SPLITS)
    hi = tl.maximum(hi, lo)
    all_lo = tl.minimum(tl.maximum(all_lo, lo), hi)
    all_hi = tl.maximum(tl.minimum(all_hi, hi), all_lo)
    return lo, all_lo, all_hi, hi
