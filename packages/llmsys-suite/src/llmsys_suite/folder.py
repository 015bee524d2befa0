"""The run folder: raw measurements and everything that is derived from them.

- JSON files and reports are written under another name and renamed, so that a reader never finds
  them incomplete. Samples are appended line by line, so that an interruption loses few of them.
- A finished folder is sealed: manifest.json contains the digest of every file that is not in a
  subfolder. `RunFolder.open` refuses edited and truncated files, and folders of other formats.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.results import from_json

Sample = dict[str, Any]
#: Version of the folder's format, increased whenever the content of its files changes.
FORMAT = 17
MANIFEST = "manifest.json"
#: Files that other commands read. Every run writes the first four.
RECORDS = (
    "config.json", "env.json", "samples.jsonl", "summary.json",
    "checks.json", "evidence.json", "model.safetensors", "tokenizer.json",
)  # fmt: skip


class FolderTaken(UsageError):
    """Error for a path that is a file, or a folder with files, such as those of another run."""


@dataclass(frozen=True)
class RunFolder:
    """A folder with env.json, config.json, samples.jsonl, summary.json, checks.json and reports."""

    path: Path

    def restart(self) -> None:
        """Replace the results and the samples of an earlier attempt by empty files."""
        self.write_json("summary.json", {"format": FORMAT, "status": "incomplete", "stages": {}})
        self.write_text("samples.jsonl", "")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return the run folder `path`.

        Raises UsageError if it is not a run folder, and as `require_whole` does.
        """
        if not (path / "summary.json").exists():
            raise UsageError(f"expected a run folder, got {path}, which has no summary.json")
        folder = cls(path)
        folder.require_whole()
        return folder

    def write_json(self, name: str, value: Any) -> None:
        """Write one JSON file atomically."""
        self.write_text(name, json.dumps(value, indent=1) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write one text file atomically, also if several threads or ranks write it at once."""
        temporary = self.path / f".{name}.{os.getpid()}.{threading.get_ident()}.part"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path / name)

    def read_json(self, name: str) -> Any:
        """Return the value of one JSON file; raise UsageError if it is missing or not JSON."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.path / name} cannot be read: {error}") from None

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return RunConfig.from_json(self.read_json("config.json"))

    @property
    def summary(self) -> dict[str, Any]:
        """The status of the run, and the results of each finished stage as JSON values.

        Raises UsageError if another version wrote the folder.
        """
        summary: Any = self.read_json("summary.json")
        received = summary.get("format") if isinstance(summary, dict) else None
        if received != FORMAT:
            raise UsageError(
                f"expected a run folder of format {FORMAT}, got {self.path} of format {received}; "
                "repeat the run, or use the version that wrote it"
            )
        return dict(summary)

    @property
    def complete(self) -> bool:
        """True if the run has finished its last stage."""
        return bool(self.summary["status"] == "complete")

    @property
    def results(self) -> dict[str, Any]:
        """The results of each finished stage, as dataclasses of `results`."""
        return from_json(self.summary["stages"])

    def add_stage(
        self, stage: str, result: Any, seconds: float = 0.0, peak_mib: float = 0.0
    ) -> None:
        """Store the results of a stage, its duration, and the peak memory of a process in it."""
        summary = self.summary
        cost = {"stage_seconds": seconds, "peak_process_mib": peak_mib}
        summary["stages"][stage] = (asdict(result) if result is not None else {}) | cost
        self.write_json("summary.json", summary)

    def fail(self, stage: str, reason: str) -> None:
        """Record why the run failed in `stage`; its status stays incomplete."""
        summary = self.summary
        self.write_json("summary.json", summary | {"failed_stage": stage, "reason": reason})

    @property
    def failure(self) -> tuple[str, str] | None:
        """The stage in which the run failed, and the reason; None if no failure was recorded."""
        summary = self.summary
        if "failed_stage" not in summary:
            return None
        return summary["failed_stage"], summary["reason"]

    def finish(self) -> None:
        """Mark the run complete and seal it."""
        self.write_json("summary.json", self.summary | {"status": "complete"})
        self.seal()

    def seal(self) -> None:
        """Write the manifest: the digest of every file outside of subfolders."""
        files = sorted(path for path in self.path.iterdir() if path.is_file())
        digests = {path.name: _compute_digest(path) for path in files if path.name != MANIFEST}
        self.write_json(MANIFEST, digests)

    def require_whole(self) -> None:
        """Raise UsageError if the format is another one, or if files of a finished run changed.

        The files of an unfinished run are not checked, because it has no manifest.
        """
        # A folder of another format is refused as such, not as an edited one.
        is_complete = self.complete
        if not (self.path / MANIFEST).exists():
            if is_complete:
                raise UsageError(f"{self.path} has no {MANIFEST}; it was deleted or never written")
            return
        digests = self.read_json(MANIFEST)
        if not isinstance(digests, dict):
            raise UsageError(f"{self.path / MANIFEST} was changed; restore it or run again")
        for name in dict.fromkeys((*RECORDS, *digests)):
            path = self.path / name
            if digests.get(name) != (_compute_digest(path) if path.exists() else None):
                raise UsageError(f"{path} was changed, added or deleted; restore it or run again")

    def append_samples(self, samples: Iterable[Sample]) -> None:
        """Append raw measurements to samples.jsonl, one line per sample."""
        with (self.path / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(sample) + "\n" for sample in samples))

    def samples(self) -> list[Sample]:
        """Return the raw measurements. A last line without a newline is left out as truncated."""
        text = (self.path / "samples.jsonl").read_text(encoding="utf-8")
        lines = text.rpartition("\n")[0].splitlines()
        # Parsed in one call, samples share the strings of their keys, which saves memory.
        samples: list[Sample] = json.loads(f"[{','.join(lines)}]")
        return samples


def claim_folder(config: RunConfig) -> RunConfig:
    """Create the run folder for this run alone, and return `config` with its path.

    Without `config.out` the folder is `runs/DATE-TIME`, with a number appended if another run of
    the same second has that name. Raises UsageError if the folder is not empty, is a file, or
    cannot be written, or if all of these names are taken.
    """
    if config.out is not None:
        return _claim(config, config.out)
    time = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    names = [time, *(f"{time}.{number}" for number in range(2, 100))]
    for name in names:
        with contextlib.suppress(FolderTaken):
            return _claim(config, Path("runs") / name)
    raise UsageError(f"runs/{time} to runs/{names[-1]} are not empty; name a folder with --out")


def _claim(config: RunConfig, out: Path) -> RunConfig:
    claimed = replace(config, out=out)
    create_folder(out, "config.json", json.dumps(claimed.to_json(), indent=1) + "\n")
    RunFolder(out).restart()
    return claimed


def create_folder(folder: Path, name: str, text: str) -> None:
    """Create a folder, unless it exists and is empty, and write one file into it.

    Raises FolderTaken if the folder has files or is a file, and UsageError if writing fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError
        # If two programs find the same empty folder, only one of them can create the file.
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        state = "is not empty" if folder.is_dir() else "is not a folder"
        raise FolderTaken(f"{folder} exists and {state}; name another folder") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{folder} cannot be written ({reason}); name another folder") from None


def _compute_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
