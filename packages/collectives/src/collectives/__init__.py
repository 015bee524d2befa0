"""Sums and shuffles over processes: the names of torch.distributed, in the open."""

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
from collectives.communicator import checked
from collectives.cost import CostModel
from collectives.faults import RankLost
from collectives.fingerprint import Mismatch

__all__ = [
    "CostModel",
    "Mismatch",
    "RankLost",
    "ReduceOp",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "checked",
    "reduce_scatter_tensor",
    "shared_empty",
]
