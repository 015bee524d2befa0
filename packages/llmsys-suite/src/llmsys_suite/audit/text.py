"""An independent reader of the text, and its comparison with the tokens of every rank.

The reader shares no code with `llmsys_suite.text.data`. The comparison therefore detects held-out
text in the training tokens, and a different split point.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from llmsys_suite.audit.reference import Tokens
from llmsys_suite.config import BYTES, RunConfig
from llmsys_suite.ranks.rank import Run

#: Number of held-out windows to search for in the training text, and their length in bytes.
WINDOWS, WINDOW_BYTES = 64, 256
#: Translation of ASCII capitals to lower case.
LOWER_CASE = bytes(range(256)).lower()


def read_parts(config: RunConfig) -> tuple[Tokens, Tokens]:
    """Return the training tokens and the held-out tokens of a run."""
    if config.tokenizer == BYTES:
        return read_bytes(config.data)
    assert config.out is not None
    return _encode(config.data, config.out / "tokenizer.json")


@lru_cache(maxsize=1)
def _encode(path: Path | None, tokenizer_file: Path) -> tuple[Tokens, Tokens]:
    """Return both parts of the text as tokens, encoded line by line."""
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    parts = []
    for part in read_bytes(path):
        *whole, last = part.split(b"\n")
        lines = [line + b"\n" for line in whole] + [last]
        text = [line.decode(errors="replace") for line in lines]
        encoded = tokenizer.encode_batch(text, add_special_tokens=False)
        parts.append(np.array([token for line in encoded for token in line.ids], "<i4"))
    train, heldout = parts
    return train, heldout


@lru_cache(maxsize=1)
def read_bytes(path: Path | None) -> tuple[bytes, bytes]:
    """Return the training bytes and the held-out bytes, which are the last tenth."""
    if path is None:
        folder = sysconfig.get_paths()["stdlib"]
        files = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".py")]
    elif os.path.isdir(path):
        names = [os.path.join(top, name) for top, _, below in os.walk(path) for name in below]
        # Exclude pipes, and broken links such as those that editors leave.
        files = [name for name in names if os.path.isfile(name)]
    else:
        files = [str(path)]
    contents = []
    for file in sorted(files, key=lambda file: file.split(os.sep)):
        with open(file, "rb") as stream:
            contents.append(stream.read())
    text = b"\n".join(contents)
    start = 9 * len(text) // 10
    return text[:start], text[start:]


def collect_split_evidence(run: Run) -> dict[str, Any]:
    """Return the digests of the text of all ranks and of the files, and counts of held-out windows.

    `repeated` counts the windows that occur in the training text, and `windows` counts all windows.
    """
    tokens = (run.corpus.train.cpu().numpy(), run.corpus.heldout.cpu().numpy())
    digests = run.gather([hashlib.sha256(part.tobytes()).hexdigest() for part in tokens])
    train, heldout = (normalize(part) for part in read_bytes(run.config.data))
    windows = list(iter_heldout_windows(heldout))
    return {
        "ranks": digests,
        "files": [hashlib.sha256(part).hexdigest() for part in read_parts(run.config)],
        "repeated": sum(window in train for window in windows),
        "windows": len(windows),
    }


def normalize(text: bytes) -> bytes:
    """Return the text in lower case and without white space.

    Copies of a file with other line ends, indentation or capital letters are then equal. Text that
    consists of white space is returned unchanged.
    """
    return text.translate(LOWER_CASE, b" \t\n\r\v\f") or text


def iter_heldout_windows(heldout: bytes) -> Iterator[bytes]:
    """Yield at most `WINDOWS` windows at equal distances in the held-out text."""
    length = min(WINDOW_BYTES, len(heldout))
    num_windows = min(WINDOWS, len(heldout) // length)
    for number in range(num_windows):
        start = number * (len(heldout) // num_windows)
        yield heldout[start : start + length]
