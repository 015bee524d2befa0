"""Recovery of the journals of all servers of a job from damage."""

import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paramserver.journal import files
from paramserver.journal.files import JournalError
from paramserver.protocol.log import Log


def list_journal_folders(folder: Path) -> list[Path]:
    """Return the folders that contain journals of a job's servers, in the order of the servers."""
    paths = {p for p in folder.glob("server-*") if re.fullmatch(r"server-\d+", p.name)}
    # A server that was killed right after its start leaves nothing but the lock file.
    present = [path for path in paths if any(file.name != files.LOCK for file in path.iterdir())]
    return sorted(present, key=lambda path: int(path.name[7:]))


def recover(folder: str | Path) -> list[str]:
    """Truncate a damaged journal to its last good record; return the lines of a report.

    Discarded records and files are moved into `discarded-N` of the same folder.

    Args:
        folder: the folder of one server, or a folder that contains the folders of all servers of a
            job. With all servers, no server remains ahead of records that another server has lost.

    Raises:
        JournalError: a journal has no good record, or starts after the last good record of another
            server. Nothing has changed.
        RuntimeError: another process uses one of the journals.
    """
    folder = Path(folder)
    folders = list_journal_folders(folder) or [folder]
    with ExitStack() as locks:
        for path in folders:
            locks.enter_context(files.lock_journal(path))
        return _recover_locked(folders)


def has_entries(folder: Path) -> bool:
    """Return True if the journal in `folder` contains an entry of the log."""
    # A server that was killed before it published its first file has no entries.
    has_files = files.list_numbers(folder, "snapshot") or files.list_numbers(folder, "journal")
    return bool(has_files) and _GoodPart(folder).get_last_end().position > 0


def _recover_locked(folders: list[Path]) -> list[str]:
    good_parts = [_GoodPart(path) for path in folders]
    ends = [part.get_last_end() for part in good_parts]
    # The first server must not continue after a record that a damaged server has lost, and no
    # server may remain ahead of the first one.
    damaged = [end.position for part, end in zip(good_parts, ends, strict=True) if part.error]
    if damaged:
        ends[0] = good_parts[0].get_last_end(min(damaged))
    ends[1:] = [
        part.get_last_end(min(end.position, ends[0].position))
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
    """A possible end of a journal: byte `stop` of a file, after `position` entries of the log."""

    position: int
    file_number: int
    stop: int


class _GoodPart:
    """The part of a journal before its first damage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: The first damage; empty if there is none.
        self.error = ""
        self._ends: list[_End] = []
        self._identity = b""
        snapshots = sorted(files.list_numbers(folder, "snapshot"), reverse=True)
        for snapshot in [*snapshots, None]:
            self._scan(snapshot)
            if self._ends:
                return
        raise JournalError(
            f"expected a good record in {folder}, got none: {self.error or 'it is empty.'} "
            "Restore the folder from a copy, or pass an empty one"
        )

    def _scan(self, snapshot: int | None) -> None:
        position = 0
        try:
            if snapshot is not None:
                self._identity = files.check_snapshot(self.folder, snapshot)
                position = int(files.read_snapshot(self.folder, snapshot)["replica"]["position"])
                self._ends.append(_End(position, snapshot, files.FILE_HEAD.size))
            for span in files.iter_checked_spans(self.folder, snapshot):
                if span.kind == files.START:
                    self._identity = files.read_identity(self.folder, [span])
                if span.kind == files.REPLAYED:
                    position = Log.from_text(files.read_body(self.folder, span).decode()).stop
                if span.kind not in (files.SEAL, files.TORN):
                    self._ends.append(_End(position, span.file_number, span.stop))
        except JournalError as error:
            self.error = self.error or str(error)

    def get_last_end(self, position: int | None = None) -> _End:
        """Return the last possible end, at most at entry `position` of the log."""
        ends = [end for end in self._ends if position is None or end.position <= position]
        if not ends:
            raise JournalError(
                f"{self.folder} starts after entry {position} of the log, at which another server "
                "would end; restore copies of all servers' folders that were made at one time"
            )
        return ends[-1]

    def cut(self, end: _End) -> list[str]:
        """Truncate at `end` and move the remainder to `discarded-N`; return a report's lines."""
        path = files.build_path(self.folder, "journal", end.file_number)
        later = [
            files.build_path(self.folder, name, number)
            for name in ("journal", "snapshot", "next")
            for number in files.list_numbers(self.folder, name)
            if number > end.file_number
        ]
        if not self.error and not later and path.exists() and path.stat().st_size == end.stop:
            return []
        numbers = (n for n in range(10**6) if not (self.folder / f"discarded-{n}").exists())
        discarded = self.folder / f"discarded-{next(numbers)}"
        discarded.mkdir()
        lines = []
        # This process may die between any two changes. Until the file is truncated, the good part
        # stays where it is, so that another call finds it.
        for file_path in later:
            file_path.rename(discarded / file_path.name)
            lines.append(f"{file_path} was moved to {discarded}")
        if path.exists():
            shutil.copyfile(path, discarded / path.name)
            lines.append(f"{path} now ends at byte {end.stop}; the original is in {discarded}")
        if end.stop > files.FILE_HEAD.size:
            os.truncate(path, end.stop)
        else:  # the head may be damaged or missing
            files.create_file(self.folder, self._identity, end.file_number).rename(path)
        files.sync_folder(self.folder)
        return lines
