"""Runs are called different or same only if their samples support it."""

import shutil
import subprocess
import sys
import time
from dataclasses import fields, replace

import numpy as np
import pytest
from llmsys_suite import cli
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.folder import RunFolder
from llmsys_suite.measure import others
from llmsys_suite.measure.samples import CORE_WAIT, PEER, SINGLE
from llmsys_suite.report import compare
from llmsys_suite.report.comparability import list_warnings
from llmsys_suite.report.compare import (
    compare_ratios,
    compare_runs,
    compute_round_ratios,
)
from llmsys_suite.results import Audit, Plan, Skipped, Train
from run_folders import create_folder

ENVIRONMENT = {"processor": "abacus", "cores": 2, "gpus": [], "cpu_flags": ["avx2", "fma"]}
ENVIRONMENT |= {"threads": 1}
DIFFERENT = ("slower", "faster")
OURS = ("ddp flat", "zero 1", "fsdp")


def make_plan(parameters, peak, measured):
    rest = dict.fromkeys((field.name for field in fields(Plan)), 0)
    known = {"parameters": parameters, "peak": peak, "measured_peak_bytes": measured}
    return Plan(**rest | known | {"variants_fit_together": True})


def make_run(
    path,
    *,
    scale=1.0,
    load=1.0,
    seed=0,
    rounds=30,
    noise=0.02,
    queued=0.0,
    others_work=None,
    environment=ENVIRONMENT,
    finish=True,
    loss=3.0,
    **config,
):
    """Create a run whose rounds are slow or fast as a whole, with noise in each step."""
    folder = create_folder(RunConfig(out=path, steps=rounds, **config), environment)
    random = np.random.default_rng(seed)
    rows, taken = [], 0
    for step in range(rounds):
        # The machine's own mood: all that runs in this round feels it.
        mood = load * np.exp(random.normal(0, 0.3))
        for name in (SINGLE, PEER, *OURS):
            for rank in range(1 if name == SINGLE else 2):
                slower = scale if name == "ddp flat" else 1.0
                rows.append(
                    {
                        "stage": "train", "variant": name, "phase": "step", "step": step,
                        "rank": rank, "warmup": False, "loss": loss - 0.01 * step,
                        "seconds": 0.1 * mood * slower * np.exp(random.normal(0, noise)),
                        CORE_WAIT: 0.1 * mood * queued,
                    }
                )  # fmt: skip
                taken += 1
                if others_work is not None:  # each turn is a second's work of both ranks
                    rows[-1] |= {"process_s": taken / 2, "machine_s": taken / (1 - others_work)}
    folder.append_samples(rows)
    folder.add_stage("train", Train([], {}, {}))
    folder.add_stage("plan", make_plan(7, 1e9 * load, seed))
    if finish:
        folder.finish()
    return folder


def find_variants_slower_by(rows, percent):
    """Return the variants that are slower by more than `percent`, and those that are undecided."""
    slower = [row.variant for row in rows if row.is_slower_by(percent)]
    return slower, [row.variant for row in rows if row.is_slower_by(percent) is None]


def get_verdicts(rows):
    return {row.variant: row.verdict for row in rows}


def test_the_same_code_under_three_times_the_load_is_not_called_different(tmp_path):
    rows = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", load=3.0, seed=1))
    assert not set(get_verdicts(rows).values()) & {*DIFFERENT}
    assert find_variants_slower_by(rows, 0.0) == ([], [row.variant for row in rows])


def test_the_peer_is_the_measure_and_has_no_row(tmp_path):
    rows = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1))
    assert {row.variant for row in rows} == {SINGLE, *OURS}


@pytest.mark.parametrize(("scale", "verdict"), [(1.5, "slower"), (0.7, "faster")])
def test_a_difference_beyond_the_noise_is_found_in_the_variant_that_has_it(
    tmp_path, scale, verdict
):
    before, after = make_run(tmp_path / "a"), make_run(tmp_path / "b", scale=scale, seed=1)
    rows = compare_runs(before, after)
    by_variant = get_verdicts(rows)
    assert by_variant.pop("ddp flat") == verdict
    assert not set(by_variant.values()) & {*DIFFERENT}
    row = next(row for row in rows if row.variant == "ddp flat")
    assert row.low < scale < row.high
    assert find_variants_slower_by(rows, 5.0)[0] == (["ddp flat"] if verdict == "slower" else [])


