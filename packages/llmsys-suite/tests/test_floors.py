"""The modules lie on six floors, and no module imports one of a higher floor."""

import ast
from pathlib import Path

import llmsys_suite
import pytest

ROOT = Path(llmsys_suite.__file__).parent
#: From the bottom up. A name is a subpackage or a module of the package.
FLOORS = (
    {"config", "config_file", "environment", "folder", "hugging_face", "measure", "model",
     "plain", "resolution", "results", "text"},
    {"ranks"},
    {"learning", "splits", "step", "variants"},
    {"stages"},
    {"audit", "report"},
    {"__init__", "__main__", "bench", "cli", "start"},
)  # fmt: skip


def find_floor(part):
    return next(i for i, floor in enumerate(FLOORS) if part in floor)


def iter_imported_parts(tree):
    """Yield the subpackages and modules of this package that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "llmsys_suite":
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmsys_suite."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_imports_one_of_a_higher_floor(path):
    top = path.relative_to(ROOT).with_suffix("").parts[0]
    parts = iter_imported_parts(ast.parse(path.read_text()))
    assert [part for part in parts if find_floor(part) > find_floor(top)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "stages").glob("*.py")), ids=lambda p: p.stem)
def test_a_stage_has_fewer_than_150_lines(path):
    assert len(path.read_text().splitlines()) < 150
