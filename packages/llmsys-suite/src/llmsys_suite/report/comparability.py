"""Conditions under which two runs can be compared, and warnings about their differences."""

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
        "size", "world", "preset", "backend", "dtype", "rows", "context", "tokenizer", "vocabulary",
    ),
}  # fmt: skip
SHOULD_AGREE = {
    "env.json": ("cpu_flags", "python", "torch", "platform", "driver", "governor", "text"),
    "config.json": ("seed", "steps", "warmup", "learning_rate", "stages"),
}


def list_warnings(before: RunFolder, after: RunFolder) -> list[str]:
    """Return sentences on failed audits, and on differences that may affect times or losses."""
    lines = []
    for folder in dict.fromkeys((before, after)):
        audit = folder.results.get("audit")
        if isinstance(audit, Audit) and not audit.passed:
            failed = f"{len(audit.red)} of {audit.checks} checks"
            lines.append(f"{failed} of {folder.path} failed; the first is {audit.red[0]}")
    return lines + _describe_differences(before, after, SHOULD_AGREE)


def require_comparable(before: RunFolder, after: RunFolder) -> None:
    """Raise `UsageError` if two runs cannot be compared.

    Both runs must be complete and unedited, and must have trained their variants interleaved. They
    must agree in the keys of `MUST_AGREE`. Their samples must differ, because a run and its copy
    would get the verdict "same" without any evidence.
    """
    for folder in (before, after):
        folder.require_whole()
        if not folder.complete:
            raise UsageError(f"{folder.path} is an incomplete run; compare complete runs")
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
    if differences := _describe_differences(before, after, MUST_AGREE):
        raise UsageError(f"{differences[0]}; their times cannot be compared")
    samples = [(folder.path / "samples.jsonl").read_bytes() for folder in (before, after)]
    if samples[0] == samples[1]:
        raise UsageError(
            f"{before.path} and {after.path} contain the same samples; expected different runs"
        )


def _describe_differences(
    before: RunFolder, after: RunFolder, keys_of_file: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a sentence for each of the keys in which two runs differ."""
    lines = []
    for file, keys in keys_of_file.items():
        old, new = before.read_json(file), after.read_json(file)
        for key in keys:
            if old.get(key) != new.get(key):
                lines.append(
                    f"the runs differ in {key}: {_describe_values(old.get(key), new.get(key))}"
                )
    return lines


def _describe_values(old: Any, new: Any) -> str:
    """Return both values, or of two lists only the entries that the other list does not have."""
    if isinstance(old, list) and isinstance(new, list):
        removed = " ".join(str(entry) for entry in old if entry not in new)
        added = " ".join(str(entry) for entry in new if entry not in old)
        return f"{removed or 'nothing'} before, {added or 'nothing'} after"
    return f"{old} and {new}"
