"""Recognition of transformers mask functions as a band over packed sequences.

A mask function returns True for two positions if the query sees the key.  Known functions are
recognized by their code and closures, in time linear in the sequence length.  No mask function is
evaluated on all (query, key) pairs.  Attention under an unknown function raises an error.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

MaskFunction = Callable[..., Any]


@dataclass(frozen=True)
class Pattern:
    """A band over packed sequences, as a mask function defines it."""

    #: Number of keys before its own position that a query sees; None for no bound.
    left: int | None = None
    #: Number of keys after its own position that a query sees; None for no bound.
    right: int | None = None
    #: The number of each key's sequence, `(batch, seq_k)`; None for one sequence.
    sequence: Tensor | None = None
    #: False if the band is correct only together with a function that separates these sequences.
    is_separated: bool = True


@dataclass(frozen=True)
class Grid:
    """The positions for which a mask is requested."""

    batch: int
    q_length: int
    kv_length: int
    #: Position of the first query.
    first_query: int
    #: Position of the first key.
    first_key: int
    device: torch.device | str

    @property
    def shift(self) -> int:
        """The index of the key at the position of the first query."""
        return self.first_query - self.first_key


def find_pattern(function: MaskFunction, grid: Grid) -> Pattern | None:
    """Return the pattern that equals the mask function on the grid, or None if none is found."""
    pattern = recognize(function, grid)
    if pattern is None or not pattern.is_separated:
        return None
    return _drop_unreached_bounds(pattern, grid)


def recognize(function: MaskFunction, grid: Grid) -> Pattern | None:
    """Return the pattern of a function that is built from known functions, or None."""
    name = _map_known_codes().get(getattr(function, "__code__", None))
    if name is None:
        return None
    if name == "causal_mask_function":
        return Pattern(right=0)
    if name == "bidirectional_mask_function":
        return Pattern()
    variables = _get_closure(function)
    if name == "and_masks":
        return _intersect([recognize(part, grid) for part in variables["mask_functions"]])
    if name == "sliding_window_overlay":
        return _make_band(variables["sliding_window"], left=-1, right=None)
    if name == "sliding_window_bidirectional_overlay":
        return _make_band(variables["sliding_window"], left=0, right=0)
    if name == "chunked_overlay":
        return _make_chunked_pattern(variables["chunk_size"], variables["left_padding"], grid)
    if name == "packed_sequence_mask_function":
        return _make_packed_pattern(variables["packed_sequence_mask"], grid)
    return _make_remapped_pattern(variables["mask_function"], variables["position_ids"], grid)


def _get_closure(function: MaskFunction) -> dict[str, Any]:
    """Return the variables that a function closes over."""
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _make_band(window: Any, left: int, right: int | None) -> Pattern | None:
    """Return the band with the bounds `window + left` and `window + right`.

    The band has no right bound if `right` is None.  The result is None if the window is not an int
    or its left bound would be negative.
    """
    if not isinstance(window, int) or window + left < 0:
        return None
    return Pattern(window + left, None if right is None else window + right)


def _make_chunked_pattern(size: Any, left_padding: Any, grid: Grid) -> Pattern | None:
    """Return the pattern of chunks of consecutive keys, counted after the left padding, or None."""
    if not isinstance(size, int) or not isinstance(left_padding, Tensor):
        return None
    if left_padding.shape != (grid.batch,):
        return None
    keys = torch.arange(grid.first_key, grid.first_key + grid.kv_length, device=grid.device)
    chunk = (keys - left_padding.to(grid.device)[:, None]) // size
    number = chunk - chunk.amin(1, keepdim=True) + 1 if chunk.numel() else chunk
    return Pattern(sequence=number.int())


def _make_packed_pattern(sequence: Tensor, grid: Grid) -> Pattern | None:
    """Return the pattern of packed sequences with rising numbers, or None."""
    has_all_keys = grid.first_query == grid.first_key == 0 and grid.q_length == grid.kv_length
    if not has_all_keys or sequence.shape != (grid.batch, grid.kv_length):
        return None
    steps = sequence.diff(dim=1)
    if (steps < 0).any():
        return None
    number = torch.ones_like(sequence, dtype=torch.int32)
    number[:, 1:] += (steps > 0).cumsum(1, dtype=torch.int32)
    return Pattern(sequence=number.to(grid.device))


def _make_remapped_pattern(function: MaskFunction, positions: Tensor, grid: Grid) -> Pattern | None:
    """Return the pattern of a function of positions that restart in each packed sequence, or None.

    If there are several runs of consecutive positions and the band has a bound, the result has a
    sequence per run.  It is then correct only together with a function that separates the same
    sequences, which `_intersect` checks.
    """
    inner = recognize(function, grid)
    if inner is None or inner.sequence is not None or positions.shape[1:] != (grid.kv_length,):
        return None
    if positions.numel() and positions.amin() < 0:
        return None
    is_restart = positions.diff(dim=1) != 1
    number = torch.ones_like(positions, dtype=torch.int32)
    number[:, 1:] += is_restart.cumsum(1, dtype=torch.int32)
    number = number.expand(grid.batch, -1).to(grid.device)
    if not number.numel() or number.amax() == 1 or (inner.left is None and inner.right is None):
        return inner
    return replace(inner, sequence=number, is_separated=False)


def _intersect(patterns: list[Pattern | None]) -> Pattern | None:
    """Return the intersection of the patterns, or None if one is None or their sequences differ."""
    left: int | None = None
    right: int | None = None
    sequence: Tensor | None = None
    is_separated = False
    for pattern in patterns:
        if pattern is None:
            return None
        left = _choose_smaller(left, pattern.left)
        right = _choose_smaller(right, pattern.right)
        if pattern.sequence is not None:
            if sequence is not None and not torch.equal(sequence, pattern.sequence):
                return None
            sequence = pattern.sequence
            is_separated = is_separated or pattern.is_separated
    return Pattern(left, right, sequence, sequence is None or is_separated)


def _choose_smaller(first: int | None, second: int | None) -> int | None:
    """Return the smaller of two bounds, where None means no bound."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


