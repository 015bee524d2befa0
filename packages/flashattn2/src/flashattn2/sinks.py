"""Attention sinks: a learned score a head that takes its share of each row's sum, and no value.

Notable: with s the sink and L the log-sum-exp without it, a row's sum grows from e^L to e^L + e^s,

    O' = O · σ(L - s)        L' = log(e^L + e^s),

so sinks need no kernel of their own: gradients of every order follow from those of O and L.
"""

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of ``(batch, heads, seq, ...)`` with a sink for each head."""
    sink = sinks.to(lse.dtype)[None, :, None]
    # A row that sees no key has L = -inf: the sink takes all, and its output stays 0.
    share = torch.sigmoid(lse - sink)
    return (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, sink)
