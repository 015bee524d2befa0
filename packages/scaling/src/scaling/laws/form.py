"""Scaling laws as data: sums of power laws with linear amplitudes and nonlinear exponents.

Note [Form of a law]
Every law of this package has the form

    y = sum_k a_k g_k(x; exponents),   a_k >= 0,

where log g_k is linear in the exponents, as in log N^-alpha = -alpha log N. Laws differ only in
log g_k, so a law is defined by one expression per term. `fit_law` can fit and resample any such
law. catalog.toml contains published laws in this notation; `fit_parametric` fits its first entry.
"""

import ast
import math
import tomllib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import CodeType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scaling.units import Array

#: Functions that an expression may call.
FUNCTIONS = {k: getattr(np, k) for k in ("exp", "expm1", "log", "minimum", "maximum")}


@dataclass(frozen=True)
class Form:
    """A family of laws: see Note [Form of a law].

    Raises `ValueError` for repeated or unknown names, unused exponents, missing inputs and invalid
    bounds. Also raises `ValueError` for terms that are not expressions or are not linear in the
    exponents.
    """

    name: str
    inputs: Sequence[str]
    #: Maps the name of each amplitude a_k to an expression of log g_k. The expression may use
    #: inputs, exponents and `FUNCTIONS`.
    terms: Mapping[str, str]
    #: Lower and upper bound of each exponent. If the lower bound is positive, the grid of the
    #: search is evenly spaced in the logarithm of the exponent.
    exponents: Mapping[str, Sequence[float]]
    target: str = "loss"
    published: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        # The caller may use the same containers for another form.
        object.__setattr__(self, "inputs", [*self.inputs])
        for mapping in ("terms", "exponents", "published"):
            object.__setattr__(self, mapping, dict(getattr(self, mapping)))
        names = [*FUNCTIONS, *self.inputs, *self.exponents, *self.terms]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{self.name}: the names {sorted(repeated)} are used twice")
        if not self.inputs:
            raise ValueError(f"{self.name}: expected at least one input")
        used = set()
        for text in self.terms.values():
            used |= self._require_known_names(text, {*FUNCTIONS, *self.inputs, *self.exponents})
        if unused := {*self.exponents} - used:
            raise ValueError(f"{self.name}: no term uses the exponents {sorted(unused)}")
        for name, bounds in self.exponents.items():
            if not (len(bounds) == 2 and -math.inf < bounds[0] < bounds[1] < math.inf):
                raise ValueError(
                    f"{self.name}: expected a lower and a larger upper bound of {name!r}, got"
                    f" {bounds}"
                )
        random = np.random.default_rng(0)
        self.require_linearity({name: random.uniform(1.5, 3.0, 7) for name in self.inputs})

    def require_linearity(self, columns: Mapping[str, Array]) -> None:
        """Raise `ValueError` unless each log g_k is linear in the exponents in all rows."""
        ends = [{k: np.float64(v[end]) for k, v in self.exponents.items()} for end in (0, 1)]
        with np.errstate(all="ignore"):
            terms = self.decompose(columns)
            for text, (constant, slopes) in zip(self.terms.values(), terms, strict=True):
                for exponents in ends:
                    values = [*exponents.values()]
                    linear = constant + sum(values[j] * slope for j, slope in slopes.items())
                    if not np.allclose(_evaluate(text, columns, exponents), linear, rtol=1e-9):
                        raise ValueError(
                            f"{self.name}: expected the logarithm of each term to be linear in the"
                            f" exponents, as in '-alpha * log(tokens)', got {text!r}"
                        )

    def _require_known_names(self, text: str, known: Set[str]) -> set[str]:
        """Return the names in an expression; raise `ValueError` for bad syntax or unknown names."""
        try:
            names = _collect_names(text)
        except SyntaxError:
            raise ValueError(
                f"{self.name}: expected an expression such as '-alpha * log(tokens)', got {text!r}"
            ) from None
        if unknown := names - known:
            raise ValueError(
                f"{self.name}: {text!r} uses the unknown names {sorted(unknown)}; expected names"
                f" among {sorted(known)}"
            )
        return names

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the constants: the amplitudes, then the exponents."""
        return (*self.terms, *self.exponents)

    def decompose(self, columns: Mapping[str, Array]) -> list[tuple[Array, dict[int, Array]]]:
        """Return, for each term, log g_k at zero exponents and its slopes in the exponents.

        All arrays are (n,). The slopes are keyed by the indices of the exponents of the term.
        """
        zeros = np.zeros(np.shape(next(iter(columns.values()))))
        at_zero = dict.fromkeys(self.exponents, np.float64(0.0))
        result = []
        for text in self.terms.values():
            constant = zeros + _evaluate(text, columns, at_zero)
            slopes = {}
            for j, name in enumerate(self.exponents):
                if name in _collect_names(text):
                    at_one = {**at_zero, name: np.float64(1.0)}
                    slopes[j] = _evaluate(text, columns, at_one) - constant
            result.append((constant, slopes))
        return result

    def predict(self, constants: Mapping[str, Any], **inputs: ArrayLike) -> Array:
        """Return y for these constants, which broadcast with the inputs."""
        columns = {k: np.asarray(inputs[k], np.float64) for k in self.inputs}
        exponents = {k: constants[k] for k in self.exponents}
        total = sum(
            constants[name] * np.exp(_evaluate(text, columns, exponents))
            for name, text in self.terms.items()
        )
        return np.asarray(total)


@cache
def _compile(text: str) -> CodeType:
    return compile(text, "a term of a law", "eval")


def _evaluate(text: str, columns: Mapping[str, Array], exponents: Mapping[str, Any]) -> Any:
    """Return log g for inputs and exponents, which broadcast with each other."""
    scope: dict[str, Any] = {**FUNCTIONS, "__builtins__": {}, **exponents, **columns}
    return eval(_compile(text), scope)


def _collect_names(text: str) -> set[str]:
    """Return the names that an expression uses."""
    return {
        node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)
    }


_PUBLISHED = tomllib.loads(files("scaling.laws").joinpath("catalog.toml").read_text("utf-8"))

#: Published laws by name.
CATALOG = {name: Form(name, **law) for name, law in _PUBLISHED.items()}
