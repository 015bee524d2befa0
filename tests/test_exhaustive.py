"""Every test that `make test` leaves out names the faster test of the same property."""

import ast
import tomllib
from functools import cache

from workspace import ROOT

TABLE = tomllib.loads((ROOT / "tests" / "exhaustive.toml").read_text())
LEFT_OUT = {"exhaustive", "timing", "gpu"}


def list_marks(expression):
    """Return the names of the pytest marks that mark a whole test or file."""
    parts = expression.elts if isinstance(expression, ast.List | ast.Tuple) else [expression]
    prefix = "pytest.mark."
    texts = [ast.unparse(part) for part in parts]
    return {text.removeprefix(prefix) for text in texts if text.startswith(prefix)}


@cache
def list_statements(file):
    """Return the top-level statements of a file."""
    return ast.parse((ROOT / file).read_text()).body


@cache
def list_marks_of_tests(file):
    """Return the marks of each test of a file."""
    of_file = set()
    for node in list_statements(file):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            of_file = list_marks(node.value)
    return {
        node.name: of_file.union(*map(list_marks, node.decorator_list))
        for node in list_statements(file)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@cache
def find_files_with_mark(name):
    """Return the test files that contain `mark.NAME`. Parsing all test files takes seconds."""
    paths = [
        p for folder in ("tests", "packages/*/tests") for p in ROOT.glob(f"{folder}/test_*.py")
    ]
    return sorted(
        str(path.relative_to(ROOT)) for path in paths if f"mark.{name}" in path.read_text()
    )


def test_the_table_lists_every_exhaustive_test():
    exhaustive = {
        (file, name)
        for file in find_files_with_mark("exhaustive")
        for name, names_of_marks in list_marks_of_tests(file).items()
        if "exhaustive" in names_of_marks
    }
    assert exhaustive == {(file, name) for file, rows in TABLE.items() for name in rows}


def list_cases(decorator):
    """Return, for each case of a `parametrize` decorator, whether it is exhaustive."""
    is_call = isinstance(decorator, ast.Call)
    if not is_call or ast.unparse(decorator.func) != "pytest.mark.parametrize":
        return []
    cases = decorator.args[1]
    if not isinstance(cases, ast.List | ast.Tuple):
        return []
    return [has_exhaustive_mark(case) for case in cases.elts]


def has_exhaustive_mark(case):
    """Return True if a case is a `pytest.param` whose marks mention `exhaustive`."""
    if not isinstance(case, ast.Call) or ast.unparse(case.func) != "pytest.param":
        return False
    marks = [keyword.value for keyword in case.keywords if keyword.arg == "marks"]
    return any("exhaustive" in ast.unparse(expression) for expression in marks)


def test_some_case_of_a_test_with_exhaustive_cases_runs_in_make_test():
    """Otherwise the whole test is exhaustive, and the table must list it."""
    num_selected = 0
    for file in find_files_with_mark("exhaustive"):
        for node in list_statements(file):
            if not isinstance(node, ast.FunctionDef) or node.name not in list_marks_of_tests(file):
                continue
            for cases in filter(None, map(list_cases, node.decorator_list)):
                if any(cases):
                    num_selected += 1
                assert not all(cases) or node.name in TABLE.get(file, {}), f"{file}::{node.name}"
    assert num_selected > 20


def test_faster_tests_of_the_table_run_in_make_test():
    for file, rows in TABLE.items():
        for name, faster_or_reason in rows.items():
            if isinstance(faster_or_reason, str):
                assert faster_or_reason.endswith("."), name
                continue
            assert faster_or_reason, name
            for faster in faster_or_reason:
                faster_file, _, faster_name = faster.rpartition("::")
                names_of_marks = list_marks_of_tests(faster_file or file)[faster_name]
                assert not names_of_marks & LEFT_OUT, f"{name}: {faster}"
