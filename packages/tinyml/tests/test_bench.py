"""The bench runs, and its machine-independent figures are what the README says."""

import os

import pytest
from tinyml import bench as bench_module
from tinyml.bench import bench, main


def test_quick_rows():
    rows = bench(quick=True)
    by_case = {row["case"]: row for row in rows}
    assert set(by_case) == {"kmeans", "linear", "integer_vgg"}
    assert by_case["kmeans"]["squared_error"] <= by_case["kmeans"]["sklearn_error"] * (1 + 1e-6)
    bits = {"int8 dynamic": 0.02, "int8 auto": 0.02, "int4 auto": 0.2}
    assert all(row["relative_error"] < bits[row["layer"]] for row in rows if "layer" in row)
    assert by_case["integer_vgg"]["relative_error"] < 0.05


def test_without_vnni_the_program_starts_again_with_limited_instructions(monkeypatch):
    class Restarted(Exception):
        pass

    def restart(path, arguments, environment):
        assert arguments[1:] == ["-m", "tinyml.bench", "--quick", "--without-vnni"]
        monkeypatch.setattr(os, "environ", environment)
        raise Restarted

    monkeypatch.setattr(os, "execve", restart)
    monkeypatch.setattr(bench_module, "bench", lambda **_: [])
    main(["--quick"])
    with pytest.raises(Restarted):
        main(["--quick", "--without-vnni"])
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    main(["--quick", "--without-vnni"])
