import json
import re
from pathlib import Path

import pytest
import torch
from interp import LowRank, composition_scores
from interp.bench import _LargestTensor, compare_composition, main, measure_describe

PACKAGE = Path(__file__).parents[1]


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
    assert len(compared) == 4
    for row in compared:
        assert row["error"] < 1e-4
        assert row["ratio_p10"] <= row["ratio_p50"] <= row["ratio_p90"]


def test_describing_measures_a_model() -> None:
    pytest.importorskip("transformers", reason="the peer, a development dependency")
    row = measure_describe(quick=True)
    assert row["longest_text"] == 64
    assert row["memory"] >= 1
    assert row["seconds"] > 0


def test_patching_is_nine_times_as_fast_in_every_row_of_the_results() -> None:
    """The README states nine times for all rows of the page of results."""
    readme = " ".join((PACKAGE / "README.md").read_text().split())
    assert "at least nine times as fast" in readme
    page = (PACKAGE.parents[1] / "docs" / "results" / "interp.md").read_text()
    # A cell is a median, or a median and two percentiles: "9.83 (9.76 to 9.9)".
    ratios = re.findall(
        r"^### patch .*\n\n.*\n\n.*\| patches \| peer ms \| ours ms \| ratio .*\n.*\n"
        r"(?:\|[^|]*){7}\| ([\d.]+)",
        page,
        re.MULTILINE,
    )
    assert len(ratios) == len(re.findall("^### patch ", page, re.MULTILINE)) >= 8
    assert min(map(float, ratios)) >= 9


def test_describe_meets_its_bounds_in_every_stored_row() -> None:
    """The README states the bounds. The newest results of each machine are on the page."""
    results = PACKAGE.parents[1] / "docs" / "results"
    paths = list(results.glob("*/interp-describe.json"))
    assert paths
    for path in paths:
        stored = json.loads(path.read_text())
        assert stored["rows"]
        has_avx512 = "avx512f" in stored["environment"]["cpu_flags"]
        for row in stored["rows"]:
            assert row["threads"] == 1
            assert row["seconds"] <= (20 if has_avx512 else 35)
            assert row["memory"] < 2


def test_composition_creates_nothing_larger_than_one_factor_of_the_circuits() -> None:
    """The peer multiplies all pairs at once."""
    torch.manual_seed(0)
    ov, qk = (LowRank(torch.randn(3, 4, 24, 2), torch.randn(3, 4, 2, 24)) for _ in range(2))

    def all_pairs(ov: LowRank, qk: LowRank) -> torch.Tensor:
        first, second = ov.dense().flatten(0, 1), qk.dense().flatten(0, 1)
        norms = torch.linalg.matrix_norm(second[None] @ first[:, None])
        scores = norms.view(3, 4, 3, 4) / (ov.norm()[:, :, None, None] * qk.norm())
        return scores * torch.ones(3, 3, device=scores.device).triu(1)[:, None, :, None]

    row = compare_composition(all_pairs, ov, qk)
    assert row["error"] < 1e-5
    large = LowRank(torch.randn(12, 12, 768, 64), torch.randn(12, 12, 64, 768))
    with _LargestTensor() as seen:
        composition_scores(large, large, kind="k")
    assert seen.bytes <= large.a.nbytes
    # The second halves of later heads read nothing that earlier heads write.
    a, b = torch.randn(3, 4, 768, 64), torch.randn(3, 4, 64, 768)
    a[..., 384:, :] = 0
    b[..., :384] = 0
    with _LargestTensor() as seen:
        assert composition_scores(LowRank(a, b), kind="v").max() == 0
    assert seen.bytes <= 16 * a.nbytes / 3
