"""The options that determine the scores of an attention call, as one `AttentionSpec`.

Causal attention is a window whose right bound is 0, so one kind of mask describes every call: a
band.  Query `i` is at position `p = i + seq_k - seq_q` and sees keys `p - left` to `p + right`.
The last query is therefore at the position of the last key.
"""

import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

#: The value of `AttentionSpec.left` and `AttentionSpec.right` for a side without a bound.
UNBOUNDED = -1
#: Exclusive upper bound of every dimension and window bound.  The kernels add positions and window
#: bounds in int32, so each must stay below half of the int32 range.
DIM_LIMIT = 2**30

#: Bounds of `scale`, `softcap` and their ratio: normal numbers of float32, the dtype of scores.
FLOAT32_RANGE = 2.0**-126, 2.0**127

Window = int | tuple[int | None, int | None] | None


@dataclass(frozen=True)
class AttentionSpec:
    """The scale, band and softcap of the scores of an attention call.

    Inside the band, scores are `scale * q @ k` or `softcap * tanh(scale * q @ k / softcap)`.
    """

    scale: float
    #: Number of keys that a query sees before its own position, or `UNBOUNDED`.
    left: int = UNBOUNDED
    #: Number of keys that a query sees after its own position, or `UNBOUNDED`.
    right: int = UNBOUNDED
    #: Scores are capped smoothly to (-softcap, softcap); 0 disables the cap.
    softcap: float = 0.0

    def has_right_bound(self) -> bool:
        """Return True if queries do not see all later keys.

        torch's kernels require a plain bool. In a graph with a symbolic bound, a comparison
        and its `bool` are symbolic, but the result of a branch is not.
        """
        if self.right == UNBOUNDED:  # noqa: SIM103
            return False
        return True

    def to_scalars(self) -> tuple[float, int, int, float]:
        """Return the fields in order, as `torch.library` operators accept them."""
        return self.scale, self.left, self.right, self.softcap

    def compute_key_ranges(
        self, first_query: int, stop_query: int, shift: int, seq_k: int
    ) -> tuple[int, int, int, int]:
        """Return the bounds of the keys that the queries `first_query` to `stop_query - 1` see.

        In the result `(start, all_start, all_stop, stop)`, no query sees a key outside
        `[start, stop)`, and every query sees all keys in `[all_start, all_stop)`.  Both ranges may
        be empty.  The `shift` is `seq_k - seq_q`.
        """
        nearest = first_query + shift
        furthest = stop_query - 1 + shift
        start = all_start = 0
        if self.left >= 0:
            start = max(0, nearest - self.left)
            all_start = max(0, furthest - self.left)
        stop = all_stop = seq_k
        if self.right >= 0:
            stop = min(seq_k, furthest + self.right + 1)
            all_stop = min(seq_k, nearest + self.right + 1)
        return start, all_start, all_stop, stop

    def make_hidden_mask(self, queries: Tensor, keys: Tensor, shift: int) -> Tensor:
        """Return a boolean mask `(queries, keys)` that is True for hidden keys."""
        distance = keys[None, :] - queries[:, None] - shift
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.left >= 0:
            hidden = hidden | (distance < -self.left)
        if self.right >= 0:
            hidden = hidden | (distance > self.right)
        return hidden


def make_spec(
    head_dim: int, is_causal: bool, scale: float | None, window: Window, softcap: float | None
) -> AttentionSpec:
    """Return the options as an `AttentionSpec`; raise TypeError or ValueError if one is invalid."""
    # Reject 1 and 1.0, which equal True but may be a scale in the wrong position.
    if not isinstance(is_causal, (bool, torch.SymBool)):
        raise TypeError(f"expected is_causal to be True or False, got {is_causal!r}")
    if scale is None:
        scale = head_dim**-0.5
    else:
        _check_positive("scale", scale, "1/sqrt(head_dim)")
    if softcap is None:
        softcap = 0.0
    else:
        _check_positive("softcap", softcap, "no cap")
        if not FLOAT32_RANGE[0] <= scale / softcap <= FLOAT32_RANGE[1]:
            raise ValueError(
                "expected scale / softcap within the normal range of float32, got scale "
                f"{scale} and softcap {softcap}"
            )
    left, right = _parse_window(window)
    return AttentionSpec(float(scale), left, 0 if is_causal else right, float(softcap))


def _check_positive(name: str, value: float, default: str) -> None:
    """Raise TypeError unless `value` is a real number, and ValueError outside `FLOAT32_RANGE`.

    Tensors raise TypeError: they would lose their gradient and make the CPU wait for the GPU.
    """
    is_number = isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt))
    if not is_number or isinstance(value, bool):
        raise TypeError(f"expected {name} to be a float, or None for {default}, got {value!r}")
    # Symbolic values in a compiled graph support comparisons, but not math.isfinite.
    if not FLOAT32_RANGE[0] <= value <= FLOAT32_RANGE[1]:
        low, high = FLOAT32_RANGE
        raise ValueError(
            f"expected {low:g} <= {name} <= {high:g}, or None for {default}, got {value}"
        )


def _parse_window(window: Window) -> tuple[int, int]:
    """Return `(left, right)`, with `UNBOUNDED` for a side without a bound.

    Raise ValueError unless the window, or each side of a pair, is None or an int >= 0.
    """
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(
            f"expected window to be (left, right), one int or None, got {window!r} with "
            f"{len(sides)} sides"
        )
    bounds = []
    for side in sides:
        # torch.compile of torch 2.11 cannot trace `hasattr` of a symbolic int.
        is_index = isinstance(side, int) or hasattr(side, "__index__")
        is_int = is_index and not isinstance(side, (bool, Tensor))
        if side is not None and not (is_int and side >= 0):
            raise ValueError(
                f"expected each side of window to be an int >= 0, the number of keys seen beyond "
                f"the query's own position, or None for no bound, got {window!r}"
            )
        # No sequence is long enough for a bound of DIM_LIMIT to hide a key.
        bounds.append(UNBOUNDED if side is None or side >= DIM_LIMIT else int(side))
    return bounds[0], bounds[1]
