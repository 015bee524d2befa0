"""A weighted sample of the laws that are consistent with the runs, and intervals computed from it.

Note [Sampling the posterior]
The predictions of a law differ from those of the fitted law by r_i in log loss. With noise s and f
degrees of freedom, the likelihood of the law is Student's (1 + sum r_i^2 / (f s^2))^(-(f + 5) / 2).
For fixed exponents a law is linear in E, A and B, as in Note [Variable projection]. Therefore these
constants are drawn from their exact conditional distribution, a Student's t. Only the two exponents
need importance sampling. They are drawn from a wide t distribution about the maximum. Their weight
is the likelihood times the prior, divided by the density of the draw. This likelihood is integrated
over E, A and B, without the determinant of the integral: see also Note [Prior of the exponents].
The sample needs no refits, and its random numbers are the same for all tables, so intervals depend
smoothly on the runs. With equal noise in all runs and a flat prior, the intervals are those of the
profile likelihood.

Note [Prior of the exponents]
Few or noisy runs leave the exponents alpha and beta of E + A / N^alpha + B / D^beta almost
undetermined. Their logarithms therefore have a normal prior: their average is log(1/3) with a
standard deviation of 0.6, and their difference is zero with a standard deviation of 0.5. In
published laws and tables the two differ by a factor of about e^0.5. The prior has no weight without
noise, and hardly any for tables that determine the exponents themselves. For other tables it bounds
the intervals, which could otherwise change by a factor of two if a few runs are dropped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import erf, ndtr

from scaling.equality import ComparesArrays
from scaling.fit import newton
from scaling.fit.search import Estimate
from scaling.law import (
    CONFIDENCE_LEVEL,
    CONSTANTS,
    OPTIMUM_FIELDS,
    Interval,
    Law,
    Optimum,
    compute_loss,
    compute_optima,
    compute_quantiles,
    require_budget,
    require_model,
)
from scaling.units import Array

#: Prior mean of both exponents.
PRIOR_EXPONENT = 1 / 3

#: The matrix that maps the deviations of (log alpha, log beta) from the prior mean to multiples of
#: standard deviations: of their average (first row) and of their difference.
PRIOR_PRECISION_ROOT = np.array([[0.5, 0.5], [-1.0, 1.0]]) / np.array([[0.6], [0.5]])

#: Number of sampled laws. Another seed changes the ends of an interval by 2 % of its width.
DRAWS = 4000

#: Maximum number of runs that are used. A larger number of runs is sampled evenly in loss order.
MAX_SAMPLED_RUNS = 1000

#: Degrees of freedom of the t distribution from which exponents are drawn, and its width divided by
#: the posterior's. The heavy tails and the larger width keep all importance weights small.
PROPOSAL_FREEDOM = 4
PROPOSAL_WIDTH = 1.2

#: Maximum number of elements of a temporary array, unless one draw needs more.
CHUNK = 1_000_000

#: Mean of |x| for a normal variable x with standard deviation one.
MEAN_ABSOLUTE = math.sqrt(2 / math.pi)

#: Ratio of a normal variable's standard deviation to the median of its absolute value.
NORMAL_PER_MEDIAN = 1.4826

#: Residuals are limited to this many standard deviations, estimated by the median.
LARGEST_RESIDUAL = 5.0

NO_FREEDOM = (
    "five runs leave no degrees of freedom for five constants: the law passes through all of them,"
    " and every interval is infinite; train more runs"
)

NO_LAWS = (
    "no sampled law near the fitted law has positive E, A and B, so every interval is infinite: the"
    " losses do not fall with parameters and tokens as the law does; check them, or train more runs"
)

#: The name of a constant, "exponent" (that of C in N_opt), or a function from the constants of
#: several laws (laws, 5) to a number for each of them (laws,).
Target = str | Callable[[Array], Array]


@dataclass(frozen=True)
class Prediction:
    """A predicted loss in nats and its interval."""

    loss: float
    interval: Interval
    #: The coverage measured for such intervals on published tables; empty if the interval does not
    #: include drift.
    coverage: str = ""
    #: The reason why the interval is (0, inf), or empty for any other interval. `loss` is nan if
    #: the runs do not identify the law.
    reason: str = ""

    def __str__(self) -> str:
        lines = [f"loss {self.loss:.5g} {self.interval}"]
        return "\n".join(lines + [f"  {text}" for text in (self.coverage, self.reason) if text])


@dataclass(frozen=True, eq=False, repr=False)
class Sample(ComparesArrays):
    """Sampled laws near a fitted law, with intervals of every quantity that they imply."""

    law: Law
    #: E, A, B, alpha and beta of each law, (laws, 5).
    constants: Array
    #: The reason why every interval is (0, inf); empty if they are not.
    reason: str = field(default="", kw_only=True)

    def interval(self, target: Target) -> Interval:
        """Return the interval of a constant, of "exponent", or of a function of the constants."""
        raise NotImplementedError

    def evaluate(self, target: Target) -> tuple[Array, float]:
        """Return a target for each law, (laws,), and for the fitted law."""
        laws = np.concatenate([self.constants, self.law.constants[None]])
        if callable(target):
            values = target(laws)
        elif target == "exponent":
            values = laws[:, 4] / (laws[:, 3] + laws[:, 4])
        elif target in CONSTANTS:
            values = laws[:, CONSTANTS.index(target)]
        else:
            raise ValueError(f"expected one of {CONSTANTS} or 'exponent', got {target!r}")
        return values[:-1], float(values[-1])

    def sizes(self, compute: float) -> Array:
        """Return the best number of parameters at `compute` FLOPs by each law, (laws,)."""
        require_budget(compute)
        sizes: Array = compute_optima(self.constants, compute)[0]
        return sizes

    def losses(self, parameters: float, tokens: float) -> Array:
        """Return the loss that each law predicts for one model, (laws,)."""
        require_model(parameters, tokens)
        return compute_loss(self.constants, parameters, tokens)

    def optimal(self, compute: float) -> Optimum:
        """Return the optimum of the fitted law, with intervals of its N, D and loss."""
        best = self.law.optimal(compute)
        intervals = {}
        for row, name in enumerate(OPTIMUM_FIELDS):

            def field(laws: Array, row: int = row) -> Array:
                values: Array = compute_optima(laws, compute)[row]
                return values

            intervals[name] = self.interval(field)
        return replace(best, intervals=intervals, reason=self.reason)

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """Return the loss by the fitted law, with an interval of the mean, without run noise."""
        require_model(parameters, tokens)
        loss = self.law.predict(parameters, tokens)
        interval = self.interval(lambda laws: compute_loss(laws, parameters, tokens))
        return Prediction(loss, interval, reason=self.reason)


@dataclass(frozen=True, eq=False, repr=False)
class Posterior(Sample):
    """A weighted sample of the laws that are consistent with the runs of a fit."""

    #: The weight of each law, (laws,); the weights sum to 1. Empty if there is a `reason`.
    weights: Array

    def interval(self, target: Target) -> Interval:
        """Return the interval of a constant, of "exponent", or of a function of the constants.

        The ends are weighted quantiles. The interval is (0, inf) if there is a `reason`. Raises
        `ValueError` if the quantity is NaN for a law.
        """
        values, estimate = self.evaluate(target)
        if self.reason:
            return Interval(0.0, math.inf)
        low, high = compute_quantiles(
            values, [0.5 - CONFIDENCE_LEVEL / 2, 0.5 + CONFIDENCE_LEVEL / 2], self.weights
        )
        return Interval(min(low, estimate), max(high, estimate))

    def compute_log_deviation(self, values: Array) -> float:
        """Return the standard deviation over the laws of the log of a positive quantity.

        It is inf if there is a `reason` for infinite intervals.
        """
        if self.reason:
            return math.inf
        logs = np.log(values)
        mean = self.weights @ logs
        return math.sqrt(float(self.weights @ (logs - mean) ** 2))

    def resample(self, count: int, seed: int) -> Array:
        """Return constants (count, 5) of laws drawn by weight; none if there is a `reason`."""
        if self.reason:
            return np.empty((0, len(CONSTANTS)))
        draws = np.random.default_rng(seed).choice(len(self.weights), count, p=self.weights)
        constants: Array = self.constants[draws]
        return constants


def sample_posterior(fit: Estimate, *, draws: int = DRAWS) -> Posterior:
    """Return a sample of the laws that are consistent with the runs of a fit.

    See Note [Sampling the posterior]. If no law can be sampled, every interval of the result is
    infinite, and `reason` says why.
    """
    freedom = len(fit.runs) - len(CONSTANTS)
    if freedom <= 0:
        return _build_unbounded_posterior(fit, NO_FREEDOM)
    # Noiseless runs have only rounding errors.
    noise = max(estimate_noise(fit), 1e-12)
    random = np.random.default_rng(0)
    exponents, log_prior, log_density = _propose_exponents(fit, noise, draws, random)
    constants, squares = _draw_amplitudes(fit, exponents, noise, freedom, random)
    likelihood = -(freedom + 2) / 2 * np.log1p(squares / (freedom * noise**2))
    log_weights = likelihood + log_prior - log_density
    possible = (constants > 0).all(1) & np.isfinite(log_weights)
    if not possible.any():
        return _build_unbounded_posterior(fit, NO_LAWS)
    weights = np.where(possible, np.exp(log_weights - log_weights[possible].max()), 0.0)
    return Posterior(fit.law, constants[possible], weights[possible] / weights.sum())


def _build_unbounded_posterior(fit: Estimate, reason: str) -> Posterior:
    return Posterior(fit.law, fit.law.constants[None], np.empty(0), reason=reason)


def _propose_exponents(
    fit: Estimate, noise: float, draws: int, random: np.random.Generator
) -> tuple[Array, Array, Array]:
    """Return exponents drawn from a t distribution about the maximum of likelihood times prior.

    The result is the pairs of exponents (draws, 2), their log densities in the prior (draws,), and
    those in the t distribution (draws,).
    """
    problem = fit.problem
    theta = problem.from_constants(fit.law.constants)
    jacobian = newton.compute_log_jacobian(problem, theta).copy()
    jacobian[3:] *= theta[3:, None]  # derivatives in the logarithms of the exponents
    information = jacobian @ jacobian.T / noise**2
    prior = PRIOR_PRECISION_ROOT.T @ PRIOR_PRECISION_ROOT
    information[3:, 3:] += prior
    scale = np.sqrt(np.diag(information))
    scaled = information / np.outer(scale, scale) + 1e-12 * np.eye(len(scale))
    covariance = (np.linalg.inv(scaled) / np.outer(scale, scale))[3:, 3:]
    mean = math.log(PRIOR_EXPONENT)
    center = np.log(theta[3:]) + covariance @ prior @ (mean - np.log(theta[3:]))
    normal = random.standard_normal((draws, 2))
    spread = np.sqrt(random.chisquare(PROPOSAL_FREEDOM, draws) / PROPOSAL_FREEDOM)
    steps = normal / spread[:, None]
    root = np.linalg.cholesky(covariance)
    logs = center + PROPOSAL_WIDTH * steps @ root.T
    squares = (steps**2).sum(1) / PROPOSAL_FREEDOM
    log_density = -(PROPOSAL_FREEDOM + 2) / 2 * np.log1p(squares)
    deviations = (logs - mean) @ PRIOR_PRECISION_ROOT.T
    log_prior = -(deviations**2).sum(1) / 2
    bounds = np.log(np.array(problem.bounds)[:, 3:])
    log_prior[((logs < bounds[0]) | (logs > bounds[1])).any(1)] = -np.inf
    return np.exp(np.clip(logs, *bounds)), log_prior, log_density


def _draw_amplitudes(
    fit: Estimate, exponents: Array, noise: float, freedom: int, random: np.random.Generator
) -> tuple[Array, Array]:
    """Draw E, A and B for each pair of exponents; return all constants and sums of squares.

    The constants have the shape (draws, 5), and the sums of squares (draws,). The squares are those
    of relative differences from the predictions of the fit. They are computed with the amplitudes
    E, A and B that fit best for the pair, not with those drawn.
    """
    count = len(fit.runs)
    rows = np.linspace(0, count - 1, min(count, MAX_SAMPLED_RUNS)).astype(int)
    rows = np.argsort(fit.runs.loss, kind="stable")[rows]
    weight = count / len(rows)
    n = fit.runs.parameters[rows]
    d = fit.runs.tokens[rows]
    fitted = fit.law.predict(n, d)
    x = np.log(n) - np.log(n).mean()
    y = np.log(d) - np.log(d).mean()
    normal = random.standard_normal((len(exponents), 3))
    spread = np.sqrt(random.chisquare(freedom + 2, len(exponents)) / (freedom + 2))
    constants = np.empty((len(exponents), 5))
    constants[:, 3:] = exponents
    squares = np.empty(len(exponents))
    chunk = max(CHUNK // (3 * len(rows)), 1)
    for start in range(0, len(exponents), chunk):
        part = slice(start, start + chunk)
        alpha, beta = exponents[part].T[..., None]
        terms = np.stack([np.ones_like(alpha * x), np.exp(-alpha * x), np.exp(-beta * y)], axis=1)
        terms /= fitted  # (chunk, 3, rows)
        lengths = np.sqrt((terms**2).mean(-1))
        terms /= lengths[..., None]
        gram = weight * (terms @ terms.transpose(0, 2, 1)) + 1e-10 * count * np.eye(3)
        best = np.linalg.solve(gram, weight * terms.sum(-1)[..., None])[..., 0]
        errors = (best[:, None] @ terms)[:, 0] - 1
        squares[part] = weight * (errors**2).sum(-1)
        # Given the exponents, the amplitudes have freedom + 2 degrees of freedom.
        deviation = np.sqrt((freedom * noise**2 + squares[part]) / (freedom + 2)) / spread[part]
        root = np.linalg.cholesky(np.linalg.inv(gram))
        drawn = best + deviation[:, None] * (root @ normal[part][..., None])[..., 0]
        constants[part, :3] = drawn / lengths
    constants[:, 1] *= np.exp(exponents[:, 0] * np.log(n).mean())
    constants[:, 2] *= np.exp(exponents[:, 1] * np.log(d).mean())
    return constants, squares


def estimate_noise(fit: Estimate) -> float:
    """Return the noise of log loss at which least squares would be as precise as a robust fit.

    The standard deviation of the runs is estimated by their mean absolute residual. This mean
    depends less on single runs than the smallest or the largest residuals. Residuals of misread
    runs are limited to `LARGEST_RESIDUAL` deviations, because they hardly move a robust fit. For
    normal errors, a Huber loss narrower than the noise is less precise than least squares (Huber
    1964).
    """
    freedom = max(len(fit.runs) - len(CONSTANTS), 1)
    if fit.loss == "squares":
        return math.sqrt(float((fit.residuals**2).sum()) / freedom)
    # A robust fit passes through about five runs, whose residuals do not measure the noise.
    sizes = np.sort(np.abs(fit.residuals))[-freedom:]
    limit = LARGEST_RESIDUAL * NORMAL_PER_MEDIAN * float(np.median(sizes))
    deviation = float(np.minimum(sizes, limit).mean()) / MEAN_ABSOLUTE
    width = (fit.delta if fit.loss == "huber" else 0.0) / max(deviation, 1e-300)
    return deviation / math.sqrt(compute_huber_efficiency(width))


def compute_huber_efficiency(width: float) -> float:
    """Return the efficiency of a Huber loss for normal errors with standard deviation one.

    It is E[psi']^2 / E[psi^2], which is 2 / pi at width zero and approaches 1 for large widths.
    """
    if width < 1e-4:
        return 2 / math.pi
    if width > 10:
        return 1.0  # also for noiseless runs, whose width in standard deviations is huge
    inside = float(erf(width / math.sqrt(2)))
    density = math.exp(-(width**2) / 2) / math.sqrt(2 * math.pi)
    square = inside - 2 * width * density + 2 * width**2 * float(ndtr(-width))
    return inside**2 / square
