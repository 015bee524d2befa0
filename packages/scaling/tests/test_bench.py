from scaling.bench import bench


def test_quick_bench_has_every_case_and_is_not_above_the_peer():
    rows = bench(quick=True)
    cases = [row["case"] for row in rows]
    assert sorted(set(cases)) == ["answer", "bootstrap", "fit", "sweep"]
    ours, _, peer = (row for row in rows if row["case"] == "fit")
    assert ours["objective"] <= peer["objective"] * (1 + 1e-9)
    assert cases.count("sweep") == 4
