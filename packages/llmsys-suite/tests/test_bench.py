"""The benchmark prints and writes the rows of all stages, which have different columns."""

import json

import pytest
from llmsys_suite import bench
from llmsys_suite.config import UsageError

STAGES = {
    "train": {
        "rows": [
            {"variant": "single process", "step_ms": 100.5},
            {"variant": "ddp flat", "step_ms": 60.25, "exposed_ms": 3.0},
        ]
    },
    "attention": {"rows": [{"kernel": "SDPA", "forward_backward_ms": 1.5}]},
    "compress": {"rows": [{"method": "float32", "size_bytes": 400}]},
}


def test_rows_with_different_columns_are_printed_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "bench", lambda **_: bench.collect_rows(STAGES))
    bench.main(["--json", str(tmp_path / "rows.json")])
    printed = capsys.readouterr().out
    assert "single process    100.5" in printed
    assert "60.25           3" in printed
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["case"] for row in rows] == ["train", "train", "attention", "compress"]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_an_unknown_device_is_not_replaced_by_a_cpu():
    with pytest.raises(UsageError, match="preset 'tpu' is unknown; choose from cpu, gpu"):
        bench.bench(device="tpu")
