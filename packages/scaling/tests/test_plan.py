import math
from functools import partial

import pytest
from scaling import Law, fit_parametric, isoflop_runs, optimum, plan

LAW = Law(1.69, 406.4, 410.7, 0.34, 0.28)


@pytest.fixture(scope="module")
def fit():
    return fit_parametric(isoflop_runs(LAW, noise=3e-3, seed=1))


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
@pytest.mark.parametrize("served", [0.0, 1e12])
def test_plan_spends_the_budget_and_its_intervals_cover_the_truth(fit, served):
    model = plan(fit, 1e23, served_tokens=served)
    assert model.training + model.serving == pytest.approx(1e23)
    assert model.serving == 2 * model.parameters * served
    truth = LAW.optimal(1e23, inference_tokens=served)
    for name in ("parameters", "tokens", "loss"):
        assert getattr(truth, name) in model.intervals[name]
        assert getattr(model, name) in model.intervals[name]
    # No other size has a lower predicted loss for the same budget.
    for factor in (0.8, 1.25):
        other = plan(fit, 1e23, served_tokens=served, parameters=factor * model.parameters)
        assert other.loss > model.loss
        assert other.training + other.serving == pytest.approx(1e23)
        assert LAW.predict(other.parameters, other.tokens) in other.intervals["loss"]


def test_serving_makes_the_model_smaller_and_impossible_budgets_are_refused(fit):
    assert plan(fit, 1e22, served_tokens=1e12).parameters < plan(fit, 1e22).parameters
    with pytest.raises(ValueError, match="do not train and serve"):
        plan(fit, 1e22, served_tokens=1e14, parameters=1e9)
    with pytest.raises(ValueError, match="expected finite compute > 0"):
        plan(fit, -1.0)


def test_loads_that_no_model_can_serve_are_refused(fit):
    for call in (fit.optimal, fit.law.optimal, partial(optimum, "loss")):
        with pytest.raises(ValueError, match="cannot serve inference_tokens = 1e"):
            call(1e22, inference_tokens=1e20)
        with pytest.raises(ValueError, match="inference_tokens = -1"):
            call(1e22, inference_tokens=-1.0)
    for options in ({}, {"parameters": 1e9}):
        with pytest.raises(ValueError, match="cannot serve"):
            plan(fit, 1e22, served_tokens=1e20, **options)
        with pytest.raises(ValueError, match="expected finite compute"):
            plan(fit, math.inf, **options)
    with pytest.raises(ValueError, match="positive and finite"):
        fit.predict(1e9, math.inf)
