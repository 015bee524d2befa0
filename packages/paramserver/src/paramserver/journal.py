"""What a server writes down so that its death costs nothing but the time to start it again.

Notable:
- before an answer is given, what it says is in the journal (write-ahead): a `kill -9` loses only
  what nobody was told. What is written survives the process; `fsync=True` also the machine;
- a snapshot is written beside the last one and renamed when it is whole. It begins a new journal:
  a disk holds one snapshot and what came after;
- a record has its length and a checksum: a half-written last one, of a server that died while it
  wrote, was never answered, and is cut off.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from paramserver.protocol.core import Core, Followed, Record, Staged
from paramserver.protocol.ledger import Log

_HEAD = struct.Struct("<cQI")  # what it is, bytes, checksum
_PUSH = struct.Struct("<qqq")


class DiskJournal:
    """The journal of one server, in a folder of its own.

    `load` brings a new server to where the last one was; then the journal is to be handed to it. A
    snapshot is made after `snapshot_bytes` of journal.
    """

    def __init__(
        self, folder: str | Path, *, fsync: bool = False, snapshot_bytes: int = 2**30
    ) -> None:
        self.folder = Path(folder)
        self._fsync, self._snapshot_bytes = fsync, snapshot_bytes
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeError(f"no journal can be kept in {self.folder}: {error}") from error
        self._number = max(self._numbers("snapshot"), default=0)
        self._file: BinaryIO | None = None
        self._written = 0

    def load(self, core: Core) -> bool:
        """Bring `core` to where the journal ends, and go on from there. False if it is empty."""
        path = self._path("snapshot", self._number)
        snapshot = torch.load(path, weights_only=True) if path.exists() else None
        journal = self._path("journal", self._number)
        records, end = _records(journal.read_bytes()) if journal.exists() else ([], 0)
        core.restore(snapshot, records)
        if journal.exists():
            os.truncate(journal, end)  # of a last record, perhaps a half
        self._open()
        core.journal = self
        return snapshot is not None or bool(records)

    def record(self, record: Record) -> None:
        """Write it, and return when it is written. RuntimeError if the disk is full."""
        kind, parts = _to_bytes(record)
        assert self._file is not None
        size, checksum = 0, 0
        for part in parts:
            size += len(part)
            checksum = zlib.crc32(part, checksum)
        try:
            start = self._file.tell()
            for part in (_HEAD.pack(kind, size, checksum), *parts):
                _write_all(self._file, part)
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(start)
            self._file.seek(start)
            raise RuntimeError(f"no journal can be written in {self.folder}: {error}") from error
        self._written += size

    def is_long(self) -> bool:
        """Whether it is time for a snapshot."""
        return self._written > self._snapshot_bytes

    def snapshot(self, core: Core) -> None:
        """Write the whole state, and begin a new journal."""
        new = self._number + 1
        unfinished = self._path("unfinished", new)
        try:
            with unfinished.open("wb") as file:
                torch.save(core.snapshot(), file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(self._path("snapshot", new))
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            self._written = 0  # the journal is whole: try again when as much has come again
            raise RuntimeError(f"no snapshot can be written in {self.folder}: {error}") from error
        old, self._number = self._number, new
        self._open()
        for name in ("snapshot", "journal"):
            self._path(name, old).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()

    def _open(self) -> None:
        self.close()
        self._file = self._path("journal", self._number).open("ab", buffering=0)
        self._written = self._file.tell()

    def _path(self, name: str, number: int) -> Path:
        return self.folder / f"{name}-{number:08d}"

    def _numbers(self, name: str) -> list[int]:
        return [int(path.name.rsplit("-", 1)[1]) for path in self.folder.glob(f"{name}-*")]


def _to_bytes(record: Record) -> tuple[bytes, list[Any]]:
    if isinstance(record, Staged):
        data = record.gradients.numpy().data
        return b"s", [memoryview(_PUSH.pack(*record.push)), data]
    kind = b"o" if record.own else b"f"
    return kind, [memoryview(record.log.to_text().encode())]


def _records(raw: bytes) -> tuple[list[Record], int]:
    """The records, and where the last whole one ends."""
    found: list[Record] = []
    end = 0
    for kind, start, stop in _whole(raw):
        if kind == b"s":
            push = _PUSH.unpack_from(raw, start)
            data = bytearray(raw[start + _PUSH.size : stop])
            found.append(Staged(push, torch.frombuffer(data, dtype=torch.uint8)))
        else:
            found.append(Followed(Log.from_text(raw[start:stop].decode()), own=kind == b"o"))
        end = stop
    return found, end


def _whole(raw: bytes) -> Iterator[tuple[bytes, int, int]]:
    position = 0
    while position + _HEAD.size <= len(raw):
        kind, size, checksum = _HEAD.unpack_from(raw, position)
        start = position + _HEAD.size
        stop = start + size
        if stop > len(raw) or zlib.crc32(raw[start:stop]) != checksum:
            return
        yield kind, start, stop
        position = stop


def _write_all(file: BinaryIO, part: bytes | memoryview) -> None:
    written = 0
    while written < len(part):
        written += file.write(part[written:])
