"""Atomic writes: a reader sees the complete new file or the old one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename the file to `path` if the body succeeds.

    If the body raises an error, the temporary file is deleted. If `path` is a symbolic link, the
    file to which it points is replaced.
    """
    path = Path(os.path.realpath(path))  # `Path.resolve` raises an error for links in a circle
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
