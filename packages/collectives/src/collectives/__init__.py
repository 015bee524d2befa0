"""Collective communication between processes, with the names and arguments of torch.distributed."""

from collectives.choice.cost import CostModel
from collectives.choice.describe import Description, describe
from collectives.collective import (
    ReduceOp,
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    reduce_scatter_tensor,
    shared_empty,
)
from collectives.errors import Mismatch, RankLost
from collectives.groups import checked
from collectives.lists import all_gather, all_to_all, gather, reduce, reduce_scatter, scatter
from collectives.rebuild import rebuild

__all__ = [
    "CostModel", "Description", "Mismatch", "RankLost", "ReduceOp", "all_gather",
    "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier",
    "broadcast", "checked", "describe", "gather", "rebuild", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "shared_empty",
]  # fmt: skip
