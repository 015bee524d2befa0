"""The tables of docs/results: one per case, with the best figure of each group in bold."""

import math

import pytest
from workspace import import_script

tables = import_script("tables")
ROWS = [
    {"case": "step", "ranks": 2, "name": "ours", "ms": 1.5, "ratio_p50": 0.5},
    {"case": "step", "ranks": 2, "name": "theirs", "ms": 3.0, "ratio_p50": 1.0, "bytes": 12345},
    {"case": "step", "ranks": 2, "name": "nothing", "ms": 0.1, "ratio_p50": 0.0},
]


def test_rows_with_different_columns_form_one_table_and_equal_columns_move_above_it():
    lines = tables.format_case_table(ROWS, {"read": "Time of a step."})
    assert lines == [
        "Time of a step.",
        "",
        "Equal in every row: ranks 2.",
        "",
        "| name | ms | ratio p50 | bytes |",
        "|---|---|---|---|",
        "| ours | 1.5 | 0.5 | - |",
        "| theirs | 3 | 1 | 12,345 |",
        "| nothing | 0.1 | 0 | - |",
        "",
    ]


def test_the_best_figure_of_each_group_is_bold_unless_its_row_is_a_reference():
    rows = [row | {"seq": seq} for seq in (128, 256) for row in ROWS]
    layout = {
        "read": "",
        "columns": ["seq", "name", "ms"],
        "best": {"ms": "lowest"},
        "within": ["seq"],
        "references": {"name": ["nothing"]},
    }
    bold = [line for line in tables.format_case_table(rows, layout) if "**" in line]
    assert bold == ["| 128 | ours | **1.5** |", "| 256 | ours | **1.5** |"]


def test_a_median_and_its_percentiles_share_one_cell():
    rows = [{"name": n, "t_p50": 2000.0 * n, "t_p10": 1.0, "t_p90": 3e4} for n in (1, 2)]
    lines = tables.format_case_table(rows, {"read": ""})
    assert "| name | t (p10 to p90) |" in lines
    assert "| 1 | 2,000 (1 to 30,000) |" in lines


def test_a_missing_figure_does_not_hide_the_best_one():
    rows = [{"name": n, "ms": ms} for n, ms in (("a", math.nan), ("b", 2.0), ("c", 1.0))]
    lines = tables.format_case_table(rows, {"read": "", "best": {"ms": "lowest"}})
    assert lines[-4:] == ["| a | - |", "| b | 2 |", "| c | **1** |", ""]


def test_numbers_that_round_to_a_thousand_have_no_exponent():
    assert tables.format_plain_table([{"ms": 999.4}, {"ms": 999.7}])[2:4] == [
        "| 999 |",
        "| 1,000 |",
    ]


def test_a_layout_that_names_an_unknown_column_is_refused():
    with pytest.raises(ValueError, match=r"got \['speed'\]"):
        tables.format_case_table(ROWS, {"read": "", "best": {"speed": "highest"}})
