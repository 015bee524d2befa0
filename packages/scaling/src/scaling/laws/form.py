"""Scaling laws as data: positive terms with linear amplitudes and nonlinear exponents.

Note [Form of a law]
Every law of this package has the form

    y = (sum_k sign_k a_k g_k(x; exponents))^power,   a_k >= 0.

Laws differ only in log g_k, so a law is defined by one expression per term. `fit_law` can fit and
resample any such law, and `select_law` compares them. catalog.toml contains published laws in this
notation, and `fit_parametric` fits its first entry.
"""

import ast
import math
import tomllib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import cached_property
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

    Raises `ValueError` for repeated or unknown names and for invalid bounds or signs.
    """

    name: str
    inputs: Sequence[str]
    #: Maps the name of each amplitude a_k to the expression of log g_k. It may use inputs,
    #: exponents, definitions of `where` and `FUNCTIONS`.
    terms: Mapping[str, str]
    #: Lower and upper bound of each exponent. If the lower bound is positive, the grid of the
    #: search is evenly spaced in the logarithm of the exponent.
    exponents: Mapping[str, Sequence[float]]
    #: Definitions of names that later definitions and the terms use, as (name, expression).
    where: Sequence[tuple[str, str]] = ()
    #: The sign of each negative term.
    signs: Mapping[str, int] = field(default_factory=dict)
    #: The name of the exponent to which the sum is raised; None means a power of one.
    power: str | None = None
    target: str = "loss"
    #: Inputs that may be zero.
    zero: Sequence[str] = ()
    published: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        defined = [name for name, _ in self.where]
        names = [*FUNCTIONS, *self.inputs, *self.exponents, *self.terms, *defined]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{self.name}: the names {sorted(repeated)} are used twice")
        known = {*FUNCTIONS, *self.inputs, *self.exponents}
        for name, text in self.where:
            self._check_names(text, known)
            known.add(name)
        for text in self.terms.values():
            self._check_names(text, known)
        for name, bounds in self.exponents.items():
            if not (len(bounds) == 2 and -math.inf < bounds[0] < bounds[1] < math.inf):
                raise ValueError(
                    f"{self.name}: expected a lower and a larger upper bound of {name!r}, got"
                    f" {bounds}"
                )
        for name, sign in self.signs.items():
            if name not in self.terms or sign not in (1, -1):
                raise ValueError(
                    f"{self.name}: expected a sign 1 or -1 of a term, got {name!r}: {sign}"
                )
        if self.power is not None and self.power not in self.exponents:
            raise ValueError(f"{self.name}: the power {self.power!r} is not an exponent")
        if unknown := {*self.zero} - {*self.inputs}:
            raise ValueError(f"{self.name}: {sorted(unknown)} in `zero` are not inputs")

    def _check_names(self, text: str, known: Set[str]) -> None:
        """Raise `ValueError` unless a text is an expression of known names."""
        try:
            unknown = _names_in(text) - known
        except SyntaxError:
            raise ValueError(f"{self.name}: {text!r} is not an expression") from None
        if unknown:
            raise ValueError(
                f"{self.name}: {text!r} uses the unknown names {sorted(unknown)}; expected names"
                f" among {sorted(known)}"
            )

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the constants: the amplitudes, then the exponents."""
        return (*self.terms, *self.exponents)

    @cached_property
    def term_exponents(self) -> list[list[int]]:
        """Indices of the exponents that occur in each term."""
        return [
            [i for i, name in enumerate(self.exponents) if name in needed]
            for needed, _, _ in self._compiled
        ]

    @cached_property
    def _compiled(self) -> list[tuple[set[str], list[tuple[str, CodeType]], CodeType]]:
        """For each term, the names it needs, the compiled definitions it uses, and its code."""
        result = []
        for text in self.terms.values():
            needed = _names_in(text)
            definitions: list[tuple[str, CodeType]] = []
            for name, expression in reversed(self.where):
                if name in needed:
                    needed |= _names_in(expression)
                    definitions.insert(0, (name, compile(expression, self.name, "eval")))
            result.append((needed, definitions, compile(text, self.name, "eval")))
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Return only the fields, because compiled code cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name in _FIELDS}

    def log_term(self, k: int, columns: Mapping[str, Array], exponents: Mapping[str, Any]) -> Any:
        """Return log g_k for inputs (n,) and exponents (S, 1), which may be complex."""
        scope: dict[str, Any] = {**FUNCTIONS, "__builtins__": {}, **exponents, **columns}
        _, definitions, term = self._compiled[k]
        for name, code in definitions:
            scope[name] = eval(code, scope)
        with np.errstate(divide="ignore"):  # log 0 is -inf, and such a term is zero
            return eval(term, scope)

    def predict(self, constants: Mapping[str, Any], **inputs: ArrayLike) -> Array:
        """Return y for these constants, which broadcast with the inputs."""
        columns = {k: np.asarray(inputs[k], np.float64) for k in self.inputs}
        exponents = {k: constants[k] for k in self.exponents}
        total = sum(
            self.signs.get(name, 1) * constants[name] * np.exp(self.log_term(k, columns, exponents))
            for k, name in enumerate(self.terms)
        )
        y: Array = np.asarray(total) ** (constants[self.power] if self.power else 1.0)
        return y


_FIELDS = frozenset(f.name for f in fields(Form))


def _names_in(text: str) -> set[str]:
    """Return the names that an expression uses."""
    return {
        node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)
    }


def _load_catalog() -> dict[str, Form]:
    text = files("scaling.laws").joinpath("catalog.toml").read_text("utf-8")
    return {name: Form(name, **law) for name, law in tomllib.loads(text).items()}


#: Published laws by name.
CATALOG = _load_catalog()
