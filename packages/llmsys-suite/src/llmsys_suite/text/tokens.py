"""Codecs of text: bytes, or tokens that the package `tokenizers` encodes.

With a tokenizer, rank 0 encodes the text once, line by line, and writes the tokens and the
tokenizer into the run folder. Every rank maps the files of tokens into memory. A byte-pair
vocabulary is trained on the start of the training text.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmsys_suite.config import BYTES, RunConfig, UsageError
from llmsys_suite.text.data import Corpus, MappedFiles, Text, iter_chunks, read_text

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Names of files in the run folder.
TOKENIZER = "tokenizer.json"
TRAIN = "tokens-train.bin"
HELDOUT = "tokens-heldout.bin"
#: Number of bytes read at once, whose complete lines are encoded together. Lines up to this length
#: are always accepted.
CHUNK_BYTES = 2**22
#: Maximum number of training bytes on which a vocabulary is trained.
SAMPLE_BYTES = 64 * 2**20
#: Type of a stored token.
INT32 = np.dtype("<i4")


class ByteCodec:
    """A codec whose tokens are bytes."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text in UTF-8."""
        return list(text.encode(errors="surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, with "·" for invalid UTF-8 and unprintable characters.

        Tabs and newlines are not replaced.
        """
        text = bytes(tokens).decode(errors="replace").replace("\ufffd", "·")
        return "".join(c if c.isprintable() or c in "\t\n" else "·" for c in text)


class TokenizerCodec:
    """The codec of a file of the package `tokenizers`; raises `UsageError` for other files."""

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer: Any = _import_tokenizers().Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain exceptions
            raise UsageError(f"{path} is not a file of the package tokenizers: {error}") from None
        # A file may configure truncation and padding, which would change the text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def size(self) -> int:
        """The largest token id plus one; a vocabulary may skip ids."""
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, whose lines are encoded separately as in training."""
        *lines, last_line = text.encode(errors="surrogateescape").split(b"\n")
        return self.encode_lines([*(line + b"\n" for line in lines), last_line])

    def encode_lines(self, lines: list[bytes]) -> list[int]:
        """Return the concatenated tokens of several lines, which are encoded in parallel."""
        texts = [line.decode(errors="replace") for line in lines]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [token for line in encoded for token in line.ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, including special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_codec(config: RunConfig, folder: Path) -> ByteCodec | TokenizerCodec:
    """Return the run's codec: bytes, or the tokenizer that is stored in its folder."""
    return ByteCodec() if config.tokenizer == BYTES else TokenizerCodec(folder / TOKENIZER)


def require_tokenizer(config: RunConfig) -> None:
    """Raise UsageError if the tokenizer, its vocabulary or a line of the text is not usable."""
    if config.tokenizer == BYTES:
        return
    if importlib.util.find_spec("tokenizers") is None:
        raise UsageError("--tokenizer needs a package; run `pip install tokenizers`")
    if config.tokenizer != "bpe":
        size = TokenizerCodec(Path(config.tokenizer)).size
        if size > config.vocabulary:
            raise UsageError(
                f"expected --vocabulary >= {size} for the tokens in {config.tokenizer}, got "
                f"{config.vocabulary}; pass --vocabulary {size}"
            )
    text = read_text(config.data)
    for part in (text.train, text.heldout):
        for _ in iter_line_batches(part, text.mapped):
            pass  # raises for a line that is too long


def write_tokens(config: RunConfig, folder: Path) -> None:
    """Write the tokenizer, the training tokens and the held-out tokens into the run folder.

    Raises ValueError if a part of the text has fewer tokens than eight rows.
    """
    text = read_text(config.data)
    if config.tokenizer == "bpe":
        _train(text, config.vocabulary).save(str(folder / TOKENIZER))
    else:
        # The stored file must encode prompts as the training text was encoded: without special
        # tokens, such as a start token, and without truncation or padding.
        content = json.loads(Path(config.tokenizer).read_text(encoding="utf-8"))
        content |= dict.fromkeys(("post_processor", "truncation", "padding"))
        (folder / TOKENIZER).write_text(json.dumps(content), encoding="utf-8")
    codec = TokenizerCodec(folder / TOKENIZER)
    for name, part in ((TRAIN, text.train), (HELDOUT, text.heldout)):
        num_tokens = 0
        with (folder / name).open("wb") as file:
            for batch in iter_line_batches(part, text.mapped):
                tokens = np.array(codec.encode_lines(batch), INT32)
                file.write(tokens.tobytes())
                num_tokens += len(tokens)
        needed = 8 * (config.context + 1)
        if num_tokens < needed:
            raise ValueError(
                f"expected at least {needed} tokens in {name}, eight rows of {config.context}, got "
                f"{num_tokens} from {text.source}; pass more text with --data"
            )


def load(folder: Path) -> Corpus:
    """Return the tokens that `write_tokens` wrote into the run folder, mapped into memory."""
    import torch

    mapped = []
    for name in (TRAIN, HELDOUT):
        with (folder / name).open("rb") as file:
            mapped.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    train, heldout = (torch.from_numpy(np.frombuffer(file, INT32)) for file in mapped)
    return Corpus(train, heldout, tuple(mapped))


def iter_line_batches(part: memoryview, mapped: MappedFiles = ()) -> Iterator[list[bytes]]:
    """Yield the lines of a text with their newlines, one list per chunk of `CHUNK_BYTES`.

    A line belongs to the chunk in which it ends. The last list has the bytes after the last
    newline. Raises UsageError if more than `CHUNK_BYTES` of a line precede the end of a chunk.
    """
    unfinished_line = b""
    for chunk in iter_chunks(part, CHUNK_BYTES, mapped):
        *lines, unfinished_line = (unfinished_line + bytes(chunk)).split(b"\n")
        if len(unfinished_line) > CHUNK_BYTES:
            raise UsageError(
                f"a line of the text is longer than {CHUNK_BYTES / 2**20:.0f} MiB, and tokenizers "
                "encode complete lines; break the line, or use --tokenizer bytes"
            )
        yield [line + b"\n" for line in lines]
    yield [unfinished_line]


def _train(text: Text, vocabulary: int) -> Any:
    """Return a byte-pair tokenizer that is trained on the start of the training text."""
    library = _import_tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    batches = iter_line_batches(text.train[:SAMPLE_BYTES], text.mapped)
    sample = (line.decode(errors="replace") for batch in batches for line in batch)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _import_tokenizers() -> Any:
    """Return the package `tokenizers` with the submodules that `_train` uses."""
    for name in ("models", "pre_tokenizers", "decoders", "trainers"):
        importlib.import_module(f"tokenizers.{name}")
    return importlib.import_module("tokenizers")
