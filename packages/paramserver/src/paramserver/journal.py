"""What a server writes down so that its death costs nothing but the time to start it again.

Notable:
- before an answer is given, what it says is in the journal (write-ahead): a `kill -9` loses only
  what nobody was told. What is written survives the process; `fsync=True` also the machine;
- a snapshot begins a new journal at once, and is written by a thread while the server goes on:
  beside the last one, and renamed when it is whole. Until then the last one and both journals stay;
- a record has its length and a checksum: a half-written last one, of a server that died while it
  wrote, was never answered, and is cut off.
"""

import logging
import os
import shutil
import struct
import threading
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch

from paramserver.protocol.core import Core, Followed, Record, Staged
from paramserver.protocol.ledger import Log

_LOG = logging.getLogger(__name__)
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
        self._number = max([*self._numbers("snapshot"), *self._numbers("journal")], default=0)
        self._file: BinaryIO | None = None
        self._written = 0
        self._writer: threading.Thread | None = None
        self.error: OSError | RuntimeError | None = None
        """Why the last snapshot could not be written; the journal goes on without it."""

    def load(self, core: Core) -> bool:
        """Bring `core` to where the journal ends, and go on from there. False if it is empty."""
        first = max(self._numbers("snapshot"), default=0)
        path = self._path("snapshot", first)
        snapshot = torch.load(path, weights_only=True) if path.exists() else None
        records: list[Record] = []
        for number in sorted(n for n in self._numbers("journal") if n >= first):
            journal = self._path("journal", number)
            found, end = _records(journal.read_bytes())
            records += found
            if end < journal.stat().st_size:
                # Of a last record, perhaps a half. What comes later has lost what it builds on.
                os.truncate(journal, end)
                for later in (n for n in self._numbers("journal") if n > number):
                    self._path("journal", later).unlink()
                self._number = number
                break
        core.restore(snapshot, records)
        self._open()
        core.journal = self
        return snapshot is not None or bool(records)

    def record(self, record: Record) -> None:
        """Write it, and return when it is written. RuntimeError if the disk is full."""
        for last in (False, True):
            try:
                return self._append(record)
            except OSError as error:
                if last:
                    text = f"no journal can be written in {self.folder}: {error}"
                    raise RuntimeError(text) from error
                self.wait()  # a snapshot that fills the disk fails, and gives its room back

    def is_long(self) -> bool:
        """Whether it is time for a snapshot, and the last one is done."""
        return self._written > self._snapshot_bytes and not self.is_writing()

    def is_writing(self) -> bool:
        """Whether a snapshot is on its way to the disk."""
        return self._writer is not None and self._writer.is_alive()

    def snapshot(self, core: Core) -> None:
        """Copy the whole state and begin a new journal; a thread writes the copy."""
        self.wait()
        self._number += 1
        try:
            self._open()
        except OSError as error:  # it goes on in the journal that it has
            self._number, self._written = self._number - 1, 0
            self._report(error)
            return
        self._writer = threading.Thread(target=self._write, args=(core.snapshot(), self._number))
        self._writer.start()

    def wait(self) -> None:
        """Until no snapshot is on its way."""
        if self._writer:
            self._writer.join()

    def close(self) -> None:
        """Close the file, when all is written."""
        self.wait()
        if self._file:
            self._file.close()

    def _append(self, record: Record) -> None:
        kind, parts = _to_bytes(record)
        assert self._file is not None
        size, checksum = sum(map(len, parts)), 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        start = self._file.tell()
        try:
            for part in (_HEAD.pack(kind, size, checksum), *parts):
                while part:
                    part = part[self._file.write(part) :]
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(start)
            self._file.seek(start)
            raise
        self._written += size

    def _write(self, state: dict[str, Any], number: int) -> None:
        unfinished = self._path("unfinished", number)
        try:
            with unfinished.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(self._path("snapshot", number))
            self.error = None
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            # The journals are whole: another is tried when as much has come again.
            unfinished.unlink(missing_ok=True)
            self._report(error)
            return
        for name in ("snapshot", "journal"):
            for old in (n for n in self._numbers(name) if n < number):
                self._path(name, old).unlink(missing_ok=True)

    def _report(self, error: OSError | RuntimeError) -> None:
        self.error = error
        free = shutil.disk_usage(self.folder).free  # torch's writer says where, but not why
        _LOG.error("no snapshot can be written in %s (%d B free): %s", self.folder, free, error)

    def _open(self) -> None:
        file = self._path("journal", self._number).open("ab", buffering=0)
        if self._file:
            self._file.close()
        self._file = file
        self._written = self._file.tell()

    def _path(self, name: str, number: int) -> Path:
        return self.folder / f"{name}-{number:08d}"

    def _numbers(self, name: str) -> list[int]:
        return [int(path.name.rsplit("-", 1)[1]) for path in self.folder.glob(f"{name}-*")]


def _to_bytes(record: Record) -> tuple[bytes, list[Any]]:
    if isinstance(record, Staged):
        return b"s", [_PUSH.pack(*record.push), record.gradients.numpy().data]
    return b"o" if record.own else b"f", [record.log.to_text().encode()]


def _records(raw: bytes) -> tuple[list[Record], int]:
    """The records, and where the last whole one ends."""
    found: list[Record] = []
    end = 0
    while end + _HEAD.size <= len(raw):
        kind, size, checksum = _HEAD.unpack_from(raw, end)
        body = raw[end + _HEAD.size : end + _HEAD.size + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            break
        if kind == b"s":
            data = torch.frombuffer(bytearray(body[_PUSH.size :]), dtype=torch.uint8)
            found.append(Staged(_PUSH.unpack_from(body), data))
        else:
            found.append(Followed(Log.from_text(body.decode()), own=kind == b"o"))
        end += _HEAD.size + size
    return found, end
