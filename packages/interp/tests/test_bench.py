import json
from functools import partial
from pathlib import Path

import pytest
import torch
from interp import LowRank, composition_scores
from interp.bench import _Largest, batched_pairs, main


def test_every_row_is_flat_and_ours_agrees_with_the_plain_computation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--quick", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert all(next(iter(row)) == "case" for row in rows)
    assert all(isinstance(value, int | float | str) for row in rows for value in row.values())
    printed = capsys.readouterr().out
    assert all(row["case"] in printed for row in rows)
    compared = [row for row in rows if "error" in row]
    assert len(compared) == 6
    for row in compared:
        assert row["error"] < 1e-4
        assert row["ratio_p10"] <= row["ratio_p50"] <= row["ratio_p90"]


def test_composition_creates_nothing_larger_than_one_factor_of_the_circuits() -> None:
    """GPT-2 small's, by their shapes."""
    ov, qk = (
        LowRank(
            torch.empty(12, 12, 768, 64, device="meta"), torch.empty(12, 12, 64, 768, device="meta")
        )
        for _ in range(2)
    )
    largest = []
    for run in (batched_pairs, partial(composition_scores, kind="k")):
        with _Largest() as seen:
            run(ov, qk)
        largest.append(seen.bytes)
    assert largest[1] <= ov.a.nbytes
    assert largest[0] > 100 * largest[1]
