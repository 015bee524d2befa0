"""The journal of a server, from which a killed server recovers.

A server records every change before it sends the answer that reports the change (write-ahead). A
`kill -9` therefore loses only changes that no worker knows of. Records survive a crash of the
process, and with `fsync=True` also a crash of the machine.

A snapshot starts a new file. A thread then writes the snapshot while the server continues, and
renames it when it is complete. Until then the previous snapshot and the files after it remain.

A server that starts checks all files before it uses any of them. It repairs one kind of damage: an
incomplete record at the end of the last file, which a server leaves if it dies during a write,
before it has answered. Any other damage raises `JournalError`; nothing changes until `recover` is
called. See Note [Detection of damage] in `files`.
"""

import errno
import logging
import os
import secrets
import shutil
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from paramserver.journal import files
from paramserver.journal.files import JournalError, Span
from paramserver.optimizers import save_state
from paramserver.protocol.core import Core
from paramserver.protocol.log import Record

_LOG = logging.getLogger(__name__)


class DiskFullError(RuntimeError):
    """The disk of a journal has no room for a record, which was not written."""


class DiskJournal:
    """The journal of one server, in a folder that no other server uses.

    Args:
        folder: the folder; it is created if it does not exist.
        fsync: True to sync each record to the disk before `record` returns.
        snapshot_bytes: size of a file in bytes above which a snapshot is due.

    Raises:
        RuntimeError: the folder cannot be created.
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
        self._identity = secrets.token_bytes(files.IDENTITY_BYTES)
        #: Number of the current file, in which records are written.
        self._file_number = 0
        self._file: BinaryIO | None = None
        self._lock: BinaryIO | None = None
        #: Byte offset of the end of the last complete record in the current file.
        self._stop = 0
        #: Size of the current file in bytes above which a snapshot is due.
        self._max_bytes = snapshot_bytes
        self._writer: threading.Thread | None = None
        #: Error of the last snapshot; the journal continues without that snapshot.
        self.error: Exception | None = None

    @classmethod
    def start(cls, folder: str | Path, core: Core, *, fsync: bool = False) -> "DiskJournal":
        """Restore `core` from the journal in `folder`, or start a journal with the state of `core`.

        Raises:
            RuntimeError: the state cannot be written, or another process uses the journal.
            JournalError: see `load`.
        """
        journal = cls(folder, fsync=fsync)
        if not journal.load(core):
            # A job may initialize its parameters at random, so the initial state is stored.
            journal.snapshot(core)
            journal.wait()
            if journal.error:
                journal.close()
                text = f"cannot write a journal in {folder}: {journal.error}"
                raise RuntimeError(text) from journal.error
        return journal

    def load(self, core: Core) -> bool:
        """Restore the journal's state in `core`, and record later changes of `core`.

        Returns:
            False if the journal is empty, otherwise True.

        Raises:
            JournalError: the journal is damaged, and `core` is unchanged; or a record cannot be
                applied, and `core` must not be used. The journal has not changed.
            RuntimeError: another process uses the journal.
        """
        # Lock before reading, so that one of two servers that start at the same time is refused.
        self._lock = files.lock_journal(self.folder)
        try:
            spans, has_state = _restore(self.folder, core)
        except BaseException:
            self._lock.close()
            raise
        if spans:
            self._identity = files.read_identity(self.folder, spans)
            self._file_number = spans[-1].file_number
        else:
            files.create_file(self.folder, self._identity, 0)
        files.publish_file(self.folder, self._file_number)
        path = files.build_path(self.folder, "journal", self._file_number)
        if spans and spans[-1].kind == files.TORN:
            nbytes = spans[-1].stop - spans[-1].start
            _LOG.warning("%s: removed the last %d bytes: an incomplete record", path, nbytes)
            os.truncate(path, spans[-1].start)
        self._switch_to(path.open("r+b", buffering=0))
        core.journal = self
        return has_state

    def record(self, record: Record) -> None:
        """Write a record and return when it is written.

        Raises:
            DiskFullError: the disk has no room. The caller may pass the record again later.
            RuntimeError: the record cannot be written for another reason.
        """
        kind, parts = files.encode_record(record)
        try:
            self._append(kind, parts)
            return
        except OSError:
            # A running snapshot may have filled the disk. Wait until it has failed and freed its
            # space, then retry.
            self.wait()
        try:
            self._append(kind, parts)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            error_class = DiskFullError if is_full else RuntimeError
            text = f"cannot write a journal in {self.folder}: {error}"
            raise error_class(text) from error

    def is_snapshot_due(self) -> bool:
        """Return True if the current file is too long and no snapshot is being written."""
        return self._stop > self._max_bytes and not self.is_writing()

    def is_writing(self) -> bool:
        """Return True if a snapshot is being written."""
        return self._writer is not None and self._writer.is_alive()

    def snapshot(self, core: Core) -> None:
        """Copy the state of `core`, start a new file, and write the copy in a thread.

        The journal must be loaded. If the new file or the snapshot cannot be written, `error` is
        set and the journal continues without the snapshot.
        """
        self.wait()
        try:
            self._start_next_file()
        except OSError as error:
            # Try again after more records, not before every record.
            self._max_bytes = self._stop + self._snapshot_bytes
            self._report(error)
            return
        arguments = (core.snapshot(), self._file_number)
        self._writer = threading.Thread(target=self._write_snapshot, args=arguments)
        self._writer.start()

    def wait(self) -> None:
        """Wait until no snapshot is being written."""
        if self._writer:
            self._writer.join()

    def close(self) -> None:
        """Wait for a running snapshot, then close the file and release the lock."""
        self.wait()
        for file in (self._file, self._lock):
            if file:
                file.close()

    def _append(self, kind: bytes, parts: list[Any]) -> None:
        assert self._file is not None
        size = sum(len(part) for part in parts)
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        if self._file.tell() != self._stop:
            self._discard_incomplete_record()
        head = files.pack_record_head(
            self._identity, self._file_number, self._stop, kind, size, checksum
        )
        try:
            for part in (head, *parts):
                while part:
                    part = part[self._file.write(part) :]
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError:
            # If discarding fails too, the next call discards the record: `load` refuses a record
            # that follows an incomplete one.
            with suppress(OSError):
                self._discard_incomplete_record()
            raise
        self._stop = self._file.tell()

    def _discard_incomplete_record(self) -> None:
        assert self._file is not None
        self._file.truncate(self._stop)
        self._file.seek(self._stop)

    def _start_next_file(self) -> None:
        """Seal the current file and continue in a new one.

        Raises:
            OSError: the new file cannot be created. The journal continues in the current file.
        """
        number = self._file_number + 1
        path = files.create_file(self.folder, self._identity, number)
        file = path.open("r+b", buffering=0)
        stop = self._stop
        try:
            self._append(files.SEAL, [])
            # If the server dies here, the next server reads the seal and renames the file.
            path.rename(files.build_path(self.folder, "journal", number))
        except OSError:
            file.close()
            self._stop = stop
            with suppress(OSError):
                self._discard_incomplete_record()  # the seal, which requires the next file
                path.unlink()
            raise
        self._file_number = number
        self._switch_to(file)
        # If the machine dies before the new name is on the disk, the temporary name is used.
        with suppress(OSError):
            files.sync_folder(self.folder)

    def _write_snapshot(self, state: dict[str, Any], number: int) -> None:
        """Write snapshot `number` with this state, and remove the files that it replaces."""
        unfinished = files.build_path(self.folder, "unfinished", number)
        try:
            with unfinished.open("w+b") as file:
                save_state(state, file)
                size = file.seek(0, os.SEEK_END)
                checksum = files.compute_checksum(file, 0, size)
                file.write(files.pack_snapshot_tail(self._identity, number, size, checksum))
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(files.build_path(self.folder, "snapshot", number))
            # No file may be removed before the name of the snapshot is on the disk.
            files.sync_folder(self.folder)
            for name in ("snapshot", "journal", "unfinished"):
                for old in (n for n in files.list_numbers(self.folder, name) if n < number):
                    files.build_path(self.folder, name, old).unlink()
            self.error = None
        except Exception as error:  # torch's writer raises RuntimeError
            # The files that remain are a complete journal; the next snapshot is written later.
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._report(error)

    def _report(self, error: Exception) -> None:
        self.error = error
        # torch's writer does not report the cause, which is often a full disk.
        free = shutil.disk_usage(self.folder).free
        _LOG.error("cannot write a snapshot in %s (%d B free): %s", self.folder, free, error)

    def _switch_to(self, file: BinaryIO) -> None:
        """Write further records at the end of `file`, which becomes the current file."""
        self._stop = file.seek(0, os.SEEK_END)
        self._max_bytes = self._snapshot_bytes
        if self._file:
            self._file.close()
        self._file = file


def restore(folder: Path, core: Core) -> None:
    """Restore `core` without recording later changes; raise `JournalError` for an empty journal."""
    with files.lock_journal(folder):
        if not _restore(folder, core)[1]:
            raise JournalError(f"expected a journal in {folder}, which is empty")


def _restore(folder: Path, core: Core) -> tuple[list[Span], bool]:
    """Restore `core` from a journal.

    Return the journal's spans, and True if it has a snapshot or a record.
    """
    first = max(files.list_numbers(folder, "snapshot"), default=None)
    has_files = first is not None or files.list_numbers(folder, "journal")
    spans = list(files.iter_checked_spans(folder, first)) if has_files else []
    snapshot = None if first is None else files.read_snapshot(folder, first)
    current: list[Span] = []
    try:
        core.restore(snapshot, files.read_records(folder, spans, current))
    except Exception as error:
        if not current:  # the snapshot is of another job
            raise
        path = files.build_path(folder, "journal", current[-1].file_number)
        start = current[-1].start
        raise JournalError(
            f"{path}: the record at byte {start} cannot be applied: {type(error).__name__}: "
            f"{error}. The journal was not changed. Pass the job and the program that wrote the "
            "record, correct the program if the update itself fails, or pass another folder"
        ) from error
    return spans, snapshot is not None or bool(current)
