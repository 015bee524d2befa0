"""Bytes per parameter of the ways in which models are trained: weights, gradients, master copy,
moments."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from accounting import checks

BYTES: dict[str, Fraction] = {
    "fp64": Fraction(8),
    "fp32": Fraction(4),
    "tf32": Fraction(4),
    "fp16": Fraction(2),
    "bf16": Fraction(2),
    "fp8": Fraction(1),
    "int8": Fraction(1),
    "int4": Fraction(1, 2),
    "nf4": Fraction(1, 2),
    "fp4": Fraction(1, 2),
}


def bytes_of(dtype: str) -> Fraction:
    """Bytes of one element; raises `ValueError` for a dtype that is not known."""
    checks.choice("dtype", dtype, BYTES)
    return BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A recipe: the dtype of everything that is kept for a parameter."""

    name: str
    weights: str
    gradients: str
    master: str | None
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

    @property
    def compute(self) -> str:
        """The dtype of the linear layers' products; attention stays in the activations'."""
        return self.matmuls or self.activations

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


_ADAM = ("fp32", "fp32")
_RECIPES = (
    Precision(
        name="fp32",
        weights="fp32",
        gradients="fp32",
        master=None,
        moments=_ADAM,
        activations="fp32",
        source="torch's default: 4 + 4 + 8 bytes",
    ),
    Precision(
        name="amp_bf16",
        weights="fp32",
        gradients="fp32",
        master=None,
        moments=_ADAM,
        activations="bf16",
        stream="fp32",
        cast_weights="bf16",
        source="torch.autocast: fp32 parameters and residual stream, cast for each linear layer",
    ),
    Precision(
        name="mixed_bf16",
        weights="bf16",
        gradients="bf16",
        master="fp32",
        moments=_ADAM,
        activations="bf16",
        source="Rajbhandari et al. 2020 (ZeRO), section 3.1: 2 + 2 + 12 bytes",
    ),
    Precision(
        name="fsdp_bf16",
        weights="fp32",
        gradients="fp32",
        master=None,
        moments=_ADAM,
        activations="bf16",
        logits="bf16",
        cast_weights="bf16",
        source="torch FSDP2 with MixedPrecisionPolicy(bfloat16, reduce in float32): fp32 shards, "
        "gathered in bf16",
    ),
    Precision(
        name="mixed_fp16",
        weights="fp16",
        gradients="fp16",
        master="fp32",
        moments=_ADAM,
        activations="fp16",
        source="Micikevicius et al. 2018, Mixed Precision Training: 2 + 2 + 12 bytes, loss scaled",
    ),
    Precision(
        name="megatron_bf16",
        weights="bf16",
        gradients="fp32",
        master="fp32",
        moments=_ADAM,
        activations="bf16",
        source="Megatron-LM: bf16 weights, gradients accumulated in fp32: 18 bytes",
    ),
    Precision(
        name="deepseek_v3",
        weights="fp8",
        gradients="fp32",
        master="fp32",
        moments=("bf16", "bf16"),
        activations="bf16",
        matmuls="fp8",
        source="DeepSeek-V3 report (arXiv 2412.19437), section 3.3: FP8 matrices, FP32 master "
        "weights and gradients, BF16 moments",
    ),
    Precision(
        name="adam_8bit",
        weights="bf16",
        gradients="bf16",
        master="fp32",
        moments=("int8", "int8"),
        moment_block=256,
        activations="bf16",
        source="Dettmers et al. 2022, 8-bit optimizers; bitsandbytes keeps a scale for 256 values",
    ),
    Precision(
        name="bf16",
        weights="bf16",
        gradients="bf16",
        master=None,
        moments=("bf16", "bf16"),
        activations="bf16",
        logits="bf16",
        source="everything in bf16",
    ),
    Precision(
        name="sgd_fp32",
        weights="fp32",
        gradients="fp32",
        master=None,
        moments=(),
        activations="fp32",
        source="plain SGD",
    ),
)
PRECISIONS: dict[str, Precision] = {recipe.name: recipe for recipe in _RECIPES}


def recipe(precision: str | Precision) -> Precision:
    """The recipe by its name, or the thing itself."""
    if isinstance(precision, Precision):
        return precision
    checks.choice("precision", precision, PRECISIONS)
    return PRECISIONS[precision]
