"""The bench runs, and its machine-independent figures are what the README says."""

from tinyml.bench import bench


def test_quick_rows():
    rows = bench(quick=True)
    by_case = {row["case"]: row for row in rows}
    assert set(by_case) == {"kmeans", "linear", "integer_vgg"}
    assert by_case["kmeans"]["squared_error"] <= by_case["kmeans"]["sklearn_error"] * (1 + 1e-6)
    bits = {"int8 dynamic": 0.02, "int8 auto": 0.02, "int4 auto": 0.2}
    assert all(row["relative_error"] < bits[row["layer"]] for row in rows if "layer" in row)
    assert by_case["integer_vgg"]["relative_error"] < 0.05
