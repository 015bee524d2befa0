"""Laws as data: one fit recovers the constants of every law."""

import itertools
import time

import numpy as np
import pytest
from figures import assert_at_most
from scaling import (
    CATALOG,
    Form,
    ScalingWarning,
    effective_speedup,
    fit_law,
    isoflop_runs,
)
from scipy.optimize import differential_evolution

RANGES = {
    "parameters": (1e7, 1e10),
    "tokens": (1e9, 1e12),
    "granularity": (1, 64),
}


def draw_table(form, noise=0.0, count=120):
    random = np.random.default_rng(1)
    rows = {k: np.exp(random.uniform(*np.log(RANGES[k]), count)) for k in form.inputs}
    y = form.predict(form.published, **rows)
    return {**rows, form.target: y * np.exp(noise * random.standard_normal(count))}


@pytest.mark.parametrize("name", CATALOG)
def test_published_constants_of_every_law_are_reproduced(name):
    form = CATALOG[name]
    fit = fit_law(name, draw_table(form))
    for constant, value in form.published.items():
        assert fit.constants[constant] == pytest.approx(value, rel=1e-6)
    if len(form.exponents) > 2:
        return
    noisy = fit_law(form, draw_table(form, 2e-3))
    proved = fit_law(form, draw_table(form, 2e-3), prove=True)
    assert noisy.objective <= proved.objective * (1 + 1e-9)
    assert proved.proof.complete


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
@pytest.mark.parametrize(
    "seed", [122, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (33, 132))]
)
def test_no_fixed_exponent_is_better_than_a_proof(seed):
    """The optimum of these runs is at the largest exponent, which few starts reach."""
    random = np.random.default_rng(seed)
    n = 10 ** random.uniform(7, 10, 20)
    d = 10 ** random.uniform(9, 12, 20)
    exponent = random.uniform(0.05, 1.2)
    amplitudes = np.exp(random.uniform(2, 8, 2))
    loss = 1.8 + amplitudes @ [n**-exponent, d**-exponent]
    loss *= np.exp(random.choice([1e-3, 1e-2, 5e-2]) * random.standard_t(2, 20))
    rows = {"parameters": n, "tokens": d, "loss": loss}
    fit = fit_law("tied", rows, prove=True)
    for fixed in (0.1, 0.5, 1.0, 2.0, 3.0):
        terms = {k: v.replace("gamma", str(fixed)) for k, v in CATALOG["tied"].terms.items()}
        form = Form("fixed", ["parameters", "tokens"], terms, {})
        assert fit.objective <= fit_law(form, rows).objective * (1 + 1e-9)


@pytest.mark.timing
@pytest.mark.parametrize("name", CATALOG)
def test_fit_takes_50_ms(name):
    form = CATALOG[name]
    rows = draw_table(form, 2e-3)
    fit_law(form, rows)
    times = []
    for _ in range(5):
        start = time.process_time()
        fit_law(form, rows)
        times.append(time.process_time() - start)
    milliseconds = 1000 * float(np.median(times))
    assert_at_most(f"scaling: fit of the law {name}", 50, milliseconds, "ms")


@pytest.mark.parametrize(
    ("active", "tokens", "granularity", "loss"),
    [(7e9, 137.6e9, 32, 2.076), (1e12, 7.94e12, 64, 1.367)],
)
def test_mixture_law_reproduces_the_losses_predicted_in_its_paper(
    active, tokens, granularity, loss
):
    # 64 experts replace a feed-forward layer, which has two thirds of the parameters of a block.
    parameters = active * (4 + 64 * 8) / 12
    form = CATALOG["mixture"]
    ours = form.predict(
        form.published, parameters=parameters, tokens=tokens, granularity=granularity
    )
    assert ours == pytest.approx(loss, rel=0.01)  # constants of two digits


