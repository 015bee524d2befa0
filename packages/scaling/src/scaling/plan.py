"""From a budget and a serving load to a model: its size, its tokens and its loss, with intervals.

Notable: `Law.optimal` answers for a law; a plan answers for runs, so what they leave open (noise,
and what earlier cuts of them got wrong) is in every number.
"""

from dataclasses import dataclass

from scaling.fit.parametric import ParametricFit
from scaling.law import FLOPS_PER_PARAMETER_SERVED_TOKEN, Interval, require_numbers
from scaling.runs import FLOPS_PER_PARAMETER_TOKEN


@dataclass(frozen=True)
class Plan:
    """A model to train; the training and the serving cost what the budget allows."""

    budget: float
    """FLOPs in all."""
    served_tokens: float
    parameters: float
    tokens: float
    loss: float
    intervals: dict[str, Interval]
    """95 %, by field name; that of the loss of a given size is for one run, noise included."""
    training: float
    """FLOPs, 6 N D."""
    serving: float
    """FLOPs, 2 N for each token served."""


def plan(
    fit: ParametricFit,
    budget: float,
    *,
    served_tokens: float = 0.0,
    parameters: float | None = None,
) -> Plan:
    """The model of least loss that `budget` FLOPs train and serve, or the best of a given size.

    The more is served, the smaller the best model and the longer its training (Sardana et al.
    2024). ValueError where serving a model of the given size takes the whole budget.
    """
    if not isinstance(fit, ParametricFit):
        raise TypeError(f"a plan needs what fit_parametric(runs) returns, not {type(fit).__name__}")
    require_numbers(budget=budget, served_tokens=served_tokens)
    if parameters is None:
        best = fit.optimal(budget, inference_tokens=served_tokens)
        n, d, loss, intervals = best.parameters, best.tokens, best.loss, best.intervals or {}
    else:
        require_numbers(parameters=parameters)
        n = parameters
        left = budget - FLOPS_PER_PARAMETER_SERVED_TOKEN * n * served_tokens
        if not (n > 0 and served_tokens >= 0 and left > 0):
            raise ValueError(
                f"parameters = {n:.3g}: {budget:.3g} FLOPs do not train and serve"
                f" {served_tokens:.3g} tokens; take a smaller model or serve less"
            )
        d = left / (FLOPS_PER_PARAMETER_TOKEN * n)
        foretold = fit.predict(n, d)
        loss, given = foretold.loss, {"parameters": Interval(n, n), "tokens": Interval(d, d)}
        intervals = {"loss": foretold.interval, **given}
    training = FLOPS_PER_PARAMETER_TOKEN * n * d
    serving = FLOPS_PER_PARAMETER_SERVED_TOKEN * n * served_tokens
    return Plan(budget, served_tokens, n, d, loss, intervals, training, serving)
