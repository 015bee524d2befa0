"""Assertions on figures fail beyond their margin, in one direction, and print both values."""

import ast
from functools import cache

import figures
import pytest
from figures import assert_at_least, assert_at_most
from test_exhaustive import find_files_with_mark, list_marks_of_tests, list_statements


@pytest.fixture(autouse=True)
def _test_cpu(monkeypatch):
    monkeypatch.setattr(figures, "read_cpu_model", lambda: "Test CPU")
    monkeypatch.setattr(figures, "measured_figures", [])


def test_slower_than_the_margin_fails_with_both_values_and_the_processor():
    assert_at_least("exchange", 4, 3.41)
    assert_at_least("exchange", 4, 40)
    with pytest.raises(
        AssertionError, match=r"exchange: expected >= 4x, measured 3.39x on Test CPU"
    ):
        assert_at_least("exchange", 4, 3.39)
    assert_at_most("step", 2, 2.29, "s")
    assert_at_most("step", 2, 0.1, "s")
    with pytest.raises(AssertionError, match=r"step: expected <= 2 s, measured 2.31 s on Test CPU"):
        assert_at_most("step", 2, 2.31, "s")


def test_figures_without_a_margin_are_bounds():
    with pytest.raises(AssertionError):
        assert_at_most("memory", 2, 2.001, margin=0)
    with pytest.raises(AssertionError):
        assert_at_least("memory", 2, 1.999, margin=0)


def test_every_figure_is_listed_whether_it_is_reached_or_not():
    assert_at_most("first", 1, 0.5, "s")
    with pytest.raises(AssertionError):
        assert_at_most("second", 1, 3, "s")
    assert [line.split(":")[0] for line in figures.measured_figures] == ["first", "second"]


@cache
def list_calls_of_functions(file):
    """Return the names of the functions that each function of a file calls directly."""
    functions = [node for node in list_statements(file) if isinstance(node, ast.FunctionDef)]
    return {
        function.name: {
            node.func.id
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        for function in functions
    }


def list_called_functions(file, name):
    """Return the names that a test calls, directly or through functions of its file."""
    calls = list_calls_of_functions(file)
    called, waiting = set(), [name]
    while waiting:
        names = calls[waiting.pop()]
        waiting += [n for n in names - called if n in calls]
        called |= names
    return called


def test_every_timing_test_asserts_figures():
    without = [
        f"{file}::{name}"
        for file in find_files_with_mark("timing")
        for name, marks in list_marks_of_tests(file).items()
        if "timing" in marks
        and not list_called_functions(file, name) & {"assert_at_least", "assert_at_most"}
    ]
    assert without == []
