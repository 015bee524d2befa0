"""Run every package's bench, keep the rows under docs/results, and write them into the READMEs.

    python docs/measure.py                  measure all packages, then write the READMEs
    python docs/measure.py ddp zero         measure these
    python docs/measure.py ddp:two-hosts    measure one run of a package's
    python docs/measure.py --write-only     write the READMEs from the newest results

No number in a README's "Measured" section is typed by hand: a test renders the results again and
compares.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->"
TWO_HOSTS = ["tests/emulated_hosts.py", "--hosts", "2", "--rate", "2gbit", "--", sys.executable]
SHARED = ["--all-reduce", "collectives:all_reduce", "--allocate", "collectives:shared_empty"]

# What each package measures: a label, where there are several runs, and the command line.
BENCHES: dict[str, dict[str, list[str]]] = {
    "accounting": {"": ["-m", "accounting.bench"]},
    "collectives": {
        "one-host": [
            *("-m", "collectives.bench", "--world", "2", "4", "6"),
            *("--sizes", "1024", "65536", "1048576", "10485760", "104857600"),
            *("--plot", "docs/results/collectives-bandwidth.png"),
        ],
        "one-gibibyte": ["-m", "collectives.bench", "--sizes", "1073741824"],
        "two-hosts": [
            *(*TWO_HOSTS, "-m", "collectives.bench"),
            *("--sizes", "1024", "65536", "1048576", "16777216"),
        ],
    },
    "ddp": {
        "one-host": ["-m", "ddp.bench", "--rounds", "16", *SHARED],
        "two-hosts": [*TWO_HOSTS, "-m", "ddp.bench", "--rounds", "8"],
        # The largest model there is takes 16 GB, and most of the machine's time; so one design.
        "xl": [
            *("-m", "ddp.bench", "--model", "suite_workloads:xl"),
            *("--designs", "25 MB", "--rounds", "2"),
        ],
    },
    "flashattn2": {"": ["-m", "flashattn2.bench", "--quick"]},
    "interp": {"": ["-m", "interp.bench", "--quick"]},
    "llmsys-suite": {"": ["-m", "llmsys_suite.bench"]},
    "paramserver": {"": ["-m", "paramserver.bench", "--quick"]},
    "scaling": {"": ["-m", "scaling.bench"]},
    "tinyml": {"": ["-m", "tinyml.bench", "--quick"]},
    "zero": {
        "one-host": ["-m", "zero.bench", "--link", "loopback"],
        "two-hosts": [*TWO_HOSTS, "-m", "zero.bench", "--link", "2 Gbit/s"],
    },
}

# What a README quotes where all rows and columns would be a wall; the file keeps the rest.
QUOTED: dict[str, dict[str, tuple[str, ...]]] = {
    "collectives": {
        "algorithm": ("auto", "shared_empty"),
        "columns": (
            *("case", "algorithm", "runs", "world", "hosts", "size_bytes", "time_us", "p99_us"),
            *("busbw_gbps", "wrong", "wire_bytes", "ratio_p50", "ratio_p10", "ratio_p90"),
            "over_best_p50",
        ),
    },
}


def main() -> None:
    """Measure, then write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="*", default=[])
    parser.add_argument("--write-only", action="store_true")
    arguments = parser.parse_args()
    if not arguments.write_only:
        for wanted in arguments.packages or BENCHES:
            name, _, label = wanted.partition(":")
            for each in [label] if label else BENCHES[name]:
                measure(name, each)
    write_readmes()


def measure(name: str, label: str) -> None:
    """Run one bench of a package and keep its rows beside what they depend on."""
    from llmsys_suite.environment import environment

    facts = environment()
    machine = "gpu" if facts["gpus"] else "cpu"
    folder = RESULTS / f"{date.today().isoformat()}-{machine}"
    folder.mkdir(parents=True, exist_ok=True)
    command = BENCHES[name][label]
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.json"
        command_line = [sys.executable, *command, "--json", str(rows)]
        # Workloads of several packages live among the tests.
        variables = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
        subprocess.run(command_line, cwd=ROOT, check=True, env=variables)
        kept = {
            "environment": facts,
            "command": _shown(command),
            "rows": json.loads(rows.read_text()),
        }
    path = folder / f"{name}{'-' if label else ''}{label}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n")


def write_readmes() -> None:
    """Fill the marked section of every README that has results."""
    for name in BENCHES:
        readme = ROOT / "packages" / name / "README.md"
        shown = rendered(name)
        head, rest = readme.read_text().split(BEGIN)
        readme.write_text(head + BEGIN + shown + END + rest.split(END)[1])


def rendered(name: str) -> str:
    """The newest results of one package, as Markdown."""
    parts = []
    for label in BENCHES[name]:
        found = sorted(RESULTS.glob(f"*/{name}{'-' if label else ''}{label}.json"))
        if found:
            kept = json.loads(found[-1].read_text())
            parts.append(_section(kept, _quoted(name, kept["rows"])))
    if name in QUOTED:
        parts.append("All rows and columns: `docs/results`.\n")
    return "\n".join(parts)


def _quoted(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    wanted = dict(QUOTED.get(name, {}))
    columns = wanted.pop("columns", None)
    kept = (row for row in rows if all(row[key] in values for key, values in wanted.items()))
    return [{k: v for k, v in row.items() if columns is None or k in columns} for row in kept]


def _section(kept: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    facts = kept["environment"]
    where = ", ".join(facts["gpus"]) or f"{facts['processor']}, {facts['cores']} cores"
    lines = [
        f"`{kept['command']}`, {facts['date'][:10]}: {where}; torch {facts['torch']}, "
        f"Python {facts['python']}.",
        "",
    ]
    for columns, group in groupby(rows, key=tuple):
        lines.append("| " + " | ".join(column.replace("_", " ") for column in columns) + " |")
        lines.append("|" + "---|" * len(columns))
        lines += ["| " + " | ".join(map(_cell, row.values())) + " |" for row in group]
        lines.append("")
    return "\n".join(lines)


def _cell(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _shown(command: list[str]) -> str:
    return " ".join(["python", *("python" if part == sys.executable else part for part in command)])


if __name__ == "__main__":
    main()
