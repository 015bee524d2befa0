"""The journal of a server, from which it continues after its process was killed.

Every change is recorded before the answer that reports it is sent (write-ahead). A `kill -9` loses
only changes that no worker knows of. Records survive the process, and with `fsync=True` also the
machine.

A snapshot starts a new file at once. A thread writes the snapshot while the server continues, next
to the previous one, and renames it when it is complete. Until then the previous snapshot and its
files remain.

All files are checked before any of them is used. The only damage that is repaired is an incomplete
record at the end of the last file: the server died while it wrote the record, and sent no answer.
Any other damage is refused, and nothing changes until `recover` is called.

Note [Detection of damage]
A file starts with the identity of the journal and the number of the file. The checksum in a
record's header covers the header, its offset, the file's number and the journal's identity. A wrong
length, or a record or file in a wrong position, is therefore detected. The body has a separate
checksum. A file that is continued by another one ends with a seal, and the next file gets its final
name only after the seal is written, so that a missing or truncated file is detected. One damage
cannot be detected: a last file that ends after a complete record, because a server that dies leaves
the same. Workers that know of the lost records are refused, because they are ahead of their server.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from paramserver.protocol.core import Core, Followed, Record, Staged
from paramserver.protocol.ledger import Log

_LOG = logging.getLogger(__name__)
_MAGIC = b"pserver2"
#: Number of random bytes that identify a journal.
_IDENTITY = 8
_FILE = struct.Struct(f"<8s{_IDENTITY}sQI")  # magic, journal, number, checksum
_RECORD = struct.Struct("<cQII")  # kind, bytes, checksum of the body, checksum of the header
_SNAPSHOT = struct.Struct(f"<QI8s{_IDENTITY}sQI")  # at the end: bytes, checksum, fields of _FILE
_PUSH = struct.Struct("<qqq")
# Kinds of records.
_STAGED = b"s"
_FOLLOWED = b"f"
_SEAL = b"n"
# Kinds of spans that are not records: the head of a file, and an incomplete record.
_START = b""
_TORN = b"t"
#: Number of bytes that are read at once for a checksum.
_CHUNK = 2**20
#: Number of times that the journal of another server, which may be running, is read.
_READS = 5


class JournalError(RuntimeError):
    """A journal is damaged. The message names the file, the byte and the remedy."""


class DiskFullError(RuntimeError):
    """The disk of a journal has no room for a record; nothing was recorded."""


@dataclass(frozen=True)
class _Span:
    """Bytes `start` to `stop` of file `number`, which were checked."""

    number: int
    kind: bytes
    start: int
    stop: int


class DiskJournal:
    """The journal of one server, in a folder that no other server uses.

    Args:
        folder: the folder; it is created if it does not exist.
        fsync: whether each record is written through to the disk before `record` returns.
        snapshot_bytes: size of the journal in bytes after which `is_long` returns True.
    """

    def __init__(
        self, folder: str | Path, *, fsync: bool = False, snapshot_bytes: int = 2**30
    ) -> None:
        self.folder = Path(folder)
        self._fsync = fsync
        self._snapshot_bytes = snapshot_bytes
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeError(f"cannot write a journal in {self.folder}: {error}") from error
        self._identity = secrets.token_bytes(_IDENTITY)
        self._number = 0
        self._file: BinaryIO | None = None
        self._written = 0
        self._writer: threading.Thread | None = None
        #: Error of the last snapshot; the journal continues without that snapshot.
        self.error: OSError | RuntimeError | None = None

    @classmethod
    def start(cls, folder: str | Path, core: Core, *, fsync: bool = False) -> "DiskJournal":
        """Return the journal in `folder`: continue it, or start it with the state of `core`.

        Raises:
            RuntimeError: the disk has no room for the state, see also `load`.
        """
        journal = cls(folder, fsync=fsync)
        if not journal.load(core):
            # A job may initialize its parameters at random, so the initial state is stored.
            journal.snapshot(core)
            journal.wait()
            if journal.error:
                raise RuntimeError(f"cannot write a journal in {folder}: {journal.error}")
        return journal

    def load(self, core: Core) -> bool:
        """Restore the state of the journal in `core`, and continue the journal with its changes.

        Returns:
            False if the journal is empty, otherwise True.

        Raises:
            JournalError: the journal is damaged. Neither `core` nor the folder has changed.
        """
        spans, has_state = _restore(self.folder, core)
        if spans:
            self._identity = _identity(self.folder, spans)
            self._number = spans[-1].number
            _publish(self.folder, self._number)
            if spans[-1].kind == _TORN:
                self._cut(spans[-1])
        else:
            _create(self.folder, self._identity, 0)
            _publish(self.folder, 0)
        self._open()
        core.journal = self
        return has_state

    def record(self, record: Record) -> None:
        """Write a record and return when it is written.

        Raises:
            DiskFullError: the disk has no room. The record may be passed again later.
            RuntimeError: another error of the disk.
        """
        kind, parts = _to_bytes(record)
        try:
            self._append(kind, parts)
            return
        except OSError:
            # A snapshot that fills the disk fails, and frees its space.
            self.wait()
        try:
            self._append(kind, parts)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            kind_of_error = DiskFullError if is_full else RuntimeError
            text = f"cannot write a journal in {self.folder}: {error}"
            raise kind_of_error(text) from error

    def is_long(self) -> bool:
        """Return True if a snapshot is due and no snapshot is being written."""
        return self._written > self._snapshot_bytes and not self.is_writing()

    def is_writing(self) -> bool:
        """Return True if a snapshot is being written."""
        return self._writer is not None and self._writer.is_alive()

    def snapshot(self, core: Core) -> None:
        """Copy the state of `core`, start a new file, and write the copy in a thread."""
        self.wait()
        if self._file is None and self._numbers():
            raise RuntimeError(f"{self.folder} has a journal; load it before the first snapshot")
        try:
            self._start_next_file()
        except OSError as error:  # the journal continues in the current file
            self._written = 0
            self._report(error)
            return
        arguments = (core.snapshot(), self._number)
        self._writer = threading.Thread(target=self._write_snapshot, args=arguments)
        self._writer.start()

    def wait(self) -> None:
        """Wait until no snapshot is being written."""
        if self._writer:
            self._writer.join()

    def close(self) -> None:
        """Close the file after everything is written."""
        self.wait()
        if self._file:
            self._file.close()

    def _append(self, kind: bytes, parts: list[Any]) -> None:
        assert self._file is not None
        size = sum(len(part) for part in parts)
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        start = self._file.tell()
        head = _record_head(self._identity, self._number, start, kind, size, checksum)
        try:
            for part in (head, *parts):
                while part:
                    part = part[self._file.write(part) :]
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(start)
            self._file.seek(start)
            raise
        self._written += size

    def _start_next_file(self) -> None:
        """Seal the current file and continue in a new one; after an `OSError` nothing changes."""
        number = self._number + 1
        path = _create(self.folder, self._identity, number)
        start = self._file.tell() if self._file else 0
        file = path.open("r+b", buffering=0)
        try:
            if self._file:
                self._append(_SEAL, [])
            # If the server dies here, the next server finds the seal and renames the file.
            path.rename(_path(self.folder, "journal", number))
        except OSError:
            file.close()
            path.unlink(missing_ok=True)
            if self._file:
                self._file.truncate(start)
                self._file.seek(start)
            raise
        self._number = number
        self._use(file)
        _sync(self.folder)

    def _write_snapshot(self, state: dict[str, Any], number: int) -> None:
        unfinished = _path(self.folder, "unfinished", number)
        try:
            with unfinished.open("w+b") as file:
                torch.save(state, file)
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                checksum = _checksum(file, size)
                file.seek(size)
                file.write(_snapshot_tail(self._identity, number, size, checksum))
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(_path(self.folder, "snapshot", number))
            _sync(self.folder)
            self.error = None
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
            # The journal files are complete without the snapshot; the next one is made later.
            unfinished.unlink(missing_ok=True)
            self._report(error)
            return
        for name in ("snapshot", "journal"):
            for old in (n for n in _numbers(self.folder, name) if n < number):
                _path(self.folder, name, old).unlink(missing_ok=True)

    def _report(self, error: OSError | RuntimeError) -> None:
        self.error = error
        # The error of torch's writer does not contain the cause, which often is a full disk.
        free = shutil.disk_usage(self.folder).free
        _LOG.error("cannot write a snapshot in %s (%d B free): %s", self.folder, free, error)

    def _numbers(self) -> list[int]:
        return _numbers(self.folder, "journal")

    def _cut(self, torn: _Span) -> None:
        path = _path(self.folder, "journal", torn.number)
        text = "%s: removed the last %d bytes, an incomplete record"
        _LOG.warning(text, path, torn.stop - torn.start)
        os.truncate(path, torn.start)

    def _open(self) -> None:
        self._use(_path(self.folder, "journal", self._number).open("r+b", buffering=0))

    def _use(self, file: BinaryIO) -> None:
        self._written = file.seek(0, os.SEEK_END)
        if self._file:
            self._file.close()
        self._file = file
        with suppress(OSError):  # some file systems have no locks
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends


def restore(folder: Path, core: Core) -> None:
    """Restore the state of a journal in `core` without continuing it; see `DiskJournal.load`."""
    if not _restore(folder, core)[1]:
        raise JournalError(f"expected a journal in {folder}, which is empty")


def _restore(folder: Path, core: Core) -> tuple[list[_Span], bool]:
    """Return the spans of a journal, and whether it contains a state, after restoring it."""
    _refuse_if_in_use(folder)
    first = _newest_snapshot(folder)
    has_files = first is not None or _numbers(folder, "journal")
    spans = list(_spans(folder, first)) if has_files else []
    snapshot = None if first is None else _read_snapshot(folder, first)
    current: list[_Span] = []
    try:
        core.restore(snapshot, _records(folder, spans, current))
    except Exception as error:
        if not current:  # the snapshot is of another job
            raise
        path = _path(folder, "journal", current[-1].number)
        start = current[-1].start
        raise JournalError(
            f"{path}: the record at byte {start} cannot be applied: {type(error).__name__}: "
            f"{error}. Nothing was changed. Correct the job, or discard this record and all later "
            f"ones by `{_remedy(folder)} --before {path}:{start}`"
        ) from error
    return spans, snapshot is not None or bool(current)


def journal_folders(folder: Path) -> list[Path]:
    """Return the journals of the servers of a job, those of servers 0, 1, ..."""
    paths = {p for p in folder.glob("server-*") if re.fullmatch(r"server-\d+", p.name)}
    present = [path for path in paths if any(path.iterdir())]
    return sorted(present, key=lambda path: int(path.name[7:]))


def require_journals(folder: Path, servers: int, numbers: Iterable[int]) -> None:
    """Raise `JournalError` if the journal of one of the servers `numbers` is lost.

    It is lost if it is missing although another server's journal contains a push, which all servers
    have stored. Journals of a larger number of servers are refused, too.
    """
    present = journal_folders(folder)
    convert = (
        f"Nothing was changed. To continue with {servers} servers instead of {len(present)}, run "
        f"`python -m paramserver convert MODULE:JOB {folder} NEW` and pass NEW"
    )
    if len(present) > servers:
        names = ", ".join(path.name for path in present)
        raise JournalError(f"expected journals of {servers} servers, got {names}. {convert}")
    lost = [path for i in numbers if (path := folder / f"server-{i}") not in present]
    if lost and any(map(_has_pushes, present)):
        raise JournalError(
            f"expected a journal of each of the {servers} servers in {folder}, or of none, but "
            f"{', '.join(map(str, lost))} is empty or missing. {convert}. If it is lost, restore "
            "it from a copy of the same time, or pass another folder"
        )
    if not present and (checkpoints := sorted(folder.glob("worker-*"))):
        raise JournalError(
            f"expected a journal of each server in {folder}, which contains {checkpoints[0].name} "
            "of a worker; restore them, or pass another folder"
        )


def _has_pushes(folder: Path) -> bool:
    """Return True unless the journal contains no push; its server may be running."""
    for _ in range(_READS):
        try:
            first = _newest_snapshot(folder)
            # Snapshot 1 contains the state with which the journal started.
            is_later = first is not None and first > 1
            return is_later or any(span.kind == _STAGED for span in _spans(folder, first))
        except (JournalError, OSError):  # damaged, or the server has just replaced its files
            time.sleep(0.1)
    return True


def recover(folder: str | Path, *, before: tuple[str, int] | None = None) -> list[str]:
    """Take a damaged journal back to its last good record, and return a report in lines.

    Discarded records and files are moved into `discarded-N` of the same folder.

    Args:
        folder: the folder of one server, or the folder that contains those of all servers of a job.
            In the latter case no server remains ahead of the records of the others.
        before: path of a file and a byte; the record there and all later ones are discarded, too.

    Raises:
        JournalError: no good record exists. Nothing has changed.
    """
    folder = Path(folder)
    folders = journal_folders(folder) or [folder]
    for path in folders:
        _refuse_if_in_use(path)
    if before and not any(_is_in(before[0], path) for path in folders):
        raise ValueError(f"{before[0]} is not a file of {folder}; pass the path of the error")
    good_parts = [
        _GoodPart(path, before if before and _is_in(before[0], path) else None) for path in folders
    ]
    ends = [part.last() for part in good_parts]
    # The first server must not continue after a record that a damaged server has lost, and no
    # server may remain ahead of the first one.
    damaged = [end.position for part, end in zip(good_parts, ends, strict=True) if part.error]
    if damaged:
        ends[0] = good_parts[0].last(min(damaged))
    ends[1:] = [
        part.last(min(end.position, ends[0].position))
        for part, end in zip(good_parts[1:], ends[1:], strict=True)
    ]
    lines = []
    for part, end in zip(good_parts, ends, strict=True):
        if part.error:
            lines.append(part.error)
        lines += part.cut(end)
        lines.append(f"{part.folder} ends at entry {end.position} of the log")
    return lines


@dataclass(frozen=True)
class _End:
    """A possible end of a journal: a byte of a file, after `position` entries of the log."""

    position: int
    number: int
    stop: int


class _GoodPart:
    """The part of a journal before its first damage."""

    def __init__(self, folder: Path, before: tuple[str, int] | None) -> None:
        self.folder = folder
        #: The first damage; empty if there is none.
        self.error = ""
        self._before = (Path(before[0]).name, before[1]) if before else None
        self._ends: list[_End] = []
        self._identity = b""
        snapshots = sorted(_numbers(folder, "snapshot"), reverse=True)
        for snapshot in [*snapshots, None]:
            self._scan(snapshot)
            if self._ends:
                return
        raise JournalError(
            f"{folder} has no good record to go back to: {self.error or 'it is empty.'} "
            "Restore it from a copy, or pass an empty folder"
        )

    def _scan(self, snapshot: int | None) -> None:
        position = 0
        try:
            if snapshot is not None:
                position = int(_read_snapshot(self.folder, snapshot)["replica"]["position"])
                self._identity = _check_snapshot(self.folder, snapshot)
                self._ends.append(_End(position, snapshot, _FILE.size))
            for span in _spans(self.folder, snapshot):
                name = _path(self.folder, "journal", span.number).name
                if self._before and (name, span.start) >= self._before:
                    self.error = self.error or f"{name} is discarded from byte {span.start} on."
                    return
                if span.kind == _START:
                    self._identity = _identity(self.folder, [span])
                if span.kind == _FOLLOWED:
                    position = Log.from_text(_read(self.folder, span).decode()).stop
                if span.kind not in (_SEAL, _TORN):
                    self._ends.append(_End(position, span.number, span.stop))
        except JournalError as error:
            self.error = self.error or str(error)

    def last(self, position: int | None = None) -> _End:
        """Return the last end, or the last one that is not after entry `position` of the log."""
        ends = [end for end in self._ends if position is None or end.position <= position]
        if not ends:
            raise JournalError(
                f"{self.folder} starts after entry {position} of the log, to which another server "
                "goes back; restore copies of all servers of one time"
            )
        return ends[-1]

    def cut(self, end: _End) -> list[str]:
        """Cut the journal at `end`, move the remainder away, and return a report in lines."""
        path = _path(self.folder, "journal", end.number)
        later = [
            _path(self.folder, name, number)
            for name in ("journal", "snapshot", "next")
            for number in _numbers(self.folder, name)
            if number > end.number
        ]
        if not self.error and not later and path.exists() and path.stat().st_size == end.stop:
            return []
        numbers = (n for n in range(10**6) if not (self.folder / f"discarded-{n}").exists())
        discarded = self.folder / f"discarded-{next(numbers)}"
        discarded.mkdir()
        lines = []
        for file_path in later:
            file_path.rename(discarded / file_path.name)
            lines.append(f"{file_path} was moved to {discarded}")
        content = b""
        if path.exists():
            with path.open("rb") as file:
                content = file.read(end.stop)
            path.rename(discarded / path.name)
            lines.append(f"{path} now ends at byte {end.stop}; the original is in {discarded}")
        _create(self.folder, self._identity, end.number, content[_FILE.size :])
        _publish(self.folder, end.number)
        return lines


def _spans(folder: Path, snapshot: int | None) -> Iterator[_Span]:
    """Check all files from a snapshot on and yield their spans; raise `JournalError` at damage."""
    identity = b"" if snapshot is None else _check_snapshot(folder, snapshot)
    number = snapshot or 0
    last = max(_numbers(folder, "journal"), default=0)
    kind = b""
    while number <= last or kind == _SEAL:
        path = _path(folder, "journal", number)
        if kind == _SEAL and not path.exists():
            path = _path(folder, "next", number)  # the server died before it renamed the file
        for span in _spans_of_file(path, number, identity, is_last=number >= last):
            if span.kind == _START:
                identity = _identity(folder, [span])
            kind = span.kind
            yield span
        number += 1


def _spans_of_file(path: Path, number: int, identity: bytes, *, is_last: bool) -> Iterator[_Span]:
    if not path.exists():
        path = path.with_name(f"journal-{number:08d}")
        raise _damaged(path, 0, "the file is missing, but files before and after it exist")
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        identity = _check_head(path, file.read(_FILE.size), number, identity)
        yield _Span(number, _START, 0, _FILE.size)
        start = _FILE.size
        kind = _START
        while start < size:
            if kind == _SEAL:
                raise _damaged(path, start, "data follow the seal at the end of the file")
            span = _read_record_span(path, file, number, identity, size)
            if span is None:
                break
            yield span
            start = span.stop
            kind = span.kind
    if start < size:
        if not is_last:
            raise _damaged(path, start, "a record is incomplete, but later files exist")
        yield _Span(number, _TORN, start, size)
    elif not is_last and kind != _SEAL:
        raise _damaged(path, size, "the file does not end with a seal, but later files exist")


def _read_record_span(
    path: Path, file: BinaryIO, number: int, identity: bytes, size: int
) -> _Span | None:
    """Check the next record of a file and return its span, or None if it is incomplete."""
    start = file.tell()
    head = file.read(_RECORD.size)
    if len(head) < _RECORD.size:
        return None
    kind, length, checksum, _ = _RECORD.unpack(head)
    if head != _record_head(identity, number, start, kind, length, checksum):
        raise _damaged(path, start, "the checksum of a record's header is wrong")
    stop = start + _RECORD.size + length
    if stop > size:
        return None
    if _checksum(file, length) != checksum:
        raise _damaged(path, start, "the checksum of a record is wrong")
    return _Span(number, kind, start, stop)


def _records(folder: Path, spans: Iterable[_Span], current: list[_Span]) -> Iterator[Record]:
    """Yield the records, each of which is read when needed; `current` receives its span."""
    for span in spans:
        if span.kind not in (_STAGED, _FOLLOWED):
            continue
        current[:] = [span]
        body = _read(folder, span)
        if span.kind == _STAGED:
            data = torch.frombuffer(bytearray(body[_PUSH.size :]), dtype=torch.uint8)
            yield Staged(_PUSH.unpack_from(body), data)
        else:
            yield Followed(Log.from_text(body.decode()))


def _read(folder: Path, span: _Span) -> bytes:
    with _path(folder, "journal", span.number).open("rb") as file:
        file.seek(span.start + _RECORD.size)
        return file.read(span.stop - span.start - _RECORD.size)


def _to_bytes(record: Record) -> tuple[bytes, list[Any]]:
    if isinstance(record, Staged):
        return _STAGED, [_PUSH.pack(*record.push), record.gradients.numpy().data]
    return _FOLLOWED, [record.log.to_text().encode()]


def _record_head(
    identity: bytes, number: int, start: int, kind: bytes, size: int, checksum: int
) -> bytes:
    seed = zlib.crc32(identity + struct.pack("<QQ", number, start))
    head = _RECORD.pack(kind, size, checksum, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head, seed))


def _file_head(identity: bytes, number: int) -> bytes:
    head = _FILE.pack(_MAGIC, identity, number, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


def _check_head(path: Path, head: bytes, number: int, identity: bytes) -> bytes:
    """Return the journal's identity; raise `JournalError` unless this is the head of the file."""
    file_identity = head[len(_MAGIC) : len(_MAGIC) + _IDENTITY]
    if not head.startswith(_MAGIC):
        text = f"expected {_MAGIC!r}, got {head[: len(_MAGIC)]!r}; is it of another version?"
        raise _damaged(path, 0, text)
    if len(head) < _FILE.size or head[-4:] != struct.pack("<I", zlib.crc32(head[:-4])):
        raise _damaged(path, 0, "the checksum of its header is wrong")
    if head != _file_head(file_identity, number):
        raise _damaged(path, 0, f"its header is that of file {_FILE.unpack(head)[2]}")
    if identity and file_identity != identity:
        raise _damaged(path, 0, "its header is that of another journal")
    return file_identity