@functools.cache
def _map_known_codes() -> dict[Any, str]:
    """Return the names of the known mask functions of transformers, keyed by their code objects.

    A function is known only if it returns the expected mask on an example, so a function whose
    meaning changes between versions of transformers is rejected.
    """
    from transformers import masking_utils

    # The examples are on the CPU, even if `torch.set_default_device` has selected another device.
    k = torch.arange(6, device="cpu")[None]
    q = k.mT
    positions = torch.tensor([0, 1, 0, 1, 2, 0], device="cpu")
    sequence = torch.tensor([0, 0, 1, 1, 1, 2], device="cpu")
    padding = torch.tensor([1], device="cpu")
    causal = masking_utils.causal_mask_function
    # The arguments of each function that returns a mask function, and the expected mask.
    examples: dict[str, tuple[tuple[Any, ...] | None, Tensor]] = {
        "causal_mask_function": (None, k <= q),
        "bidirectional_mask_function": (None, k >= 0 * q),
        "and_masks": ((causal, causal), k <= q),
        "sliding_window_overlay": ((3,), k > q - 3),
        "sliding_window_bidirectional_overlay": ((2,), (q - k).abs() <= 2),
        "chunked_overlay": ((2, padding), (q + 1) // 2 == (k + 1) // 2),
        "packed_sequence_mask_function": ((sequence[None],), sequence[q] == sequence[k]),
        "remap_positions_for_packed_sequence": (
            (causal, positions[None]),
            positions[k] <= positions[q],
        ),
    }
    codes = {}
    for name, (arguments, expected) in examples.items():
        function: Any = getattr(masking_utils, name, None)
        if function is None:
            continue
        if arguments is not None:
            function = function(*arguments)
        mask = torch.as_tensor(function(0, 0, q, k), device="cpu").expand(6, 6)
        if torch.equal(mask, expected):
            codes[function.__code__] = name
    return codes


def _drop_unreached_bounds(pattern: Pattern, grid: Grid) -> Pattern:
    """Return the pattern with None for each bound that hides no key."""
    longest = grid.shift + grid.q_length
    if pattern.sequence is not None and pattern.sequence.numel():
        longest = max(int(torch.bincount(row).amax()) for row in pattern.sequence)
    left, right = pattern.left, pattern.right
    if left is not None and left >= longest - 1:
        left = None
    if right is not None and right >= grid.kv_length - 1 - grid.shift:
        right = None
    return replace(pattern, left=left, right=right)
