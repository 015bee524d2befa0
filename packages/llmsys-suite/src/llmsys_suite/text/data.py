"""Text as byte tokens, and batches of tokens.

The text is the standard library of this interpreter, a file or a folder. A batch depends only on
(seed, step), and each rank reads its rows of the batch. Every variant therefore reads the same
tokens in the same order, at any world size.

A file is mapped into memory, so that a process reads only the windows that it needs. The files of a
folder are joined in memory. Reading does not import torch, so that a run with too little text is
refused within a second.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from llmsys_suite.config import UsageError

if TYPE_CHECKING:
    from torch import Tensor


#: Files that are mapped into memory.
MappedFiles = tuple[mmap.mmap, ...]
#: Maximum total size in bytes of the files of a folder, which are joined in memory.
LARGEST_FOLDER = 256 * 2**20
#: Number of windows below which `torch.randint` draws every start from 32 random bits. For more
#: windows, the number of bits depends on the version of torch.
FEW_WINDOWS = 2**28
#: Minimum number of held-out bytes, so that the 256 rows of `scale` have different starts.
LEAST_HELDOUT = 512
#: Number of bytes or tokens read at once to compute a digest.
DIGEST_CHUNK = 2**24


@dataclass(frozen=True)
class Text:
    """The training bytes, and the held-out bytes, which are the last tenth of the text.

    Both are views, either of bytes in memory or of a file that is mapped into memory.
    """

    train: memoryview
    heldout: memoryview
    source: str
    mapped: MappedFiles = ()

    def compute_digest(self) -> str:
        """Return the hexadecimal SHA-256 digest of both parts, with a zero byte after each."""
        digest = hashlib.sha256()
        for part in (self.train, self.heldout):
            for chunk in iter_chunks(part, DIGEST_CHUNK, self.mapped):
                digest.update(chunk)
            digest.update(b"\0")
        return digest.hexdigest()

    def to_corpus(self) -> Corpus:
        """Return the training bytes and the held-out bytes as tokens (uint8)."""
        import torch

        parts: list[memoryview | bytearray] = [self.train, self.heldout]
        if not self.mapped:
            # torch expects the memory of a tensor to be writable, and `bytes` are not.
            parts = [bytearray(part) for part in parts]
        train, heldout = (torch.from_numpy(np.frombuffer(part, np.uint8)) for part in parts)
        return Corpus(train, heldout, self.mapped)


@dataclass(frozen=True)
class Corpus:
    """The training tokens and the held-out tokens, which are views of `mapped` files if any."""

    train: Tensor
    heldout: Tensor
    mapped: MappedFiles = ()

    def compute_digest(self) -> str:
        """Return twelve hexadecimal digits of the SHA-256 of the training tokens."""
        digest = hashlib.sha256()
        for chunk in iter_chunks(self.train.numpy().data, DIGEST_CHUNK, self.mapped):
            digest.update(chunk)
        return digest.hexdigest()[:12]

    def draw_batch(
        self, *, rows: int, context: int, seed: int, step: int, rank: int = 0, world: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of a rank's rows, each of shape (rows / world, context).

        Raises ValueError if `rows` is not a multiple of `world`: with different numbers of rows,
        the mean of the ranks' losses would not be the loss over all rows.
        """
        if rows % world:
            raise ValueError(f"expected rows to be a multiple of world={world}, got {rows}")
        starts = _draw_starts(len(self.train), rows, context, seed, step)
        rank_starts = starts[rank * rows // world : (rank + 1) * rows // world]
        return self._cut_windows(self.train, rank_starts, context)

    def build_heldout_batch(self, *, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, each (rows, context), spread evenly over the held-out text.

        Every call returns the same rows. Raises ValueError if the text has fewer starts of rows,
        because a loss over repeated rows would be reported as a loss over `rows` rows.
        """
        stride = (len(self.heldout) - context - 1) // rows
        if stride < 1:
            raise ValueError(
                f"expected held-out text for {rows} different rows of {context} tokens, got "
                f"{len(self.heldout)} tokens; pass more text with --data"
            )
        return self._cut_windows(self.heldout, [i * stride for i in range(rows)], context)

    def _cut_windows(self, text: Tensor, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of the rows at `starts`, and the targets, which follow by one token."""
        import torch

        windows = torch.stack([text[start : start + context + 1] for start in starts]).long()
        _release(self.mapped)
        # Pipelines expect contiguous tensors.
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def read_text(path: Path | None = None) -> Text:
    """Return the bytes of a file, or of all files below a folder, joined by newlines.

    Without a path, the files are the modules `*.py` at the top level of the standard library.
    Raises UsageError if the text has fewer than two bytes, if a file cannot be read, or if the
    files of a folder exceed `LARGEST_FOLDER`.
    """
    if path is not None and path.is_file():
        return _read_file(path)
    try:
        if path is None:
            files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        elif path.is_dir():
            tree = os.walk(path, onerror=_raise)
            files = sorted(Path(parent, name) for parent, _, names in tree for name in names)
            files = [file for file in files if file.is_file()]
        else:
            raise UsageError(f"expected --data to be a file or a folder, got {path}")
        size = sum(file.stat().st_size for file in files)
        if size > LARGEST_FOLDER:
            raise UsageError(
                f"expected a folder of at most {LARGEST_FOLDER / 2**20:.0f} MiB, whose files are "
                f"joined in memory, got {size / 2**20:.0f} MiB in {path}; pass one file with "
                "--data, which is read from disk"
            )
        content = b"\n".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be read: {error.strerror}") from None
    return _split(content, path or Path("the standard library of this interpreter"))


def _raise(error: OSError) -> NoReturn:
    """Raise the error of a folder that `os.walk` would otherwise leave out."""
    raise error


def _read_file(path: Path) -> Text:
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                # An empty file, or a kernel file such as one in /proc, cannot be mapped.
                return _split(file.read(), path)
            # The mapping is private and writable, because torch expects writable memory.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    return _split(memoryview(mapped), path, (mapped,))


def _split(content: bytes | memoryview, source: Path, mapped: MappedFiles = ()) -> Text:
    if len(content) < 2:
        raise UsageError(f"expected text in {source}, got {len(content)} bytes; pass more text")
    content = memoryview(content)
    cut = len(content) * 9 // 10
    # A relative path such as `.` can have an empty name; an absolute path does not.
    return Text(content[:cut], content[cut:], source.absolute().name, mapped)


def require_text(text: Text, *, context: int) -> None:
    """Raise UsageError if the held-out tenth has fewer than eight rows or `LEAST_HELDOUT` bytes."""
    needed = 10 * max(8 * (context + 1), LEAST_HELDOUT)
    received = len(text.train) + len(text.heldout)
    if received < needed:
        raise UsageError(
            f"expected at least {needed} bytes of text for a context of {context}, because a tenth "
            f"is held out, got {received} in {text.source}; pass more text with --data"
        )


def load_corpus(path: Path | None = None) -> Corpus:
    """Return the text that `read_text` reads, as byte tokens."""
    return read_text(path).to_corpus()


def iter_chunks(part: memoryview, length: int, mapped: MappedFiles = ()) -> Iterator[memoryview]:
    """Yield chunks of at most `length` items; release the pages of a chunk after its use."""
    for start in range(0, len(part), length):
        yield part[start : start + length]
        _release(mapped)


def compute_row_digests(tokens: Tensor, targets: Tensor) -> list[str]:
    """Return twelve hexadecimal digits of the SHA-256 of each row: its tokens and targets as int32.

    A zero byte separates the tokens from the targets.
    """
    import torch

    digests = []
    for row in zip(tokens, targets, strict=True):
        x, y = (part.to(torch.int32).cpu().numpy().tobytes() for part in row)
        digests.append(hashlib.sha256(x + b"\0" + y).hexdigest()[:12])
    return digests


def _release(mapped: MappedFiles) -> None:
    """Release the pages of mapped files; the kernel reads a page again when it is needed.

    Otherwise the pages count as memory of the process, up to two MiB per window that was read.
    """
    for file in mapped:
        file.madvise(mmap.MADV_DONTNEED)


def _draw_starts(length: int, rows: int, context: int, seed: int, step: int) -> list[int]:
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    windows = length - context - 1
    if windows < FEW_WINDOWS:
        starts: list[int] = torch.randint(windows, (rows,), generator=generator).tolist()
        return starts
    pairs = torch.randint(2**24, (rows, 2), generator=generator).tolist()
    return [(2**24 * high + low) % windows for high, low in pairs]
