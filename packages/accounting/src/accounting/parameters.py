"""How many parameters a model has, in all and for one token, to the integer."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from accounting import checks
from accounting.breakdown import Breakdown, product, total
from accounting.model.matrices import matrices
from accounting.model.records import Matrix
from accounting.model.shape import Shape

if TYPE_CHECKING:
    from torch import nn

UNIT = "parameters"


@checks.entry()
def parameters(model: Shape | nn.Module, *, active: bool = False) -> Breakdown:
    """Count every parameter; with `active`, only those that one token meets.

    Active means all of them but the experts that the router did not choose. A tied head is counted
    once, as torch does. An `nn.Module` (also on the meta device) is counted as it is, by submodule.
    """
    if not isinstance(model, Shape):
        from accounting.model.module import count_module

        return count_module(model)

    def leaf(matrix: Matrix) -> Breakdown:
        factors = {}
        if matrix.layers is not None:
            factors["layers"] = len(matrix.layers)
        if matrix.routed:
            factors["experts"] = matrix.chosen if active else matrix.copies
        if matrix.kind != "vector" or matrix.rows > 1:
            factors["rows"] = matrix.rows
        return product(matrix.name, UNIT, **factors, columns=matrix.columns)

    name = "active parameters" if active else "parameters"
    encoder = parameters(model.encoder, active=active) if model.encoder else None
    return total(
        f"{name} of {model.name}",
        UNIT,
        *(total(part, UNIT, *map(leaf, group)) for part, group in by_part(model)),
        total("encoder", UNIT, *encoder.parts) if encoder else None,
    )


def by_part(model: Shape) -> list[tuple[str, list[Matrix]]]:
    """The matrices of a model under the headings that its parts have, in order."""
    order = list(dict.fromkeys(matrix.part for matrix in matrices(model)))
    listed = sorted(matrices(model), key=lambda matrix: order.index(matrix.part))
    return [(part, list(group)) for part, group in groupby(listed, lambda matrix: matrix.part)]


@checks.entry()
def lora_parameters(inputs: int, outputs: int, rank: int) -> int:
    """A low-rank update of one matrix, `A` (inputs, rank) and `B` (rank, outputs): r(m + l)."""
    return rank * (inputs + outputs)


@checks.entry()
def soft_prompt_parameters(model: Shape, *, tokens: int) -> int:
    """A soft prompt trains one vector of the embedding's width a token, and nothing else."""
    return tokens * model.embedding_dim
