"""A checkpoint folder that is written beside its final path and renamed when it is complete.

Note [Two jobs, one path]
Each save writes to a separate folder, so the files of two saves never mix. The path is locked from
the first file to the last rename. A second job that saves to a locked path gets an error, because
it would replace the checkpoint of the first job. The operating system releases the lock when the
process that locked the path dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from zero.checkpoint import checksums

LOCKED_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EACCES)


class PathLock:
    """An exclusive lock on a path, in a file beside it that is removed with the lock.

    A killed process leaves the file behind, but not the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.with_name(f".{path.name}.lock")
        self._handle: int | None = None

    def acquire(self) -> None:
        """Lock the path; raise RuntimeError if it is locked, OSError if it cannot be locked."""
        while self._handle is None:
            handle = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The file may have been removed by its last holder since it was opened.
                if _is_same_file(handle, self.file):
                    os.ftruncate(handle, 0)
                    os.pwrite(
                        handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0
                    )
                    self._handle = handle
                    handle = -1
            except OSError as error:
                if error.errno in LOCKED_BY_ANOTHER:
                    holder = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
                    raise RuntimeError(
                        f"{self.path} is being saved to by {holder}: save to a separate path per "
                        "job, or wait until that save is done"
                    ) from None
                raise OSError(
                    error.errno,
                    f"{self.file} cannot be locked ({error.strerror}), so that two jobs could "
                    "replace each other's checkpoints: save to a file system with locks (for NFS "
                    "and Lustre, a mount option), and copy from there",
                ) from None
            finally:
                if handle >= 0:
                    os.close(handle)

    def release(self) -> None:
        """Unlock the path; do nothing if it is not locked.

        Errors are ignored: the save has already succeeded or raised, and the next save accepts a
        lock file that could not be removed.
        """
        if self._handle is None:
            return
        handle = self._handle
        self._handle = None
        with suppress(OSError):
            self.file.unlink(missing_ok=True)
        with suppress(OSError):
            # Forked processes, such as those of a DataLoader, have copies of the handle.
            fcntl.flock(handle, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(handle)


def _is_same_file(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False


class Draft:
    """The folder in which one save is written. Rank 0 locks the path, and broadcasts `token`."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{path} is a file: choose a folder")
        self.path = path
        self.token = secrets.token_hex(8)
        self.folder = build_draft_path(path, self.token)
        self._lock = PathLock(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        try:
            # An earlier save may have been killed between its two renames.
            if not path.exists() and build_previous_path(path).exists():
                build_previous_path(path).rename(path)
            self._remove_stale()
            self.folder.mkdir()
        except BaseException:
            self._lock.release()
            raise

    def publish(self) -> None:
        """Copy other files at the path into the folder, and rename the folder to its final path."""
        copy_other_files(self.path, self.folder)
        replace_folder(self.folder, self.path)

    def close(self) -> None:
        """Unlock the path, and remove the folder unless it was published."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()

    def _remove_stale(self) -> None:
        """Remove the folders of killed saves; the lock ensures that no other save is running."""
        name = re.compile(rf"\.{re.escape(self.path.name)}\.[0-9a-f]{{16}}\.saving")
        for folder in self.path.parent.iterdir():
            if name.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)


def build_draft_path(path: Path, token: str) -> Path:
    """Return the folder in which the save called `token` is written."""
    return path.with_name(f".{path.name}.{token}.saving")


def build_previous_path(path: Path) -> Path:
    """Return the path of the last good checkpoint while a new one replaces it."""
    return path.with_name(f".{path.name}.previous")


def find_checkpoint(path: Path) -> Path:
    """Return the path of the checkpoint, even if a save was killed between its renames."""
    if path.exists():
        return path  # the name of a link may have a suffix that its target does not have
    # `..` also works in the real path if the folder before it does not exist.
    real = Path(os.path.realpath(path))
    previous = build_previous_path(real)
    return previous if not real.exists() and previous.exists() else real


def _link_or_copy(file: str | Path, target: str | Path) -> None:
    """Hard-link a file at `target`, or copy it if it cannot be linked."""
    # A process that has the file open, such as a logger, continues to write to the linked file.
    try:
        os.link(file, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(file, target, follow_symlinks=False)


def copy_other_files(path: Path, draft: Path) -> None:
    """Copy files in `path` that belong to no checkpoint into `draft`, which will replace `path`."""
    for other in path.iterdir() if path.is_dir() else ():
        target = draft / other.name
        is_checkpoint = other.name in (".metadata", checksums.NAME) or other.match("__*.distcp")
        if is_checkpoint or target.exists():
            continue
        if other.is_dir() and not other.is_symlink():
            shutil.copytree(other, target, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(other, target)


def replace_folder(draft: Path, path: Path) -> None:
    """Rename a finished folder to `path`; until then, keep the old one under its previous path."""
    old = build_previous_path(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    draft.rename(path)
    shutil.rmtree(old, ignore_errors=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
