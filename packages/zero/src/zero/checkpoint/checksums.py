"""Checksums of a checkpoint, one per stored range of bytes, so that no corrupted byte is loaded.

The file `checksums.json` beside the data stores them. Its first line is the checksum of its second
line. The second line contains the checksum of `.metadata` and, for each file, the offset, length
and checksum of every box and object in it.
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
#: Maps each file name to the (offset, length, checksum) of its ranges.
Ranges = dict[str, list[tuple[int, int, int]]]
#: File, offset and length.
FileRange = tuple[Path, int, int]


def checksum(path: Path, offset: int = 0, length: int | None = None) -> int:
    """Return the CRC-32 of a range of a file, which is the whole file by default."""
    size = path.stat().st_size - offset if length is None else length
    return checksums_of([(path, offset, size)])[0]


def checksums_of(ranges: Sequence[FileRange], *, read_ahead: bool = False) -> list[int]:
    """Return each range's CRC-32; `read_ahead` reads a chunk while the previous one is summed."""
    crcs = [0] * len(ranges)
    chunks = _read_chunks(ranges)
    if read_ahead and sum(length for _, _, length in ranges) > CHUNK:
        chunks = _read_ahead(chunks)
    for index, chunk in chunks:
        crcs[index] = crc32(chunk, crcs[index])
    return crcs


def _read_chunks(ranges: Sequence[FileRange]) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of each range in chunks, with the range's index.

    Two buffers alternate, so a chunk is overwritten when the chunk after the next one is requested.
    """
    size = min(CHUNK, max((length for _, _, length in ranges), default=0))
    buffers = cycle([memoryview(bytearray(size)), memoryview(bytearray(size))])
    for path, numbered in groupby(enumerate(ranges), key=lambda entry: entry[1][0]):
        with path.open("rb", buffering=0) as file:
            for index, (_, offset, length) in numbered:
                file.seek(offset)
                remaining = length
                while remaining > 0:
                    chunk = next(buffers)[:remaining]
                    count = file.readinto(chunk)
                    if not count:
                        raise ValueError(f"{path} ends before byte {offset + length}")
                    remaining -= count
                    yield index, chunk[:count]


def _read_ahead(chunks: Iterator[T]) -> Iterator[T]:
    """Yield the same items; a thread fetches each item while the caller uses the previous one."""
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        pending = thread.submit(next, chunks, None)
        while (chunk := pending.result()) is not None:
            pending = thread.submit(next, chunks, None)
            yield chunk


def of_ranges(folder: Path, infos: Iterable[Any]) -> Ranges:
    """Return the checksums of ranges, described by `relative_path`, `offset` and `length`."""
    ranges: Ranges = {}
    written = list(infos)
    crcs = checksums_of([(folder / i.relative_path, i.offset, i.length) for i in written])
    for info, crc in zip(written, crcs, strict=True):
        ranges.setdefault(info.relative_path, []).append((info.offset, info.length, crc))
    return ranges


def write(folder: Path, ranges_of_ranks: Iterable[Ranges], token: str = "") -> None:
    """Write the checksums of all ranks and of `.metadata`, and the token of the save."""
    files: Ranges = {}
    for ranges_of_rank in ranges_of_ranks:
        for name, ranges in ranges_of_rank.items():
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
    """Return the token of the save that wrote a folder, or None if it cannot be read."""
    try:
        token: str = json.loads((folder / NAME).read_text().splitlines()[1])["save"]
    except (OSError, ValueError, LookupError):
        return None
    return token


class Verifier:
    """A verifier that compares stored bytes with the checksums recorded when they were written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: For each file, the checksums not yet compared, by (offset, length).
        self.known: dict[str, dict[tuple[int, int], int]] = {}
        self.present = (folder / NAME).exists()
        if not self.present:
            return
        contents = self._read()
        expected = contents.get("metadata")
        if expected is not None and checksum(folder / ".metadata") != expected:
            raise ValueError(f"{folder}/.metadata is damaged: use an older checkpoint")
        for name, ranges in contents["files"].items():
            self.known[name] = {(offset, length): crc for offset, length, crc in ranges}

    def _read(self) -> dict[str, Any]:
        path = self.folder / NAME
        try:
            first, text = path.read_text().splitlines()
            if int(first) == zlib.crc32(text.encode()):
                contents: dict[str, Any] = json.loads(text)
                return contents
        except ValueError:
            # The file is not text, or does not consist of a number and a second line.
            pass
        raise ValueError(f"{path} is damaged: use an older checkpoint")

    def check(self, wanted: Iterable[tuple[str, str, int, int]]) -> None:
        """Raise ValueError if any of (description, file, offset, length) is damaged.

        Every written range that overlaps these bytes is compared, but only once.
        """
        due: dict[tuple[str, tuple[int, int]], str] = {}
        for name, file, offset, length in dict.fromkeys(wanted):
            known = self.known.get(file, {})
            for written in _overlapping(known, offset, length):
                due.setdefault((file, written), name)
        # Sort by file and offset, to read sequentially.
        ordered = sorted(due)
        ranges = [(self.folder / file, *written) for file, written in ordered]
        crcs = checksums_of(ranges, read_ahead=True)
        for (file, written), crc in zip(ordered, crcs, strict=True):
            if self.known[file].pop(written) != crc:
                raise ValueError(
                    f"{due[file, written]} in {self.folder / file} is damaged (its checksum "
                    "differs): use an older checkpoint"
                )


def _overlapping(
    known: dict[tuple[int, int], int], offset: int, length: int
) -> list[tuple[int, int]]:
    """Return the written ranges that overlap a range."""
    if (offset, length) in known:
        return [(offset, length)]
    return [
        (start, size) for start, size in known if start < offset + length and offset < start + size
    ]
