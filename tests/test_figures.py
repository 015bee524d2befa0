"""Assertions on figures fail beyond their margin, in one direction, and print both values."""

import ast

import figures
import pytest
from figures import assert_at_least, assert_at_most
from workspace import ROOT


@pytest.fixture(autouse=True)
def _test_cpu(monkeypatch):
    monkeypatch.setattr(figures, "cpu_model", lambda: "Test CPU")
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


def functions_called(path, name):
    """Return the names that a test calls, directly or through functions of its file."""
    tree = ast.parse(path.read_text())
    bodies = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    called, waiting = set(), [name]
    while waiting:
        node = bodies[waiting.pop()]
        names = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
        waiting += [n for n in names - called if n in bodies]
        called |= names
    return called


def test_every_timing_test_asserts_figures():
    from test_exhaustive import TESTS

    without = [
        f"{file}::{name}"
        for file, tests in TESTS.items()
        for name, marks in tests.items()
        if "timing" in marks
        and not functions_called(ROOT / file, name) & {"assert_at_least", "assert_at_most"}
    ]
    assert without == []
