"""The benchmark returns checked rows with nccl-tests' columns."""

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives import bench
from collectives.bench import interleaved
from collectives.bench.rows import _describe_row
from host_layout import emulate_hosts
from worker_pool import run_ranks

COLUMNS = {"size_bytes", "count", "type", "redop", "time_us", "algbw_gbps", "busbw_gbps", "wrong",
           "p99_us", "wire_bytes", "ratio_p50", "ratio_p10", 
           "runs"}  # fmt: skip
IN_PLACE = {"in_place_time_us", "in_place_algbw_gbps", "in_place_busbw_gbps", "in_place_wrong"}


# A call of this size is timed twice per round.
SIZE = 2 << 20


def run_small_benches():
    """Return the rows of all cases, and those of one case of another size."""
    interleaved._choose_num_rounds = lambda size, quick: 1
    measured = bench.bench(quick=True, sizes=(SIZE,))
    return measured, bench.bench(quick=True, sizes=(SIZE // 2,), cases=("all_gather",))


def test_rows_have_nccl_tests_columns_and_no_wrong_elements(tmp_path):
    (measured, of_one_case), nothing = run_ranks(run_small_benches, 2)
    assert nothing == ([], [])
    # Only the requested case is measured.
    assert {(row["case"], row["size_bytes"]) for row in of_one_case} == {("all_gather", SIZE // 2)}
    assert {row["case"] for row in measured} == {"all_reduce", "reduce_scatter", "all_gather"}
    reduced = {row["algorithm"] for row in measured if row["case"] == "all_reduce"}
    assert reduced >= {"gloo", "auto", "ring", "tree", "shared_empty"}
    for row in measured:
        assert set(row) >= COLUMNS
        assert row["wrong"] == 0
        factor = {"all_reduce": 1.0}.get(str(row["case"]), 0.5)
        assert abs(row["busbw_gbps"] - factor * row["algbw_gbps"]) < 1e-9
        if row["case"] == "all_reduce":
            assert set(row) >= IN_PLACE
            assert row["in_place_wrong"] == 0
    # Shared memory sends nothing; a ring of two sends the tensor once, plus headers.
    by_algorithm = {row["algorithm"]: row for row in measured if row["case"] == "all_reduce"}
    assert by_algorithm["shared_empty"]["wire_bytes"] < 0.1 * SIZE
    assert 1.0 <= by_algorithm["ring"]["wire_bytes"] / SIZE < 1.1
    assert "busbw_gbps" in bench.table(measured)
    # The ranks load this file, and need no matplotlib.
    from collectives.bench.plot import plot

    plot(measured, tmp_path / "bandwidth.png")
    assert (tmp_path / "bandwidth.png").stat().st_size > 10_000


def list_choices_of_auto(size):
    """Return the choice of "auto" for arrays whose size need not be a multiple of one element."""
    emulate_hosts("apart")
    world = dist.get_world_size()
    collectives.all_reduce(torch.ones(size // 4))
    collectives.all_gather_into_tensor(
        torch.ones(size // 4 // world * world), torch.ones(size // 8)
    )
    return [
        _describe_row(kind, "auto", size, "cpu")["runs"] for kind in ("all_reduce", "all_gather")
    ]


def test_choice_of_auto_is_found_for_every_size():
    assert run_ranks(list_choices_of_auto, 2, 1027) == [["tree", "ring"]] * 2


def test_sizes_without_an_element_per_rank_are_refused():
    with pytest.raises(ValueError, match=r"at least 16 bytes.* got 8"):
        bench.bench(sizes=[1024, 8], worlds=[2, 4])


def test_groups_without_ranks_are_refused():
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        bench.bench(worlds=[2, 0])
