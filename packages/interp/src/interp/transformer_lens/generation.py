"""Generation of token ids, one per call of the model and row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from interp.decoder.modules.cache import Cache

#: A function from new tokens, the mask of all tokens and the cache to logits (batch, pos, d_vocab).
Call = Callable[[Tensor, Tensor | None, Cache], Tensor]
#: A function from the logits of the next token, (batch, d_vocab), to its id in each row, (batch,).
Choose = Callable[[Tensor], Tensor]


def continue_tokens(
    call: Call, choose: Choose, tokens: Tensor, mask: Tensor | None, max_new: int, eos: int | None
) -> Tensor:
    """Return token ids (batch, pos), followed by up to `max_new` further ids per row.

    After the token `eos`, a row is filled with this token. No further tokens are added after all
    rows have ended. `mask` (batch, pos) is 0 at padding.
    """
    cache, new = Cache(), tokens
    has_ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for _ in range(max_new):
        chosen = choose(call(new, mask, cache)[:, -1])
        if eos is not None:
            chosen = chosen.masked_fill(has_ended, eos)
            has_ended |= chosen == eos
        new = chosen[:, None]
        tokens = torch.cat([tokens, new], 1)
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(new)], 1)
        if bool(has_ended.all()):
            break
    return tokens


def sample(logits: Tensor, *, temperature: float, top_k: int | None) -> Tensor:
    """Return one sampled token id per row of logits (batch, d_vocab).

    A temperature of 0 selects the most likely token. `top_k` is the number of most likely tokens to
    sample from, or None for all. Raises ValueError for a negative temperature and `top_k` < 1.
    """
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"expected temperature >= 0 and top_k >= 1 or None, got {temperature} and {top_k}"
        )
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None:
        lowest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]
