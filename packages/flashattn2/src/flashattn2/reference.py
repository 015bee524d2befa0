"""The specification: attention as it is defined, every option, any dtype, differentiable.

Notable: the whole score matrix stands in memory, which is what the rest of this package avoids.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flashattn2.problem import Score, Window, check_dense, check_sinks, make_score


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Softmax attention written out, with the arguments of `flash_attention`."""
    check_dense(q, k, v)
    score = make_score(q.shape[-1], is_causal, scale, window, softcap)
    heads_missing = q.dim() == 3
    check_sinks(sinks, 1 if heads_missing else q.shape[1], q)
    if heads_missing:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    out, lse, largest = attend(q, k, v, score, sinks)
    if heads_missing:
        out, lse = out.squeeze(1), lse.squeeze(1)
    results = (out, *((lse,) if return_lse else ()), *((largest,) if return_max_logits else ()))
    return results if len(results) > 1 else out


def attend(
    q: Tensor, k: Tensor, v: Tensor, score: Score, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and each head's largest score, of ``(batch, heads, ...)``.

    A row that sees no key gives 0 and -inf.  A sink is the score of a key whose value is zero.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    s = (q @ k.transpose(-1, -2)) * score.scale
    if score.softcap:
        s = score.softcap * torch.tanh(s / score.softcap)
    seq_q, seq_k = s.shape[-2:]
    queries, keys = (torch.arange(n, device=q.device) for n in (seq_q, seq_k))
    hidden = score.hidden(queries, keys, seq_k - seq_q)
    seen = s.detach().masked_fill(hidden, -torch.inf)
    largest = seen.amax((0, 2, 3)) if seen.numel() else s.new_full(s.shape[1:2], -torch.inf)
    if sinks is not None:
        column = sinks.to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)
        s, v = torch.cat((s, column), -1), F.pad(v, (0, 0, 0, 1))
        hidden = F.pad(hidden, (0, 1), value=False)
    # A row that sees nothing keeps finite scores until its result is set: no NaN in its gradient.
    empty = hidden.all(-1)
    s = s.masked_fill(hidden & ~empty[:, None], -torch.inf)
    lse = s.logsumexp(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
    p = torch.exp(s - lse[..., None])
    out = (p @ v).masked_fill(empty[:, None], 0.0)
    return out, lse.masked_fill(empty, -torch.inf), largest
