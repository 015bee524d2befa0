"""The backend that `flash_attention` would select for an input, with the reason."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flashattn2.attention import specify_call
from flashattn2.compilation import is_mapped, is_recorded
from flashattn2.spec import FLOAT32_RANGE, Window
from flashattn2.validation import DTYPES, is_jit_tracing


@dataclass(frozen=True)
class Explanation:
    """The backend of a call and the reason for its selection."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = True,
    backend: str = "auto",
) -> Explanation:
    """Return the backend that `flash_attention` would select for these arguments.

    With `cu_seqlens_q` and `cu_seqlens_k`, the explanation applies to `flash_attention_varlen`.

    With `attn_mask` or `dropout_p`, the explanation applies to `sdpa`, which passes such a call to
    torch's own function: the backend is then "torch.nn.functional".

    Raises the errors of the call for invalid arguments, except for the values of boundaries.
    """
    if attn_mask is not None or dropout_p:
        reason = find_torch_reason(q, k, v, attn_mask, dropout_p, scale, enable_gqa=True)
        return Explanation("torch.nn.functional", str(reason))
    boundaries = None
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        boundaries = cu_seqlens_q, cu_seqlens_k
    scores = is_causal, scale, window, softcap
    *_, method, reason = specify_call(q, k, v, boundaries, sinks, scores, deterministic, backend)
    return Explanation(method.backend, reason)


def find_torch_reason(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """Return the reason why `sdpa` calls torch's own function, or None if it does not."""
    if attn_mask is not None:
        return "sdpa passes an attn_mask to torch's own function; flashattn2 reads no mask tensor"
    if dropout_p:
        return "sdpa passes dropout to torch's own function; flashattn2 has no dropout"
    if scale is not None and not _is_supported_scale(scale):
        return (
            f"sdpa passes scale {scale!r} to torch's own function; flashattn2 needs a positive "
            "normal number of float32"
        )
    if is_jit_tracing() or is_recorded():
        return "sdpa passes calls inside torch.jit.trace and make_fx to torch's own function"
    for x in (query, key, value):
        reason = _find_tensor_reason(x, query)
        if reason is not None:
            return reason
    heads, kv_heads = query.shape[1], key.shape[1]
    are_heads_valid = heads % kv_heads == 0 if enable_gqa else heads == kv_heads
    if not are_heads_valid or query.shape[0] != key.shape[0] or key.shape[:-1] != value.shape[:-1]:
        return "sdpa passes dimensions that broadcast or do not match to torch's own function"
    return None


def _find_tensor_reason(x: Tensor, query: Tensor) -> str | None:
    """Return the reason why `sdpa` calls torch's own function for tensor `x`, or None."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.dim() != 4:
        return "sdpa passes tensors without four dense dimensions to torch's own function"
    if 0 in x.shape:
        return "sdpa passes empty tensors to torch's own function"
    if is_mapped(x):
        return "sdpa passes tensors inside torch.func.vmap to torch's own function"
    if x.dtype not in DTYPES or x.dtype != query.dtype or x.device != query.device:
        return "sdpa passes unequal or unsupported dtypes and devices to torch's own function"
    return None


def _is_supported_scale(scale: float) -> bool:
    """Return True if `flash_attention` supports the scale."""
    is_number = isinstance(scale, (int, float, torch.SymInt, torch.SymFloat))
    if not is_number or isinstance(scale, bool):
        return False
    low, high = FLOAT32_RANGE
    return bool(low <= scale <= high)
