"""Checksums of a checkpoint: one for each stored range of bytes, so that no flipped bit is read.

A file beside the data, `checksums.json`: its first line is the checksum of the rest, which holds
that of `.metadata` and, for each file, (offset, length, checksum) of every box and object in it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, groupby
from pathlib import Path
from typing import Any, TypeVar

NAME = "checksums.json"
CHUNK = 1 << 22

crc32 = zlib.crc32

T = TypeVar("T")
Ranges = dict[str, list[tuple[int, int, int]]]
Place = tuple[Path, int, int]


def checksum(path: Path, offset: int = 0, length: int | None = None) -> int:
    """The CRC-32 of a range of a file, which is the whole file by default."""
    size = path.stat().st_size - offset if length is None else length
    return sums_of([(path, offset, size)])[0]


def sums_of(places: Sequence[Place], *, ahead: bool = False) -> list[int]:
    """The CRC-32 of each (file, offset, length); `ahead`: the disk does not wait for the sums."""
    crcs = [0] * len(places)
    chunks = _read(places)
    if ahead and sum(length for _, _, length in places) > CHUNK:
        chunks = _ahead(chunks)
    for index, chunk in chunks:
        crcs[index] = crc32(chunk, crcs[index])
    return crcs


def _read(places: Sequence[Place]) -> Iterator[tuple[int, memoryview]]:
    """Each place's bytes in order, with its number; they last until the next but one is asked."""
    size = min(CHUNK, max((length for _, _, length in places), default=0))
    buffers = cycle([memoryview(bytearray(size)), memoryview(bytearray(size))])
    for path, numbered in groupby(enumerate(places), key=lambda entry: entry[1][0]):
        with path.open("rb", buffering=0) as file:
            for index, (_, offset, length) in numbered:
                file.seek(offset)
                left = length
                while left > 0:
                    chunk = next(buffers)[:left]
                    count = file.readinto(chunk)
                    if not count:
                        raise ValueError(f"{path} ends before byte {offset + length}")
                    left -= count
                    yield index, chunk[:count]


def _ahead(made: Iterator[T]) -> Iterator[T]:
    """The same, the next one made in a thread while the caller uses this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        coming = thread.submit(next, made, None)
        while (now := coming.result()) is not None:
            coming = thread.submit(next, made, None)
            yield now


def of_ranges(folder: Path, infos: Iterable[Any]) -> Ranges:
    """The checksums of ranges that were written, each with relative_path, offset and length."""
    sums: Ranges = {}
    written = list(infos)
    crcs = sums_of([(folder / i.relative_path, i.offset, i.length) for i in written])
    for info, crc in zip(written, crcs, strict=True):
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

    def check(self, wanted: Iterable[tuple[str, str, int, int]]) -> None:
        """Raise ValueError if any of (what it is, file, offset, length) is damaged.

        Compared are all ranges that were written and hold some of these bytes, each of them once.
        """
        due: dict[tuple[str, tuple[int, int]], str] = {}
        for name, file, offset, length in dict.fromkeys(wanted):
            known, exact = self.known.get(file, {}), (offset, length)
            overlap = (at for at in known if at[0] < offset + length and offset < sum(at))
            for at in [exact] if exact in known else overlap:
                due.setdefault((file, at), name)
        # In the order in which they lie on the disk.
        places = sorted(due)
        crcs = sums_of([(self.folder / file, *at) for file, at in places], ahead=True)
        for (file, at), crc in zip(places, crcs, strict=True):
            if self.known[file].pop(at) != crc:
                raise ValueError(
                    f"{due[file, at]} in {self.folder / file} is damaged (its checksum differs): "
                    "use an older checkpoint"
                )
