"""A decoder-only Transformer: RMSNorm, RoPE, SwiGLU, no biases, an untied head.

Shape suffixes: B batch, T tokens, D d_model, F d_ff, H heads, K head_dim, V vocabulary.

The attention function is an argument, so that any kernel can be used with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmsys_suite.config import Size, get_size, require_integer

#: f(q, k, v, *, is_causal) -> (B, H, T, K); each argument is (B, H, T, K).
Attention = Callable[..., Any]
#: Constant that RMSNorm adds to the mean square.
NORM_EPSILON = 1e-5
#: Base of the rotary angles (Su et al. 2021, section 3.2).
ROPE_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Size):
    """The shape of a `Decoder`. The default vocabulary is the 256 byte values."""

    vocabulary: int = 256
    context: int = 128
    #: If True, only the input of each block is saved, and the backward pass recomputes the block.
    checkpoint: bool = False

    def __post_init__(self) -> None:
        """Raise `ValueError` if no model can have this shape."""
        super().__post_init__()
        require_integer("vocabulary", self.vocabulary, 1)
        require_integer("context", self.context, 1)

    @classmethod
    def from_size(cls, size: str, *, vocabulary: int = 256, context: int = 128) -> ModelConfig:
        """Return the shape of a size that `config.get_size` accepts."""
        return cls(**vars(get_size(size)), vocabulary=vocabulary, context=context)


def plain_attention(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, *, is_causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v, materializing the full matrix of scores."""
    scores_BHTT = q_BHTK @ k_BHTK.transpose(-2, -1) / q_BHTK.shape[-1] ** 0.5
    if is_causal:
        future = torch.ones_like(scores_BHTT[0, 0], dtype=torch.bool).triu(1)
        scores_BHTT = scores_BHTT.masked_fill(future, float("-inf"))
    mixed_BHTK: Tensor = scores_BHTT.softmax(-1) @ v_BHTK
    return mixed_BHTK


class Decoder(nn.Module):
    """A model that maps tokens (B, T) to logits (B, T, V)."""

    rope: Tensor  #: Cosines and sines of the rotary angles, (2, context, K / 2).

    def __init__(self, config: ModelConfig, attention: Attention | None = None) -> None:
        super().__init__()
        self.config = config
        attention = attention or F.scaled_dot_product_attention
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=NORM_EPSILON)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        rope = compute_rotary_table(config.d_model // config.num_heads, config.context)
        self.register_buffer("rope", rope, persistent=False)
        self.apply(self._initialize)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits (B, T, V) for the token after each position.

        Raises ValueError if T exceeds the context.
        """
        if tokens_BT.shape[1] > self.config.context:
            raise ValueError(
                f"expected at most {self.config.context} tokens per row, got "
                f"{tokens_BT.shape[1]}; pass shorter rows, or build the model with a larger context"
            )
        x_BTD = self.embedding(tokens_BT)
        rope = self.rope[:, : tokens_BT.shape[1]].to(x_BTD.dtype)
        for block in self.blocks:
            x_BTD = run_block(block, x_BTD, rope, checkpointed=self.config.checkpoint)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV

    def list_blocks(self) -> list[Block]:
        """Return the blocks in order."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def compute_loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token."""
        return cross_entropy(self(tokens_BT), targets_BT)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            std = (2 / (module.in_features + module.out_features)) ** 0.5
            nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
        elif isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=1.0, a=-3.0, b=3.0)


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token, computed in float32."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def run_block(block: nn.Module, x_BTD: Tensor, rope: Tensor, *, checkpointed: bool) -> Tensor:
    """Return the output of a block; if `checkpointed`, the backward pass recomputes the block."""
    if checkpointed and torch.is_grad_enabled():
        out_BTD: Tensor = checkpoint(block, x_BTD, rope, use_reentrant=False)
    else:
        out_BTD = block(x_BTD, rope)
    return out_BTD


class Block(nn.Module):
    """Pre-norm attention and a pre-norm feed-forward network, each added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=NORM_EPSILON)
        self.attention = MultiHeadAttention(config, attention)
        self.ffn_norm = nn.RMSNorm(config.d_model, eps=NORM_EPSILON)
        self.ffn = SwiGLU(config.d_model, config.d_ff)

    def forward(self, x_BTD: Tensor, rope: Tensor) -> Tensor:
        """Return the residual stream after this block."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope)
        out_BTD: Tensor = x_BTD + self.ffn(self.ffn_norm(x_BTD))
        return out_BTD


class MultiHeadAttention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attend = attention
        self.q = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k = nn.Linear(config.d_model, config.d_model, bias=False)
        self.v = nn.Linear(config.d_model, config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x_BTD: Tensor, rope: Tensor) -> Tensor:
        """Return, for each position, the attention output over it and all earlier positions."""
        q, k, v = (
            project(x_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed_BHTK = self.attend(rotate(q, rope), rotate(k, rope), v, is_causal=True)
        out_BTD: Tensor = self.out(mixed_BHTK.transpose(1, 2).flatten(2))
        return out_BTD


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); Shazeer 2020, "GLU Variants Improve Transformer"."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output of the feed-forward network at each position."""
        out_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out_BTD


def compute_rotary_frequencies(head_dim: int) -> Tensor:
    """Return the angle per position, in radians, of each pair of dims; shape (head_dim / 2,).

    See Su et al. 2021, section 3.2. `Size` ensures that `head_dim` is even.
    """
    # Computed on the CPU, so that the frequencies are the same on every device.
    even_dims = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu")
    return ROPE_BASE ** (-even_dims / head_dim)


def compute_rotary_table(head_dim: int, context: int) -> Tensor:
    """Return cosines and sines of the rotary angles: float32, (2, context, head_dim / 2)."""
    position = torch.arange(context, dtype=torch.float64)
    angle = position[:, None] * compute_rotary_frequencies(head_dim).to(position.device)
    return torch.stack((angle.cos(), angle.sin())).float()


def rotate(x_BHTK: Tensor, rope: Tensor) -> Tensor:
    """Rotate dims i and i + K / 2 of each position by the angles of `compute_rotary_table`.

    Raises ValueError if `rope` is not of shape (2, T, K / 2), because it would broadcast.
    """
    expected = (2, x_BHTK.shape[-2], x_BHTK.shape[-1] // 2)
    if rope.shape != expected:
        raise ValueError(f"expected rope of shape {expected}, got {tuple(rope.shape)}")
    a, b = x_BHTK.chunk(2, dim=-1)
    cos, sin = rope
    # Under autocast the table may be more precise than the queries and keys.
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_BHTK.dtype)