def test_custom_form_is_fitted():
    form = Form("own", ["x"], {"a": "0", "b": "-p * log(x)"}, {"p": [0.1, 2.0]}, target="y")
    x = np.geomspace(1, 100, 12)
    fit = fit_law(form, {"x": x, "y": 2 + 3 * x**-0.7}, prove=True)
    assert fit.constants == pytest.approx({"a": 2, "b": 3, "p": 0.7})
    assert fit.predict(x=4.0) == pytest.approx(2 + 3 * 4**-0.7)
    for wrong in ({}, {"x": 4.0, "z": 1.0}, {"x": -4.0}, {"x": np.nan}, {"x": [1.0, 0.0]}):
        with pytest.raises(ValueError, match=r"expected the inputs \['x'\]|must be positive"):
            fit.predict(**wrong)
    assert fit.proof.holds
    with pytest.raises(ValueError, match=r"'-q \* x' uses the unknown names \['q'\]"):
        Form("own", ["x"], {"b": "-q * x"}, {"p": [0.1, 2.0]})
    with pytest.raises(ValueError, match=r"expected a column 'x', got columns \['y'\]"):
        fit_law(form, {"y": x})
    with pytest.raises(ValueError, match="'y' must be positive and finite, but row 12 is -1"):
        fit_law(form, {"x": x, "y": [*x[:-1], -1.0]})
    with pytest.raises(ValueError, match="expected at least 3 rows to fit own, got 2"):
        fit_law(form, {"x": x[:2], "y": x[:2]})
    with pytest.raises(ValueError, match="expected one-dimensional columns of one length, got"):
        fit_law(form, {"x": x, "y": x[:-1]})
    with pytest.raises(ValueError, match="no law 'chinchila' in the catalog"):
        fit_law("chinchila", {"x": x})
    with pytest.raises(TypeError, match="expected form to be a Form or its name, got dict"):
        fit_law({"x": x}, form)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mixture", "tied"])
def test_differential_evolution_finds_nothing_better(name):
    form = CATALOG[name]
    rows = draw_table(form, 5e-3, 40)
    ours = fit_law(form, rows)
    logs = np.add(np.log([[form.published[k]] * 2 for k in form.terms]), [-3, 3])

    def objective(z):
        constants = dict(
            zip(form.constants, [*np.exp(z[: len(logs)]), *z[len(logs) :]], strict=True)
        )
        y = np.maximum(form.predict(constants, **{k: rows[k] for k in form.inputs}), 1e-9)
        r = np.abs(np.log(y / rows[form.target]))
        return float(np.where(r <= 1e-3, r**2 / 2, 1e-3 * (r - 5e-4)).sum())

    box = [*logs, *form.exponents.values()]
    evolved = differential_evolution(objective, box, seed=0, maxiter=300, popsize=12)
    assert ours.objective <= evolved.fun * (1 + 1e-9)


def test_undetermined_constants_and_bad_options_are_reported():
    runs = isoflop_runs(noise=1e-3)
    rising = {"tokens": np.geomspace(1e9, 1e12, 6), "loss": [2.0, 2.1, 2.2, 2.3, 2.4, 2.5]}
    terms = {"E": "0", "B": "-beta * log(tokens)"}
    form = Form("data", ["tokens"], terms, {"beta": [0.02, 3.0]})
    with pytest.warns(ScalingWarning, match="B.* of data ended at a bound"):
        fit_law(form, rising)
    with pytest.raises(ValueError, match="column 'loss' is 3 in every row"):
        fit_law(form, rising | {"loss": [3.0] * 6})
    for options, message in (
        ({"loss": "mse"}, "expected loss to be one of"),
        ({"delta": -1.0}, "expected delta > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_law("chinchilla", runs, **options)
    with pytest.raises(ValueError, match="got 'zeta'"):
        fit_law("chinchilla", runs).interval("zeta")


CONSTANT = "0*log(parameters)"
RISING = Form(
    "rising",
    ("parameters",),
    {"E": CONSTANT, "A": "-alpha*log(parameters)"},
    {"alpha": (0.01, 2)},
)


@pytest.mark.filterwarnings("ignore::scaling.ScalingWarning")
def test_interval_of_a_function_that_is_infinite_for_some_resamples():
    random = np.random.default_rng(0)
    n = np.geomspace(1e6, 1e9, 8)
    loss = (0.05 + 400 * n**-0.3) * np.exp(0.05 * random.standard_normal(8))
    fit = fit_law(RISING, {"parameters": n, "loss": loss})
    with np.errstate(divide="ignore"):
        interval = fit.interval(lambda c: np.divide(c["A"], c["E"]))
    assert 0 < interval.low < interval.high == np.inf
    values = itertools.chain([1.0], itertools.repeat(np.nan))
    with pytest.raises(
        ValueError, match="expected a number for every sampled law, got NaN for 400"
    ):
        fit.interval(lambda _: next(values))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"terms": {"E": "0", "alpha": "-alpha * log(tokens)"}}, r"\['alpha'\] are used twice"),
        ({"terms": {"E": "0", "A": "-alpha *"}}, "expected an expression .* got '-alpha [*]'"),
        ({"terms": {"A": "-u * log(tokens)"}}, r"unknown names \['u'\]"),
        ({"terms": {"A": "alpha**2 * log(tokens)"}}, r"linear in the exponents.*got 'alpha\*\*2"),
        (
            {"exponents": {"alpha": [2.0, 0.02]}},
            r"larger upper bound of 'alpha', got \[2.0, 0.02\]",
        ),
        ({"exponents": {"alpha": [0.02, 2.0], "beta": [0.1, 1]}}, r"no term uses .* \['beta'\]"),
        ({"inputs": [], "terms": {"E": "0"}, "exponents": {}}, "expected at least one input"),
    ],
)
def test_inconsistent_form_is_refused(changes, message):
    terms = {"E": "0", "A": "-alpha * log(tokens)"}
    fields = {"inputs": ["tokens"], "terms": terms, "exponents": {"alpha": [0.02, 2.0]}}
    with pytest.raises(ValueError, match=message):
        Form("own", **fields | changes)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        # Near tokens = 1, the minimum is the first argument.
        ("-minimum(alpha * log(tokens), 5)", "linear in the exponents"),
        ("-alpha * exp(tokens)", "logarithm of term 'A' is not finite in every row"),
    ],
)
def test_law_that_is_not_linear_or_finite_for_the_rows_is_refused(term, message):
    form = Form("own", ["tokens"], {"E": "0", "A": term}, {"alpha": [0.02, 2.0]})
    tokens = np.geomspace(1e9, 1e12, 20)
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=message):
        fit_law(form, {"tokens": tokens, "loss": 1.7 + 400 * tokens**-0.3})


