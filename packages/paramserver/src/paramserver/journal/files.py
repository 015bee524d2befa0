"""The files of a journal: their format, and the checks that detect damage.

    journal-N     head, records, seal if journal-(N+1) exists
    next-N        the next file before the seal of the previous one is written
    snapshot-N    the state at the start of journal-N, which replaces all earlier files
    unfinished-N  a snapshot that is being written

    head          magic number, identity of the journal, N, checksum
    record        kind, length, checksum of the body, checksum of this header, body

Note [Detection of damage]
The checksum of a record's header covers the header, its offset, the file's number and the journal's
identity. This detects a wrong length, and a record or file in a wrong position. A file gets its
final name only after the seal of the previous file is written, so that a missing or truncated file
is detected. One kind of damage cannot be detected: a last file that was truncated after a complete
record, because a server that dies leaves the same file. Workers that have seen the lost records are
refused, because they are ahead of their server.
"""

import errno
import fcntl
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from paramserver.protocol.log import Log, Record, Replayed, Staged

MAGIC = b"pserver3"
#: Number of random bytes that identify a journal.
IDENTITY_BYTES = 8
# Magic number, identity of the journal, number of the file, checksum.
FILE_HEAD = struct.Struct(f"<8s{IDENTITY_BYTES}sQI")
# Kind, body length in bytes, body checksum, header checksum.
RECORD_HEAD = struct.Struct("<cQII")
# At the end of a snapshot: length in bytes, checksum, and the fields of FILE_HEAD.
SNAPSHOT_TAIL = struct.Struct(f"<QI8s{IDENTITY_BYTES}sQI")
# Worker, epoch and clock of a push: `Staged.push`.
PUSH_FIELDS = struct.Struct("<qqq")
# Kinds of records.
STAGED = b"s"
REPLAYED = b"f"
SEAL = b"n"
# Kinds of spans that are not records: the head of a file, and an incomplete record.
START = b""
TORN = b"t"
#: Name of the file in a journal's folder that its server locks.
LOCK = "lock"
#: Number of bytes that are read at once for a checksum.
_CHUNK_BYTES = 2**20


class JournalError(RuntimeError):
    """A journal is damaged or lost. The message names the file, any damaged byte and the remedy."""


@dataclass(frozen=True)
class Span:
    """Bytes `start` to `stop` of a file of the journal, which have passed the checks."""

    file_number: int
    kind: bytes
    start: int
    stop: int


def iter_checked_spans(folder: Path, snapshot: int | None) -> Iterator[Span]:
    """Check a snapshot and the files after it; yield their spans, or raise `JournalError`."""
    identity = b"" if snapshot is None else check_snapshot(folder, snapshot)
    number = snapshot or 0
    last = max(list_numbers(folder, "journal"), default=0)
    kind = b""
    while number <= last or kind == SEAL:
        path = build_path(folder, "journal", number)
        if kind == SEAL:
            path = _find_path_after_seal(folder, number)
        for span in _iter_checked_file_spans(path, number, identity, is_last=number >= last):
            if span.kind == START:
                identity = read_identity(folder, [span])
            kind = span.kind
            yield span
        number += 1


def _iter_checked_file_spans(
    path: Path, number: int, identity: bytes, *, is_last: bool
) -> Iterator[Span]:
    if not path.exists():
        path = path.with_name(f"journal-{number:08d}")
        raise build_error(path, 0, "the file is missing, but files before and after it exist")
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        identity = _check_head(path, file.read(FILE_HEAD.size), number, identity)
        yield Span(number, START, 0, FILE_HEAD.size)
        start = FILE_HEAD.size
        kind = START
        while start < size:
            if kind == SEAL:
                raise build_error(path, start, "data follow the seal at the end of the file")
            span = _read_record_span(path, file, number, identity, size)
            if span is None:
                break
            yield span
            start = span.stop
            kind = span.kind
    if start < size:
        if not is_last:
            raise build_error(path, start, "a record is incomplete, but later files exist")
        yield Span(number, TORN, start, size)
    elif not is_last and kind != SEAL:
        raise build_error(path, size, "the file does not end with a seal, but later files exist")


