"""Plans: the size, tokens and loss of a model for a budget and a serving load, with intervals.

`Law.optimal` treats the law as exact. `plan` starts from a fit of runs, so each of its results has
an interval that includes noise and drift.
"""

from dataclasses import dataclass

from scaling.fit.parametric import ParametricFit
from scaling.law import FLOPS_PER_PARAMETER_SERVED_TOKEN, Interval, require_budget, require_numbers
from scaling.units import FLOPS_PER_PARAMETER_TOKEN


@dataclass(frozen=True)
class Plan:
    """A model whose training and serving together cost the budget."""

    #: FLOPs of training and serving.
    budget: float
    served_tokens: float
    parameters: float
    tokens: float
    loss: float
    #: 95 % intervals by field name. If the size was passed, the interval of the loss is that of a
    #: single run, including its noise.
    intervals: dict[str, Interval]
    #: FLOPs of training, 6 N D.
    training: float
    #: FLOPs of serving, 2 N per served token.
    serving: float


def plan(
    fit: ParametricFit,
    budget: float,
    *,
    served_tokens: float = 0.0,
    parameters: float | None = None,
) -> Plan:
    """Return the model with the lowest loss that `budget` FLOPs can train and serve.

    With `parameters`, the size is fixed and the budget determines only the tokens. The more tokens
    a model serves, the smaller the best model and the longer its training (Sardana et al. 2024).
    Raises `ValueError` if serving a model of the given size, or of 1000 parameters, costs the whole
    budget.
    """
    if not isinstance(fit, ParametricFit):
        raise TypeError(f"expected the result of fit_parametric(runs), got {type(fit).__name__}")
    require_numbers(budget=budget, served_tokens=served_tokens)
    require_budget(budget, served_tokens)
    if parameters is None:
        best = fit.optimal(budget, inference_tokens=served_tokens)
        n = best.parameters
        d = best.tokens
        loss = best.loss
        intervals = best.intervals or {}
    else:
        require_numbers(parameters=parameters)
        n = parameters
        training = budget - FLOPS_PER_PARAMETER_SERVED_TOKEN * n * served_tokens
        if not (n > 0 and training > 0):
            raise ValueError(
                f"parameters = {n:.3g}: {budget:.3g} FLOPs do not train and serve"
                f" {served_tokens:.3g} tokens; choose a smaller model or serve less"
            )
        d = training / (FLOPS_PER_PARAMETER_TOKEN * n)
        prediction = fit.predict(n, d)
        loss = prediction.loss
        intervals = {
            "loss": prediction.interval,
            "parameters": Interval(n, n),
            "tokens": Interval(d, d),
        }
    return Plan(
        budget=budget,
        served_tokens=served_tokens,
        parameters=n,
        tokens=d,
        loss=loss,
        intervals=intervals,
        training=FLOPS_PER_PARAMETER_TOKEN * n * d,
        serving=FLOPS_PER_PARAMETER_SERVED_TOKEN * n * served_tokens,
    )
