"""What a scaling law is, as data: positive terms, linear amplitudes, nonlinear exponents.

Notable: y = (sum_k sign_k a_k g_k(x; exponents))^power with a_k >= 0. Whoever writes down log g_k
has a law that `fit_law` fits, proves, resamples and compares; catalog.toml is nothing else, and
`fit_parametric` is this fit of its first entry.
"""

import ast
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib.resources import files
from types import CodeType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scaling.runs import Array

FUNCTIONS = {k: getattr(np, k) for k in ("exp", "expm1", "log", "minimum", "maximum")}


@dataclass(frozen=True)
class Form:
    """A family of laws.

    `terms` are the logarithms of the g_k, by the names of their amplitudes: expressions of the
    inputs, the exponents, what `where` defines, and `FUNCTIONS`. `exponents` have a least and a
    largest value each; one whose least is above zero is searched in its logarithm. ValueError for
    a name that is none of these.
    """

    name: str
    inputs: Sequence[str]
    terms: Mapping[str, str]
    exponents: Mapping[str, Sequence[float]]
    where: Sequence[tuple[str, str]] = ()
    signs: Mapping[str, int] = field(default_factory=dict)
    power: str | None = None
    """Which exponent is that of the sum; None: one."""
    target: str = "loss"
    zero: Sequence[str] = ()
    """Inputs that may be zero."""
    published: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        known = {*self.inputs, *self.exponents, *FUNCTIONS, *(name for name, _ in self.where)}
        for text in (*self.terms.values(), *(text for _, text in self.where)):
            if strange := _names(text) - known:
                raise ValueError(
                    f"{self.name}: {sorted(strange)} in {text!r} are not of {sorted(known)}"
                )

    @property
    def constants(self) -> tuple[str, ...]:
        """Amplitudes, then exponents."""
        return (*self.terms, *self.exponents)

    @cached_property
    def occurring(self) -> list[list[int]]:
        """Of each term, which exponents it holds."""
        return [
            [i for i, name in enumerate(self.exponents) if name in needed]
            for needed, _, _ in self._compiled
        ]

    @cached_property
    def _compiled(self) -> list[tuple[set[str], list[tuple[str, CodeType]], CodeType]]:
        """Of each term the names that it needs, what defines some of them, and its code."""
        found = []
        for text in self.terms.values():
            needed, code = _names(text), compile(text, self.name, "eval")
            named: list[tuple[str, CodeType]] = []
            for name, meaning in reversed(self.where):
                if name in needed:
                    needed |= _names(meaning)
                    named.insert(0, (name, compile(meaning, self.name, "eval")))
            found.append((needed, named, code))
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: compiled code cannot be pickled, and is compiled again."""
        return {name: value for name, value in vars(self).items() if name in _FIELDS}

    def log_term(self, k: int, columns: Mapping[str, Array], exponents: Mapping[str, Any]) -> Any:
        """log g of a term, of inputs (n,) and exponents (S, 1), which may be complex."""
        scope: dict[str, Any] = {**FUNCTIONS, "__builtins__": {}, **exponents, **columns}
        _, named, term = self._compiled[k]
        for name, code in named:
            scope[name] = eval(code, scope)
        with np.errstate(divide="ignore"):  # log 0 is -inf, and its term none
            return eval(term, scope)

    def predict(self, constants: Mapping[str, float], **inputs: ArrayLike) -> Array:
        """y of a law of the family with these constants; broadcasts."""
        columns = {k: np.asarray(inputs[k], np.float64) for k in self.inputs}
        exponents = {k: constants[k] for k in self.exponents}
        total = sum(
            self.signs.get(name, 1) * constants[name] * np.exp(self.log_term(k, columns, exponents))
            for k, name in enumerate(self.terms)
        )
        y: Array = np.asarray(total) ** (constants[self.power] if self.power else 1.0)
        return y


_FIELDS = frozenset(f.name for f in fields(Form))


def _names(text: str) -> set[str]:
    return {
        node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)
    }


CATALOG = {
    name: Form(name, **law)
    for name, law in tomllib.loads(
        files("scaling.laws").joinpath("catalog.toml").read_text("utf-8")
    ).items()
}
"""The laws by name."""
