"""Every audit check passes on an honest record and fails on one that was tampered with."""

import copy

import pytest
from llmsys_suite.audit import audit
from llmsys_suite.config import RunConfig
from llmsys_suite.samples import summarize

CONFIG = RunConfig(world=2, rows=8, context=16, steps=3, warmup=1)
PLAN = {
    "parameters": 100,
    "actual_parameters": 100,
    "step_flops_full": 600,
    "step_flops_causal": 500,
    "counted_flops": 600,
    "gradient_bytes": 400,
    "training_peak_bytes": 1000,
    "measured_peak_bytes": 1040,
    "peak": 1e6,
}


def honest():
    samples = []
    for variant, ranks in (("single process", 1), ("ddp flat", 2)):
        for step in range(4):
            for rank in range(ranks):
                row = {
                    "stage": "train",
                    "variant": variant,
                    "step": step,
                    "warmup": step < 1,
                    "rank": rank,
                }
                parts = {"forward": 0.03, "backward": 0.05 + 0.01 * rank, "optimizer": 0.02}
                samples += [row | {"phase": k, "seconds": s} for k, s in parts.items()]
                samples.append(
                    row
                    | {
                        "phase": "step",
                        "seconds": sum(parts.values()) + 0.001,
                        "tokens": 8 * 16 // ranks,
                        "loss": 5.0 - step + 0.1 * (2 * rank - 1) * (ranks - 1),
                    }
                )
    return samples


def checks(config=CONFIG, plan=PLAN, samples=None, change=lambda train: None):
    train = summarize(honest()) | {"gradient_bytes": {"ddp flat": 400.0}}
    change(train)
    return audit(config, plan, train, honest() if samples is None else samples)


def failed(found):
    return [check.name for check in found if not check.passed]


def test_an_honest_record_passes_every_check():
    found = checks()
    assert failed(found) == []
    assert len(found) == 16


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("actual_parameters", "predicted parameters = the model's"),
        ("counted_flops", "analytic FLOPs = counted FLOPs"),
    ],
)
def test_a_wrong_prediction_fails(key, name):
    assert failed(checks(plan=PLAN | {key: PLAN[key] + 1})) == [name]


def test_a_peak_beyond_its_tolerance_fails():
    names = failed(checks(plan=PLAN | {"measured_peak_bytes": 1110}))
    assert names == ["predicted peak memory = a real step's"]


def test_a_step_that_lost_its_core_between_two_phases_is_no_failure():
    samples = copy.deepcopy(honest())
    late = next(s for s in samples if s["phase"] == "step" and not s["warmup"])
    late["seconds"] *= 3
    assert not any("phases" in name for name in failed(checks(samples=samples)))


def test_bytes_that_were_not_handed_over_fail():
    found = checks(change=lambda train: train["gradient_bytes"].update({"ddp flat": 396.0}))
    assert failed(found) == ["ddp flat: predicted gradient bytes = bytes handed to the collective"]


def test_a_missing_rank_fails_and_so_do_its_tokens():
    samples = [s for s in honest() if not (s["rank"] == 1 and s["step"] == 2)]
    names = failed(checks(samples=samples))
    assert "ddp flat: no rank's samples are missing" in names
    assert "ddp flat: tokens = steps x global batch" in names


def test_a_step_time_that_is_not_the_slowest_ranks_fails():
    def flatter(train):
        train["rows"][1]["step_ms"] *= 0.9

    assert failed(checks(change=flatter)) == ["ddp flat: step time = the slowest rank's"]


def test_time_outside_the_phases_fails():
    samples = [s for s in honest() if s["phase"] != "optimizer"]
    assert failed(checks(samples=samples)) == [
        "single process: phases sum to the step",
        "ddp flat: phases sum to the step",
    ]


def test_a_utilisation_above_the_peak_fails():
    names = failed(checks(plan=PLAN | {"peak": 4000.0}))
    assert names == ["single process: MFU in % of the measured peak"]


def test_a_loss_that_departs_from_one_process_fails():
    samples = copy.deepcopy(honest())
    for sample in samples:
        if sample["variant"] == "ddp flat" and sample["step"] == 3 and "loss" in sample:
            sample["loss"] += 0.05
    assert failed(checks(samples=samples)) == ["ddp flat: every loss = one process's"]


def test_a_loss_that_is_nan_fails():
    samples = copy.deepcopy(honest())
    samples[-1]["loss"] = float("nan")
    assert "ddp flat: every loss = one process's" in failed(checks(samples=samples))


def test_a_loss_that_does_not_fall_fails():
    samples = copy.deepcopy(honest())
    for sample in samples:
        if "loss" in sample:
            sample["loss"] = 5.0 + sample["step"]
    assert failed(checks(samples=samples)) == ["the loss falls: last over first"]
