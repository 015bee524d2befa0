"""Ranks of this machine that act as if they ran on several hosts."""

import os

import collectives
from collectives.algorithms import dispatch
from collectives.shared_memory import segment

HOST_IDENTITY, TUNE = segment.get_host_identity, dispatch.tune


def emulate_hosts(where):
    """Emulate one host, one host per rank ("apart") or one host per two ranks ("pairs")."""
    if where != "together":
        ranks_per_host = 1 if where == "apart" else 2
        segment.get_host_identity = lambda: f"host {int(os.environ['RANK']) // ranks_per_host}"
        # Default prices, so that "auto" does not measure for seconds.
        dispatch.tune = lambda *_, **options: collectives.CostModel()


def prepare_rank():
    """Undo `emulate_hosts` of an earlier call on this rank (see `worker_pool`)."""
    segment.get_host_identity, dispatch.tune = HOST_IDENTITY, TUNE
