"""What a server writes down so that its death costs nothing but the time to start it again.

Notable:
- before an answer is given, what it says is in the journal (write-ahead): a `kill -9` loses only
  what nobody was told. What is written survives the process; `fsync=True` also the machine;
- a snapshot begins a new file at once, and is written by a thread while the server goes on:
  beside the last one, and renamed when it is whole. Until then the last one and its files stay;
- everything on the disk is checked before any of it is used. Only a record that the last file does
  not hold to its end is cut: its server died while it wrote, and nobody was answered. Anything else
  is refused and left as it is, until `recover` is called.

# Note [What a damaged journal cannot hide]
A file begins with the journal's identity and the file's number. A record's header has a checksum of
itself, its offset, its file and its journal, so that neither a wrong length nor a record or a file
in another one's place is believed; the body has a checksum of its own. A file that is continued by
the next one ends with a seal, and becomes visible (by a rename) only when the last one is sealed:
a missing file, or one that is cut short, shows wherever it is. What cannot show is the last file
cut between two records, since a server that dies leaves the same: those who were answered notice,
as a worker that is ahead of its server is refused.
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
_IDENTITY = 8  # random bytes, the same in all files of a journal
_FILE = struct.Struct(f"<8s{_IDENTITY}sQI")  # magic, journal, number, checksum
_RECORD = struct.Struct("<cQII")  # kind, bytes, checksum of the body, checksum of the header
_SNAPSHOT = struct.Struct(f"<QI8s{_IDENTITY}sQI")  # bytes, checksum, and as _FILE; at its end
_PUSH = struct.Struct("<qqq")
_STAGED, _FOLLOWED, _SEAL = b"s", b"f", b"n"  # what a record is
_START, _TORN = b"", b"t"  # a file's head, and a record that was not written to its end
_CHUNK = 2**20


class JournalError(RuntimeError):
    """A journal is damaged. The message names the file, the byte and the remedy."""


@dataclass(frozen=True)
class _Place:
    """Bytes `start` to `stop` of file `number`, which have been checked."""

    number: int
    kind: bytes
    start: int
    stop: int


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
        self._identity, self._number = secrets.token_bytes(_IDENTITY), 0
        self._file: BinaryIO | None = None
        self._written = 0
        self._writer: threading.Thread | None = None
        self.error: OSError | RuntimeError | None = None
        """Why the last snapshot could not be written; the journal goes on without it."""

    def load(self, core: Core) -> bool:
        """Bring `core` to where the journal ends, and go on from there. False if it is empty.

        JournalError if it is damaged; then neither `core` nor the folder has changed.
        """
        _refuse_if_in_use(self.folder)
        first = _newest_snapshot(self.folder)
        places = list(_places(self.folder, first)) if first is not None or self._numbers() else []
        snapshot = None if first is None else _read_snapshot(self.folder, first)
        at: list[_Place] = []
        try:
            core.restore(snapshot, _records(self.folder, places, at))
        except Exception as error:
            if not at:  # the snapshot is of another job
                raise
            path, start = _path(self.folder, "journal", at[-1].number), at[-1].start
            text = f"{path}: the record at byte {start} cannot be applied: {type(error).__name__}: "
            text += f"{error}. Nothing was changed. Correct the job, or lose this record and all "
            text += f"later ones by `{_remedy(self.folder)} --before {path}:{start}`"
            raise JournalError(text) from error
        if places:
            self._identity, self._number = _identity(self.folder, places), places[-1].number
            _show(self.folder, self._number)
            if places[-1].kind == _TORN:
                self._cut(places[-1])
        else:
            _create(self.folder, self._identity, 0)
            _show(self.folder, 0)
        self._open()
        core.journal = self
        return snapshot is not None or bool(at)

    def record(self, record: Record) -> None:
        """Write it, and return when it is written. RuntimeError if the disk is full."""
        for last in (False, True):
            try:
                return self._append(*_to_bytes(record))
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
        """Copy the whole state and begin a new file; a thread writes the copy."""
        self.wait()
        if self._file is None and self._numbers():
            raise RuntimeError(f"{self.folder} has a journal; load it before a snapshot is made")
        try:
            self._continue()
        except OSError as error:  # it goes on in the file that it has
            self._written = 0
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

    def _append(self, kind: bytes, parts: list[Any]) -> None:
        assert self._file is not None
        size, checksum = sum(map(len, parts)), 0
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

    def _continue(self) -> None:
        """Go on in a new file. OSError if that cannot be; then it goes on in the file it has."""
        number = self._number + 1
        path = _create(self.folder, self._identity, number)
        start = self._file.tell() if self._file else 0
        file = path.open("r+b", buffering=0)
        try:
            if self._file:
                self._append(_SEAL, [])
            # If the server dies here, the next one finds the seal and renames the file.
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

    def _write(self, state: dict[str, Any], number: int) -> None:
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
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            # The journals are whole: another is tried when as much has come again.
            unfinished.unlink(missing_ok=True)
            self._report(error)
            return
        for name in ("snapshot", "journal"):
            for old in (n for n in _numbers(self.folder, name) if n < number):
                _path(self.folder, name, old).unlink(missing_ok=True)

    def _report(self, error: OSError | RuntimeError) -> None:
        self.error = error
        free = shutil.disk_usage(self.folder).free  # torch's writer says where, but not why
        _LOG.error("no snapshot can be written in %s (%d B free): %s", self.folder, free, error)

    def _numbers(self) -> list[int]:
        return _numbers(self.folder, "journal")

    def _cut(self, torn: _Place) -> None:
        path = _path(self.folder, "journal", torn.number)
        text = "%s: the last %d bytes are of a record that was not written to its end: cut"
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


def recover(folder: str | Path, *, before: tuple[str, int] | None = None) -> list[str]:
    """Take a damaged journal back to its last good record, and return what was done, in lines.

    `folder` is a server's own, or the one that holds those of all servers of a job: then no server
    stays ahead of what the others can follow. `before` is the path of a file and a byte: the record
    there, and all later ones, are given up too. What is given up is moved into `discarded-N` of the
    same folder. JournalError if there is nothing to go back to; then nothing has changed.
    """
    folder = Path(folder)
    found = [path for path in folder.glob("server-*") if re.fullmatch(r"server-\d+", path.name)]
    folders = sorted(found, key=lambda path: int(path.name[7:])) or [folder]
    for each in folders:
        _refuse_if_in_use(each)
    if before and not any(_is_in(before[0], each) for each in folders):
        raise ValueError(f"{before[0]} is not a file of {folder}; give the path of the error")
    goods = [
        _Good(each, before if before and _is_in(before[0], each) else None) for each in folders
    ]
    ends = [good.last() for good in goods]
    # What a damaged server has lost, the first one must not go on from; nobody stays ahead of it.
    damaged = [end.position for good, end in zip(goods, ends, strict=True) if good.error]
    if damaged:
        ends[0] = goods[0].last(min(damaged))
    ends[1:] = [
        good.last(min(end.position, ends[0].position))
        for good, end in zip(goods[1:], ends[1:], strict=True)
    ]
    lines = []
    for good, end in zip(goods, ends, strict=True):
        lines += [good.error] if good.error else []
        lines += good.cut(end)
        lines.append(f"{good.folder} ends at entry {end.position} of the log")
    return lines


@dataclass(frozen=True)
class _End:
    """Where a journal may end: after `position` entries of the log, at a byte of a file."""

    position: int
    number: int
    stop: int


class _Good:
    """The good part of a folder, up to the first `error`."""

    def __init__(self, folder: Path, before: tuple[str, int] | None) -> None:
        self.folder, self.error = folder, ""
        self._before = (Path(before[0]).name, before[1]) if before else None
        self._ends: list[_End] = []
        self._identity = b""
        snapshots = sorted(_numbers(folder, "snapshot"), reverse=True)
        for snapshot in [*snapshots, None]:
            self._scan(snapshot)
            if self._ends:
                return
        text = f"{folder} has nothing to go back to: {self.error or 'it is empty'}"
        raise JournalError(f"{text} Restore it from a copy, or give an empty folder")

    def _scan(self, snapshot: int | None) -> None:
        position = 0
        try:
            if snapshot is not None:
                position = int(_read_snapshot(self.folder, snapshot)["replica"]["position"])
                self._identity = _check_snapshot(self.folder, snapshot)
                self._ends.append(_End(position, snapshot, _FILE.size))
            for place in _places(self.folder, snapshot):
                name = _path(self.folder, "journal", place.number).name
                if self._before and (name, place.start) >= self._before:
                    self.error = self.error or f"{name} is given up from byte {place.start} on."
                    return
                if place.kind == _START:
                    self._identity = _identity(self.folder, [place])
                if place.kind == _FOLLOWED:
                    position = Log.from_text(_read(self.folder, place).decode()).stop
                if place.kind not in (_SEAL, _TORN):
                    self._ends.append(_End(position, place.number, place.stop))
        except JournalError as error:
            self.error = self.error or str(error)

    def last(self, position: int | None = None) -> _End:
        """The last end, or the last one at `position` or before."""
        ends = [end for end in self._ends if position is None or end.position <= position]
        if not ends:
            text = f"{self.folder} begins after entry {position} of the log, to which another"
            raise JournalError(
                f"{text} server goes back; restore copies of one time of all servers"
            )
        return ends[-1]

    def cut(self, end: _End) -> list[str]:
        """End there, and move what came after out of the way."""
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
        away = self.folder / f"discarded-{next(numbers)}"
        away.mkdir()
        lines = []
        for each in later:
            each.rename(away / each.name)
            lines.append(f"{each} was moved to {away}")
        kept = b""
        if path.exists():
            with path.open("rb") as file:
                kept = file.read(end.stop)
            path.rename(away / path.name)
            lines.append(f"{path} now ends at byte {end.stop}; as it was it is in {away}")
        _create(self.folder, self._identity, end.number, kept[_FILE.size :])
        _show(self.folder, end.number)
        return lines


def _places(folder: Path, snapshot: int | None) -> Iterator[_Place]:
    """Check everything from a snapshot on, and yield each record. JournalError at a bad byte."""
    identity = b"" if snapshot is None else _check_snapshot(folder, snapshot)
    number, last, kind = snapshot or 0, max(_numbers(folder, "journal"), default=0), b""
    while number <= last or kind == _SEAL:
        path = _path(folder, "journal", number)
        if kind == _SEAL and not path.exists():
            path = _path(folder, "next", number)  # its server died before it was renamed
        for place in _places_of(path, number, identity, is_last=number >= last):
            if place.kind == _START:
                identity = _identity(folder, [place])
            kind = place.kind
            yield place
        number += 1


def _places_of(path: Path, number: int, identity: bytes, *, is_last: bool) -> Iterator[_Place]:
    if not path.exists():
        text = "it is missing, and was there: what lies before and after it is"
        raise _damaged(path.with_name(f"journal-{number:08d}"), 0, text)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        identity = _check_head(path, file.read(_FILE.size), number, identity)
        yield _Place(number, _START, 0, _FILE.size)
        start, kind = _FILE.size, _START
        while start < size:
            if kind == _SEAL:
                raise _damaged(path, start, "something follows the seal at its end")
            head = file.read(_RECORD.size)
            if len(head) < _RECORD.size:
                break
            kind, length, checksum, _ = _RECORD.unpack(head)
            if head != _record_head(identity, number, start, kind, length, checksum):
                raise _damaged(path, start, "the checksum of a record's header is wrong")
            if start + _RECORD.size + length > size:
                break
            if _checksum(file, length) != checksum:
                raise _damaged(path, start, "the checksum of a record is wrong")
            stop = start + _RECORD.size + length
            yield _Place(number, kind, start, stop)
            start = stop
    if start < size:
        if not is_last:
            raise _damaged(path, start, "a record is cut short, and later files exist")
        yield _Place(number, _TORN, start, size)
    elif not is_last and kind != _SEAL:
        raise _damaged(path, size, "it is cut short, as no seal ends it, and later files exist")


def _records(folder: Path, places: Iterable[_Place], at: list[_Place]) -> Iterator[Record]:
    """The records, each read when it is needed; `at` gets where the last one lies."""
    for place in places:
        if place.kind not in (_STAGED, _FOLLOWED):
            continue
        at[:] = [place]
        body = _read(folder, place)
        if place.kind == _STAGED:
            data = torch.frombuffer(bytearray(body[_PUSH.size :]), dtype=torch.uint8)
            yield Staged(_PUSH.unpack_from(body), data)
        else:
            yield Followed(Log.from_text(body.decode()))


def _read(folder: Path, place: _Place) -> bytes:
    with _path(folder, "journal", place.number).open("rb") as file:
        file.seek(place.start + _RECORD.size)
        return file.read(place.stop - place.start - _RECORD.size)


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
    """Return the journal's identity. JournalError unless a file begins as file `number` of it."""
    theirs = head[len(_MAGIC) : len(_MAGIC) + _IDENTITY]
    if not head.startswith(_MAGIC):
        text = f"expected {_MAGIC!r}, got {head[: len(_MAGIC)]!r}; is it of another version?"
        raise _damaged(path, 0, text)
    if len(head) < _FILE.size or head[-4:] != struct.pack("<I", zlib.crc32(head[:-4])):
        raise _damaged(path, 0, "the checksum of its header is wrong")
    if head != _file_head(theirs, number):
        raise _damaged(path, 0, f"by its header it is file {_FILE.unpack(head)[2]}")
    if identity and theirs != identity:
        raise _damaged(path, 0, "by its header it belongs to another journal")
    return theirs


