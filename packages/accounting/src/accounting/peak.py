"""The peak of a plain training loop on one device, and the bytes of single tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from accounting import checks
from accounting.activations import activations, head_activations
from accounting.breakdown import Breakdown, product, total
from accounting.memory import model_states, one_layer, times
from accounting.parameters import attention_matrices, parameters
from accounting.plan import Plan
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
    checkpointed: bool = False,
) -> Breakdown:
    """The most that one device holds at one time in a plain training loop, once it has made a step.

    Not everything is alive at once: where gradients are set to None they are not there yet when the
    backward starts, and activations are gone when the optimizer runs. Each block of the backward
    frees its activations and leaves its gradients, so the peak is at an end: at the start, inside
    the last or the first block (run again there where blocks are `checkpointed`), or in the
    optimizer. `gradients_kept` is for loops that keep them (accumulation, buckets); `foreach` is
    torch's default on a GPU, where the optimizer takes the square root of all second moments in one
    go.
    """
    checks.whole("batch", batch)
    checks.whole("seq", seq)
    kind = recipe(precision)
    states = {part.name: part for part in model_states(_count(model), precision=kind)}
    everything = _count(model)

    def held(layers: Transformer, recompute: str) -> Breakdown:
        return activations(
            layers,
            Plan(recompute=recompute),
            batch=batch,
            seq=seq,
            precision=kind,
            flash=flash,
            fused_norm=fused_norm,
            fused_projections=fused_projections,
        )

    def moment(when: str, *parts: Breakdown | None, gradients: int) -> Breakdown:
        size = bytes_of(kind.gradients)
        return total(
            f"peak memory of {model.name}, {when}",
            "B",
            states["weights"],
            product("gradients", "B", parameters=gradients, bytes=size) if gradients else None,
            states["optimizer"],
            *parts,
        )

    cast = product(
        "cast weights",
        "B",
        parameters=_matrix_parameters(model),
        bytes=bytes_of(kind.cast_weights) if kind.cast_weights else Fraction(0),
    )
    kept = held(model, "full" if checkpointed else "none")
    head = head_activations(model, tokens=batch * seq, precision=kind, fused_norm=fused_norm)
    before = times(
        "activations of the blocks before", kept, share=Fraction(model.layers - 1, model.layers)
    )
    moments = [
        moment(
            "at the start of the backward",
            cast,
            Breakdown("activations", "B", parts=kept.parts),
            head,
            gradients=everything * gradients_kept,
        ),
        moment("in the optimizer", _roots(model, kind, foreach), gradients=everything),
    ]
    later = everything if gradients_kept else everything - _first_block_and_table(model)
    block = held(one_layer(model), "none")
    for part, alive in _inside(model, block, batch * seq, kind, None if flash else seq):
        moments += [
            moment(
                f"in the last block's {part}",
                cast,
                before,
                alive,
                gradients=everything * gradients_kept,
            ),
            moment(f"in the first block's {part}", cast, alive, gradients=later),
        ]
    return max(moments, key=lambda moment: moment.total)


def _inside(
    model: Transformer, block: Breakdown, tokens: int, kind: Precision, keys: int | None
) -> Iterator[tuple[str, Breakdown]]:
    """What is alive in the backward of one block: in its MLP all that it saved and the gradients of
    two hidden tensors, in its attention what that saved and the gradients of two score matrices
    (of `keys` a row; with None, flash attention, of queries, keys and values)."""
    hidden = model.d_ff
    if model.expert_layers:
        hidden = model.experts_per_token * model.d_expert + model.d_shared
    scores = 3 * model.qk_dim if keys is None else 2 * keys
    size = bytes_of(kind.activations)
    for part, saved, width in (
        ("MLP", block.parts, 2 * hidden),
        ("attention", (block["attention"],), model.heads * scores),
    ):
        gradients = product(
            "gradients in flight", "B", tokens=tokens, width=model.d_model + width, bytes=size
        )
        yield part, Breakdown(f"one block, in its {part}", "B", parts=(*saved, gradients))


def _roots(model: Transformer, kind: Precision, foreach: bool) -> Breakdown:
    """Adam's square roots of second moments: of all parameters, or of one and its denominator."""
    return product(
        "square roots",
        "B",
        parameters=_count(model) if foreach else 2 * _largest(model),
        bytes=bytes_of(kind.moments[-1]) if kind.moments else Fraction(0),
    )


def _count(model: Transformer) -> int:
    return int(parameters(model).total)


def _first_block_and_table(model: Transformer) -> int:
    """Parameters whose gradients are not there yet when the backward enters the first block."""
    groups = parameters(one_layer(model))
    block = sum(
        int(group.total) for group in groups if group.name in ("attention", "mlp", "experts")
    )
    table = 0 if model.tied else int(groups["embedding"].total)
    return block + table


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
    for extent in shape:
        checks.whole("an extent of shape", extent, least=0)
    size = math.prod(shape) * bytes_of(dtype)
    return math.ceil(size)
