"""The bench runs, and its machine-independent figures are what the README says."""

from tinyml.bench import bench, table


def test_quick_rows():
    rows = bench(quick=True)
    by_case = {row["case"]: row for row in rows}
    assert set(by_case) == {
        "kmeans",
        "int8_linear",
        "integer_vgg",
        "lora_unmerge",
        "sensitivity",
        "digits",
    }
    assert by_case["kmeans"]["squared_error"] <= by_case["kmeans"]["even_start_error"] * (1 + 1e-9)
    assert by_case["kmeans"]["squared_error"] <= by_case["kmeans"]["sklearn_error"] * (1 + 1e-6)
    assert all(row["relative_error"] < 0.02 for row in rows if row["case"] == "int8_linear")
    assert by_case["integer_vgg"]["relative_error"] < 0.05
    assert all(row["ours_changed_share"] == 0 for row in rows if row["case"] == "lora_unmerge")
    assert by_case["sensitivity"]["same_numbers"] == "True"
    assert by_case["sensitivity"]["prefix_layer_calls"] == 2 * 55 + 10
    assert by_case["sensitivity"]["whole_layer_calls"] == 2 * 100 + 10
    digits = {row["model"]: row for row in rows if row["case"] == "digits"}
    assert digits["float32"]["right_of_360"] > 300
    assert digits["linear 8 bits"]["right_of_360"] >= digits["float32"]["right_of_360"] - 2
    assert digits["integers only, 8 bits"]["times_smaller"] > 3.8
    assert len(table(rows).splitlines()) == len(rows) + 2 * len(by_case) - 1
