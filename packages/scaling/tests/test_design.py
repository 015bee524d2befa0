import numpy as np
import pytest
from scaling import design, fit_parametric, isoflop_runs, load_runs
from scaling.synthetic import CHINCHILLA

NOISE = 3e-3
TRUSTED = {"discrepancy": 0.0, "apart": 1.0, "tokens_per_parameter": (1, 1000)}


def spread(parameters, tokens, sets=50):
    """Return the factor that covers the estimated best size at 1e24 after these runs."""
    log_sizes = []
    for seed in range(sets):
        old = isoflop_runs(noise=NOISE, seed=seed)
        error = np.exp(NOISE * np.random.default_rng(seed + 10**6).standard_normal(len(parameters)))
        new = CHINCHILLA.predict(np.asarray(parameters), np.asarray(tokens)) * error
        columns = {
            "N": np.concatenate([old.parameters, parameters]),
            "D": np.concatenate([old.tokens, tokens]),
            "loss": np.concatenate([old.loss, new]),
        }
        fit = fit_parametric(load_runs(columns), "squares")
        log_sizes.append(np.log(fit.law.optimal(1e24).parameters))
    return float(np.exp(1.99 * np.std(log_sizes)))


@pytest.fixture(scope="module")
def fit():
    return fit_parametric(isoflop_runs(noise=NOISE, seed=11), "squares")


def test_designed_runs_narrow_the_interval_as_predicted(fit):
    plan = design(fit, budget=1e21, target=1e24, **TRUSTED)
    narrowed = np.log(spread(plan.parameters, plan.tokens)) / np.log(spread([], []))
    predicted = np.log(plan.factor_after) / np.log(plan.factor_before)
    assert narrowed == pytest.approx(predicted, rel=0.15)


@pytest.mark.exhaustive
def test_designed_runs_narrow_the_interval_more_than_usual_runs(fit):
    budget = 1e21
    plan = design(fit, budget=budget, target=1e24, **TRUSTED)
    assert plan.compute.sum() <= budget * (1 + 1e-9)
    np.testing.assert_allclose(6 * plan.parameters * plan.tokens, plan.compute)
    designed = np.log(spread(plan.parameters, plan.tokens))
    single = CHINCHILLA.optimal(budget)
    valley = CHINCHILLA.optimal(budget / 8).parameters * np.geomspace(1 / 6, 6, 8)
    assert designed < 0.95 * np.log(spread([single.parameters], [single.tokens]))
    assert designed < 0.95 * np.log(spread(valley, budget / 8 / 6 / valley))


def test_no_random_design_of_the_same_cost_is_better(fit):
    plan = design(fit, budget=1e21, target=1e24, runs=4, **TRUSTED)
    rng = np.random.default_rng(0)
    from scaling import optimum
    from scaling.fit import newton
    from scaling.fit.varpro import Problem

    problem = Problem.chinchilla(fit.runs)
    theta = problem.from_law(fit.law)
    target = optimum("parameters", 1e24)
    slope = newton.numerical_gradient(
        lambda t: np.log(target.evaluate(problem.to_constants(t))), theta[None]
    )[0]
    known = newton.log_jacobian(problem, theta)

    def variance(n, d):
        new = problem.with_columns({"parameters": n, "tokens": d})
        rows = np.concatenate([known, newton.log_jacobian(new, theta)], axis=1)
        return slope @ np.linalg.solve(rows @ rows.T, slope)

    ours = variance(plan.parameters, plan.tokens)
    ratio = np.log(plan.factor_after) / np.log(plan.factor_before)
    assert ratio**2 == pytest.approx(ours / variance(np.empty(0), np.empty(0)), rel=1e-6)
    for _ in range(300):
        count = rng.integers(1, 5)
        n = np.exp(rng.uniform(np.log(fit.runs.parameters.min()), np.log(1e10), count))
        c = 1e21 * rng.dirichlet(np.ones(count))
        d = c / (6 * n)
        if (d >= fit.runs.tokens.min()).all() and (d / n >= 1).all() and (d / n <= 1000).all():
            assert variance(n, d) >= ours * 0.97


def test_designed_runs_are_not_smaller_or_shorter_than_fitted_runs(fit):
    plan = design(fit, budget=1e21, target=1e24)
    assert (plan.parameters >= fit.runs.parameters.min() * (1 - 1e-9)).all()
    assert (plan.tokens >= fit.runs.tokens.min() * (1 - 1e-9)).all()
    assert plan.factor_after < plan.factor_before


def test_design_satisfies_constraints_and_repeats_no_run(fit):
    plan = design(fit, budget=1e22, target=1e24, tokens_per_parameter=(5, 200), largest=3e21)
    ratios = plan.tokens / plan.parameters
    assert len(ratios) > 2
    assert ratios.min() >= 5 * (1 - 1e-9)
    assert ratios.max() <= 200 * (1 + 1e-9)
    assert plan.compute.max() <= 3e21 * (1 + 1e-9)
    assert plan.compute.sum() <= 1e22 * (1 + 1e-9)
    logs = np.log([plan.parameters, plan.tokens])
    gaps = np.abs(logs[:, :, None] - logs[:, None]).max(0) + np.eye(len(ratios))
    assert gaps.min() >= np.log(1.25) - 1e-9
    assert plan.factor_after < plan.factor_before
    with pytest.raises(ValueError, match=r"apart = 0\.5"):
        design(fit, budget=1e22, target=1e24, apart=0.5)


def test_discrepancy_spreads_the_runs_and_widens_the_expected_interval(fit):
    trusted = design(fit, budget=1e22, target=1e24, **TRUSTED)
    wary = design(fit, budget=1e22, target=1e24, **TRUSTED | {"discrepancy": 3.0})
    assert wary.factor_after > trusted.factor_after
    assert len(np.unique(wary.parameters)) > len(np.unique(trusted.parameters))
