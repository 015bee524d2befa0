"""Two runs are told apart only where their samples can tell them apart."""

import random

import pytest
from llmsys_suite.compare import compare_runs, too_slow
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.folder import RunFolder

ENVIRONMENT = {"processor": "abacus", "cores": 2, "gpus": []}


def make_run(path, *, scale=1.0, seed=0, environment=ENVIRONMENT, finish=True, **config):
    folder = RunFolder.create(RunConfig(out=path, **config), environment)
    generator = random.Random(seed)
    folder.append_samples(
        {
            "stage": "train",
            "variant": "ddp flat",
            "phase": "step",
            "step": step,
            "rank": 0,
            "warmup": False,
            "seconds": scale * generator.uniform(0.9, 1.1),
        }
        for step in range(30)
    )
    if finish:
        folder.finish()
    return folder


def test_the_same_speed_is_not_distinguishable(tmp_path):
    rows = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1))
    assert [row.verdict for row in rows] == ["not distinguishable"]
    assert not too_slow(rows, 0.0)


@pytest.mark.parametrize(("scale", "verdict"), [(1.5, "slower"), (0.7, "faster")])
def test_a_difference_beyond_the_noise_is_found(tmp_path, scale, verdict):
    before, after = make_run(tmp_path / "a"), make_run(tmp_path / "b", scale=scale, seed=1)
    (row,) = compare_runs(before, after)
    assert row.verdict == verdict
    assert row.low < scale < row.high or abs(row.ratio - scale) < 0.1
    assert too_slow([row], 5.0) == (verdict == "slower")


@pytest.mark.parametrize(
    ("difference", "complaint"),
    [
        ({"environment": ENVIRONMENT | {"cores": 64}}, "differ in cores"),
        ({"size": "small"}, "differ in size"),
        ({"finish": False}, "incomplete"),
    ],
)
def test_runs_that_do_not_compare_are_refused(tmp_path, difference, complaint):
    with pytest.raises(UsageError, match=complaint):
        compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", **difference))
