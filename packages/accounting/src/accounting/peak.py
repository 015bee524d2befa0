"""The peak of a plain training loop on one device, and the bytes of single tensors."""

from __future__ import annotations

import math
from fractions import Fraction

from accounting.activations import activations, head_activations
from accounting.breakdown import Breakdown, product, total
from accounting.memory import model_states
from accounting.parameters import attention_matrices, parameters
from accounting.precision import Precision, bytes_of, recipe
from accounting.transformer import Transformer


def peak_memory(
    model: Transformer,
    *,
    batch: int,
    seq: int,
    precision: str | Precision = "fp32",
    flash: bool = True,
    fused_norm: bool = True,
    fused_projections: bool = False,
    foreach: bool = True,
    gradients_kept: bool = False,
) -> Breakdown:
    """The most that one device holds at one time in a plain training loop, once it has made a step.

    Not everything is alive at once: where gradients are set to None they are not there yet when the
    backward starts, and activations are gone when the optimizer runs. The peak is the larger of the
    two moments. `gradients_kept` is for loops that keep them (accumulation, buckets); `foreach` is
    torch's default on a GPU, where the optimizer takes the square root of all second moments in one
    go.
    """
    kind = recipe(precision)
    states = {part.name: part for part in model_states(_count(model), precision=kind)}
    blocks = activations(
        model,
        batch=batch,
        seq=seq,
        precision=kind,
        flash=flash,
        fused_norm=fused_norm,
        fused_projections=fused_projections,
    )
    head = head_activations(model, tokens=batch * seq, precision=kind, fused_norm=fused_norm)
    cast = bytes_of(kind.cast_weights) if kind.cast_weights else Fraction(0)
    backward = total(
        f"peak memory of {model.name}, at the start of the backward",
        "B",
        *(part for name, part in states.items() if name != "gradients" or gradients_kept),
        product("cast weights", "B", parameters=_matrix_parameters(model), bytes=cast),
        Breakdown("activations", "B", parts=blocks.parts),
        head,
    )
    moment = bytes_of(kind.moments[-1]) if kind.moments else Fraction(0)
    whole = _count(model) if foreach else 2 * _largest(model)
    optimizer = total(
        f"peak memory of {model.name}, in the optimizer",
        "B",
        *states.values(),
        product("square roots", "B", parameters=whole, bytes=moment),
    )
    return max(backward, optimizer, key=lambda moment: moment.total)


def _count(model: Transformer) -> int:
    return int(parameters(model).total)


def _largest(model: Transformer) -> int:
    """The largest single parameter tensor of a plain implementation."""
    d = model.d_model
    matrices = [rows * columns for _, rows, columns in attention_matrices(model)]
    return max(d * model.d_ff, model.vocab_size * model.embedding_dim, *matrices, 0)


def _matrix_parameters(model: Transformer) -> int:
    """Parameters of linear layers: all but tables, norms, biases and sinks."""
    skipped = {"tokens", "positions", "inner norms", "sinks", "in layers", "final", "bias"}
    leaves = (leaf for leaf in parameters(model).leaves() if leaf.name not in skipped)
    matrices = sum(int(leaf.total) for leaf in leaves if "bias" not in leaf.name)
    return matrices + (model.vocab_size * model.embedding_dim if model.tied else 0)


def tensor_bytes(*shape: int, dtype: str = "fp32") -> int:
    """Bytes of one tensor, such as a residual stream (B, S, d) or a score matrix (B, S, S)."""
    size = math.prod(shape) * bytes_of(dtype)
    return math.ceil(size)
