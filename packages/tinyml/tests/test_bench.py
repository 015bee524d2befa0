"""The bench runs, and its machine-independent figures are what the README says."""

import os

import pytest
import torch
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


def test_sklearns_error_is_summed_in_float64(monkeypatch):
    cluster = pytest.importorskip("sklearn.cluster", reason="scikit-learn is not installed")
    fitted = []

    class Recorded(cluster.KMeans):
        def fit(self, values):
            fitted.append(super().fit(values))
            return self

    monkeypatch.setattr(cluster, "KMeans", Recorded)
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    _, error = bench_module._run_sklearn(values)
    nearest = fitted[0].cluster_centers_[fitted[0].labels_, 0].astype("float64")
    assert error == pytest.approx(((values.numpy() - nearest) ** 2).sum(), rel=1e-9)
    assert error != pytest.approx(fitted[0].inertia_, rel=1e-7)


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
