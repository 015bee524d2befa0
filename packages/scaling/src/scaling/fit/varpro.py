"""Variable projection: for given exponents the best amplitudes follow by linear algebra.

Notable: a grid over two exponents finds the basin that 4,500 starts in five dimensions look for;
of any law, since all that is asked of one are its terms. (Golub and Pereyra 1973.)
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from scaling.equality import ComparesArrays
from scaling.law import Law
from scaling.laws.form import CATALOG, Form
from scaling.runs import Array, Runs

STARTS, MOST = 289, 17
"""Of a grid over all exponents about so many points, and at most so many of each."""

STEP = 1e-30
"""Of derivatives by an imaginary step, which loses no digits however small it is."""


@dataclass(frozen=True)
class Terms:
    """The K terms of S laws at n rows, divided by exp(what centers them)."""

    logs: list[Array]
    """log g of each, (S or 1, n)."""
    slopes: list[dict[int, Array]]
    """Of each, by exponent, (S or 1, n)."""
    centers: list[Array]
    """(S or 1,) what was taken off each log."""


@dataclass(frozen=True, eq=False)
class Problem(ComparesArrays):
    """The data of a fit of a form: z = log y at rows of the form's inputs.

    Its parameters theta are the amplitudes, then the exponents. The amplitude of a term that holds
    exponents is in logs, and its term is centered: its log has mean zero, or amplitude and exponent
    would stand in for each other. That of any other term is plain, and may be zero. For
    Chinchilla's law theta is (E, a, b, alpha, beta) of E + exp(a - alpha x) + exp(b - beta y) with
    x = log N - mean, y = log D - mean. A power of the sum goes by y over its geometric mean.
    """

    form: Form
    columns: Mapping[str, Array]
    z: Array
    fixed: Mapping[str, float] = field(default_factory=dict)
    reference: Mapping[str, Array] | None = None
    """The rows whose mean centers; None: these."""
    untuned: float = 1.0
    """The weight of rows that lie above the law."""

    @staticmethod
    def of(runs: Runs, untuned: float = 1.0) -> "Problem":
        """The runs under Chinchilla's law."""
        columns = {"parameters": runs.parameters, "tokens": runs.tokens}
        return Problem(CATALOG["chinchilla"], columns, np.log(runs.loss), untuned=untuned)

    def weigh(self, weights: Array, r: Array) -> Array:
        """(S, n) weights of rows with residuals r, log of predicted over observed."""
        return weights if self.untuned == 1 else weights * np.where(r < 0, self.untuned, 1.0)

    def elsewhere(self, columns: Mapping[str, Array]) -> "Problem":
        """Other rows, for the same parameters."""
        n = len(next(iter(columns.values())))
        return replace(self, columns=columns, z=np.zeros(n), reference=self.columns)

    @cached_property
    def count(self) -> int:
        """Of terms, K."""
        return len(self.form.terms)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The constants, as in theta."""
        return self.form.constants

    @cached_property
    def signs(self) -> Array:
        """(K,)"""
        return np.array([self.form.signs.get(name, 1) for name in self.form.terms], np.float64)

    @cached_property
    def logarithmic(self) -> list[int]:
        """Terms whose amplitude is in logs."""
        return [k for k, held in enumerate(self.form.occurring) if held or self.power]

    @cached_property
    def held(self) -> list[list[int]]:
        """The exponents that the log of each term depends on, as it is centered."""
        by_level = [self.power - self.count] if self.power else []
        every = enumerate(self.form.occurring)
        return [sorted({*e, *(by_level if k not in self.free else ())}) for k, e in every]

    @cached_property
    def free(self) -> list[int]:
        """Terms whose amplitude is not fixed."""
        return [k for k, name in enumerate(self.form.terms) if name not in self.fixed]

    @cached_property
    def power(self) -> int | None:
        """Where theta has the power of the sum."""
        return self.names.index(self.form.power) if self.form.power else None

    @cached_property
    def level(self) -> float:
        """Mean of z, which a power goes by."""
        return float(self.z.mean()) if self.power else 0.0

    @cached_property
    def spread(self) -> float:
        """Standard deviation of y: the scale on which a term is large or small."""
        return 1.0 if self.power else max(float(np.exp(self.z).std()), 1e-16)

    @cached_property
    def bounds(self) -> tuple[Array, Array]:
        """The least and the largest theta; a fixed constant has one value."""
        shift = math.log(self.spread)
        low, high = np.zeros(self.count), np.full(self.count, np.inf)
        low[self.logarithmic], high[self.logarithmic] = shift - 30.0, 30.0 + max(shift, 0.0)
        ranges = np.array([*self.form.exponents.values()], np.float64).reshape(-1, 2)
        low, high = np.r_[low, ranges[:, 0]], np.r_[high, ranges[:, 1]]
        for name, value in self.fixed.items():
            i = self.names.index(name)
            low[i] = high[i] = math.log(value) if i in self.logarithmic else value
        return low, high

    @cached_property
    def axes(self) -> list[Array]:
        """Where the search starts in each exponent."""
        unknown = [name for name in self.form.exponents if name not in self.fixed]
        points = min(MOST, round(STARTS ** (1 / max(len(unknown), 1))))
        axes = []
        for name, (low, high) in self.form.exponents.items():
            if name in self.fixed:
                axes.append(np.array([self.fixed[name]]))
            elif low > 0:
                axes.append(np.geomspace(low * 2, high / 1.5, points))
            else:
                axes.append(np.linspace(low, high, points + 2)[1:-1])
        return axes

    def terms(self, theta: Array, *, slopes: bool = False) -> Terms:
        """Of (S, P) laws, with the slopes of their logs in the exponents where asked."""
        found = Terms([], [{} for _ in range(self.count)], [])
        for k, linear in enumerate(self._linear):
            if linear is None:
                log, center = self._curved(theta[:, self.count :], k)
            else:
                steepness, rest, middle = linear
                held = [*steepness]
                center = middle[-1] + theta[:, [self.count + j for j in held]] @ middle[held]
                log = rest[None]
                for at, (j, x) in enumerate(steepness.items()):
                    moved = theta[:, self.count + j, None] * x
                    log = log + moved if at or rest.any() else moved
            found.logs.append(log)
            found.centers.append(center)
            if not slopes:
                continue
            for j in self.held[k]:
                if linear is not None:
                    found.slopes[k][j] = linear[0][j][None]
                else:
                    imaginary: Any = theta[:, self.count :].astype(np.complex128)
                    imaginary[:, j] += 1j * STEP
                    found.slopes[k][j] = self._curved(imaginary, k)[0].imag / STEP
        return found

    def _curved(self, exponents: Array, k: int) -> tuple[Any, Any]:
        """log g less its center, of exponents that may be complex."""
        named = {name: exponents[:, [j]] for j, name in enumerate(self.form.exponents)}
        log = self.form.log_term(k, self.columns, named) + np.zeros((len(exponents), len(self.z)))
        center = np.zeros(len(exponents), exponents.dtype)
        if k in self.logarithmic and k in self.free:
            there = log
            if self.reference is not None:
                there = self.form.log_term(k, self.reference, named)
                there = there + np.zeros((len(exponents), 1))
            center = there.mean(1)
        elif self.power:
            center = self.level / exponents[:, self.power - self.count]
        return log - center[:, None], center

    @cached_property
    def _linear(self) -> list[tuple[dict[int, Array], Array, Array] | None]:
        """Of terms that are linear in their exponents: slopes, the rest, and what centers those.

        Found by trying: the slope is the same at two places.
        """
        places = np.array([[axis[0] for axis in self.axes], [axis[-1] * 0.9 for axis in self.axes]])
        found: list[tuple[dict[int, Array], Array, Array] | None] = []
        for k, held in enumerate(self.held):
            slopes, middle = {}, np.zeros(len(self.form.exponents) + 1)
            log, center = (a.real for a in self._curved(places[:1].astype(complex), k))
            rest, middle[-1] = log[0], center[0]
            linear = True
            for j in held:
                moved = places.astype(complex)
                moved[:, j] += 1j * STEP
                log, center = (a.imag / STEP for a in self._curved(moved, k))
                slopes[j], middle[j] = log[0], center[0]
                linear &= bool(np.allclose(log[0], log[1], rtol=1e-12, atol=1e-12))
                rest = rest - places[0, j] * log[0]
                middle[-1] -= places[0, j] * center[0]
            found.append((slopes, rest, middle) if linear else None)
        return found

    def natural(self, theta: Array) -> Array:
        """(…, P) parameters as constants of the form."""
        flat = theta.reshape(-1, theta.shape[-1])
        constants, centers = flat.copy(), self.terms(flat).centers
        for k in self.logarithmic:
            lifted = centers[k] if k in self.free else 0.0
            if self.power and k in self.free:
                lifted = lifted - self.level / flat[:, self.power]
            constants[:, k] = np.exp(np.clip(flat[:, k] - lifted, -700, 700))
        natural: Array = constants.reshape(theta.shape)
        return natural

    def law(self, theta: Array) -> Law:
        """One row of parameters as a law."""
        return Law(*map(float, self.natural(theta)))

    def centered(self, law: Law) -> Array:
        """The inverse of `law`."""
        theta = law.constants.copy()
        for k, center in enumerate(self.terms(theta[None]).centers):
            if k in self.logarithmic:
                theta[k] = math.log(theta[k]) + center[0]
        return theta


def grid_starts(problem: Problem) -> Array:
    """(S, P) starts: at every point of the grid the amplitudes >= 0 of least squares in y."""
    k, fixed = problem.count, problem.bounds[0]
    grid = np.array(list(itertools.product(*problem.axes)))
    theta = np.concatenate([np.tile(fixed[:k], (len(grid), 1)), grid], axis=1)
    # Relative to what the sum should be: y, or the power's root of it.
    goal = np.broadcast_to(problem.z, (len(grid), len(problem.z)))
    if problem.power:
        goal = (problem.z - problem.level) / theta[:, [problem.power]]
    columns = np.stack([np.exp(log - goal) for log in problem.terms(theta).logs], axis=1)
    columns *= problem.signs[:, None]
    free = problem.free
    rest = np.ones_like(goal)
    for i in set(range(k)) - set(free):
        rest = rest - columns[:, i] * (np.exp(fixed[i]) if i in problem.logarithmic else fixed[i])
    columns = columns[:, free]
    moment = (columns @ rest[..., None])[..., 0]
    theta[:, free] = nonnegative(columns @ columns.transpose(0, 2, 1), moment)
    # A term that is switched off keeps a part of the spread, or its exponent could not move.
    for i in set(free) & set(problem.logarithmic):
        theta[:, i] = np.log(np.maximum(theta[:, i], 0.05 * problem.spread))
    return theta


def nonnegative(gram: Array, moment: Array) -> Array:
    """Batched non-negative least squares of a few variables: the best of all faces, exactly."""
    best, best_value = np.zeros_like(moment), np.zeros(moment.shape[:-1])
    every = range(moment.shape[-1])
    faces = itertools.chain(*(itertools.combinations(every, k + 1) for k in every))
    for face in map(list, faces):
        inside = gram[..., face, :][..., :, face]
        # In units of each column, which may differ by many orders.
        unit = np.sqrt(np.maximum(np.einsum("...ii->...i", inside), 1e-300))
        scaled = inside / (unit[..., :, None] * unit[..., None, :]) + 1e-13 * np.eye(len(face))
        solution = np.linalg.solve(scaled, (moment[..., face] / unit)[..., None])[..., 0] / unit
        value = -(solution * moment[..., face]).sum(-1)
        better = (solution >= 0).all(-1) & (value < best_value)
        best_value = np.where(better, value, best_value)
        full = np.zeros_like(moment)
        full[..., face] = solution
        best = np.where(better[..., None], full, best)
    return best
