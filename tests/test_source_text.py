"""A search of the text finds the same comments and imports as Python's own tokenizer and parser."""

import ast
import io
import tokenize

import pytest
from source_text import iter_comments, list_imports
from workspace import ROOT

FILES = sorted((ROOT / "tests").glob("*.py"))
TRICKY = r'''
"# no comment", r"\\" # a comment after a raw string
text = """
import nothing  # not a comment
"""
def f():
    from a.b import (  # a reason
        c as d,
        e,
    )
    import os, sys
    raise ValueError('"', "#") from None
'''


@pytest.fixture
def tricky(tmp_path):
    path = tmp_path / "tricky.py"
    path.write_text(TRICKY)
    return path


def test_comments_are_those_of_the_tokenizer(tricky):
    for path in (tricky, *FILES):
        text = path.read_text()
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        expected = [(*t.start, t.string) for t in tokens if t.type == tokenize.COMMENT]
        assert [*iter_comments(text)] == expected, path


def test_imports_are_those_of_the_parser(tricky):
    for path in (tricky, *FILES):
        nodes = ast.walk(ast.parse(path.read_text()))
        expected = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        assert sorted(map(ast.unparse, list_imports(path))) == sorted(map(ast.unparse, expected)), (
            path
        )
