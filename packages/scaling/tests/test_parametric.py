import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling import Law, fit_parametric, isoflop_runs, newton
from scaling.bench import lbfgs
from scaling.varpro import Problem

laws = st.builds(
    Law,
    E=st.floats(0.3, 3),
    A=st.floats(50, 3000),
    B=st.floats(50, 3000),
    alpha=st.floats(0.2, 0.7),
    beta=st.floats(0.2, 0.7),
)


@pytest.mark.filterwarnings("ignore:column 'loss' is above 20 nats")
@pytest.mark.filterwarnings("ignore:.*converged starts reached the best objective")
@settings(max_examples=25, deadline=None)
@given(law=laws, loss=st.sampled_from(["huber", "lad", "squares"]))
def test_a_noiseless_law_is_recovered_whatever_law_it_was(law, loss):
    fit = fit_parametric(isoflop_runs(law), loss, prove=True)
    assert fit.law.alpha == pytest.approx(law.alpha, abs=1e-6)
    assert fit.law.beta == pytest.approx(law.beta, abs=1e-6)
    truth = law.optimal(1e24).parameters
    assert fit.law.optimal(1e24).parameters == pytest.approx(truth, rel=1e-4)
    # At the flattest corner (both exponents 0.2) two starts settle early, and the fit says so.
    assert fit.proof.landed >= fit.proof.converged - 5


@pytest.mark.parametrize("loss", ["huber", "lad", "squares"])
def test_every_start_that_converges_lands_on_the_answer_under_noise(loss):
    fit = fit_parametric(isoflop_runs(noise=5e-3, seed=1), loss, prove=True)
    assert fit.proof.starts == 289
    assert fit.proof.landed == fit.proof.converged >= 285


def test_the_objective_is_not_above_that_of_lbfgs_from_many_starts():
    runs = isoflop_runs(noise=5e-3, seed=2)
    assert fit_parametric(runs).objective <= lbfgs(runs, 60) * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), delta=st.sampled_from([1e-3, 1e-2, np.inf]))
def test_derivatives_agree_with_differences(seed, delta):
    rng = np.random.default_rng(seed)
    problem = Problem.of(isoflop_runs(noise=5e-3, seed=seed))
    theta = problem.centred(Law(1.8, 300, 500, 0.33, 0.3)) + 0.01 * rng.standard_normal(5)
    weights = rng.integers(0, 3, (1, len(problem.z))).astype(float)

    def value(t):
        return newton._Point.at(problem, t[None], weights, delta).objective[0]

    point = newton._Point.at(problem, theta[None], weights, delta)
    gradient, hessian = newton._derivatives(problem, point, weights, delta, np.zeros(1))
    step = 1e-6 * np.eye(5)
    slopes = [(value(theta + h) - value(theta - h)) / 2e-6 for h in step]
    np.testing.assert_allclose(gradient[0], slopes, rtol=1e-5, atol=1e-6 * abs(gradient).max())

    def slope(t):
        point = newton._Point.at(problem, t[None], weights, delta)
        return newton._derivatives(problem, point, weights, delta, np.zeros(1))[0][0]

    if np.isinf(delta):  # the Huber gradient has corners
        bends = [(slope(theta + h) - slope(theta - h)) / 2e-6 for h in step]
        np.testing.assert_allclose(hessian[0], bends, rtol=1e-4, atol=1e-6 * abs(hessian).max())
