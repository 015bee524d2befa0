"""Write docs/answers.md: every question of the source material, and what answers it.

    python docs/answers.py                  compute all answers and write the page
    python docs/answers.py --data FOLDER    and those that need the data sets of scaling's README

Numbers come from the table in accounting's tests and are computed while the page is written;
arguments come from answers.toml. A test writes the page again and compares. What needs the data
sets, which are not ours to ship, keeps the values of the last run that had them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "answers.md"
REASONED = ROOT / "docs" / "answers.toml"
WITH_DATA = ROOT / "docs" / "answers_with_data.json"

sys.path.insert(0, str(ROOT / "packages" / "accounting" / "tests"))

Row = tuple[str, str, str]

# Sections of accounting's own table, by the first letters of an answer's id.
COMPUTED = {
    "a": "A. Short answers",
    "c1": "B. GPU performance",
    "c2": "B. Bytes of parallel training: 32 layers, d = 4096, batch 128 x 4096, 8 GPUs, fp16",
    "m": "C. Memory of the 2.7B model",
    "b": "C. Overhead of data parallelism",
    "x": "C. Communication accounting of the XXL model: d = 16384, d_ff = 53248, 126 blocks",
    "cs336": "C. Parameters of the course's models, vocabulary 10,000",
    "z": "C. Sharding the optimizer of xl",
    "l": "D. LoRA",
    "s": "D. Soft prompts",
    "f": "D. Fermi estimates",
    "r": "Published runs, reproduced",
    "p": "Published models: parameters",
    "pa": "Published models: active parameters",
    "kv": "Published models: bytes of the KV cache for a token",
}


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    if arguments.data:
        WITH_DATA.write_text(json.dumps(answers_with_data(arguments.data), indent=1) + "\n")
    PAGE.write_text(page())


def page() -> str:
    """The whole page as Markdown."""
    written = tomllib.loads(REASONED.read_text())
    sections = {**_computed(), **_reasoned(written["answer"]), **_scaling()}
    order = sorted(sections, key=lambda title: (title[1] != ".", title[0]))
    return "\n".join([written["header"], *(sections[title] for title in order)])


def _computed() -> dict[str, str]:
    from answers import ANSWERS

    groups: dict[str, list[str]] = {}
    for answer in ANSWERS:
        prefix = next(p for p in sorted(COMPUTED, key=len, reverse=True) if _belongs(answer.id, p))
        value = _value(answer.compute())
        groups.setdefault(COMPUTED[prefix], []).append(
            f"| {answer.question} | {value} {answer.unit} | `{answer.call}` | {answer.derivation} |"
        )
    head = "| question | answer | accounting | derivation |\n|---|---|---|---|\n"
    return {t: f"## {t}\n\n{head}" + "\n".join(rows) + "\n" for t, rows in groups.items()}


def _belongs(identifier: str, prefix: str) -> bool:
    rest = identifier.removeprefix(prefix)
    return identifier.startswith(prefix) and not rest[:1].isalpha()


def _reasoned(answers: list[dict[str, Any]]) -> dict[str, str]:
    values = _values()
    groups: dict[str, list[str]] = {}
    for entry in answers:
        argument = " ".join(entry["answer"].split()).format(**values)
        row = (entry["question"], argument, ", ".join(entry["shown_by"]))
        groups.setdefault(entry["section"], []).append(_line(row))
    head = "| question | answer | shown by |\n|---|---|---|\n"
    return {t: f"## {t}\n\n{head}" + "\n".join(rows) + "\n" for t, rows in groups.items()}


def _values() -> dict[str, Any]:
    """What the reasoned answers quote, computed."""
    import tinyml
    import torch
    from llmsys_suite.stages.precision import accumulation
    from torch import nn

    sums = ", ".join(
        f"{row['sum']:.6g} ({row['sum_in']} sum, {row['term_in']} terms)" for row in accumulation()
    )
    torch.manual_seed(0)
    pruned = tinyml.prune(nn.Linear(5, 5, bias=False), 0.75).model
    centroids, _ = tinyml.kmeans(torch.randn(25), 16)
    return {
        "accumulation": f"{sums}. Terms may be rounded, sums may not.",
        "pruned": sum(int((p == 0).sum()) for p in pruned.parameters()),
        "colours": len(centroids),
    }


def _scaling() -> dict[str, str]:
    from scaling import Law

    law = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
    optimum = law.optimal(5.76e23)
    rows = [
        (
            "Chinchilla's optimum in closed form at 5.76e23 FLOPs, rounded constants",
            f"N = {optimum.parameters:.4e}, D = {optimum.tokens:.4e}, "
            f"D/N = {optimum.tokens / optimum.parameters:.1f}",
            "`Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28).optimal(5.76e23)`",
        ),
        *(tuple(row) for row in json.loads(WITH_DATA.read_text())),
    ]
    head = "| question | answer | scaling |\n|---|---|---|\n"
    title = "E. Scaling laws"
    return {title: f"## {title}\n\n{head}" + "\n".join(_line(row) for row in rows) + "\n"}


def answers_with_data(folder: Path) -> list[Row]:
    """IsoFLOP and parametric fits of the two public data sets."""
    return [*_isoflop(folder / "isoflops_curves.json"), *_parametric(folder)]


def _isoflop(path: Path) -> Iterator[Row]:
    import scaling

    runs = scaling.load_runs(path)
    fits: tuple[tuple[str, dict[str, Any]], ...] = (
        ("IsoFLOP fit: a parabola for each budget", {"degree": 2}),
        ("The same, all budgets skewed alike", {}),
        ("The usual shortcut, the best run of each budget", {"method": "minimum"}),
    )
    for label, options in fits:
        with warnings.catch_warnings(record=True) as doubts:
            warnings.simplefilter("always")
            fit = scaling.fit_isoflop(runs, **options)
        parts = []
        for compute in (1e23, 1e24):
            best = fit.optimal(compute)
            parts.append(f"at {compute:.0e} N = {best.parameters:.4e}, D = {best.tokens:.4e}")
        parts.append(f"{len(doubts)} warnings")
        call = ", ".join(["load_runs(...)", *(f"{k}={v!r}" for k, v in options.items())])
        yield label, "; ".join(parts), f"`fit_isoflop({call})`"


def _parametric(folder: Path) -> Iterator[Row]:
    import scaling

    runs = scaling.load_runs(folder / "chinchilla_svg_extracted_data.csv").without_highest(5)
    for loss, label in (("huber", "Huber on log-loss"), ("lad", "least absolute deviations")):
        law = scaling.fit_parametric(runs, loss=loss).law
        yield (
            f"Parametric fit of the points read off Chinchilla's figure 4, {label}",
            f"E = {law.E:.6g}, A = {law.A:.6g}, B = {law.B:.6g}, alpha = {law.alpha:.5g}, "
            f"beta = {law.beta:.5g}",
            f"`fit_parametric(load_runs(...).without_highest(5), loss={loss!r})`",
        )


def _line(row: tuple[str, ...]) -> str:
    return "| " + " | ".join(row) + " |"


def _value(value: Any) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.7g}"
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) < 1e16 else f"{value:.6g}"
    return str(value)


if __name__ == "__main__":
    main()
