"""The specification: attention as it is defined, every option, any dtype, differentiable.

Notable: the whole score matrix stands in memory, which is what the rest of this package avoids.
"""

import torch
from torch import Tensor

from flashattn2.problem import Score, Window, check_dense, make_score


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention written out, with the arguments of `flash_attention`."""
    check_dense(q, k, v)
    score = make_score(q.shape[-1], is_causal, scale, window, softcap)
    if q.dim() == 3:
        out, lse = attend(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), score)
        out, lse = out.squeeze(1), lse.squeeze(1)
    else:
        out, lse = attend(q, k, v, score)
    return (out, lse) if return_lse else out


def attend(q: Tensor, k: Tensor, v: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, ``(batch, heads, ...)``; 0 and -inf where a row sees no key."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    s = (q @ k.transpose(-1, -2)) * score.scale
    if score.softcap:
        s = score.softcap * torch.tanh(s / score.softcap)
    seq_q, seq_k = s.shape[-2:]
    queries, keys = (torch.arange(n, device=q.device) for n in (seq_q, seq_k))
    hidden = score.hidden(queries, keys, seq_k - seq_q)
    # A row that sees nothing keeps finite scores until its result is set: no NaN in its gradient.
    empty = hidden.all(-1)
    s = s.masked_fill(hidden & ~empty[:, None], -torch.inf)
    lse = s.logsumexp(-1) if seq_k else s.new_zeros(s.shape[:-1])
    p = torch.exp(s - lse[..., None])
    out = (p @ v).masked_fill(empty[:, None], 0.0)
    return out, lse.masked_fill(empty, -torch.inf)
