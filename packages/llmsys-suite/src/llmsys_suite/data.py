"""Real text as bytes, from this interpreter's own standard library or from a file or folder.

A batch is a function of (seed, step) alone, and each rank takes its rows of it: every way of
training the same model sees the same tokens in the same order, at any world size.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


class DataError(ValueError):
    """The data cannot serve the run."""


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and the last tenth, held out."""

    train: Tensor
    heldout: Tensor
    source: str

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
    """The bytes of `path` (a file, or every file below a folder), or the standard library's.

    Raises DataError where there is nothing to read.
    """
    if path is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files, source = sorted(folder.glob("*.py")), "the standard library of this interpreter"
    elif path.is_file():
        files, source = [path], path.name
    elif path.is_dir():
        files, source = sorted(p for p in path.rglob("*") if p.is_file()), path.name
    else:
        raise DataError(f"no data at {path}; give a file or a folder, or leave --data out")
    text = b"\n".join(file.read_bytes() for file in files)
    if len(text) < 2:
        raise DataError(f"no text in {path or source}; give a file or a folder that holds some")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(tokens) * 9 // 10
    return Corpus(tokens[:cut], tokens[cut:], source)


def require_tokens(corpus: Corpus, *, rows: int, context: int, steps: int, world: int) -> None:
    """Raise DataError if the corpus is too small for so many ranks to read it once."""
    needed = rows * context * steps
    if len(corpus.train) < needed or len(corpus.heldout) < 8 * (context + 1):
        raise DataError(
            f"{corpus.source} holds {len(corpus.train)} training bytes, and {steps} steps of "
            f"{rows} rows of {context} on {world} ranks read {needed}; "
            "give more text with --data, or fewer --steps or ranks"
        )


def _shifted(text: Tensor, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    """Tokens, and the same moved on by one: both contiguous, as pipelines expect."""
    window = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _starts(length: int, rows: int, context: int, seed: int, step: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts: list[int] = torch.randint(length - context - 1, (rows,), generator=generator).tolist()
    return starts
