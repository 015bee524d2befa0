"""Real text as bytes, from this interpreter's own standard library or from a file or folder.

Notable: this needs no torch, so that a run without enough to read is refused at once.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from llmsys_suite.config import UsageError


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and the last tenth, held out."""

    train: bytes
    heldout: bytes
    source: str


def read_text(path: Path | None = None) -> Text:
    """The bytes of `path` (a file, or every file below a folder), or the standard library's.

    Raises UsageError where there is nothing to read.
    """
    if path is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files, source = sorted(folder.glob("*.py")), "the standard library of this interpreter"
    elif path.is_file():
        files, source = [path], path.name
    elif path.is_dir():
        files, source = sorted(p for p in path.rglob("*") if p.is_file()), path.name
    else:
        raise UsageError(f"no data at {path}; give a file or a folder, or leave --data out")
    content = b"\n".join(file.read_bytes() for file in files)
    if len(content) < 2:
        raise UsageError(f"no text in {path or source}; give a file or a folder that holds some")
    cut = len(content) * 9 // 10
    return Text(content[:cut], content[cut:], source)


def require_text(text: Text, *, context: int) -> None:
    """Raise UsageError where the text is too short for a row to train on and eight held out."""
    needed = 10 * 8 * (context + 1)
    if len(text.train) + len(text.heldout) < needed:
        raise UsageError(
            f"{text.source} holds {len(text.train)} training bytes and {len(text.heldout)} held "
            f"out; rows of {context} need {needed} bytes in all, of which a tenth is held out: "
            "give more text with --data"
        )
