"""A custom decoder with RMS norm, rotary positions, SwiGLU and grouped queries."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))


class RMSNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(d) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequency
    left, right = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return features (batch, seq, heads * d_head) as (batch, heads, seq, d_head)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class DecoderBlock(nn.Module):
    def __init__(self, d: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        d_head = d // heads
        self.norm1, self.norm2 = RMSNorm(d), RMSNorm(d)
        self.q = nn.Linear(d, d, bias=False)
        self.k = nn.Linear(d, kv_heads * d_head, bias=False)
        self.v = nn.Linear(d, kv_heads * d_head, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = rotate(split_heads(self.q(x), self.heads))
        k = rotate(split_heads(self.k(x), self.kv_heads))
        return q, k, split_heads(self.v(x), self.kv_heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads_of(self.norm1(x))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = 17, d: int = 12, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.layers = nn.ModuleList(DecoderBlock(d, 3, 1) for _ in range(layers))
        self.norm = RMSNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().double()
