"""Text as tokens, one a byte, and batches of them.

A batch is a function of (seed, step) alone, and each rank takes its rows of it: every way of
training the same model sees the same tokens in the same order, at any world size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmsys_suite.text import read_text


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on, and those held out."""

    train: Tensor
    heldout: Tensor

    def batch(
        self, *, rows: int, context: int, seed: int, step: int, rank: int = 0, world: int = 1
    ) -> tuple[Tensor, Tensor]:
        """This rank's rows of the global batch: tokens and targets (rows / world, context)."""
        starts = _starts(len(self.train), rows, context, seed, step)
        mine = starts[rank * rows // world : (rank + 1) * rows // world]
        return _shifted(self.train, mine, context)

    def heldout_batch(self, *, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """The same `rows` held-out rows each time, spread evenly over the held-out text."""
        stride = (len(self.heldout) - context - 1) // rows
        return _shifted(self.heldout, [i * stride for i in range(rows)], context)


def load_corpus(path: Path | None = None) -> Corpus:
    """The text of `path`, or the standard library's, as tokens; UsageError where there is none."""
    text = read_text(path)
    return Corpus(
        *(torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (text.train, text.heldout))
    )


def _shifted(text: Tensor, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    """Tokens, and the same moved on by one: both contiguous, as pipelines expect."""
    window = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _starts(length: int, rows: int, context: int, seed: int, step: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts: list[int] = torch.randint(length - context - 1, (rows,), generator=generator).tolist()
    return starts
