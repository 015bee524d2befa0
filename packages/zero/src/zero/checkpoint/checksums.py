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

crc32 = zlib.crc32

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
            crc = crc32(chunk, crc)
            left -= len(chunk)
    return crc


def of_ranges(folder: Path, infos: Iterable[Any]) -> Ranges:
    """The checksums of ranges that were written, each with relative_path, offset and length."""
    sums: Ranges = {}
    for info in infos:
        crc = checksum(folder / info.relative_path, info.offset, info.length)
        sums.setdefault(info.relative_path, []).append((info.offset, info.length, crc))
    return sums


def write(folder: Path, everyones: Iterable[Ranges], token: str = "") -> None:
    """Write the sums of all ranks, that of the table of contents, and which save it was."""
    files: Ranges = {}
    for sums in everyones:
        for name, ranges in sums.items():
            files.setdefault(name, []).extend(ranges)
    contents: dict[str, Any] = {"files": files, "save": token}
    if (folder / ".metadata").exists():
        contents["metadata"] = checksum(folder / ".metadata")
    text = json.dumps(contents)
    with (folder / NAME).open("w") as file:
        file.write(f"{zlib.crc32(text.encode())}\n{text}\n")
        file.flush()
        os.fsync(file.fileno())


def token_of(folder: Path) -> str | None:
    """Which save the folder is of, if it can be read."""
    try:
        token: str = json.loads((folder / NAME).read_text().splitlines()[1])["save"]
    except (OSError, ValueError, LookupError):
        return None
    return token


class Verifier:
    """Compares what is about to be read with what was written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Of each file, the ranges that were not compared yet: (offset, length) -> checksum.
        self.known: dict[str, dict[tuple[int, int], int]] = {}
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
        expected = found.get("metadata")
        if expected is not None and checksum(folder / ".metadata") != expected:
            raise ValueError(f"{folder}/.metadata is damaged: use an older checkpoint")
        for name, ranges in found["files"].items():
            self.known[name] = {(offset, length): crc for offset, length, crc in ranges}

    def check(self, name: str, info: Any) -> None:
        """Raise ValueError if the bytes of the tensor or object `name` are not those written."""
        self._compare(name, info.relative_path, (info.offset, info.length))

    def check_range(self, name: str, file: str, offset: int, length: int) -> None:
        """Raise ValueError if a range that was written and holds some of these bytes is damaged."""
        for start, size in list(self.known.get(file, {})):
            if start < offset + length and offset < start + size:
                self._compare(name, file, (start, size))

    def _compare(self, name: str, file: str, place: tuple[int, int]) -> None:
        # A range is compared once.
        crc = self.known.get(file, {}).pop(place, None)
        if crc is not None and checksum(self.folder / file, *place) != crc:
            raise ValueError(
                f"{name} in {self.folder / file} is damaged (its checksum differs): use an older "
                "checkpoint"
            )
