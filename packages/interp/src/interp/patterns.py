"""Recording of the attention patterns of any model.

    with record_patterns(model) as patterns:
        model(tokens)
    patterns["model.layers.0.self_attn"]          # (batch, heads, seq_q, seq_k)

Calls of torch functions are intercepted, and their outputs do not change. The output of a softmax
over keys is recorded as a pattern. The pattern of `scaled_dot_product_attention` is recomputed from
the arguments of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SOFTMAX = (F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax)


@contextmanager
def record_patterns(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the attention pattern of the latest call of each module of `model` in the context.

    Entering the context returns a dictionary from module names to patterns (batch, heads, seq_q,
    seq_k), in the order of calls.

    Three functions are intercepted: a softmax over the last of four dimensions,
    `scaled_dot_product_attention` and `multi_head_attention_forward`. If the softmax includes a
    sink (gpt-oss), the sink is the last column. Patterns of custom kernels and compiled graphs are
    not recorded. Inside the context, `nn.MultiheadAttention` does not use its fast path for
    inference, whose rounding errors differ.

    Raises RuntimeError on exit if no pattern was recorded. Raises ValueError if a module computes
    two patterns in one call, because both would have the name of this module.
    """
    patterns: dict[str, Tensor] = {}
    running: list[_Call] = []
    handles = []

    def enter(name: str, module: nn.Module, args: Any) -> None:
        running.append(_Call(name, module))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    def store(pattern: Tensor) -> None:
        call = running[-1]
        if call.has_pattern:
            raise ValueError(
                f"expected one attention in module {call.name!r}, got two in one call; call each "
                "attention in a separate module"
            )
        call.has_pattern = True
        pattern = _unpack_groups(call.module, pattern)
        patterns.pop(call.name, None)
        patterns[call.name] = pattern.detach()

    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(enter, name)))
            # always_call: after an exception, another call may follow in the same context.
            handles.append(module.register_forward_hook(leave, always_call=True))
        with _AttentionObserver(store, running):
            yield patterns
    finally:
        for handle in handles:
            handle.remove()
    if not patterns:
        raise RuntimeError(
            "no attention was recorded: the model was not called in the context, was compiled, or "
            "uses a custom kernel; switch it to SDPA or eager attention"
        )


@dataclass
class _Call:
    """A call of a module that has not returned yet."""

    name: str
    module: nn.Module
    has_pattern: bool = False


class _AttentionObserver(TorchFunctionMode):
    """A mode that passes patterns to `store` and does not change arguments or results.

    Calls are ignored while `running`, the stack of calls of modules, is empty.
    """

    def __init__(self, store: Callable[[Tensor], None], running: Sequence[object]) -> None:
        super().__init__()
        self.store = store
        self.running = running

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        if not self.running:  # a softmax outside the model
            return out
        if func is F.scaled_dot_product_attention:
            self.store(compute_sdpa_pattern(*args, **kwargs))
        elif func is F.multi_head_attention_forward:
            # The softmax in this function is not intercepted, so a second call returns its weights.
            options = {"need_weights": True, "average_attn_weights": False, "training": False}
            pattern: Any = func(*args, **{**kwargs, **options})[1]
            self.store(pattern if pattern.ndim == 4 else pattern[None])
        elif func in _SOFTMAX and _is_softmax_over_keys(out, args, kwargs):
            # Clone the pattern, because the model may change it in place.
            self.store(out.clone())
        return out


def compute_sdpa_pattern(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the pattern of `scaled_dot_product_attention` for its arguments, before dropout.

    The pattern is computed in float32 or float64 and returned in the dtype of `query`. A query
    without visible keys has a row of zeros.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
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
    is_empty = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(is_empty, 0.0).to(query.dtype)


def _unpack_groups(module: nn.Module, pattern: Tensor) -> Tensor:
    """Unpack the pattern of a single query to (batch, query heads, 1, seq_k).

    For one query and a mask, transformers passes the query heads that share a key head to SDPA as
    several queries of one head. Other patterns are returned unchanged.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    is_packed = groups > 1 and pattern.shape[2] == groups and pattern.shape[1] * groups == heads
    return pattern.flatten(1, 2)[:, :, None] if is_packed else pattern


def _is_softmax_over_keys(out: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return isinstance(out, Tensor) and out.ndim == 4 and dim in (-1, 3)
