"""An independent reader of the text, and its comparison with the tokens of every rank.

The reader shares no code with `llmsys_suite.data`, so that held-out text in the training tokens, or
a different split point, is detected.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmsys_suite.audit.check import Check, none
from llmsys_suite.ranks.rank import Run

#: Windows of the held-out text that are searched in the training text, and their length in bytes.
WINDOWS, WINDOW_BYTES = 64, 256
#: Allowed fraction of such windows. In the standard library one in 64 is boilerplate.
REPEATED = 0.1


@lru_cache(maxsize=1)
def read_parts(path: Path | None) -> tuple[bytes, bytes]:
    """Return the training bytes and the held-out bytes, which are the last tenth."""
    if path is None:
        folder = sysconfig.get_paths()["stdlib"]
        files = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".py")]
    elif os.path.isdir(path):
        files = [os.path.join(top, name) for top, _, names in os.walk(path) for name in names]
    else:
        files = [str(path)]
    contents = []
    for file in sorted(files, key=lambda file: file.split(os.sep)):
        with open(file, "rb") as stream:
            contents.append(stream.read())
    text = b"\n".join(contents)
    start = 9 * len(text) // 10
    return text[:start], text[start:]


def text_digests(run: Run) -> list[tuple[str, str]]:
    """Return the digests of the training and held-out tokens of every rank."""
    corpus = run.corpus
    parts = (corpus.train.cpu().numpy(), corpus.heldout.cpu().numpy())
    mine = tuple(hashlib.sha256(part.tobytes()).hexdigest() for part in parts)
    return run.gather(mine)


def split_evidence(run: Run) -> dict[str, Any]:
    """Return the digests of all ranks and of the files, and the repeated held-out windows."""
    digests = text_digests(run)
    train, heldout = read_parts(run.config.data)
    return {
        "ranks": digests,
        "files": [hashlib.sha256(part).hexdigest() for part in (train, heldout)],
        "repeated": sum(window in train for window in held_out_windows(heldout)),
        "windows": sum(1 for _ in held_out_windows(heldout)),
    }


def held_out_windows(heldout: bytes) -> Iterator[bytes]:
    """Yield windows at equal distances in the held-out text."""
    length = min(WINDOW_BYTES, len(heldout))
    count = min(WINDOWS, len(heldout) // length)
    for number in range(count):
        start = number * (len(heldout) // count)
        yield heldout[start : start + length]


def checks(evidence: dict[str, Any]) -> Iterator[Check]:
    """Check that every rank has the text of the files, and that the parts are disjoint."""
    different = [
        f"{part} text of rank {rank}"
        for rank, digests in enumerate(evidence["ranks"])
        for part, ours, theirs in zip(
            ("training", "held-out"), digests, evidence["files"], strict=True
        )
        if ours != theirs
    ]
    yield none("text of every rank", "digests of its tokens", "the files, read again", different)
    fraction = evidence["repeated"] / evidence["windows"]
    yield Check(
        "held-out text is not training text",
        f"windows of {WINDOW_BYTES} bytes",
        "those found in the training text",
        0.0,
        fraction,
        0.0,
        REPEATED,
    )
