"""Run every package's bench, store the rows in docs/results, and write them into the pages.

    python docs/measure.py                  measure all packages, then write the pages
    python docs/measure.py ddp zero         measure these
    python docs/measure.py ddp:two-hosts    measure one run of a package's
    python docs/measure.py --write-only     write the pages from the stored results

Runs whose names begin with `gpu` need a GPU and are left out without one; `tests/gpu.sh` runs them.
A package's `measured.toml` lists the runs of its bench, the few rows that its README quotes, and
how to read the table of each case. docs/results/PACKAGE.md has the tables of all cases, for every
machine that was measured. No number in either is typed by hand: a test renders the results again
and compares.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

from tables import format_case_table, format_plain_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->"
#: Replaces `{two_hosts}` in a command: two network namespaces with a link of this rate.
TWO_HOSTS = "tests/emulated_hosts.py --hosts 2 --rate 2gbit -- python"
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/measured.toml"))

#: Flags of a processor on which its speed of matrix products and of int8 depends.
DECIDING_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
)

#: READMEs quote the results of processors with this flag. The pages of results have all processors.
QUOTED_FLAG = "avx512_vnni"

Row = dict[str, Any]


def main() -> None:
    """Measure, then write the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="*", default=[])
    parser.add_argument("--write-only", action="store_true")
    arguments = parser.parse_args()
    if not arguments.write_only:
        for wanted in arguments.packages or PACKAGES:
            name, _, label = wanted.partition(":")
            for run in [label] if label else list_possible_runs(name):
                measure(name, run)
    for name in PACKAGES:
        write_pages(name)


def read_settings(name: str) -> dict[str, Any]:
    """Return `runs` (command lines) and `readme` (the quoted rows) of a package."""
    return tomllib.loads((ROOT / "packages" / name / "measured.toml").read_text())


def list_possible_runs(name: str) -> list[str]:
    """Return the runs of a package that this machine can make."""
    from llmsys_suite.config import count_gpus

    return [run for run in read_settings(name)["runs"] if not run.startswith("gpu") or count_gpus()]


def measure(name: str, label: str) -> None:
    """Run one bench of a package and store its rows with the environment they depend on."""
    from llmsys_suite.environment import collect_environment

    facts = collect_environment()
    machine = "gpu" if facts["gpus"] else "cpu"
    folder = RESULTS / f"{date.today().isoformat()}-{machine}"
    folder.mkdir(parents=True, exist_ok=True)
    shown = read_settings(name)["runs"][label].replace("{two_hosts}", TWO_HOSTS)
    command = [sys.executable if part == "python" else part for part in shlex.split(shown)]
    prefix = "PYTHONPATH=tests " if "suite_workloads" in shown else ""
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.json"
        command_line = [sys.executable, *command, "--json", str(rows)]
        # Some runs load a model from the module `suite_workloads`, which is in `tests`.
        paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run(command_line, cwd=ROOT, check=True, env=variables)
        stored = {
            "environment": facts,
            "command": f"{prefix}python {shown}",
            "rows": json.loads(rows.read_text()),
        }
    (folder / f"{name}-{label}.json").write_text(json.dumps(stored, indent=1) + "\n")


def find_newest(name: str, label: str) -> dict[str, Any] | None:
    """Return the newest results of one run that the pages quote, or None.

    Sentences on the pages compare these figures. Results of a processor without `QUOTED_FLAG` are
    therefore quoted only if there are no others.
    """
    every = list(find_newest_by_machine(name, label).values())
    quoted = [stored for stored in every if _is_quoted(stored)]
    return max(quoted or every, key=_format_date, default=None)


def find_newest_by_machine(name: str, label: str) -> dict[str, dict[str, Any]]:
    """Return the newest results of one run on each kind of GPU or processor.

    The first results did not record the flags of the processor. They are left out if there are
    results that did.
    """
    every = [json.loads(path.read_text()) for path in RESULTS.glob(f"*/{name}-{label}.json")]
    with_flags = [stored for stored in every if "cpu_flags" in stored["environment"]]
    return {
        _describe_machine(stored): stored
        for stored in sorted(with_flags or every, key=_format_date)
    }


