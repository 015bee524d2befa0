"""A reference implementation: attention from its definition, with every dtype and derivative.

It stores the whole score matrix, which the backends avoid.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flashattn2.spec import AttentionSpec, Window, make_spec
from flashattn2.validation import check_dense, check_sinks


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax attention from its definition.

    The arguments and results are those of `flash_attention`, without `deterministic` and `backend`,
    but products and the log-sum-exp have the dtype of the inputs.  On CPUs with AMX, torch's
    product in bfloat16 may spread a NaN to the previous row; float32 inputs avoid this.

    Raises:
        ValueError, TypeError: If an argument is invalid.
    """
    check_dense(q, k, v)
    spec = make_spec(q.shape[-1], is_causal, scale, window, softcap)
    has_heads = q.dim() == 4
    check_sinks(sinks, q.shape[1] if has_heads else 1, q)
    if not has_heads:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    seq_q, seq_k = q.shape[2], k.shape[2]
    queries = torch.arange(seq_q, device=q.device)
    keys = torch.arange(seq_k, device=q.device)
    hidden = spec.make_hidden_mask(queries, keys, seq_k - seq_q)
    out, lse = attend(q, k, v, spec, hidden, sinks)
    if not has_heads:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return (out, lse) if return_lse else out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    hidden: Tensor,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of `(batch, heads, seq, dim)`, with every derivative.

    The mask `hidden` `(seq_q, seq_k)` replaces the band of the specification.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    s = (q @ k.transpose(-1, -2)) * spec.scale  # [batch, heads, seq_q, seq_k]
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    if sinks is not None:
        # A sink is the score of an additional key whose value is zero.
        column = sinks.to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)
        s = torch.cat((s, column), -1)
        v = F.pad(v, (0, 0, 0, 1))
        hidden = F.pad(hidden, (0, 1), value=False)

    # A row that sees no key keeps its finite scores until its output is set to 0: with scores of
    # -inf its gradient would be NaN.
    is_empty = hidden.all(-1)
    s = s.masked_fill(hidden & ~is_empty[:, None], -torch.inf)
    lse = s.logsumexp(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
    p = torch.exp(s - lse[..., None])
    out = (p @ v).masked_fill(is_empty[:, None], 0.0)
    return out, lse.masked_fill(is_empty, -torch.inf)
