"""Checksums of a checkpoint's files, so that no corrupted byte is loaded.

The file `checksums.json` beside the data stores one checksum per file. Its first line is the
checksum of its second line. Before a load reads the data, each rank verifies some of the files.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

NAME = "checksums.json"
CHUNK = 1 << 22


def compute_checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def write(folder: Path, files: dict[str, int], token: str) -> None:
    """Write the checksums of all files, and the token of the save."""
    text = json.dumps({"files": files, "save": token})
    with (folder / NAME).open("w") as file:
        file.write(f"{zlib.crc32(text.encode())}\n{text}\n")
        file.flush()
        os.fsync(file.fileno())


def read_token(folder: Path) -> str | None:
    """Return the token of the save that wrote a folder, or None if no token can be read."""
    try:
        token: str = _read(folder / NAME)["save"]
    except (OSError, ValueError, LookupError):
        return None
    return token


def verify(folder: Path, rank: int, world: int) -> None:
    """Raise ValueError if a file is missing or differs from its checksum.

    Each of n ranks verifies 1/n of the files. Also raise ValueError if the file of the checksums is
    damaged. Checkpoints of other programs have no checksums, so nothing is verified.
    """
    if not (folder / NAME).exists():
        return
    files = _read(folder / NAME)["files"]
    for name in sorted(files)[rank::world]:
        if not (folder / name).exists():
            raise ValueError(f"{folder / name} is missing: use an older checkpoint")
        if compute_checksum(folder / name) != files[name]:
            raise ValueError(
                f"{folder / name} is damaged (its checksum differs): use an older checkpoint"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        first, text = path.read_text().splitlines()
        if int(first) == zlib.crc32(text.encode()):
            contents: dict[str, Any] = json.loads(text)
            return contents
    except ValueError:
        # The file is not text, or does not consist of a number and a second line.
        pass
    raise ValueError(f"{path} is damaged: use an older checkpoint")
