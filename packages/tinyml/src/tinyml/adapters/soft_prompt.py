"""Soft prompts: trainable vectors in front of the input of a frozen language model.

Only `length` x `dim` numbers are trained. The method is that of Lester et al., "The Power of Scale
for Parameter-Efficient Prompt Tuning", 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tinyml.validation import check_strided

IGNORED = -100  # the target that `F.cross_entropy` ignores


class SoftPrompt(nn.Module):
    """`length` trainable vectors of width `dim` before the embeddings of the tokens.

    `init` (length, dim) contains the initial values, such as the embeddings of a text. By default,
    they are normal random numbers with standard deviation 0.02.
    """

    def __init__(self, length: int, dim: int, *, init: Tensor | None = None) -> None:
        super().__init__()
        if length < 1 or dim < 1:
            raise ValueError(f"expected length >= 1 and dim >= 1, got {length} and {dim}")
        if init is not None and init.shape != (length, dim):
            raise ValueError(f"expected init of shape {(length, dim)}, got {tuple(init.shape)}")
        start = torch.randn(length, dim) * 0.02 if init is None else init.detach().clone()
        self.embeddings = nn.Parameter(start)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map (batch, seq, dim) to (batch, length + seq, dim)."""
        check_strided("embeddings", embeddings)
        prompt = self.embeddings.to(embeddings.dtype).expand(len(embeddings), -1, -1)
        return torch.cat([prompt, embeddings], dim=1)

    def targets(self, tokens: Tensor, carries_loss: Tensor) -> Tensor:
        """Return the target of each output of the prompted model: (batch, length + seq), int64.

        Output i predicts the token after position i. Only tokens at which `carries_loss` (batch,
        seq) is True are targets; all others are -100, which `F.cross_entropy` ignores.
        """
        if tokens.shape != carries_loss.shape:
            raise ValueError(
                f"expected carries_loss with one bool per token, of shape "
                f"{tuple(tokens.shape)}, got {tuple(carries_loss.shape)}"
            )
        targets = torch.where(carries_loss, tokens.long(), IGNORED)
        prompt = targets.new_full((len(tokens), len(self.embeddings) - 1), IGNORED)
        end = targets.new_full((len(tokens), 1), IGNORED)
        return torch.cat([prompt, targets, end], dim=1)
