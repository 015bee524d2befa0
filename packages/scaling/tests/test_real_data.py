"""Two public data sets, which are not shipped: the README says where to get them."""

import csv
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from figures import assert_at_most
from scaling import (
    CATALOG,
    ScalingWarning,
    bootstrap,
    fit_isoflop,
    fit_law,
    fit_parametric,
    load_runs,
)
from scaling.fit import newton
from scaling.fit.varpro import Problem
from shortcuts import fit_shortcut

FOLDER = Path(os.environ.get("SCALING_DATA", ""))
pytestmark = pytest.mark.skipif(
    not os.environ.get("SCALING_DATA"),
    reason="SCALING_DATA names no folder with isoflops_curves.json and "
    "chinchilla_svg_extracted_data.csv (README: Limits)",
)


@pytest.fixture
def isoflops():
    return load_runs(FOLDER / "isoflops_curves.json")


@pytest.fixture
def chinchilla():
    return load_runs(FOLDER / "chinchilla_svg_extracted_data.csv").without_highest(5)


def fit_quietly(fit, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalingWarning)
        return fit(*arguments, **options)


@pytest.mark.parametrize(
    ("options", "at_1e23", "at_1e24"),
    [
        ({"nearest": 5}, 91_693_801_285, 299_650_379_939),
        ({"nearest": 8}, 91_144_421_334, 298_064_035_371),
    ],
)
def test_isoflop_laws(isoflops, options, at_1e23, at_1e24):
    fit = fit_quietly(fit_isoflop, isoflops, **options)
    assert fit.optimal(1e23).parameters == pytest.approx(at_1e23, rel=2e-6)
    assert fit.optimal(1e24).parameters == pytest.approx(at_1e24, rel=2e-6)
    assert fit.optimal(1e24).tokens == pytest.approx(1e24 / 6 / at_1e24, rel=2e-6)


@pytest.mark.parametrize(
    ("method", "at_1e23", "at_1e24"),
    [
        ("minimum", 70_054_233_905, 206_118_539_185),
        ("minimum-offset", 39_792_543_901, 85_491_134_810),
    ],
)
def test_shortcuts_reproduce_published_worked_answers(isoflops, method, at_1e23, at_1e24):
    best_size = fit_shortcut(isoflops, method)
    assert [best_size(1e23), best_size(1e24)] == pytest.approx([at_1e23, at_1e24], rel=2e-6)


def test_parametric_fit_recovers_the_law_of_the_isoflop_runs(isoflops):
    fit = fit_parametric(isoflops, prove=True)
    assert fit.proof.holds
    np.testing.assert_allclose(fit.law.constants, [2.69, 1606.4, 3210.7, 0.34, 0.36], rtol=1e-6)
    # The best size at 1e24 is 3.003e11, up to rounding of N in the file: 3.5 times the shortcut.
    best = fit.law.optimal(1e24).parameters
    assert best == pytest.approx(3.0031e11, rel=1e-4)
    assert fit_quietly(fit_isoflop, isoflops).optimal(1e24).parameters == pytest.approx(
        best, rel=1e-5
    )


