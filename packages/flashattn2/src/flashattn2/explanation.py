"""The backend that `flash_attention` would select for an input, with the reason."""

from dataclasses import dataclass

from torch import Tensor

from flashattn2.attention import specify_call
from flashattn2.spec import Window


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
    """Return the backend that `flash_attention` would select for these arguments, and why.

    With `cu_seqlens_q` and `cu_seqlens_k`, the explanation applies to `flash_attention_varlen`.
    With `attn_mask` or `dropout_p`, the explanation applies to `sdpa`, which passes such a call to
    torch's own function: the backend is then "torch.nn.functional".

    In all other cases, invalid arguments raise the errors of the call.  Two checks are skipped: of
    the values in `cu_seqlens_q` and `cu_seqlens_k`, and of dimensions of 2**30 or more.
    """
    if attn_mask is not None or dropout_p:
        obstacle = "reads no mask tensor" if attn_mask is not None else "has no dropout"
        reason = f"sdpa passes this call to torch's own function, because flashattn2 {obstacle}"
        return Explanation("torch.nn.functional", reason)
    boundaries = None
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        boundaries = cu_seqlens_q, cu_seqlens_k
    score_options = is_causal, scale, window, softcap
    *_, choice, reason = specify_call(
        q, k, v, boundaries, sinks, score_options, deterministic, backend
    )
    return Explanation(choice.backend, reason)
