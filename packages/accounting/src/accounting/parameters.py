"""Exact parameter counts, in total and per token."""

from itertools import groupby

from accounting import checks
from accounting.breakdown import Breakdown, multiply, sum_parts
from accounting.model.records import Matrix
from accounting.model.transformer import Transformer, list_matrices

UNIT = "parameters"


@checks.validate()
def parameters(model: Transformer, *, active: bool = False) -> Breakdown:
    """Return the number of parameters by part; with `active`, of the parameters that a token uses.

    A token uses all parameters except the experts that its router did not choose. A tied head
    and embedding count once, as in torch.
    """

    def build_leaf(matrix: Matrix) -> Breakdown:
        factors = {}
        if matrix.layers is not None:
            factors["blocks" if matrix.shared else "layers"] = matrix.stored_count
        if matrix.routed:
            factors["experts"] = matrix.chosen if active else matrix.copies
        if matrix.kind != "vector" or matrix.rows > 1:
            factors["rows"] = matrix.rows
        return multiply(matrix.name, UNIT, **factors, columns=matrix.columns)

    name = "active parameters" if active else "parameters"
    parts = (sum_parts(part, UNIT, *map(build_leaf, group)) for part, group in group_by_part(model))
    return sum_parts(f"{name} of {model.name}", UNIT, *parts)


def group_by_part(model: Transformer) -> list[tuple[str, list[Matrix]]]:
    """Return pairs of the name of a part, such as `attention`, and the matrices of this part."""
    order = list(dict.fromkeys(matrix.part for matrix in list_matrices(model)))
    listed = sorted(list_matrices(model), key=lambda matrix: order.index(matrix.part))
    return [(part, list(group)) for part, group in groupby(listed, lambda matrix: matrix.part)]
