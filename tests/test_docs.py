"""Pages agree with the code: figures are recomputed, calls are executed, links are followed."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from workspace import PACKAGES, ROOT, get_folder, get_source_folder, import_script
from workspace import get_module_name as package_module

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(DOCS.glob("*.md")),
    *(get_folder(p) / "README.md" for p in PACKAGES),
]
COMPUTED = import_script("computed")
WRITTEN = sorted(COMPUTED.PAGES)


def find_names(page):
    return str(page.relative_to(ROOT))


def list_blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def at_the_root():
    """Change to the root of the checkout, from which the calls on pages are executed."""
    before = Path.cwd()
    os.chdir(ROOT)
    yield
    os.chdir(before)


@pytest.mark.fixed_seed("pages quote values of one seed")
@pytest.mark.usefixtures("at_the_root")
@pytest.mark.parametrize("name", WRITTEN)
def test_page_equals_the_output_of_its_calls(name):
    assert (DOCS / name).read_text() == COMPUTED.compute_page(name)


@pytest.mark.fixed_seed("pages quote values of one seed")
@pytest.mark.usefixtures("at_the_root")
@pytest.mark.parametrize("name", WRITTEN)
def test_every_call_on_a_page_returns_the_value_beside_it(name):
    # Each section alone, as by a reader who has only it and a Python prompt.
    calls = sum(map(check_typed_calls, COMPUTED.split_sections((DOCS / name).read_text())))
    assert calls >= {"answers.md": 240, "numerics.md": 5, "choosing.md": 8}.get(name, 0)


def check_typed_calls(section):
    """Execute the calls of a section, compare each with its value, and return their number."""
    typed = {}
    heads = []
    calls = 0
    for part in re.split(r"^(```python\n.*?^```)$", section, flags=re.S | re.M):
        if part.startswith("```python"):
            COMPUTED.run(part.removeprefix("```python\n").removesuffix("```"), typed)
            continue
        for line in part.splitlines():
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            if not line.startswith("|"):
                heads = []
            elif not heads:
                heads = cells
            elif "call" in heads and "---" not in line:
                value = cells[heads.index("answer") if "answer" in heads else 1]
                call = cells[heads.index("call")].strip("`")
                got = COMPUTED.format_value(eval(call, typed))
                # A unit may follow the number.
                assert re.match(rf"{re.escape(got)}(\.0+)?(?![\d.,])", value), (call, got, value)
                calls += 1
            elif heads[-1].startswith("`") and "---" not in line:
                for head, value in zip(heads[1:], cells[1:], strict=True):
                    got = eval(head.strip("`"), typed | {"name": cells[0]})
                    assert COMPUTED.format_value(got) == value, (head, cells[0])
                    calls += 1
    return calls


def test_the_readme_quotes_the_newest_run():
    text = (ROOT / "README.md").read_text()
    assert text == COMPUTED.compute_readme()
    assert "| torch DDP |" in text


def test_figures_without_a_check_are_those_of_the_report():
    assert (ROOT / "docs" / "benchmarking.md").read_text() == COMPUTED.compute_benchmarking()


def test_pictures_are_drawn_from_their_rows():
    pictures = DOCS / "answers" / "pictures"
    drawings = COMPUTED.draw_pictures()
    assert {path.name for path in pictures.glob("*.svg")} == set(drawings)
    for name, drawing in drawings.items():
        assert (pictures / name).read_text() == drawing, name
        assert len(drawing) < 20_000, name


def test_every_test_that_pages_cite_exists():
    cited = [
        where
        for page in PAGES
        for where in re.findall(r"`([a-z0-9-]+)/(test_\w+)(?:::(test_\w+))?`", page.read_text())
    ]
    assert len(cited) > 25
    for package, file, name in cited:
        text = (get_folder(package) / "tests" / f"{file}.py").read_text()
        assert not name or f"def {name}(" in text, (package, file, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_test_that_a_page_of_a_package_cites_exists(package):
    for page in get_folder(package).glob("*.md"):
        cited = re.findall(r"`(?:tests/)?(test_\w+)\.py(?:::(test_\w+))?`", page.read_text())
        for file, name in cited:
            text = (get_folder(package) / "tests" / f"{file}.py").read_text()
            assert not name or f"def {name}(" in text, (page, file, name)


@pytest.mark.parametrize("page", PAGES, ids=find_names)
def test_links_have_a_target(page):
    for target, heading in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        reached = page.parent / target if target else page
        assert reached.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", reached.read_text(), re.MULTILINE)
            assert heading in map(COMPUTED.get_anchor, headings), f"{target}#{heading}"


@pytest.mark.parametrize("page", PAGES, ids=find_names)
def test_python_on_a_page_is_python(page):
    for block in list_blocks(page, "python"):
        ast.parse(block)


def test_the_reading_order_names_files_that_exist_and_begins_with_the_plain_ones():
    listed = re.findall(r"\]\((\.\./packages/[^)]+\.py)\)", (DOCS / "index.md").read_text())
    for file in listed:
        assert (DOCS / file).is_file(), file
    for package in PACKAGES:
        mine = [file for file in listed if f"/packages/{package}/" in file]
        assert len(mine) >= 3, package
        assert (DOCS / mine[0]).resolve() == get_source_folder(package) / "plain.py"


def list_commands(page):
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        yield from block.strip().splitlines()


def test_every_make_target_that_the_readme_names_does_something():
    targets = {
        target
        for line in list_commands(ROOT / "README.md")
        for target in re.findall(r"^make ([a-z -]+?)(?: [A-Z]+=.*)?$", line)
        for target in target.split()
    }
    assert targets >= {"run", "test", "help", "bench", "lint", "types", "docs", "site"}
    for target in targets:
        done = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_the_readme_names_the_packages_that_have_cuda_tests():
    text = (ROOT / "README.md").read_text()
    (sentence,) = re.findall(r"The CUDA tests of (.*?) passed", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == {
        package
        for package in PACKAGES
        if any(
            "mark.gpu" in file.read_text() for file in get_folder(package).glob("tests/test_*.py")
        )
    }


def test_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()
    # Inside `make test` the inner make would print its directory.
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    done = subprocess.run(
        ["make", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name not in outer},
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == phony


def test_the_readme_s_uv_commands_run_as_written():
    lines = [line for line in list_commands(ROOT / "README.md") if line.startswith("uv run")]
    assert "uv run llmsys doctor" in lines
    for line in lines:
        if line != "uv run llmsys run":  # tests/test_end_to_end.py does that one
            command, *arguments = line.split()[2:]
            (script,) = metadata.entry_points(group="console_scripts", name=command)
            # In this process, which has imported torch already.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", [command, *arguments])
                with pytest.raises(SystemExit) as end:
                    script.load()()
            assert end.value.code == 0


def test_each_name_of_a_walk_occurs_in_a_linked_file_of_its_package():
    text = (DOCS / "architecture.md").read_text().split("## A walk")[1].split("## The rules")[0]
    walks = re.findall(r"\*\*([a-z0-9-]+): .*?\*\*(.*?)(?=\n\n)", text, re.DOTALL)
    assert {package for package, _ in walks} == set(PACKAGES)
    for package, walk in walks:
        files = [DOCS / target for target in re.findall(r"\]\(([^)]+\.py)\)", walk)]
        assert len(files) >= 3, package
        sources = "\n".join(path.read_text() for path in files)
        public = (get_source_folder(package) / "__init__.py").read_text()
        for name in re.findall(r"`([A-Za-z_.]+)`", walk):
            word = name.split(".")[-1]
            if name not in ("config.json",):
                assert re.search(rf"\b{word}\b", sources + public), (package, name)


def test_the_last_name_before_a_link_of_a_walk_is_defined_in_the_linked_file():
    text = (DOCS / "architecture.md").read_text().split("## A walk")[1].split("## The rules")[0]
    parts = re.split(r"\[[^\]]*\]\(([^)]+\.py)\)", text)
    checked = 0
    for before, target in zip(parts[::2], parts[1::2], strict=False):
        names = re.findall(r"`([A-Za-z_][\w.]*)`", re.split(r"\.\s", before)[-1])
        if not names or names[-1] == "config.json":
            continue
        word = names[-1].split(".")[-1]
        definition = rf"^\s*(?:def|class) {word}\b|^{word}\b[^=\n]*="
        assert re.search(definition, (DOCS / target).read_text(), re.MULTILINE), (word, target)
        checked += 1
    assert checked > 25


def test_the_readme_s_three_lines_run():
    (block,) = list_blocks(ROOT / "README.md", "python")
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=find_names)
def test_shell_scripts_on_a_page_parse(page):
    for block in list_blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_site_has_every_page_and_no_broken_link(tmp_path):
    website = import_script("website")
    website.stage_pages(tmp_path)  # an unknown target is an error
    for page in PAGES:
        assert (tmp_path / website.list_site_paths()[page]).exists()
    for staged in tmp_path.rglob("*.md"):
        if "files" in staged.relative_to(tmp_path).parts:
            continue
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", staged.read_text()):
            assert (staged.parent / target).exists(), (staged, target)


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=find_names)
def test_commands_for_one_host_run_as_written(page):
    for line in list_commands(page):
        if re.match(r"torchrun (--standalone )?--nproc-per-node 2 packages/", line):
            arguments = line.split()[1:]
            program = [sys.executable, "-m", "torch.distributed.run", *arguments]
            done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr


def test_imports_of_the_measurements_exist():
    # `make test` does not run the measurements, so it would not notice a renamed module.
    text = (DOCS / "answers" / "measure.py").read_text()
    for module, names in re.findall(r"^\s*from ([\w.]+) import ([\w, ]+)$", text, re.MULTILINE):
        if module.split(".")[0] in map(package_module, PACKAGES):
            imported = importlib.import_module(module)
            for name in names.split(", "):
                assert hasattr(imported, name) or importlib.import_module(f"{module}.{name}"), name


def test_contributing_names_files_that_exist():
    text = (DOCS / "contributing.md").read_text()
    for path in re.findall(r"`((?:packages|docs|tests)/[\w./-]+)`", text):
        if "NAME" not in path:
            assert (ROOT / path).exists(), path


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["attention_memory", "sharding", "isoflop", "parametric"])
def test_rows_without_times_are_reproduced(name, monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "answers")
    monkeypatch.delitem(sys.modules, "measure", raising=False)  # docs/measure.py has that name too
    measure = importlib.import_module("measure")
    arguments = []
    if name in measure.NEED_DATA:
        if not (folder := os.environ.get("SCALING_DATA")):
            pytest.skip("SCALING_DATA names no folder with the public data sets")
        arguments = [Path(folder)]
    stored = json.loads((DOCS / "answers" / "rows" / f"{name}.json").read_text())["rows"]
    rows = json.loads(json.dumps(measure.CASES[name](*arguments)))
    for row, expected in zip(rows, stored, strict=True):
        assert {k: v for k, v in row.items() if not isinstance(v, float)} == {
            k: v for k, v in expected.items() if not isinstance(v, float)
        }
        for key, value in row.items():
            if isinstance(value, float):
                assert value == pytest.approx(expected[key], rel=1e-4), key