@pytest.mark.parametrize(
    ("scale", "noise", "disturbed", "status"),
    [
        (1.0, 0.002, 0.0, 0),
        (1.5, 0.002, 0.0, 1),
        (1.0, 0.5, 0.0, 3),
        (1.0, 0.002, 0.9, 3),
    ],
    ids=["equal", "slower", "too noisy to tell", "disturbed in all rounds"],
)
def test_fail_above_succeeds_only_if_every_variant_is_shown_to_be_fast_enough(
    tmp_path, scale, noise, disturbed, status, monkeypatch
):
    options = {"noise": noise, "queued": disturbed, "others_work": 0.5 if disturbed else None}
    make_run(tmp_path / "a", **options)
    make_run(tmp_path / "b", scale=scale, seed=1, **options)
    arguments = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-above", "5"]
    monkeypatch.setattr(sys, "argv", ["llmsys", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == status


@pytest.mark.parametrize("percent", [5.0, 8.0])
def test_a_variant_that_is_the_same_within_the_margin_passes_any_limit_above_it(percent):
    row = compare.Comparison("a", 1.01, 0.97, 1.049, 30, 0, margin=0.05)
    assert row.verdict == "same"
    assert row.is_slower_by(percent) is False


def test_a_limit_below_half_of_the_margin_never_fails_for_a_small_difference():
    row = compare.Comparison("a", 1.02, 1.015, 1.025, 30, 0, margin=0.05, differs=True)
    assert row.verdict == "same"
    assert row.is_slower_by(1.0) is None


#: Noise of real runs of the same code, and worse: correlated rounds, heavy tails, slow seconds, and
#: runs that differ as a whole by their memory layout.
NOISES = {
    "even": {},
    "lasting": {"lasts": 0.6},
    "heavy": {"tail": 3},
    "heavy and lasting": {"tail": 3, "lasts": 0.6, "noise": 0.15},
    "spikes": {"spikes": 0.05, "noise": 0.05},
    "apart": {"apart": 0.007},
}


def draw_ratios(
    rounds, random, *, variants=12, scale=1.0, noise=0.08, lasts=0.3, tail=0, spikes=0.0, apart=0.0
):
    """Return logs of ratios of some variants; each round is correlated with the one before."""
    shape = (variants, rounds + 50)
    fresh = random.standard_t(tail, shape) / tail**0.5 if tail else random.normal(size=shape)
    logs = noise * fresh
    for step in range(1, shape[1]):
        logs[:, step] = lasts * logs[:, step - 1] + (1 - lasts**2) ** 0.5 * logs[:, step]
    logs = logs[:, 50:] + random.exponential(0.5, (variants, rounds)) * (
        random.random((variants, rounds)) < spikes
    )
    logs += random.normal(0, apart, (variants, 1))
    logs[0] += np.log(scale)
    return {str(i): (row, 0) for i, row in enumerate(logs)}


def iter_pairs(count, rounds, **noise):
    random = np.random.default_rng(rounds)
    for _ in range(count):
        yield compare_ratios(*(draw_ratios(rounds, random, **noise) for _ in range(2)))


def compute_fraction_called_different(rows_of_pairs):
    """Return the fraction of comparisons in which any variant is called slower or faster."""
    different = [any(row.verdict in DIFFERENT for row in rows) for rows in rows_of_pairs]
    return sum(different) / len(different)


@pytest.mark.parametrize(("rounds", "noise"), [(20, "heavy and lasting"), (60, "lasting")])
def test_equal_code_is_rarely_called_different(rounds, noise):
    assert compute_fraction_called_different(iter_pairs(10, rounds, **NOISES[noise])) <= 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("rounds", [15, 20, 60, 400])
def test_of_a_hundred_pairs_of_the_same_code_ninety_five_cannot_be_told_apart(rounds, noise):
    assert compute_fraction_called_different(iter_pairs(100, rounds, **NOISES[noise])) <= 0.05


def iter_verdicts_at(rounds, scale, *, count, **noise):
    """Yield verdicts on one variant among twelve whose time is multiplied by `scale`."""
    random = np.random.default_rng(rounds)
    for _ in range(count):
        sides = [
            draw_ratios(rounds, random, variants=1, scale=s, **noise)["0"] for s in (1.0, scale)
        ]
        yield compare._compare("0", *sides, 0.05, 12, random).verdict


@pytest.mark.parametrize(("scale", "verdict"), [(1.05, "slower"), (1 / 1.05, "faster")])
def test_a_true_difference_of_the_margin_is_found_with_enough_rounds(scale, verdict):
    assert [*iter_verdicts_at(1000, scale, count=5)] == [verdict] * 5


def test_equal_code_is_called_the_same_with_enough_rounds():
    assert [*iter_verdicts_at(1000, 1.0, count=5)] == ["same"] * 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("noise", ["even", "lasting", "heavy", "spikes", "apart"])
@pytest.mark.parametrize(
    ("scale", "verdict"), [(1.05, "slower"), (1 / 1.05, "faster"), (1.0, "same")]
)
def test_of_a_hundred_comparisons_with_enough_rounds_ninety_are_right(noise, scale, verdict):
    verdicts = [*iter_verdicts_at(2000, scale, count=100, **NOISES[noise])]
    assert verdicts.count(verdict) >= 90


def test_the_same_run_twice_is_refused_also_as_a_copy(tmp_path):
    before = make_run(tmp_path / "a")
    shutil.copytree(before.path, tmp_path / "copy")
    for twice in (before, RunFolder.open(tmp_path / "copy")):
        with pytest.raises(UsageError, match="contain the same samples; expected different runs"):
            compare_runs(before, twice)


def test_a_run_whose_audit_failed_is_warned_of(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1)
    b.add_stage("audit", Audit(9, ["step time: one says 1, another 2"]))
    b.finish()
    (warning,) = list_warnings(a, b)
    assert "1 of 9 checks of" in warning
    assert "step time: one says 1, another 2" in warning


@pytest.mark.exhaustive
def test_real_runs_of_the_same_code_are_not_told_apart_and_five_percent_is_found(tmp_path):
    # Two real runs; what is compared are stretches of theirs, a hundred times: the noise is real,
    # what lasts for some seconds too, and so is what one process has and the other has not.
    command = [sys.executable, "-m", "llmsys_suite", "run", "train", "--size", "mini", "--preset",
               "cpu", "--warmup", "20", "--steps", "600", "--out"]  # fmt: skip
    recorded = []
    for name in "ab":
        subprocess.run([*command, tmp_path / name], check=True, timeout=900)
        recorded.append(compute_round_ratios(RunFolder.open(tmp_path / name).samples()))
    left = min(len(logs) for run in recorded for logs, _ in run.values())
    if left < 300:
        pytest.skip(f"other programs had the cores: {left} of 600 rounds are left")
    random = np.random.default_rng(0)

    def stretches(run, rounds, scale=1.0, length=30):
        starts = random.integers(0, left - length, -(-rounds // length))
        picked = (starts[:, None] + np.arange(length)).ravel()[:rounds]
        return {
            n: (logs[picked] + (n == OURS[0]) * np.log(scale), 0) for n, (logs, _) in run.items()
        }

    def compared(rounds, scale=1.0):
        before, after = recorded if random.random() < 0.5 else recorded[::-1]
        return compare_ratios(stretches(before, rounds), stretches(after, rounds, scale))

    assert compute_fraction_called_different([compared(60) for _ in range(100)]) <= 0.05
    verdicts_on_slower = [compared(2000, 1.05)[0].verdict for _ in range(100)]
    assert verdicts_on_slower.count("slower") >= 80


def test_rounds_in_which_others_had_the_cores_give_no_verdict(tmp_path):
    rows = compare_runs(
        make_run(tmp_path / "a"), make_run(tmp_path / "b", scale=2.0, queued=0.3, seed=1)
    )
    assert set(get_verdicts(rows).values()) == {"cannot tell"}
    assert all("other programs used the cores in 30 of 30 rounds" in str(row) for row in rows)


def test_a_rank_that_waits_for_threads_of_its_own_run_is_not_disturbed(tmp_path):
    queued = {"scale": 2.0, "queued": 0.3, "seed": 1, "rounds": 60}
    before = make_run(tmp_path / "a", rounds=60)
    by_fraction = {
        fraction: get_verdicts(compare_runs(before, make_run(path, others_work=fraction, **queued)))
        for fraction in (0.02, 0.4)
        for path in [tmp_path / str(fraction)]
    }
    assert by_fraction[0.02]["ddp flat"] == "slower"
    assert set(by_fraction[0.4].values()) == {"cannot tell"}


def test_the_work_of_other_programs_is_that_of_the_machine_without_the_ranks(tmp_path):
    begin = [others.read_busy_clocks(world=1) | {"step": 0, "rank": 0}]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        time.sleep(1.0)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    fractions = others.compute_foreign_cpu_fractions(
        [*begin, others.read_busy_clocks(world=1) | {"step": 1, "rank": 0}]
    )
    assert fractions[1] > 0.9


def test_a_ratio_is_of_one_round_and_one_rank():
    def sample(variant, rank, step, seconds, warmup=False):
        return {
            "stage": "train", "variant": variant, "phase": "step", "step": step, "rank": rank,
            "warmup": warmup, "seconds": seconds,
        }  # fmt: skip

    logs, disturbed = compute_round_ratios(
        [
            sample(PEER, 0, 0, 1.0),
            sample(PEER, 1, 0, 2.0),
            sample(PEER, 0, 1, 4.0),
            sample("fsdp", 0, 0, 2.0),
            sample("fsdp", 1, 0, 2.0),
            sample("fsdp", 0, 1, 4.0),
            sample("fsdp", 0, 9, 100.0, warmup=True),
        ]
    )["fsdp"]
    np.testing.assert_allclose(np.exp(logs), [2**0.5, 1.0])
    assert disturbed == 0


@pytest.mark.parametrize(
    ("difference", "complaint"),
    [
        ({"environment": ENVIRONMENT | {"cores": 64}}, "differ in cores"),
        ({"environment": ENVIRONMENT | {"threads": 2}}, "differ in threads"),
        ({"size": "small"}, "differ in size"),
        ({"finish": False}, "incomplete"),
    ],
)
def test_runs_that_do_not_compare_are_refused(tmp_path, difference, complaint):
    with pytest.raises(UsageError, match=complaint):
        compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", **difference))


def test_variants_that_ran_one_after_another_have_no_rounds_to_compare(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1)]
    runs[1].add_stage("plan", replace(make_plan(7, 1e9, 1), variants_fit_together=False))
    runs[1].finish()
    with pytest.raises(UsageError, match="one after another, so they have no rounds"):
        compare_runs(*runs)


def test_an_edited_run_is_refused(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    lines = (b.path / "samples.jsonl").read_text().splitlines()
    (b.path / "samples.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(UsageError, match="was changed, added or deleted"):
        compare_runs(a, b)


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ({"environment": ENVIRONMENT | {"cpu_flags": ["avx2", "fma", "amx_int8"]}}, "amx_int8"),
        ({"environment": ENVIRONMENT | {"torch": "3.0"}}, "torch"),
        ({"environment": ENVIRONMENT | {"text": "another"}}, "text"),
        ({"learning_rate": 1.0}, "learning_rate"),
    ],
)
def test_differences_that_may_change_times_are_warned_of(tmp_path, difference, named):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", **difference)
    (warning,) = list_warnings(a, b)
    assert named in warning
    assert list_warnings(a, a) == []


def test_a_training_that_failed_compares_with_none(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    b.add_stage("train", Skipped("no variant"))
    b.finish()
    with pytest.raises(UsageError, match="has no stage train that ended"):
        compare_runs(a, b)


def test_runs_without_a_common_variant_are_refused():
    with pytest.raises(UsageError, match="no variant besides the peer"):
        compare_ratios({"zero 1": (np.zeros(9), 0)}, {"fsdp": (np.zeros(9), 0)})


@pytest.mark.parametrize(("disturbed", "verdict"), [(80, "same"), (120, "cannot tell")])
def test_each_run_has_enough_rounds_by_its_own_number_of_disturbed_ones(disturbed, verdict):
    random = np.random.default_rng(0)
    before = {"zero 1": (random.normal(0, 0.01, 30), 0)}
    after = {"zero 1": (random.normal(0, 0.01, 100), disturbed)}
    (row,) = compare_ratios(before, after)
    assert row.verdict == verdict
    assert (row.rounds, row.disturbed) == ((30, 0) if verdict == "same" else (100, 120))


def test_a_variant_that_only_some_runs_have_trained_cannot_be_told():
    random = np.random.default_rng(0)
    before, after = ({v: (random.normal(0, 0.01, 300), 0) for v in OURS} for _ in range(2))
    del after["fsdp"]
    rows = compare_ratios(before, after)
    assert find_variants_slower_by(rows, 10)[1] == ["fsdp"]
    assert "fsdp  not trained by both runs  cannot tell" in str(rows[-1])