def test_huber_optimum_of_the_chinchilla_points(chinchilla):
    assert len(chinchilla) == 240
    fit = fit_quietly(fit_parametric, chinchilla, prove=True)
    assert fit.objective <= 1.018274018e-3
    expected = [1.81722, 477.826, 2143.417, 0.34731, 0.36717]
    np.testing.assert_allclose(fit.law.constants, expected, rtol=1e-5)
    assert fit.proof.holds
    assert fit.proof.converged == fit.proof.starts
    # The published constants are not this objective's optimum.
    problem = Problem.from_runs(chinchilla)
    published = type(fit.law)(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
    there = newton.compute_objective(
        problem, problem.from_constants(published.constants)[None], 1e-3
    )[0]
    assert there == pytest.approx(1.02284e-3, rel=1e-5)


PUBLISHED = [1.816864, 482.0057, 2085.434, 0.347813, 0.365854]
DIGITS = [6, 4, 3, 6, 6]


def round_constants(law):
    return [round(c, d) for c, d in zip(law.constants, DIGITS, strict=True)]


def test_least_absolute_deviations_reproduce_the_published_constants(chinchilla):
    fit = fit_quietly(fit_parametric, chinchilla, "lad", prove=True)
    assert fit.proof.holds
    np.testing.assert_allclose(fit.law.constants, PUBLISHED, rtol=1e-6)
    # E, alpha and beta to every printed digit; A and B to seven and six.
    assert round_constants(fit.law) == [1.816864, 482.006, 2085.436, 0.347813, 0.365854]
    # The published constants are not the optimum, whichever way their digits were rounded.
    problem = Problem.from_runs(chinchilla)

    def deviations(constants):
        law = type(fit.law)(*map(float, constants))
        return np.abs(
            newton.compute_residuals(problem, problem.from_constants(law.constants)[None])
        ).sum()

    assert fit.objective == pytest.approx(1.129494654659, abs=2e-12)
    assert deviations(PUBLISHED) == pytest.approx(1.129497630319, abs=1e-11)
    half = 0.5 * 10.0 ** -np.array(DIGITS)
    near = np.random.default_rng(0).uniform(-1, 1, (500, 5)) * half + PUBLISHED
    assert min(map(deviations, near)) > fit.objective * (1 + 1e-7)
    # An optimum of least absolute deviations passes through as many runs as it has constants.
    assert (np.abs(fit.residuals) < 1e-8).sum() >= 5


def test_published_digits_are_those_of_a_delta_of_4_7e_9(chinchilla):
    """Their optimizer minimized a Huber loss whose scale had shrunk to this delta."""
    fit = fit_quietly(fit_parametric, chinchilla, "huber", delta=4.7e-9)
    assert round_constants(fit.law) == PUBLISHED
    least = fit_quietly(fit_parametric, chinchilla, "lad").objective
    assert least < np.abs(fit.residuals).sum() < least * (1 + 1e-8)


@pytest.mark.timing
def test_chinchilla_fit_takes_50_ms_and_4000_refits_5_s(chinchilla):
    fit_quietly(fit_parametric, chinchilla)
    start = time.process_time()
    fit = fit_quietly(fit_parametric, chinchilla)
    milliseconds = 1000 * (time.process_time() - start)
    assert_at_most("scaling: fit of the Chinchilla runs", 50, milliseconds, "ms")
    start = time.process_time()
    drawn = bootstrap(fit)
    assert_at_most("scaling: 4,000 refits", 5, time.process_time() - start, "s")
    # Epoch's own intervals from 4,000 refits: alpha .317-.373, beta .331-.415.
    assert drawn.interval("alpha").low == pytest.approx(0.317, abs=0.003)
    assert drawn.interval("alpha").high == pytest.approx(0.373, abs=0.003)


def test_exponents_of_hoffmann_and_besiroglu_are_those_of_the_chinchilla_runs(chinchilla):
    """Hoffmann et al. print N_opt ~ C^0.49 for parabolas, and C^0.46 for a parametric fit.

    Besiroglu et al. 2024 show that the parametric fit to the same runs gives C^0.51 instead.
    """
    parabolas = fit_quietly(fit_isoflop, chinchilla, nearest=100)
    assert 0.49 in parabolas.exponent_interval
    assert 0.462 <= parabolas.exponent <= 0.534  # the interval of Hoffmann et al., table 2
    interval = fit_quietly(fit_parametric, chinchilla).posterior.interval("exponent")
    assert 0.513 in interval
    assert 0.46 not in interval


def test_tied_constants_are_those_of_their_runs():
    """Gadre et al. print E + (a M^eta + b M^-eta) C^-eta for these 34 models on c4."""
    path = FOLDER / "scaling" / "overtrained_c4.csv"
    if not path.exists():
        pytest.skip("SCALING_DATA names no folder with scaling/overtrained_c4.csv")
    runs, law = load_runs(path, columns={"loss": "loss_c4"}), CATALOG["tied"]
    loss = law.predict(law.published, parameters=runs.parameters, tokens=runs.tokens)
    assert np.median(np.abs(loss / runs.loss - 1)) < 0.011
    c = 6 * runs.parameters * runs.tokens
    m = runs.tokens / runs.parameters
    eta = 0.121
    printed = 1.51 + (141 * m**eta + 190 * m**-eta) * c**-eta
    np.testing.assert_allclose(loss, printed, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
@pytest.mark.parametrize(
    ("runs_of", "published", "other"),
    [
        # Runs as by Kaplan et al. reproduce their exponent, and tuned ones that of Hoffmann et al.
        ("base-long-kaplan-kaplan-train", 0.88, 0.50),
        ("tuned-short-const-standard-val", 0.50, 0.88),
    ],
)
@pytest.mark.parametrize("text", ["owt2", "rw"])
def test_exponents_of_kaplan_and_hoffmann_are_those_of_porian_s_runs(
    text, runs_of, published, other
):
    """Porian et al. 2024, arXiv 2406.19146: tuning explains the difference of the exponents."""
    path = FOLDER / "scaling" / "porian.csv"
    if not path.exists():
        pytest.skip("SCALING_DATA names no folder with scaling/porian.csv")
    interval = fit_isoflop(load_runs(path, where={"set": f"{text}-{runs_of}"})).exponent_interval
    assert published in interval
    assert other not in interval


#: The relative errors in percent that figure 3 of Bhagia et al. 2024 (arXiv 2412.04403) prints for
#: each task loss: mean error of the fit, and errors of the predicted losses at 7B and 13B.
OLMO_ERRORS = {
    "mmlu_{}_test": (0.46, 1.3, 0.2),
    "hellaswag_val": (0.26, 0.3, 1.2),
    "arc_challenge_test": (0.48, 7.0, 9.4),
    "arc_easy_test": (1.18, 13.3, 16.0),
    "piqa_val": (0.31, 2.0, 2.7),
    "csqa_val": (1.05, 11.7, 18.5),
    "socialiqa_val": (0.54, 4.3, 3.6),
    "openbookqa_test": (0.59, 1.3, 0.9),
}

#: The weights of the four parts of MMLU in the ladder's mean loss.
MMLU_WEIGHTS = {"stem": 0.215, "humanities": 0.335, "social_sciences": 0.219, "other": 0.231}


def read_olmo_runs(file):
    """Return the rows of each run of a file, in order of the steps."""
    runs = {}
    with (FOLDER / "scaling" / file).open() as lines:
        for row in csv.DictReader(lines):
            runs.setdefault(row["run"], []).append(row)
    return runs


def compute_olmo_point(rows, task):
    """Return N, D and the mean task loss of the last five evaluations of a run."""
    parts = MMLU_WEIGHTS if "{}" in task else {"": 1.0}
    losses = []
    for part in parts:
        name = f"eval/downstream_bpb/{task.format(part)}_rc_5shot_bpb"
        losses.append(np.mean([float(row[name]) for row in rows[-5:]]))
    last = rows[-1]
    tokens = last.get("throughput/total_tokens")
    tokens = tokens or float(last["_step"]) * float(last["batch_size_in_tokens"])
    return float(last["n_params"]), float(tokens), np.dot(losses, [*parts.values()])


@pytest.mark.skipif(
    not (FOLDER / "scaling" / "olmo_ladder_targets.csv").exists(),
    reason="SCALING_DATA names no folder with scaling/olmo_ladder_targets.csv (README: Limits)",
)
@pytest.mark.parametrize("task", OLMO_ERRORS)
def test_laws_of_the_olmo_ladder_have_every_published_error(task):
    ladder = read_olmo_runs("olmo_ladder.csv")
    sizes = ("190M", "370M", "760M", "1B")
    points = [
        compute_olmo_point(ladder[f"{size}-{length}xC"], task)
        for size in sizes
        for length in (1, 2, 5, 10)
    ]
    columns = dict(zip(("parameters", "tokens", "loss"), np.transpose(points), strict=True))
    fit = fit_quietly(fit_law, "chinchilla", columns)
    errors = [float(np.mean(np.abs(np.expm1(fit.residuals))))]
    for rows in read_olmo_runs("olmo_ladder_targets.csv").values():
        n, d, loss = compute_olmo_point(rows, task)
        errors.append(abs(float(fit.predict(parameters=n, tokens=d)) / loss - 1))
    of_fit, *of_targets = OLMO_ERRORS[task]
    assert [round(100 * error, 1) for error in errors[1:]] == of_targets
    assert round(100 * errors[0], 2) == of_fit