def _read_record_span(
    path: Path, file: BinaryIO, number: int, identity: bytes, size: int
) -> Span | None:
    """Check the next record of a file and return its span, or None if it is incomplete."""
    start = file.tell()
    head = file.read(RECORD_HEAD.size)
    if len(head) < RECORD_HEAD.size:
        return None
    kind, length, checksum, _ = RECORD_HEAD.unpack(head)
    if head != pack_record_head(identity, number, start, kind, length, checksum):
        raise build_error(path, start, "the checksum of a record's header is wrong")
    stop = start + RECORD_HEAD.size + length
    if stop > size:
        return None
    if compute_checksum(file, start + RECORD_HEAD.size, length) != checksum:
        raise build_error(path, start, "the checksum of a record is wrong")
    return Span(number, kind, start, stop)


def read_records(folder: Path, spans: Iterable[Span], current: list[Span]) -> Iterator[Record]:
    """Yield the records in the spans, one at a time; `current` contains the span of the last."""
    for span in spans:
        if span.kind not in (STAGED, REPLAYED):
            continue
        current[:] = [span]
        body = read_body(folder, span)
        if span.kind == STAGED:
            data = torch.frombuffer(bytearray(body[PUSH_FIELDS.size :]), dtype=torch.uint8)
            yield Staged(PUSH_FIELDS.unpack_from(body), data)
        else:
            yield Replayed(Log.from_text(body.decode()))


def read_body(folder: Path, span: Span) -> bytes:
    """Return the body of a record."""
    with _find_path_after_seal(folder, span.file_number).open("rb") as file:
        file.seek(span.start + RECORD_HEAD.size)
        return file.read(span.stop - span.start - RECORD_HEAD.size)


def encode_record(record: Record) -> tuple[bytes, list[Any]]:
    """Return the kind of a record and the parts of its body."""
    if isinstance(record, Staged):
        return STAGED, [PUSH_FIELDS.pack(*record.push), record.gradients.numpy().data]
    return REPLAYED, [record.log.to_text().encode()]


def pack_record_head(
    identity: bytes, number: int, start: int, kind: bytes, size: int, checksum: int
) -> bytes:
    """Return the header of a record at byte `start` of file `number`."""
    seed = zlib.crc32(identity + struct.pack("<QQ", number, start))
    head = RECORD_HEAD.pack(kind, size, checksum, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head, seed))