def _identity(folder: Path, spans: list[_Span]) -> bytes:
    number = spans[-1].number
    path = _path(folder, "journal", number)
    with (path if path.exists() else _path(folder, "next", number)).open("rb") as file:
        return file.read(_FILE.size)[len(_MAGIC) : len(_MAGIC) + _IDENTITY]


def _snapshot_tail(identity: bytes, number: int, size: int, checksum: int) -> bytes:
    tail = _SNAPSHOT.pack(size, checksum, _MAGIC, identity, number, 0)[:-4]
    return tail + struct.pack("<I", zlib.crc32(tail))


def _check_snapshot(folder: Path, number: int) -> bytes:
    """Return the journal's identity; raise `JournalError` if the snapshot is damaged."""
    path = _path(folder, "snapshot", number)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - _SNAPSHOT.size
        if size < 0:
            raise _damaged(path, 0, "the file is incomplete")
        file.seek(size)
        tail = file.read()
        length, checksum, magic, identity, its_number, _ = _SNAPSHOT.unpack(tail)
        if magic != _MAGIC or tail != _snapshot_tail(identity, its_number, length, checksum):
            raise _damaged(path, size, "the end of the file is not that of a snapshot")
        if its_number != number:
            raise _damaged(path, size, f"the end of the file is that of snapshot {its_number}")
        file.seek(0)
        if length != size or _checksum(file, size) != checksum:
            raise _damaged(path, 0, f"the checksum of its {size} bytes is wrong")
    return bytes(identity)


