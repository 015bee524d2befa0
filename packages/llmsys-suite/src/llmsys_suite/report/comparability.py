"""Comparability of runs: refusals, warnings, and losses and counts that differ."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from llmsys_suite.config import UsageError
from llmsys_suite.folder import RunFolder
from llmsys_suite.measure.samples import loss_curves
from llmsys_suite.results import Audit, Plan, Train

#: Runs that differ in one of these keys are not comparable; other differences are warnings.
MUST_AGREE = {
    "env.json": ("processor", "cores", "threads", "gpus"),
    "config.json": (
        "size",
        "world",
        "device",
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
    "config.json": ("seed", "steps", "epochs", "warmup", "learning_rate", "stages"),
}
#: Relative difference of losses between machines, as the audit allows between ranks.
LOSS_TOLERANCE = 1e-5


def require_distinct(folders: Sequence[RunFolder]) -> None:
    """Raise UsageError if the same measurements occur twice, even in a copied folder.

    A run that is counted twice would make the intervals narrower than its samples justify, and a
    run that is compared with itself would be "same" without any evidence.
    """
    paths: dict[str, RunFolder] = {}
    for folder in folders:
        digest = hashlib.sha256((folder.path / "samples.jsonl").read_bytes()).hexdigest()
        if digest in paths:
            raise UsageError(
                f"{paths[digest].path} and {folder.path} contain the same samples; "
                "expected different runs"
            )
        paths[digest] = folder


def warnings(before: RunFolder, after: RunFolder) -> list[str]:
    """Return failed audits, and differences between two runs that may affect times or losses."""
    lines = [
        f"{len(audit.red)} checks of {folder.path} failed: {audit.red[0]}"
        for folder in dict.fromkeys((before, after))
        if isinstance(audit := folder.results.get("audit"), Audit) and not audit.passed
    ]
    for file, keys in SHOULD_AGREE.items():
        old, new = before.read_json(file), after.read_json(file)
        for key in keys:
            if old.get(key) != new.get(key):
                lines.append(f"the runs differ in {key}: {_short(old.get(key), new.get(key))}")
    return lines


def differences(before: RunFolder, after: RunFolder) -> Iterator[str]:
    """Yield every loss and count that differs between two runs, possibly of different machines."""
    require_comparable(before, after, times=False)
    for key in ("seed", "steps", "epochs", "warmup", "learning_rate"):
        old, new = (getattr(folder.config, key) for folder in (before, after))
        if old != new:
            yield f"{key}: {old} and {new}"
    old_curves, new_curves = (
        loss_curves([s for s in folder.samples() if s["stage"] == "train"])
        for folder in (before, after)
    )
    for name in old_curves.keys() | new_curves.keys():
        ours, theirs = old_curves.get(name, []), new_curves.get(name, [])
        if len(ours) != len(theirs):
            yield f"{name}: {len(ours)} losses and {len(theirs)}"
        tolerance = LOSS_TOLERANCE * math.sqrt(max(1, len(ours)))
        for step, (x, y) in enumerate(zip(ours, theirs, strict=False)):
            if not abs(y - x) <= tolerance * abs(x):
                yield f"{name}, loss of step {step}: {x:.9g} and {y:.9g}"
                break
    old_counts, new_counts = (dict(_counts(folder.summary["stages"])) for folder in (before, after))
    for key in sorted(old_counts.keys() | new_counts.keys()):
        if old_counts.get(key) != new_counts.get(key):
            yield f"{key}: {old_counts.get(key)} and {new_counts.get(key)}"


def require_comparable(before: RunFolder, after: RunFolder, *, times: bool = True) -> None:
    """Raise UsageError if two runs cannot be compared.

    A run folder must be complete and unedited. The runs must agree in the configuration keys of
    `MUST_AGREE` and, with `times`, in the machine.
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
        if times and isinstance(plan, Plan) and not plan.variants_fit_together:
            raise UsageError(
                f"the variants of {folder.path} did not fit in memory together and ran one after "
                "another, so they have no rounds to compare; choose a smaller --size"
            )
    for name, keys in MUST_AGREE.items():
        if name == "env.json" and not times:
            continue
        old, new = before.read_json(name), after.read_json(name)
        for key in keys:
            if old.get(key) != new.get(key):
                raise UsageError(
                    f"the runs differ in {key}: {_short(old.get(key), new.get(key))}; "
                    f"their {'times' if times else 'losses'} cannot be compared"
                )


def _counts(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield the integers in the results of the stages, with their paths, except measured ones."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _counts(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _counts(inner, f"{path}[{i}]")
    elif type(value) is int and path.startswith(COUNTED) and "measured" not in path:
        yield path, value


#: Stages whose integers depend on the configuration only, not on the machine.
COUNTED = ("plan.", "memory.", "scale.")


def _short(old: Any, new: Any) -> str:
    if isinstance(old, list) and isinstance(new, list):
        less, more = ([str(x) for x in a if x not in b] for a, b in ((old, new), (new, old)))
        return f"{' '.join(less) or 'nothing'} before, {' '.join(more) or 'nothing'} after"
    return f"{old} and {new}"