@pytest.mark.parametrize("bounds", [(0.25, 0.4), (0.2, 1.0)])
def test_exponent_between_close_bounds_is_found(bounds):
    tokens = np.geomspace(1e9, 1e12, 20)
    form = Form("own", ["tokens"], {"E": "0", "A": "-alpha * log(tokens)"}, {"alpha": bounds})
    fit = fit_law(form, {"tokens": tokens, "loss": 1.7 + 400 * tokens**-0.3}, prove=True)
    assert fit.constants["alpha"] == pytest.approx(0.3, rel=1e-5)
    (axis,) = fit.problem.exponent_grid
    assert bounds[0] <= axis.min() <= axis.max() <= bounds[1]


def test_form_without_exponents_is_least_squares():
    tokens = np.geomspace(1e9, 1e12, 20)
    form = Form("line", ["tokens"], {"E": "0", "B": "-0.3 * log(tokens)"}, {})
    fit = fit_law(form, {"tokens": tokens, "loss": 1.7 + 400 * tokens**-0.3})
    assert fit.constants == pytest.approx({"E": 1.7, "B": 400})


def test_fit_does_not_change_with_the_rows_and_forms_of_its_caller():
    runs = isoflop_runs(noise=2e-3)
    rows = {name: getattr(runs, name).copy() for name in ("parameters", "tokens", "loss")}
    terms = dict(CATALOG["chinchilla"].terms)
    form = Form("law", ["parameters", "tokens"], terms, CATALOG["chinchilla"].exponents)
    fit, other = fit_law(form, rows), fit_law("chinchilla", runs)
    rows["parameters"] *= 1e3
    terms["A"] = "0"
    assert effective_speedup(fit, other, 1e23) == effective_speedup(other, other, 1e23)


def test_masked_cells_are_not_read():
    tokens = np.ma.masked_values([1e9, 2e9, 4e9, 8e9], 4e9)
    with pytest.raises(ValueError, match="column 'tokens' must be positive and finite, but row 3"):
        fit_law("step_batch", {"tokens": tokens, "batch": [1.0, 2.0, 3.0, 4.0]})


@pytest.mark.parametrize("unit", [1e-12, 1e6, 1e12])
def test_unit_of_the_target_only_scales_the_amplitudes(unit):
    runs = isoflop_runs(noise=2e-3, per_budget=4)
    columns = {"parameters": runs.parameters, "tokens": runs.tokens, "loss": runs.loss}
    expected = fit_law("chinchilla", columns)
    scaled = fit_law("chinchilla", columns | {"loss": runs.loss * unit})
    assert scaled.proof.landed == scaled.proof.starts
    for name, value in expected.constants.items():
        factor = unit if name in expected.form.terms else 1
        assert scaled.constants[name] == pytest.approx(factor * value, rel=1e-6)


def test_interval_around_an_infinite_number_is_refused():
    fit = fit_law("chinchilla", isoflop_runs(noise=1e-3, per_budget=4))
    for target in (lambda _: np.inf, lambda _: np.nan, lambda c: np.array([c["A"], c["B"]])):
        with pytest.raises(ValueError, match="expected one finite number for the fitted constants"):
            fit.interval(target)
