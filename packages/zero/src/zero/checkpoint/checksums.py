"""Checksums of a checkpoint: one for each stored range of bytes, so that no flipped bit is read.

A file beside the data, `checksums.json`: its first line is the checksum of the rest, which holds
that of `.metadata` and, for each file, (offset, length, checksum) of every box and object in it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NAME = "checksums.json"
CHUNK = 1 << 22

Ranges = dict[str, list[tuple[int, int, int]]]


def checksum(path: Path, offset: int = 0, length: int | None = None) -> int:
    """The CRC-32 of a range of a file, which is the whole file by default."""
    crc, left = 0, path.stat().st_size - offset if length is None else length
    with path.open("rb") as file:
        file.seek(offset)
        while left > 0:
            chunk = file.read(min(left, CHUNK))
            if not chunk:
                raise ValueError(f"{path} ends before byte {offset + (length or 0)}")
            crc = zlib.crc32(chunk, crc)
            left -= len(chunk)
    return crc


def of_ranges(folder: Path, infos: Iterable[Any]) -> Ranges:
    """The checksums of ranges that were written, each with relative_path, offset and length."""
    sums: Ranges = {}
    for info in infos:
        crc = checksum(folder / info.relative_path, info.offset, info.length)
        sums.setdefault(info.relative_path, []).append((info.offset, info.length, crc))
    return sums


def write(folder: Path, everyones: Iterable[Ranges]) -> None:
    """Write the sums of all ranks, and that of the table of contents."""
    files = {name: ranges for sums in everyones for name, ranges in sums.items()}
    text = json.dumps({"metadata": checksum(folder / ".metadata"), "files": files})
    with (folder / NAME).open("w") as file:
        file.write(f"{zlib.crc32(text.encode())}\n{text}\n")
        file.flush()
        os.fsync(file.fileno())


class Verifier:
    """Compares what is about to be read with what was written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[tuple[str, int, int], int] = {}
        self.present = (folder / NAME).exists()
        if not self.present:
            return
        try:
            first, text = (folder / NAME).read_text().splitlines()
            intact = int(first) == zlib.crc32(text.encode())
            found = json.loads(text) if intact else {}
        except ValueError:
            intact, found = False, {}
        if not intact:
            raise ValueError(f"{folder / NAME} is damaged: use an older checkpoint")
        if checksum(folder / ".metadata") != found["metadata"]:
            raise ValueError(f"{folder}/.metadata is damaged: use an older checkpoint")
        for name, ranges in found["files"].items():
            for offset, length, crc in ranges:
                self.known[name, offset, length] = crc

    def check(self, name: str, info: Any) -> None:
        """Raise ValueError if the bytes of the tensor or object `name` are not those written."""
        place = info.relative_path, info.offset, info.length
        # A range is compared once.
        crc = self.known.pop(place, None)
        if crc is not None and checksum(self.folder / place[0], *place[1:]) != crc:
            raise ValueError(
                f"{name} in {self.folder / place[0]} is damaged (its checksum differs): use an "
                "older checkpoint"
            )
