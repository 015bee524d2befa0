"""The journal of a server, from which it continues after its process was killed.

Every change is recorded before the answer that reports it is sent (write-ahead). A `kill -9` loses
only changes that no worker knows of. Records survive a crash of the process, and with `fsync=True`
also a crash of the machine.

A snapshot immediately starts a new file. While the server continues, a thread writes the snapshot
next to the previous one and renames it when it is complete. Until then the previous snapshot and
its files remain.

All files are checked before any of them is used. The only damage that is repaired is an incomplete
record at the end of the last file: the server died while it wrote the record, and sent no answer.
Any other damage is refused, and nothing changes until `recover` is called. See
Note [Detection of damage] in `files`.
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

from paramserver.journal.files import (
    IDENTITY_BYTES,
    SEAL,
    TORN,
    JournalError,
    Span,
    checked_spans,
    compute_checksum,
    create_file,
    encode_record,
    file_numbers,
    journal_path,
    lock_journal,
    newest_snapshot,
    publish_file,
    read_identity,
    read_records,
    read_snapshot,
    record_head,
    recovery_command,
    snapshot_tail,
    sync_folder,
)
from paramserver.optimizers import save_state
from paramserver.protocol.core import Core
from paramserver.protocol.records import Record

_LOG = logging.getLogger(__name__)


class DiskFullError(RuntimeError):
    """The disk of a journal has no room for a record; nothing was recorded."""


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
        self._identity = secrets.token_bytes(IDENTITY_BYTES)
        self._number = 0
        self._file: BinaryIO | None = None
        self._lock: BinaryIO | None = None
        #: End of the last complete record of the file.
        self._stop = 0
        #: Bytes that were written since the last snapshot.
        self._written = 0
        self._writer: threading.Thread | None = None
        #: Error of the last snapshot; the journal continues without that snapshot.
        self.error: Exception | None = None

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
                journal.close()
                text = f"cannot write a journal in {folder}: {journal.error}"
                raise RuntimeError(text) from journal.error
        return journal

    def load(self, core: Core) -> bool:
        """Restore the state of the journal in `core`, and continue the journal with its changes.

        Returns:
            False if the journal is empty, otherwise True.

        Raises:
            JournalError: the journal is damaged. Neither `core` nor the journal has changed.
            RuntimeError: another process uses the journal.
        """
        # Locked before anything is read, so that of two servers that start together one is refused.
        self._lock = lock_journal(self.folder)
        try:
            spans, has_state = _restore(self.folder, core)
        except BaseException:
            self._lock.close()
            raise
        if spans:
            self._identity = read_identity(self.folder, spans)
            self._number = spans[-1].number
            publish_file(self.folder, self._number)
            if spans[-1].kind == TORN:
                self._cut(spans[-1])
        else:
            create_file(self.folder, self._identity, 0)
            publish_file(self.folder, 0)
        self._use(journal_path(self.folder, "journal", self._number).open("r+b", buffering=0))
        core.journal = self
        return has_state

    def record(self, record: Record) -> None:
        """Write a record and return when it is written.

        Raises:
            DiskFullError: the disk has no room. The record may be passed again later.
            RuntimeError: another error of the disk.
        """
        kind, parts = encode_record(record)
        try:
            self._append(kind, parts)
            return
        except OSError:
            # If a running snapshot has filled the disk, it fails and frees its space.
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
        if self._file is None and file_numbers(self.folder, "journal"):
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
        head = record_head(self._identity, self._number, self._stop, kind, size, checksum)
        try:
            for part in (head, *parts):
                while part:
                    part = part[self._file.write(part) :]
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError:
            # If this fails too, the next call repeats it: a record that follows an incomplete one
            # would be lost, because `load` refuses both.
            with suppress(OSError):
                self._discard_incomplete_record()
            raise
        self._stop = self._file.tell()
        self._written += size

    def _discard_incomplete_record(self) -> None:
        assert self._file is not None
        self._file.truncate(self._stop)
        self._file.seek(self._stop)

    def _start_next_file(self) -> None:
        """Seal the current file and continue in a new one; after an `OSError` nothing changes."""
        number = self._number + 1
        path = create_file(self.folder, self._identity, number)
        stop = self._stop
        file = path.open("r+b", buffering=0)
        try:
            if self._file:
                self._append(SEAL, [])
            # If the server dies here, the next server finds the seal and renames the file.
            path.rename(journal_path(self.folder, "journal", number))
        except OSError:
            self._stop = stop
            if self._file:  # discard the seal
                with suppress(OSError):
                    self._discard_incomplete_record()
            file.close()
            path.unlink(missing_ok=True)
            raise
        self._number = number
        self._use(file)
        sync_folder(self.folder)

    def _write_snapshot(self, state: dict[str, Any], number: int) -> None:
        unfinished = journal_path(self.folder, "unfinished", number)
        try:
            with unfinished.open("w+b") as file:
                save_state(state, file)
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                checksum = compute_checksum(file, size)
                file.seek(size)
                file.write(snapshot_tail(self._identity, number, size, checksum))
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(journal_path(self.folder, "snapshot", number))
            sync_folder(self.folder)
            self.error = None
        except Exception as error:  # torch's writer raises RuntimeError
            # The journal files are complete without the snapshot; the next one is made later.
            unfinished.unlink(missing_ok=True)
            self._report(error)
            return
        for name in ("snapshot", "journal", "unfinished"):
            for old in (n for n in file_numbers(self.folder, name) if n < number):
                journal_path(self.folder, name, old).unlink(missing_ok=True)

    def _report(self, error: Exception) -> None:
        self.error = error
        # torch's writer does not report the cause, which is often a full disk.
        free = shutil.disk_usage(self.folder).free
        _LOG.error("cannot write a snapshot in %s (%d B free): %s", self.folder, free, error)

    def _cut(self, torn: Span) -> None:
        path = journal_path(self.folder, "journal", torn.number)
        text = "%s: removed the last %d bytes, an incomplete record"
        _LOG.warning(text, path, torn.stop - torn.start)
        os.truncate(path, torn.start)

    def _use(self, file: BinaryIO) -> None:
        self._stop = self._written = file.seek(0, os.SEEK_END)
        if self._file:
            self._file.close()
        self._file = file


def restore(folder: Path, core: Core) -> None:
    """Restore the state of a journal in `core` without continuing it; see `DiskJournal.load`."""
    with lock_journal(folder):
        if not _restore(folder, core)[1]:
            raise JournalError(f"expected a journal in {folder}, which is empty")


def _restore(folder: Path, core: Core) -> tuple[list[Span], bool]:
    """Return the spans of a journal, and whether it contains a state, after restoring it."""
    first = newest_snapshot(folder)
    has_files = first is not None or file_numbers(folder, "journal")
    spans = list(checked_spans(folder, first)) if has_files else []
    snapshot = None if first is None else read_snapshot(folder, first)
    current: list[Span] = []
    try:
        core.restore(snapshot, read_records(folder, spans, current))
    except Exception as error:
        if not current:  # the snapshot is of another job
            raise
        path = journal_path(folder, "journal", current[-1].number)
        start = current[-1].start
        raise JournalError(
            f"{path}: the record at byte {start} cannot be applied: {type(error).__name__}: "
            f"{error}. Nothing was changed. Correct the job, or discard this record and all later "
            f"ones by `{recovery_command(folder)} --before {path}:{start}`"
        ) from error
    return spans, snapshot is not None or bool(current)