def _identity(folder: Path, places: list[_Place]) -> bytes:
    number = places[-1].number
    path = _path(folder, "journal", number)
    with (path if path.exists() else _path(folder, "next", number)).open("rb") as file:
        return file.read(_FILE.size)[len(_MAGIC) : len(_MAGIC) + _IDENTITY]


def _snapshot_tail(identity: bytes, number: int, size: int, checksum: int) -> bytes:
    tail = _SNAPSHOT.pack(size, checksum, _MAGIC, identity, number, 0)[:-4]
    return tail + struct.pack("<I", zlib.crc32(tail))


def _check_snapshot(folder: Path, number: int) -> bytes:
    """Return the journal's identity. JournalError unless the snapshot is whole."""
    path = _path(folder, "snapshot", number)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - _SNAPSHOT.size
        if size < 0:
            raise _damaged(path, 0, "it is cut short")
        file.seek(size)
        tail = file.read()
        length, checksum, magic, identity, its_number, _ = _SNAPSHOT.unpack(tail)
        if magic != _MAGIC or tail != _snapshot_tail(identity, its_number, length, checksum):
            raise _damaged(path, size, "its end is not that of a snapshot")
        if its_number != number:
            raise _damaged(path, size, f"by its end it is snapshot {its_number}")
        file.seek(0)
        if length != size or _checksum(file, size) != checksum:
            raise _damaged(path, 0, f"the checksum of its {size} bytes is wrong")
    return bytes(identity)


