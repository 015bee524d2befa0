"""Checks that two runs can be compared: errors and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmsys_suite.config import UsageError
from llmsys_suite.folder import RunFolder
from llmsys_suite.results import Audit, Plan, Train

#: Runs that differ in one of these keys are not comparable. Differences in the keys of
#: `SHOULD_AGREE` are warnings.
MUST_AGREE = {
    "env.json": ("processor", "cores", "threads", "gpus"),
    "config.json": (
        "size",
        "world",
        "preset",
        "backend",
        "dtype",
        "rows",
        "context",
        "tokenizer",
        "vocabulary",
    ),
}
SHOULD_AGREE = {
    "env.json": ("cpu_flags", "python", "torch", "platform", "driver", "governor", "text"),
    "config.json": ("seed", "steps", "warmup", "learning_rate", "stages"),
}


def warnings(before: RunFolder, after: RunFolder) -> list[str]:
    """Return sentences on failed audits, and on differences that may affect times or losses."""
    lines = [
        f"{len(audit.red)} checks of {folder.path} failed: {audit.red[0]}"
        for folder in dict.fromkeys((before, after))
        if isinstance(audit := folder.results.get("audit"), Audit) and not audit.passed
    ]
    return lines + _differences(before, after, SHOULD_AGREE)


def require_comparable(before: RunFolder, after: RunFolder) -> None:
    """Raise UsageError if two runs cannot be compared.

    Both runs must be complete and unedited, and must have trained their variants interleaved. They
    must agree in the keys of `MUST_AGREE`. A run that is compared with a copy of itself would be
    "same" without any evidence, so that their samples must differ.
    """
    for folder in (before, after):
        folder.require_whole()
        if not folder.complete:
            raise UsageError(f"{folder.path} is an incomplete run; compare complete ones")
        if not isinstance(folder.results.get("train"), Train):
            raise UsageError(
                f"{folder.path} has no stage train that ended; compare runs of that stage"
            )
        plan = folder.results.get("plan")
        if isinstance(plan, Plan) and not plan.variants_fit_together:
            raise UsageError(
                f"the variants of {folder.path} did not fit in memory together and ran one after "
                "another, so they have no rounds to compare; choose a smaller --size"
            )
    if differences := _differences(before, after, MUST_AGREE):
        raise UsageError(f"{differences[0]}; their times cannot be compared")
    samples = [(folder.path / "samples.jsonl").read_bytes() for folder in (before, after)]
    if samples[0] == samples[1]:
        raise UsageError(
            f"{before.path} and {after.path} contain the same samples; expected different runs"
        )


def _differences(
    before: RunFolder, after: RunFolder, keys_of_file: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a sentence for each of the keys in which two runs differ."""
    lines = []
    for file, keys in keys_of_file.items():
        old, new = before.read_json(file), after.read_json(file)
        for key in keys:
            if old.get(key) != new.get(key):
                lines.append(f"the runs differ in {key}: {_short(old.get(key), new.get(key))}")
    return lines


def _short(old: Any, new: Any) -> str:
    if isinstance(old, list) and isinstance(new, list):
        less, more = ([str(x) for x in a if x not in b] for a, b in ((old, new), (new, old)))
        return f"{' '.join(less) or 'nothing'} before, {' '.join(more) or 'nothing'} after"
    return f"{old} and {new}"
