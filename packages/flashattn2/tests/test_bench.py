"""The rows of the bench are complete, with the stated FLOPs."""

import json

import pytest
import torch
from flashattn2 import attention_reference
from flashattn2.bench import bench, cases, report


@pytest.fixture(scope="module")
def rows():
    """Return the rows of every case, whose forward and backward passes have 32 tokens."""

    def compare_few(case, attentions, shape, *options):
        return compare(case, attentions, (*shape[:2], 32, shape[3]), *options)

    compare = cases.compare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "compare", compare_few)
        return bench(quick=True)


def test_every_case_reports_its_rows(rows):
    assert [r["case"] for r in rows if r["case"] == "machine"] == ["machine"]
    assert {r["case"] for r in rows} == {"machine", "flash", "train", "decode"}
    for row in rows:
        if row["case"] in ("flash", "train"):
            assert row["time_ms"] > 0
            if row["impl"] == "ours":
                assert row["ratio_p50"] == 1.0
    assert report.format_table(rows).count("\n\n") == 2


def test_device_without_a_clock_is_refused():
    with pytest.raises(ValueError, match="one of cpu, cuda, got 'cuda:1'"):
        bench(device="cuda:1")


def test_work_is_counted_by_the_stated_formula():
    assert cases.count_flops((2, 3, 100, 16), "forward", is_causal=False) == 4 * 6 * 100**2 * 16
    assert cases.count_flops((2, 3, 100, 16), "both") == 3.5 * 2 * 6 * 100**2 * 16


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("out of memory"), "out of memory"),
        (ValueError("expected another shape\nin detail"), "expected another shape"),
    ],
)
def test_failure_of_ours_is_reported_and_the_others_are_timed(error, reason):
    def refused(q, k, v):
        raise error

    every = {"ours": refused, "other": attention_reference}
    rows = list(cases.compare("flash", every, (1, 1, 16, 16), torch.float32, "cpu", True))
    assert [row["impl"] for row in rows] == ["other", "ours"] * 3
    for other, ours in zip(rows[::2], rows[1::2], strict=True):
        assert ours["time_ms"] == ours["peak_mib"] == reason
        assert other["time_ms"] > 0
        assert other["ratio_p50"] == "ours failed"
        assert tuple(ours) == tuple(other)


def test_json_option_writes_only_the_rows(rows, monkeypatch, tmp_path):
    monkeypatch.setattr(cases, "measure_cases", lambda *_: rows)
    monkeypatch.chdir(tmp_path)
    report.main(["--json", "rows.json"])
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"]
    assert json.loads((tmp_path / "rows.json").read_text()) == rows