def _pack_file_head(identity: bytes, number: int) -> bytes:
    head = FILE_HEAD.pack(MAGIC, identity, number, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


def _check_head(path: Path, head: bytes, number: int, identity: bytes) -> bytes:
    """Return the identity in the head of file `number`; raise `JournalError` if it is invalid."""
    file_identity = head[len(MAGIC) : len(MAGIC) + IDENTITY_BYTES]
    if not head.startswith(MAGIC):
        text = f"expected {MAGIC!r} of this version of the format, got {head[: len(MAGIC)]!r}"
        raise build_error(path, 0, text)
    if len(head) < FILE_HEAD.size or head[-4:] != struct.pack("<I", zlib.crc32(head[:-4])):
        raise build_error(path, 0, "the checksum of its header is wrong")
    if head != _pack_file_head(file_identity, number):
        raise build_error(path, 0, f"its header is that of file {FILE_HEAD.unpack(head)[2]}")
    if identity and file_identity != identity:
        raise build_error(path, 0, "its header is that of another journal")
    return file_identity


def read_identity(folder: Path, spans: list[Span]) -> bytes:
    """Return the identity that the head of the last span's file contains."""
    with _find_path_after_seal(folder, spans[-1].file_number).open("rb") as file:
        return file.read(FILE_HEAD.size)[len(MAGIC) : len(MAGIC) + IDENTITY_BYTES]


def pack_snapshot_tail(identity: bytes, number: int, size: int, checksum: int) -> bytes:
    """Return the last bytes of a snapshot, which follow `size` bytes of state."""
    tail = SNAPSHOT_TAIL.pack(size, checksum, MAGIC, identity, number, 0)[:-4]
    return tail + struct.pack("<I", zlib.crc32(tail))


def check_snapshot(folder: Path, number: int) -> bytes:
    """Return the journal's identity; raise `JournalError` if the snapshot is damaged."""
    path = build_path(folder, "snapshot", number)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - SNAPSHOT_TAIL.size
        if size < 0:
            raise build_error(path, 0, "the file is incomplete")
        file.seek(size)
        tail = file.read()
        length, checksum, magic, identity, tail_number, _ = SNAPSHOT_TAIL.unpack(tail)
        if magic != MAGIC or tail != pack_snapshot_tail(identity, tail_number, length, checksum):
            raise build_error(path, size, "the end of the file is not that of a snapshot")
        if tail_number != number:
            raise build_error(path, size, f"the end of the file is that of snapshot {tail_number}")
        if length != size or compute_checksum(file, 0, size) != checksum:
            raise build_error(path, 0, f"the checksum of its {size} bytes is wrong")
    return bytes(identity)


def read_snapshot(folder: Path, number: int) -> dict[str, Any]:
    """Return the state of a snapshot that `check_snapshot` has accepted."""
    state: dict[str, Any] = torch.load(build_path(folder, "snapshot", number), weights_only=True)
    return state


def compute_checksum(file: BinaryIO, start: int, size: int) -> int:
    """Return the checksum of `size` bytes from byte `start`, and move to the byte after them."""
    file.seek(start)
    checksum = 0
    while size > 0 and (part := file.read(min(size, _CHUNK_BYTES))):
        checksum = zlib.crc32(part, checksum)
        size -= len(part)
    return checksum


def create_file(folder: Path, identity: bytes, number: int) -> Path:
    """Write a file without records under its temporary name, and sync it; return its path."""
    path = build_path(folder, "next", number)
    try:
        with path.open("wb") as file:
            file.write(_pack_file_head(identity, number))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


def publish_file(folder: Path, number: int) -> None:
    """Rename a file of the journal to its final name, unless it has that name already."""
    path = build_path(folder, "journal", number)
    if not path.exists():
        build_path(folder, "next", number).rename(path)
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Sync the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def build_path(folder: Path, name: str, number: int) -> Path:
    """Return the path of a file: `name` is `journal`, `next`, `snapshot` or `unfinished`."""
    return folder / f"{name}-{number:08d}"


def _find_path_after_seal(folder: Path, number: int) -> Path:
    """Return the path of a file whose predecessor is sealed.

    The file has its temporary name if the server died before it renamed the file. The same is true
    if the machine died before the new name was on the disk.
    """
    path = build_path(folder, "journal", number)
    return path if path.exists() else build_path(folder, "next", number)


def list_numbers(folder: Path, name: str) -> list[int]:
    """Return the sorted numbers of all files with this name; see `build_path`."""
    matches = (re.fullmatch(rf"{name}-(\d{{8,}})", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def build_error(path: Path, offset: int, damage: str) -> JournalError:
    """Return the error for damage at byte `offset`, with the remedy."""
    folder = path.parent
    if re.fullmatch(r"server-\d+", folder.name):
        folder = folder.parent  # the folder of all servers of the job, which recover together
    return JournalError(
        f"{path} is damaged at byte {offset}: {damage}. Nothing was changed. Restore the file from "
        f"a copy, or go back to the last good record by `python -m paramserver recover {folder}`."
    )


def lock_journal(folder: Path) -> BinaryIO:
    """Lock a journal against other processes until the returned file is closed.

    As with every POSIX record lock, closing any other open copy of the file in this process
    releases the lock.

    Raises:
        RuntimeError: another process has locked the journal.
    """
    path = folder / LOCK
    file = path.open("ab", buffering=0)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            raise RuntimeError(
                f"{folder} is in use by another process; stop that server first"
            ) from error
        # The file system has no locks, so continue without one.
    return file
