"""The model and the text that all steps of the tutorial share.

A decoder reads bytes: pre-norm blocks with causal attention and a feed-forward network.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from flashattn2 import sdpa
from torch import Tensor, nn


def read_bytes(files: list[Path]) -> Tensor:
    """Return the bytes of all files as one tensor of integers."""
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


WIDTH = 64
LAYERS = 2
HEADS = 4
CONTEXT = 64
ROWS = 16
VOCABULARY = 256

#: The folder in which the steps leave files for each other.
FOLDER = Path("runs/tutorial")
#: The text is the source of Python's standard library. Every tenth module is held out.
MODULES = sorted(Path(argparse.__file__).parent.glob("*.py"))
HELD_OUT = read_bytes(MODULES[::10])
TRAINING = read_bytes([module for number, module in enumerate(MODULES) if number % 10])


class Block(nn.Module):
    """Attention and a feed-forward network, each added to the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map the residual stream (batch, tokens, width) to the next one."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, head_dim)
        x = x + self.out(sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """A decoder-only Transformer with learned positions and an untied head."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (batch, tokens, vocabulary) of tokens (batch, tokens)."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def draw_batch(step: int, rank: int = 0, text: Tensor = TRAINING) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets (rows, context) of a step, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(text) - CONTEXT, (ROWS, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


def compute_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@torch.no_grad()
def compute_held_out_loss(model: nn.Module) -> float:
    """Return the loss over 32 batches of held-out text."""
    losses = [compute_loss(model, *draw_batch(step, text=HELD_OUT)).item() for step in range(32)]
    return sum(losses) / len(losses)


def load_trained_model() -> Decoder:
    """Return the model that the training step has saved."""
    model = Decoder()
    model.load_state_dict(torch.load(FOLDER / "model.pt"))
    return model


def save_lines(name: str, lines: dict[str, list[tuple[float, float]]]) -> None:
    """Store the points of each line of a picture, for docs/tutorial/run.py."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(lines))
