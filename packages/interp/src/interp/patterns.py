"""The attention patterns of any model, tapped where they are computed.

    with record_patterns(model) as patterns:
        model(tokens)
    patterns["model.layers.0.self_attn"]          (batch, heads, seq_q, seq_k)

Calls of torch's functions are watched, so that outputs stay equal bit by bit: a softmax over keys
is a pattern already, that of `scaled_dot_product_attention` is computed beside the real call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_SOFTMAX = (F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax)


class Patterns(dict[str, Tensor]):
    """Patterns (batch, heads, seq_q, seq_k) by the name of the module that attends.

    `norms` are those of the values, (batch, heads, seq_k), by the same names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[str, Tensor] = {}

    def value_weighted(self) -> dict[str, Tensor]:
        """Each weight times the norm of what it lets through, as a share of the head's largest.

        A head that rests on a token of small value moves nothing from there (Kobayashi et al.
        2020). Raises RuntimeError if the values of some module were not seen.
        """
        weighted = {}
        for name, pattern in self.items():
            if name not in self.norms:
                raise RuntimeError(
                    f"what {name!r} does with its pattern was not seen (dropout, or no product of "
                    "it with the values): use eval(), or SDPA"
                )
            norms = self.norms[name]
            most = norms.amax(-1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)
            weighted[name] = pattern * (norms / most)[..., None, :].to(pattern)
        return weighted

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"{name!r} did not attend; those that did: {', '.join(self) or 'none'}")


@contextmanager
def record_patterns(model: nn.Module, *, detach: bool = True) -> Iterator[Patterns]:
    """Record the pattern of every attention of `model` while the block runs, the latest call's.

    Seen are softmax over the last of four dimensions and `scaled_dot_product_attention`. Raises
    RuntimeError at the end if there was none: kernels of one's own and compiled graphs hide theirs.
    While watched, `nn.MultiheadAttention` takes its ordinary path, not that of inference alone.
    """
    patterns = Patterns()
    inside: list[str] = []
    handles = []

    def enter(name: str, module: nn.Module, args: Any) -> None:
        inside.append(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        inside.pop()

    def keep(pattern: Tensor) -> None:
        name = inside[-1] if inside else ""
        patterns.pop(name, None)
        patterns.norms.pop(name, None)
        patterns[name] = pattern.detach() if detach else pattern

    def weigh(pattern: Tensor | None, value: Tensor) -> None:
        name = inside[-1] if inside else ""
        kept = patterns.get(name)
        if kept is None or name in patterns.norms:
            return
        # A product with something else than the pattern is none of ours.
        if pattern is not None and (
            pattern.shape != kept.shape or not torch.equal(pattern, kept.to(pattern.dtype))
        ):
            return
        norms = torch.linalg.vector_norm(value.detach(), dim=-1, dtype=_wide(value))
        shared = kept.shape[-3] // norms.shape[-2]
        patterns.norms[name] = norms.repeat_interleave(shared, dim=-2)

    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(enter, name)))
            # Also when the module raises: another call may follow in the same block.
            handles.append(module.register_forward_hook(leave, always_call=True))
        with _Watch(keep, weigh, inside):
            yield patterns
    finally:
        for handle in handles:
            handle.remove()
    if not patterns:
        raise RuntimeError(
            "no attention was seen: the model was not called inside the block, was compiled, or "
            "attends by a kernel of its own; switch it to SDPA or written-out attention"
        )


class _Watch(TorchFunctionMode):
    """Sees torch's functions before they run; what they are given and give is left alone."""

    def __init__(
        self,
        keep: Callable[[Tensor], None],
        weigh: Callable[[Tensor | None, Tensor], None],
        inside: list[str],
    ) -> None:
        super().__init__()
        self.keep, self.weigh, self.inside = keep, weigh, inside

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        if not self.inside:  # outside the model: the user's own softmax
            return out
        if func is F.scaled_dot_product_attention:
            self.keep(sdpa_pattern(*args, **kwargs))
            self.weigh(None, args[2] if len(args) > 2 else kwargs["value"])
        elif func is F.multi_head_attention_forward:
            # Watching ends at functions of Python that torch hands over whole: ask it for the rest.
            asked = {"need_weights": True, "average_attn_weights": False, "training": False}
            pattern: Any = func(*args, **{**kwargs, **asked})[1]
            self.keep(pattern if pattern.ndim == 4 else pattern[None])
        elif func in _SOFTMAX and _over_keys(out, args, kwargs):
            # Cloned: what the model does with it in place is the model's own affair.
            self.keep(out.clone())
        elif func in _PRODUCTS and all(isinstance(x, Tensor) and x.ndim == 4 for x in args):
            self.weigh(*args)
        return out


def sdpa_pattern(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The pattern that `scaled_dot_product_attention` uses, before dropout; its own arguments.

    Computed in float32 at least. A query that may look at nothing has a row of zeros.
    """
    wide = _wide(query)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = (query.to(wide) @ key.to(wide).mT) * (
        query.shape[-1] ** -0.5 if scale is None else scale
    )
    if is_causal:
        # SDPA aligns the first query with the first key.
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    nothing = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(nothing, 0.0).to(query.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _over_keys(out: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return isinstance(out, Tensor) and out.ndim == 4 and dim in (-1, 3)
