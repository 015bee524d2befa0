"""What is asked for: shapes, options and the pattern of keys a query may see, checked once.

Notable: causal attention is a window whose right side is 0, so every implementation knows one
kind of mask, a band.  Query ``i`` stands at position ``p = i + seq_k - seq_q`` (bottom-right
alignment: the last query sees the last key) and sees keys ``p - left .. p + right``.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

UNBOUNDED = -1
# Positions and window bounds are summed as int32 in the kernels: both stay below half of it.
MOST_ROWS = 2**30
SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = 16, 256
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Window = int | tuple[int | None, int | None] | None


@dataclass(frozen=True)
class Score:
    """How a score is made: ``softcap · tanh(scale · q·k / softcap)`` inside the band.

    ``left`` and ``right`` are -1 where unbounded, ``softcap`` is 0 where there is none.
    """

    scale: float
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    softcap: float = 0.0

    def keys_seen(self, first: int, last: int, shift: int, seq_k: int) -> tuple[int, int, int, int]:
        """``(start, all_start, all_stop, stop)`` for the queries ``first .. last - 1``.

        Keys outside ``[start, stop)`` are seen by none of them, keys in ``[all_start, all_stop)``
        by all.  ``shift = seq_k - seq_q``.
        """
        nearest, furthest = first + shift, last - 1 + shift
        start, all_start = 0, 0
        if self.left >= 0:
            start, all_start = max(0, nearest - self.left), max(0, furthest - self.left)
        stop, all_stop = seq_k, seq_k
        if self.right >= 0:
            stop = min(seq_k, furthest + self.right + 1)
            all_stop = min(seq_k, nearest + self.right + 1)
        return start, all_start, all_stop, stop

    def hidden(self, queries: Tensor, keys: Tensor, shift: int) -> Tensor:
        """Boolean ``(queries, keys)``: which of these keys each of these queries may not see."""
        distance = keys[None, :] - queries[:, None] - shift
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.left >= 0:
            hidden |= distance < -self.left
        if self.right >= 0:
            hidden |= distance > self.right
        return hidden


def make_score(
    head_dim: int, is_causal: bool, scale: float | None, window: Window, softcap: float | None
) -> Score:
    """Options as the user gives them, checked, as one `Score`."""
    if isinstance(is_causal, Tensor) or is_causal not in (True, False):
        raise TypeError(f"is_causal {is_causal!r} is not a bool; give True or False")
    if scale is None:
        scale = head_dim**-0.5
    else:
        _check_positive("scale", scale, "1/sqrt(head_dim)")
    if softcap is None:
        softcap = 0.0
    else:
        _check_positive("softcap", softcap, "no cap")
    left, right = _sides(window)
    return Score(float(scale), left, 0 if is_causal else right, float(softcap))


def _check_positive(name: str, value: float, default: str) -> None:
    """A tensor would lose its gradient, and make the CPU wait for a GPU."""
    if isinstance(value, (Tensor, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} {value!r} is no number; give a float, or None for {default}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} {value} must be positive and finite; None means {default}")


def _sides(window: Window) -> tuple[int, int]:
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"window {window!r} has {len(sides)} sides; give (left, right) or one int")
    for side in sides:
        whole = hasattr(side, "__index__") and not isinstance(side, (bool, Tensor))
        if side is not None and not (whole and side >= 0):
            raise ValueError(
                f"window {window!r}: each side is the number of keys seen beyond the query's own, "
                "an int >= 0, or None for no bound"
            )
    # No sequence is so long that a bound of MOST_ROWS hides anything.
    left, right = (UNBOUNDED if side is None or side >= MOST_ROWS else int(side) for side in sides)
    return left, right


def check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless these are ``(batch, heads, seq, dim)`` that attend to each other."""
    check_tensors(q=q, k=k, v=v)
    if q.dim() not in (3, 4):
        raise ValueError(
            f"q has {q.dim()} dimensions, shape {tuple(q.shape)}; "
            "give (batch, heads, seq, dim) or (batch, seq, dim)"
        )
    _check_alike(q, k, v)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; "
            "they must be the same but for the head dim"
        )
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q has batch {q.shape[0]} and k {k.shape[0]}; they must be the same "
            "(expand() costs no memory)"
        )
    if q.dim() == 4:
        _check_heads(q.shape[1], k.shape[1])


