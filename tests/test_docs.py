"""The pages say what the code says: answers are computed again, links and tests exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workspace import PACKAGES, ROOT, folder, script

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(folder(p) / "README.md" for p in PACKAGES),
]


def test_the_answers_are_what_their_calls_give():
    assert (ROOT / "docs" / "answers.md").read_text() == script("answers").page()


def test_every_test_that_answers_cite_exists():
    text = (ROOT / "docs" / "answers.md").read_text()
    cited = re.findall(r"([a-z0-9-]+)/(test_\w+)::(test_\w+)", text)
    assert len(cited) > 25
    for package, file, name in cited:
        assert f"def {name}(" in (folder(package) / "tests" / f"{file}.py").read_text(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def commands(page):
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        yield from block.strip().splitlines()


def test_every_make_target_that_the_readme_names_does_something():
    targets = {
        target
        for line in commands(ROOT / "README.md")
        for target in re.findall(r"^make ([a-z -]+?)(?: [A-Z]+=.*)?$", line)
        for target in target.split()
    }
    assert targets >= {"run", "test", "help", "bench", "lint", "types"}
    for target in targets:
        done = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()
    # Within `make test` the inner make would say where it is.
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True,
        env={name: value for name, value in os.environ.items() if name not in outer},
    ).stdout  # fmt: skip
    assert [line.split()[0] for line in listed.splitlines()] == phony


def test_the_readme_s_uv_commands_run_as_written():
    lines = [line for line in commands(ROOT / "README.md") if line.startswith("uv run")]
    assert "uv run llmsys doctor" in lines
    for line in lines:
        if line != "uv run llmsys run":  # tests/test_end_to_end.py does that one
            command, *arguments = line.split()[2:]
            program = Path(sys.executable).parent / command
            subprocess.run([program, *arguments], cwd=ROOT, check=True, capture_output=True)
