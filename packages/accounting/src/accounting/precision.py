"""Training recipes: dtypes of weights, gradients, master copy, moments and activations.

precisions.toml lists the recipes that are known by name.
"""

import tomllib
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path

from accounting import checks

_NAMES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4", "nf4", "fp4")
#: Bytes of one element by dtype; the number in a name is the number of bits.
BYTES: dict[str, Fraction] = {
    name: Fraction(int("".join(filter(str.isdigit, name))), 8) for name in _NAMES
}


@checks.validate()
def get_itemsize(dtype: str) -> Fraction:
    """Return the bytes of one element; raise `ValueError` for an unknown dtype."""
    checks.require_choice("dtype", dtype, BYTES)
    return BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A training recipe: the dtypes of model states, activations and matrix products."""

    name: str
    weights: str
    gradients: str
    #: Dtype of the master copy that the optimizer updates; None if it updates the weights directly.
    master: str | None = None
    #: One dtype per tensor of optimizer state: two for Adam, one for SGD with momentum, none for
    #: plain SGD.
    moments: tuple[str, ...]
    activations: str
    #: Dtype of the residual stream, if it differs from the dtype of the activations.
    stream: str | None = None
    logits: str = "fp32"
    #: Dtype of the copies of matrices that autocast makes, or in which FSDP gathers; None for none.
    cast_weights: str | None = None
    #: Dtype in which linear layers multiply, if it differs from the dtype of the activations.
    matmuls: str | None = None
    #: Number of parameters per fp32 scale of a quantized moment; 0 means no scales.
    moment_block: int = 0
    source: str

    def __post_init__(self) -> None:
        others = {"name", "moments", "moment_block", "source"}
        dtypes = {field.name for field in fields(Precision)} - others
        checks.convert_fields(self, **dict.fromkeys(dtypes, tuple(BYTES)))
        checks.require_instance("moments", self.moments, tuple, "a tuple of dtypes")
        for moment in self.moments:
            checks.require_choice("a dtype of moments", moment, BYTES)

    @property
    def compute(self) -> str:
        """The dtype in which linear layers multiply; attention uses `activations`."""
        return self.matmuls or self.activations

    @property
    def bytes_per_parameter(self) -> Fraction:
        """The bytes of weights, gradients, master copy and moments per parameter.

        The temporary copies in `count_cast_weight_bytes` are not included.
        """
        return (
            get_itemsize(self.weights)
            + get_itemsize(self.gradients)
            + (get_itemsize(self.master) if self.master else 0)
            + self.moment_bytes
        )

    @property
    def moment_bytes(self) -> Fraction:
        """The bytes of all moments per parameter, with their scales."""
        scale = Fraction(4, self.moment_block) if self.moment_block else Fraction(0)
        return sum((get_itemsize(moment) + scale for moment in self.moments), Fraction(0))


_FILE = Path(__file__).with_name("precisions.toml")
PRECISIONS: dict[str, Precision] = {
    name: Precision(name=name, **entry | {"moments": tuple(entry["moments"])})
    for name, entry in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}


@checks.validate()
def get_recipe(precision: str | Precision) -> Precision:
    """Return the recipe with this name, or a `Precision` unchanged.

    Raises `ValueError` for an unknown name.
    """
    if isinstance(precision, Precision):
        return precision
    checks.require_choice("precision", precision, PRECISIONS)
    return PRECISIONS[precision]
