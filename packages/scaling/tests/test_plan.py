import pytest
from scaling import Law, fit_parametric, isoflop_runs, plan

LAW = Law(1.69, 406.4, 410.7, 0.34, 0.28)


@pytest.fixture(scope="module")
def fit():
    return fit_parametric(isoflop_runs(LAW, noise=3e-3, seed=1))


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
@pytest.mark.parametrize("served", [0.0, 1e12])
def test_a_plan_spends_the_budget_and_holds_the_truth_in_every_interval(fit, served):
    made = plan(fit, 1e23, served_tokens=served)
    assert made.training + made.serving == pytest.approx(1e23)
    assert made.serving == 2 * made.parameters * served
    truth = LAW.optimal(1e23, inference_tokens=served)
    for name in ("parameters", "tokens", "loss"):
        assert getattr(truth, name) in made.intervals[name]
        assert getattr(made, name) in made.intervals[name]
    # No other size is foretold to be better for the same money.
    for factor in (0.8, 1.25):
        other = plan(fit, 1e23, served_tokens=served, parameters=factor * made.parameters)
        assert other.loss > made.loss
        assert other.training + other.serving == pytest.approx(1e23)
        assert LAW.predict(other.parameters, other.tokens) in other.intervals["loss"]


def test_what_is_served_makes_the_model_smaller_and_a_budget_has_its_limits(fit):
    assert plan(fit, 1e22, served_tokens=1e12).parameters < plan(fit, 1e22).parameters
    with pytest.raises(ValueError, match="do not train and serve"):
        plan(fit, 1e22, served_tokens=1e14, parameters=1e9)
    with pytest.raises(ValueError, match="must be positive"):
        plan(fit, -1.0)