def _read_snapshot(folder: Path, number: int) -> dict[str, Any]:
    _check_snapshot(folder, number)
    state: dict[str, Any] = torch.load(_path(folder, "snapshot", number), weights_only=True)
    return state


def _checksum(file: BinaryIO, size: int) -> int:
    """Return the checksum of the next `size` bytes."""
    checksum = 0
    while size > 0 and (part := file.read(min(size, _CHUNK))):
        checksum = zlib.crc32(part, checksum)
        size -= len(part)
    return checksum


def _create(folder: Path, identity: bytes, number: int, records: bytes = b"") -> Path:
    """Write a file under its temporary name."""
    path = _path(folder, "next", number)
    try:
        with path.open("wb") as file:
            file.write(_file_head(identity, number) + records)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


def _publish(folder: Path, number: int) -> None:
    """Give a file of the journal its final name, if it does not have it."""
    path = _path(folder, "journal", number)
    if not path.exists():
        _path(folder, "next", number).rename(path)
        _sync(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _path(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}-{number:08d}"


def _numbers(folder: Path, name: str) -> list[int]:
    matches = (re.fullmatch(rf"{name}-(\d{{8,}})", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def _newest_snapshot(folder: Path) -> int | None:
    return max(_numbers(folder, "snapshot"), default=None)


def _damaged(path: Path, offset: int, what: str) -> JournalError:
    return JournalError(
        f"{path} is damaged at byte {offset}: {what}. Nothing was changed. Restore the file from a "
        f"copy, or go back to the last good record by `{_remedy(path.parent)}`."
    )


def _remedy(folder: Path) -> str:
    """Return the command that recovers a folder, with those of the job's other servers."""
    whole = folder.parent if re.fullmatch(r"server-\d+", folder.name) else folder
    return f"python -m paramserver recover {whole}"


def _is_in(path: str, folder: Path) -> bool:
    return Path(path).resolve().parent == folder.resolve()


def _refuse_if_in_use(folder: Path) -> None:
    for number in _numbers(folder, "journal")[-1:]:
        path = _path(folder, "journal", number)
        with path.open("r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise RuntimeError(
                        f"{path} is in use by another process; stop that server first"
                    ) from error