def _read_snapshot(folder: Path, number: int) -> dict[str, Any]:
    _check_snapshot(folder, number)
    state: dict[str, Any] = torch.load(_path(folder, "snapshot", number), weights_only=True)
    return state


def _checksum(file: BinaryIO, size: int) -> int:
    """The checksum of the next `size` bytes."""
    checksum = 0
    while size > 0 and (part := file.read(min(size, _CHUNK))):
        checksum, size = zlib.crc32(part, checksum), size - len(part)
    return checksum


def _create(folder: Path, identity: bytes, number: int, records: bytes = b"") -> Path:
    """Write a file that is yet to be shown."""
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


def _show(folder: Path, number: int) -> None:
    """Let a file of the journal be seen, if it is not."""
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
    found = (re.fullmatch(rf"{name}-(\d{{8,}})", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def _newest_snapshot(folder: Path) -> int | None:
    return max(_numbers(folder, "snapshot"), default=None)


def _damaged(path: Path, offset: int, what: str) -> JournalError:
    text = f"{path} is damaged at byte {offset}: {what}. Nothing was changed. Restore the file"
    text += f" from a copy, or go back to the last good record by `{_remedy(path.parent)}`."
    return JournalError(text)


def _remedy(folder: Path) -> str:
    """The command that takes a folder back, with those of the job's other servers."""
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
                    text = f"{path} is in use by another process; stop that server first"
                    raise RuntimeError(text) from error