def check_varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    """Raise ValueError unless these are ``(total, heads, dim)`` cut by the two ``cu_seqlens``.

    What the boundaries hold is checked where they have values: see `check_boundaries`.
    """
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    if q.dim() != 3:
        raise ValueError(
            f"q has {q.dim()} dimensions, shape {tuple(q.shape)}; give (total, heads, dim)"
        )
    _check_alike(q, k, v)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; "
            "they must be the same but for the head dim"
        )
    _check_heads(q.shape[1], k.shape[1])
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu.dtype != torch.int32 or cu.dim() != 1 or not cu.shape[0]:
            raise ValueError(
                f"{name} is {cu.dtype} of shape {tuple(cu.shape)}; give int32 boundaries of shape "
                "(sequences + 1,), such as torch.tensor([0, 3, 7], dtype=torch.int32)"
            )
        if cu.device != q.device:
            raise ValueError(f"{name} is on {cu.device} and q on {q.device}; move one of them")
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_q bounds {cu_q.shape[0] - 1} sequences and cu_seqlens_k "
            f"{cu_k.shape[0] - 1}; each sequence needs its queries and its keys"
        )


def check_boundaries(name: str, cu: Tensor, total: int) -> None:
    """Raise ValueError unless these boundaries cut ``total`` rows; on a GPU, assert it there.

    The operators ask, since in a compiled graph nothing else sees values.
    """
    rule = f"{name} must start at 0, never fall, and end at {total}, the rows given"
    good = (cu[0] == 0) & (cu[-1] == total) & (cu[1:] >= cu[:-1]).all()
    if cu.device.type == "cpu":
        if not good:
            raise ValueError(f"{name} is {cu.tolist()}; {rule}")
    else:
        torch._assert_async(good, rule)


def check_sinks(sinks: Tensor | None, heads: int, q: Tensor) -> None:
    """Raise unless there are no sinks or one floating-point number a query head."""
    if sinks is None:
        return
    check_tensors(sinks=sinks)
    if sinks.shape != (heads,) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks are {sinks.dtype} of shape {tuple(sinks.shape)}; "
            f"give one floating-point number for each of the {heads} query heads"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks are on {sinks.device} and q on {q.device}; move one of them")


def check_tensors(**named: Tensor) -> None:
    """Raise TypeError for what is no tensor."""
    for name, x in named.items():
        if not isinstance(x, Tensor):
            kind = f"{type(x).__module__}.{type(x).__qualname__}"
            raise TypeError(
                f"{name} is a {kind.removeprefix('builtins.')}; give a torch.Tensor, "
                "such as torch.as_tensor(...) makes of a list or a NumPy array"
            )
        if x.layout != torch.strided:
            raise ValueError(
                f"{name} has layout {x.layout}; give a dense tensor, such as to_dense() makes, and "
                "nested sequences packed, with the offsets as cu_seqlens of flash_attention_varlen"
            )


def _check_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, other in (("k", k), ("v", v)):
        for what in ("dtype", "device"):
            if getattr(q, what) != getattr(other, what):
                raise ValueError(
                    f"q has {what} {getattr(q, what)} and {name} {getattr(other, what)}; "
                    f"convert one with {name}.to(q.{what})"
                )
        if q.dim() != other.dim():
            raise ValueError(
                f"q has {q.dim()} dimensions and {name} {other.dim()}; they must be the same"
            )
    if q.dtype not in DTYPES:
        raise ValueError(f"dtype {q.dtype} is not one of float64, float32, bfloat16, float16")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q has head dim {q.shape[-1]} and k {k.shape[-1]}; they must be the same "
            "(that of v may differ)"
        )
    if 0 in (q.shape[-1], v.shape[-1]):
        raise ValueError("head dim 0 leaves nothing to attend with; give at least 1")
    for name, x in (("q", q), ("k", k)):
        if max(x.shape) >= MOST_ROWS:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; at most {MOST_ROWS - 1} a side")


def _check_heads(heads: int, kv_heads: int) -> None:
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"{heads} query heads do not divide among {kv_heads} key heads; grouped-query "
            "attention needs heads % kv_heads == 0"
        )
