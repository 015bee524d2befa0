"""The run folder: everything that was measured, raw, and everything that was made of it.

Files are written beside themselves and renamed, so none is ever half there; samples are appended
a line at a time, so what was measured before an interruption stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmsys_suite.config import RunConfig

Sample = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """A folder with env.json, config.json, samples.jsonl, summary.json, checks.json and reports."""

    path: Path

    @classmethod
    def create(cls, config: RunConfig, environment: dict[str, Any]) -> RunFolder:
        """Make the folder; until `finish` its summary says that the run is incomplete."""
        config.out.mkdir(parents=True, exist_ok=True)
        folder = cls(config.out)
        folder.write_json("config.json", config.to_json())
        folder.write_json("env.json", environment)
        folder.write_json("summary.json", {"status": "incomplete", "stages": {}})
        (folder.path / "samples.jsonl").touch()
        return folder

    def write_json(self, name: str, value: Any) -> None:
        """Write one JSON file whole."""
        self.write_text(name, json.dumps(value, indent=1) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write one text file whole."""
        beside = self.path / f".{name}.part"
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, self.path / name)

    def read_json(self, name: str) -> Any:
        """One JSON file; FileNotFoundError where this is no run folder."""
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    @property
    def config(self) -> RunConfig:
        """What the run was asked to do."""
        return RunConfig.from_json(self.read_json("config.json"))

    @property
    def summary(self) -> dict[str, Any]:
        """Status, and each finished stage's results."""
        summary: dict[str, Any] = self.read_json("summary.json")
        return summary

    @property
    def complete(self) -> bool:
        """Whether the run got to its end."""
        return bool(self.summary["status"] == "complete")

    def add_stage(self, stage: str, result: dict[str, Any]) -> None:
        """Keep one finished stage's results."""
        summary = self.summary
        summary["stages"][stage] = result
        self.write_json("summary.json", summary)

    def finish(self) -> None:
        """Mark the run complete."""
        self.write_json("summary.json", self.summary | {"status": "complete"})

    def append_samples(self, samples: Iterable[Sample]) -> None:
        """Add raw measurements, a line each."""
        with (self.path / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(sample) + "\n" for sample in samples))

    def samples(self) -> list[Sample]:
        """All raw measurements; a last line cut short by a kill is left out."""
        rows = []
        for line in (self.path / "samples.jsonl").read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows
