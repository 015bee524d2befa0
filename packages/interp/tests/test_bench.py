import json
from pathlib import Path

import pytest
from interp.bench import main


def test_every_row_is_flat_and_ours_agrees_with_the_plain_computation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--quick", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert all(next(iter(row)) == "case" for row in rows)
    assert all(isinstance(value, int | float | str) for row in rows for value in row.values())
    printed = capsys.readouterr().out
    assert all(row["case"] in printed for row in rows)
    by_case = {row["case"]: row for row in rows}
    compared = [row for row in rows if "error" in row]
    assert len(compared) == 6
    for row in compared:
        assert row["error"] < 1e-4
        assert row["ratio_p10"] <= row["ratio_p50"] <= row["ratio_p90"]
    # A property of shapes: nothing larger than one factor of the circuits themselves.
    batched, streamed = (row["largest_mib"] for row in rows if row["case"] == "composition_memory")
    assert streamed <= by_case["composition_memory"]["inputs_mib"] / 4
    assert batched > 100 * streamed
