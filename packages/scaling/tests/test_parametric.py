import functools
import itertools
import time
import warnings

import numpy as np
import pytest
from figures import assert_at_most
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scaling import Law, ScalingWarning, fit_law, fit_parametric, isoflop_runs, load_runs
from scaling.bench import minimize_by_lbfgs
from scaling.fit import newton, search
from scaling.fit.varpro import Problem, _solve_nonnegative_amplitudes
from scipy.optimize import basinhopping, differential_evolution, nnls

exponents = st.floats(0.06, 1.5)
constants = st.floats(10, 5000)
laws = st.builds(
    Law, E=st.floats(0.1, 3), A=constants, B=constants, alpha=exponents, beta=exponents
)


def compute_rounding_of_exponents(law, runs):
    """Return by how much half an ulp in every loss changes alpha and beta, to first order."""
    problem = Problem.from_runs(runs)
    slope = newton.compute_log_jacobian(problem, problem.from_constants(law.constants))
    norm = np.linalg.norm(slope, axis=1)
    covariance = np.linalg.inv((slope / norm[:, None]) @ (slope / norm[:, None]).T)
    return 1.1e-16 * np.sqrt(np.diag(covariance))[3:] / norm[3:]


def test_a_search_that_does_not_converge_is_reported_as_such(monkeypatch):
    monkeypatch.setattr(search, "MAX_STEPS", 1)
    with pytest.warns(ScalingWarning, match=r"none of \d+ starts converged") as caught:
        fit = fit_parametric(isoflop_runs(noise=2e-3))
    assert fit.proof.converged == 0
    assert not any("several optima" in str(warning.message) for warning in caught)


@pytest.mark.filterwarnings("ignore:column 'loss' is above 14 nats")
@settings(max_examples=2, deadline=None, derandomize=True)
@given(law=laws, loss=st.sampled_from(["huber", "lad", "squares"]))
@example(Law(2.37, 4816, 4816, 0.06, 0.06), "huber")
def test_any_noiseless_law_is_recovered(law, loss):
    runs = isoflop_runs(law)
    # With exponents near 1.5 a term is 1e-10 of the loss, of which float64 keeps few digits.
    assume(compute_rounding_of_exponents(law, runs).max() < 1e-8)
    fit = fit_parametric(runs, loss, prove=True)
    assert fit.law.alpha == pytest.approx(law.alpha, abs=1e-6)
    assert fit.law.beta == pytest.approx(law.beta, abs=1e-6)
    truth = law.optimal(1e24).parameters
    assert fit.law.optimal(1e24).parameters == pytest.approx(truth, rel=1e-4)
    assert fit.proof.holds


@pytest.mark.parametrize("loss", ["huber", "lad", "squares"])
def test_every_converged_start_reaches_the_best_objective_under_noise(loss):
    fit = fit_parametric(isoflop_runs(noise=5e-3, seed=1), loss, prove=True)
    assert fit.proof.starts == 289
    assert fit.proof.landed == fit.proof.converged >= 285


def iter_hard_runs(count):
    """Yield few runs with heavy tails and any exponents; half of them have several optima."""
    random = np.random.default_rng(0)
    for _ in range(count):
        amplitudes = np.exp(random.uniform(2, 8.5, 2))
        exponents = random.uniform(0.06, 1.2, 2)
        law = Law(random.uniform(0.1, 3), *amplitudes, *exponents)
        runs = random.integers(6, 30)
        n = np.exp(random.uniform(np.log(1e7), np.log(1e10), runs))
        d = np.exp(random.uniform(np.log(1e9), np.log(1e12), runs))
        noise = np.exp(random.choice([1e-3, 1e-2, 5e-2]) * random.standard_t(2, runs))
        loss = law.predict(n, d) * noise
        if loss.max() < 19:
            units = {"parameters": 1, "tokens": 1, "loss": 1}
            yield load_runs({"N": n, "D": d, "loss": loss}, units=units)


