"""The bench runs, and its machine-independent figures are right."""

import os

import pytest
import torch.distributed as dist
from paramserver.bench.rows import _consistency, _local_steps, bench, table
from worker_pool import run_ranks


def test_consistency_rows():
    rows = _consistency(6)
    by_kind = {row["kind"]: row for row in rows}
    assert by_kind["BulkSynchronous()"]["updates"] == 6
    assert by_kind["BulkSynchronous()"]["staleness_max_versions"] == 0
    assert by_kind["Asynchronous()"]["updates"] == 3 * 6
    for bound in (1, 4):
        oldest = by_kind[f"StaleSynchronous(bound={bound})"]["staleness_max_versions"]
        assert oldest <= 2 * (2 * bound + 1)  # each of the 2 others is within bound on both sides
    assert len(table(rows).splitlines()) == 1 + len(rows)


def bench_in_group():
    os.environ["RANK"] = str(dist.get_rank())
    return bench(quick=True)


def test_rows_of_a_group_come_from_rank_0():
    rows, others = run_ranks(bench_in_group, 2)
    assert others == []
    assert rows[0]["case"] == "exchange_in_group"
    assert rows[0]["push_gbps"] > 0


@pytest.mark.exhaustive
def test_local_steps_rows():
    every, local, _, four, _ = _local_steps(50)
    assert every["times_fewer_bytes"] == 1
    assert local["times_fewer_bytes"] > 45
    assert four["times_fewer_bytes"] > local["times_fewer_bytes"]
    assert all(row["held_out_loss"] < 5 for row in (every, local))
