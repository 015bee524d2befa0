"""Bytes per parameter of the ways in which models are trained: weights, gradients, master copy,
moments. The recipes are in precisions.toml."""

import tomllib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from accounting import checks

_BITS = {
    **{"fp64": 64, "fp32": 32, "tf32": 32, "fp16": 16, "bf16": 16},
    **{"fp8": 8, "int8": 8, "int4": 4, "nf4": 4, "fp4": 4},
}
BYTES: dict[str, Fraction] = {dtype: Fraction(bits, 8) for dtype, bits in _BITS.items()}


@checks.entry()
def bytes_of(dtype: str) -> Fraction:
    """Bytes of one element; raises `ValueError` for a dtype that is not known."""
    checks.choice("dtype", dtype, BYTES)
    return BYTES[dtype]


_DTYPES = (
    "weights",
    "gradients",
    "master",
    "activations",
    "stream",
    "logits",
    "cast_weights",
    "matmuls",
)


@checks.named
@dataclass(frozen=True, kw_only=True)
class Precision:
    """A recipe: the dtype of everything that is kept for a parameter."""

    name: str
    weights: str
    gradients: str
    master: str | None = None
    """A copy of the weights that the optimizer updates, where it is not the weights themselves."""
    moments: tuple[str, ...]
    """A dtype for each tensor of optimizer state: two for Adam, one for momentum, none for SGD."""
    activations: str
    stream: str | None = None
    """The residual stream, where it is not of the activations' dtype."""
    logits: str = "fp32"
    cast_weights: str | None = None
    """A copy of the matrices that the graph keeps from the forward until the backward is done."""
    matmuls: str | None = None
    """What linear layers multiply in, where it is not the activations' dtype."""
    moment_block: int = 0
    """Parameters that share one fp32 scale in each moment; 0: no scales."""
    source: str

    def __post_init__(self) -> None:
        checks.fields(Precision, vars(self), **dict.fromkeys(_DTYPES, tuple(BYTES)))
        checks.instance("moments", self.moments, tuple, "a tuple of dtypes")
        for moment in self.moments:
            checks.choice("a dtype of moments", moment, BYTES)

    @property
    def compute(self) -> str:
        """The dtype of the linear layers' products; attention stays in the activations'."""
        return self.matmuls or self.activations

    @property
    def travels(self) -> dict[str, str]:
        """Dtypes on the wire: what is computed with, a copy in fewer bytes where there is one."""
        weights = self.cast_weights or self.weights
        return {"weights": weights, "gradients": self.gradients, "activations": self.activations}

    @property
    def bytes_per_parameter(self) -> Fraction:
        """Weights, gradients, master copy and moments, without the transient copy."""
        return (
            bytes_of(self.weights)
            + bytes_of(self.gradients)
            + (bytes_of(self.master) if self.master else 0)
            + self.moment_bytes
        )

    @property
    def moment_bytes(self) -> Fraction:
        """Bytes of optimizer state per parameter, scales included."""
        scale = Fraction(4, self.moment_block) if self.moment_block else Fraction(0)
        return sum((bytes_of(moment) + scale for moment in self.moments), Fraction(0))


_FILE = Path(__file__).with_name("precisions.toml")
PRECISIONS: dict[str, Precision] = {
    name: Precision(name=name, **entry | {"moments": tuple(entry["moments"])})
    for name, entry in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}


@checks.entry()
def recipe(precision: str | Precision) -> Precision:
    """The recipe by its name, or the thing itself."""
    if isinstance(precision, Precision):
        return precision
    checks.choice("precision", precision, PRECISIONS)
    return PRECISIONS[precision]