def test_fit_law_reports_several_optima_as_fit_parametric_does():
    reports = []
    for runs in itertools.islice(iter_hard_runs(40), 5, 6):
        has_several = []
        for fit in (fit_parametric, functools.partial(fit_law, "chinchilla")):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fit(runs)
            has_several.append(any("several optima" in str(w.message) for w in caught))
        assert has_several[0] == has_several[1]
        reports += has_several
    assert any(reports)


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
@pytest.mark.parametrize("count", [2, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_only_the_whole_grid_is_a_proof(count):
    missed = 0
    for runs in iter_hard_runs(count):
        for loss in ("huber", "lad"):
            fit, proved = fit_parametric(runs, loss), fit_parametric(runs, loss, prove=True)
            assert proved.objective <= fit.objective * (1 + 1e-6)
            # Agreement of some starts is not a proof, since a better optimum may be missed.
            assert fit.proof.starts == 289 or not fit.proof.holds
            missed += fit.objective > proved.objective * (1 + 1e-6)
    assert missed <= 1 + count // 10


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
@pytest.mark.parametrize(
    ("count", "steps"), [(3, 20), pytest.param(200, 150, marks=pytest.mark.exhaustive)]
)
def test_no_other_method_finds_better_if_the_proof_holds(count, steps):
    """The other methods are differential evolution and basin hopping, each polished."""
    proofs = 0
    for runs in itertools.islice(iter_hard_runs(2 * count), count):
        fit = fit_parametric(runs, prove=True)
        problem, log_spread = fit.problem, np.log(fit.problem.target_spread)
        box = [(0, runs.loss.max()), *[(log_spread - 14, log_spread + 5)] * 2, *[(0.02, 3)] * 2]

        def objective(theta, problem=problem):
            return newton.compute_objective(problem, np.atleast_2d(theta.T), 1e-3)

        evolved = differential_evolution(
            objective,
            box,
            vectorized=True,
            updating="deferred",
            seed=1,
            maxiter=steps,
            polish=False,
        )
        hopped = basinhopping(
            lambda theta, value=objective: float(value(theta)[0]),
            problem.from_constants(Law(1.0, 100.0, 100.0, 0.3, 0.3).constants),
            niter=steps // 10,
            seed=1,
            minimizer_kwargs={"method": "L-BFGS-B", "bounds": box},
        )
        ends = newton.polish(problem, np.stack([evolved.x, hopped.x]), delta=1e-3, max_steps=1000)
        least = min(ends.objective.min(), evolved.fun, hopped.fun)
        proofs += fit.proof.holds
        assert not fit.proof.holds or least >= fit.objective * (1 - 1e-7)
    assert proofs >= max(count // 4, 1)


@pytest.mark.parametrize("loss", ["huber", "squares"])
def test_fit_of_a_large_table_reaches_the_optimum_of_the_whole_search(loss, monkeypatch):
    runs = isoflop_runs(noise=5e-3, per_budget=80, seed=2)
    monkeypatch.setattr(search, "SEARCH_ROWS", 400)
    fast = fit_parametric(runs, loss)
    monkeypatch.setattr(search, "SEARCH_ROWS", 10**9)
    whole = fit_parametric(runs, loss)
    assert fast.objective == pytest.approx(whole.objective, rel=1e-9)
    assert fast.proof.starts < whole.proof.starts


def test_vanished_term_is_revived_if_that_lowers_the_objective():
    """Without revival, starts of this law end at two points: with and without the term of B."""
    problem = Problem.from_runs(isoflop_runs(Law(1, 50, 50, 0.2, 0.2)))
    dead = np.array([[1.776, -0.953, -29.0, 0.258, 0.025]])
    ends = newton.polish(problem, dead, delta=1e-3)
    assert ends.converged[0]
    assert newton.flag_vanished_terms(problem, ends.theta).tolist() == [[False, False, True]]
    rows, revived = search._revive_terms(problem, ends, 1e-3)
    assert rows.tolist() == [0]
    assert newton.compute_objective(problem, revived, 1e-3) < ends.objective
    polished = newton.polish(problem, revived, delta=1e-3)
    np.testing.assert_allclose(polished.theta[0, 3:], 0.2, rtol=1e-9)


def test_better_of_two_vanished_terms_is_revived():
    problem = Problem.from_runs(isoflop_runs(Law(2.0, 100.0, 1000.0, 0.5, 0.3)))
    theta = np.array([[1.9, *problem.bounds[0][1:3], 0.4, 0.4]])
    value = newton.compute_objective(problem, theta, 1e-3)
    ends = newton.PolishResult(theta, value, np.ones(1, dtype=bool))
    rows, starts = search._revive_terms(problem, ends, 1e-3)
    assert rows.tolist() == [0]
    sizes = np.log(search.REVIVAL_SIZES * problem.target_spread)
    least = []
    for term in (1, 2):
        exponents = problem.exponent_grid[term - 1]
        trials = np.tile(theta, (len(sizes) * len(exponents), 1))
        trials[:, [term, 2 + term]] = list(itertools.product(sizes, exponents))
        least.append(newton.compute_objective(problem, trials, 1e-3).min())
    assert least[0] != least[1]
    assert newton.compute_objective(problem, starts, 1e-3) == min(least)


@pytest.mark.parametrize("loss", ["huber", pytest.param("lad", marks=pytest.mark.exhaustive)])
def test_start_slightly_above_the_best_objective_has_not_landed(loss, monkeypatch):
    polish = newton.polish

    def almost(*arguments, **options):
        ends = polish(*arguments, **options)
        ends.objective[0] *= 1 + 3e-7
        return ends

    runs = isoflop_runs(budgets=(1e19, 1e20, 1e21), per_budget=5, noise=2e-3)
    exact = fit_parametric(runs, loss, prove=True).proof
    monkeypatch.setattr(newton, "polish", almost)
    with pytest.warns(ScalingWarning, match="several optima"):
        proof = fit_parametric(runs, loss, prove=True).proof
    assert proof.landed == exact.landed - 1
    assert not proof.holds


def test_vanished_term_stays_vanished_if_the_runs_do_not_show_it():
    """Tokens do not lower these losses, so the optimum has no term of B."""
    runs = isoflop_runs(budgets=(1e19, 1e20, 1e21), per_budget=5)
    flat = 2 + 400 * runs.parameters**-0.35 * (1 + 1e-3 * np.log(runs.tokens / 1e9))
    problem = Problem.from_runs(load_runs({"N": runs.parameters, "D": runs.tokens, "loss": flat}))
    theta, proof = search.search(problem, "squares", np.inf, True)
    assert newton.flag_vanished_terms(problem, theta).tolist() == [[False, False, True]]
    assert proof.holds


@pytest.mark.parametrize("loss", ["lad", "squares"])
def test_delta_of_a_huber_loss_is_ignored_by_other_losses(loss):
    runs = isoflop_runs(noise=5e-3, seed=2)
    assert fit_parametric(runs, loss, delta=0.0).law == fit_parametric(runs, loss).law


def test_objective_is_not_above_lbfgs_from_many_starts():
    runs = isoflop_runs(noise=5e-3, seed=2)
    assert fit_parametric(runs).objective <= minimize_by_lbfgs(runs, 20) * (1 + 1e-9)


def test_fit_and_interval_are_those_of_lmfit():
    """The optional reference is lmfit: a search by MINPACK, and intervals by an F test."""
    lmfit = pytest.importorskip("lmfit")
    runs = isoflop_runs(noise=2e-3, seed=3)
    fit = fit_parametric(runs, "squares")
    x, y, target = np.log([runs.parameters, runs.tokens, runs.loss])
    x, y = x - x.mean(), y - y.mean()

    def residuals(p):
        terms = np.exp(p["a"] - p["alpha"] * x) + np.exp(p["b"] - p["beta"] * y)
        return np.log(p["E"] + terms) - target

    start = lmfit.create_params(E=1.7, a=-1.0, b=-1.0, alpha=0.35, beta=0.35)
    search = lmfit.Minimizer(residuals, start)
    result = search.minimize(method="leastsq")
    assert fit.objective == pytest.approx(result.chisqr / 2, rel=1e-9)
    names = ["E", "alpha", "beta"]
    for name, levels in lmfit.conf_interval(search, result, p_names=names, sigmas=[0.95]).items():
        (_, low), (_, best), (_, high) = levels
        interval = fit.posterior.interval(name)
        assert getattr(fit.law, name) == pytest.approx(best, rel=1e-6)
        assert interval.low == pytest.approx(low, abs=0.05 * (high - low))
        assert interval.high == pytest.approx(high, abs=0.05 * (high - low))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), delta=st.sampled_from([1e-3, 1e-2, np.inf]))
def test_derivatives_agree_with_differences(seed, delta):
    rng = np.random.default_rng(seed)
    problem = Problem.from_runs(isoflop_runs(noise=5e-3, seed=seed))
    theta = problem.from_constants(
        Law(1.8, 300, 500, 0.33, 0.3).constants
    ) + 0.01 * rng.standard_normal(5)
    weights = rng.integers(0, 3, (1, len(problem.log_target))).astype(float)

    def value(t):
        return newton._Evaluation.from_parameters(problem, t[None], weights, delta).objective[0]

    point = newton._Evaluation.from_parameters(problem, theta[None], weights, delta)
    gradient, hessian = newton._compute_derivatives(
        problem, theta[None], point, weights, delta, np.zeros(1)
    )
    step = 1e-6 * np.eye(5)
    slopes = [(value(theta + h) - value(theta - h)) / 2e-6 for h in step]
    np.testing.assert_allclose(gradient[0], slopes, rtol=1e-5, atol=1e-6 * abs(gradient).max())

    def slope(t):
        point = newton._Evaluation.from_parameters(problem, t[None], weights, delta)
        return newton._compute_derivatives(problem, t[None], point, weights, delta, np.zeros(1))[0][
            0
        ]

    if np.isinf(delta):  # the Huber gradient has corners
        bends = [(slope(theta + h) - slope(theta - h)) / 2e-6 for h in step]
        np.testing.assert_allclose(hessian[0], bends, rtol=1e-4, atol=1e-6 * abs(hessian).max())


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
@pytest.mark.timing
def test_first_optimum_takes_300_ms():
    """The first answer of a fit includes its posterior and its drift; the median of five counts."""
    seconds = []
    for seed in range(6):
        fit = fit_parametric(isoflop_runs(noise=2e-3, seed=seed))
        start = time.process_time()
        fit.optimal(1e24)
        seconds.append(time.process_time() - start)
    # The first call loads LAPACK.
    median = float(np.median(seconds[1:]))
    assert_at_most("scaling: first optimum of a fit", 0.3, median, "s")


@pytest.mark.timing
def test_large_table_is_read_and_fitted_in_5_seconds():
    random = np.random.default_rng(0)
    n, d = 10 ** random.uniform([[7], [9]], [[9], [11]], (2, 100_000))
    loss = Law(1.69, 406.4, 410.7, 0.34, 0.28).predict(n, d)
    loss *= np.exp(3e-3 * random.standard_normal(100_000))
    records = [dict(zip("NDL", row, strict=True)) for row in zip(n, d, loss, strict=True)]
    start = time.process_time()
    fit = fit_parametric(load_runs(records))
    seconds = time.process_time() - start
    assert fit.law.alpha == pytest.approx(0.34, abs=0.01)
    assert_at_most("scaling: 100,000 rows read and fitted", 5, seconds, "s")


def test_amplitudes_of_starts_are_those_of_scipys_non_negative_least_squares():
    design = np.random.default_rng(0).lognormal(size=(60, 3, 30)) * np.array([[[1e-9], [1], [1e9]]])
    design[0, 1] = design[0, 0] * 2
    ours = _solve_nonnegative_amplitudes(design)
    for matrix, amplitudes in zip(design, ours, strict=True):
        norms = np.linalg.norm(matrix, axis=1)
        _, error = nnls((matrix / norms[:, None]).T, np.ones(30))
        assert (amplitudes >= 0).all()
        assert np.linalg.norm(amplitudes @ matrix - 1) == pytest.approx(error, rel=1e-9)