def _is_quoted(stored: dict[str, Any]) -> bool:
    """Return True for a GPU, and for a processor with `QUOTED_FLAG`."""
    facts = stored["environment"]
    return bool(facts["gpus"]) or QUOTED_FLAG in facts.get("cpu_flags", ())


def _format_date(stored: dict[str, Any]) -> str:
    return str(stored["environment"]["date"])


def _describe_machine(stored: dict[str, Any]) -> str:
    """Return the GPUs, or the processor with the flags on which its speed depends."""
    facts = stored["environment"]
    if facts["gpus"]:
        return ", ".join(facts["gpus"])
    flags = " ".join(flag for flag in facts.get("cpu_flags", ()) if flag in DECIDING_FLAGS)
    return f"{facts['processor']}, {facts['cores']} cores {flags}".strip()


def write_pages(name: str) -> None:
    """Fill the marked section of a README, and write the page of all rows."""
    readme = ROOT / "packages" / name / "README.md"
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(head + BEGIN + format_quoted_rows(name) + END + rest.split(END)[1])
    (RESULTS / f"{name}.md").write_text(format_page(name))


def format_quoted_rows(name: str) -> str:
    """Return the quoted rows as one Markdown table."""
    wanted = read_settings(name)["readme"]
    rows, commands = [], []
    for pattern in wanted["rows"]:
        pattern = dict(pattern)
        stored = find_newest(name, pattern.pop("run", wanted.get("run")))
        if stored is None:
            return ""
        matching = [row for row in stored["rows"] if _is_match(row, pattern)]
        if not matching:
            raise ValueError(f"{name}/measured.toml: no row matches {pattern}")
        rows += [{column: row.get(column, "-") for column in wanted["columns"]} for row in matching]
        commands.append(_format_command(stored))
    return "\n".join(
        [
            *dict.fromkeys(commands),
            "",
            *format_plain_table(rows),
            f"[All rows](../../docs/results/{name}.md).",
            "",
        ]
    )


def format_page(name: str) -> str:
    """Return the newest results of a package on every machine as Markdown, a table per case."""
    lines = [
        f"# {name}: measurements",
        "",
        f"This page has the tables of the benchmark of `{name}`. A section is one run on one "
        "machine; its title is the name of the run in `measured.toml`. Each case has one table. "
        f"The files `docs/results/*/{name}-*.json` have all columns.",
        "",
    ]
    layouts = read_settings(name)["cases"]
    for label in read_settings(name)["runs"]:
        for stored in find_newest_by_machine(name, label).values():
            lines += [f"## {label}", "", _format_command(stored), ""]
            cases = dict.fromkeys(row["case"] for row in stored["rows"])
            for case in cases:
                if case not in layouts:
                    raise ValueError(f"{name}/measured.toml: expected [cases.{case}]")
                rows = [row for row in stored["rows"] if row["case"] == case]
                lines += [
                    f"### {case.replace('_', ' ')}",
                    "",
                    *format_case_table(rows, layouts[case]),
                ]
    pictures = sorted(path.name for path in RESULTS.glob(f"{name}-*.[ps][nv]g"))
    lines += [f"![{picture}]({picture})\n" for picture in pictures]
    return "\n".join(lines).rstrip() + "\n"


def _is_match(row: Row, pattern: Row) -> bool:
    return all(
        row.get(key) in (value if isinstance(value, list) else [value])
        for key, value in pattern.items()
    )


def _format_command(stored: dict[str, Any]) -> str:
    facts = stored["environment"]
    return (
        f"`{stored['command']}`, {facts['date'][:10]}: {_describe_machine(stored)}; "
        f"torch {facts['torch']}, Python {facts['python']}."
    )


if __name__ == "__main__":
    main()
