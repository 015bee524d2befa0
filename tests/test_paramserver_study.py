"""paramserver beside data-parallel training of the suite's model: measured, and drawn."""

import statistics

import paramserver_study as study
import pytest
from figures import assert_at_least, assert_at_most
from paramserver.bench import format_table
from workspace import get_folder, import_script


def test_a_scale_is_measured_and_drawn(tmp_path):
    scales = [("size", 1, 1, 1), ("workers", 1, 2, 1), ("servers", 1, 1, 2)]
    rows = [study._measure_scale(*scale, rounds=1) for scale in scales]
    assert all(row["push_ms"] > 0 and row["pull_ms"] > 0 for row in rows)
    assert len(format_table(rows).splitlines()) == 1 + 3
    pytest.importorskip("matplotlib", reason="plots need it")
    target = {"case": "target", "kind": "this", "seconds": 1.0}
    loss = {"case": "loss", "kind": "this", "worker_bytes": 10, "held_out_loss": 2.0}
    study.plot([*rows, target, loss], str(tmp_path / "plot"))
    assert len([*tmp_path.glob("plot-*.png")]) == 3


@pytest.mark.exhaustive
def test_an_exchange_is_measured_beside_what_bounds_it():
    rows = {row["transport"]: row for row in study.measure_bound(1, 2)}
    assert [*rows] == ["shared_memory", "copies", "zeromq", "bare zeromq", "socket", "rpc"]
    assert all(row["push_ms"] > 0 and row["pull_ms"] > 0 for row in rows.values())
    assert rows["rpc"]["rpc_over_this_p50"] == 1


@pytest.mark.exhaustive
@pytest.mark.timing
def test_an_exchange_takes_little_more_than_what_bounds_it():
    rows = {row["transport"]: row["rpc_over_this_p50"] for row in study.measure_bound(80, 15)}
    # The weaker of two AMD EPYC reached 0.70 of the copies; the goals are 6 and 2.5.
    shared = min(6, 0.7 * rows["copies"])
    assert_at_least("paramserver: RPC over shared memory", shared, rows["shared_memory"])
    # Frames and copies one after the other take the sum of their times.
    parts = 1 / (1 / rows["bare zeromq"] + 1 / rows["copies"])
    assert_at_least("paramserver: RPC over ZeroMQ", min(2.5, 0.9 * parts), rows["zeromq"])


@pytest.mark.exhaustive
@pytest.mark.timing
def test_a_journaled_push_takes_as_long_as_a_push_and_an_append():
    pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")
    rows = study.measure_journal(80, 3)
    ratio, over_parts = (
        statistics.median(row[name] for row in rows) for name in ("over_push", "over_parts")
    )
    figure = f"paramserver: a journaled push ({ratio:.2f}x a push) over a push and an append"
    assert_at_most(figure, 1.2, over_parts)


def find_newest_rows(label):
    return import_script("measure").find_newest("paramserver", label)["rows"]


def test_readme_states_the_measured_exchanges():
    rows = {row["transport"]: row for row in find_newest_rows("measured") if row["case"] == "bound"}
    sums = {name: row["push_ms"] + row["pull_ms"] for name, row in rows.items()}
    text = " ".join((get_folder("paramserver") / "README.md").read_text().split())
    assert (
        f"the copies and the update alone are {rows['copies']['rpc_over_this_p50']:.1f} times"
        in text
    )
    bare = rows["bare zeromq"]["rpc_over_this_p50"]
    assert f"Bare ZeroMQ frames of the same bytes are {bare:.1f} times" in text
    parts = sums["bare zeromq"] + sums["copies"]
    assert f"a push and a pull over ZeroMQ take {sums['zeromq']:.0f} ms." in text
    assert f"followed by the copies and the update, would take {parts:.0f} ms of it" in text


def test_readme_states_the_measured_pushes_with_a_journal():
    rows = find_newest_rows("journal")
    text = " ".join((get_folder("paramserver") / "README.md").read_text().split())
    least, most = (bound(row["over_push"] for row in rows) for bound in (min, max))
    assert f"took {least:.1f} to {most:.1f} times as long" in text
    assert all(row["over_parts"] <= 1 for row in rows)  # never longer than a push and an append
    parts = [row["append_ms"] / row["push_ms"] for row in rows]
    bounds = f"took {min(parts):.1f} to {max(parts):.1f} times as long as a push without a journal"
    assert bounds in text
    assert min(parts) > 1.2


def test_readme_states_the_measured_bytes_of_diloco():
    text = " ".join((get_folder("paramserver") / "README.md").read_text().split())
    kind = "DiLoCo, 4 bits, 5 fragments, overlap 5"
    loss = {row["kind"]: row for row in find_newest_rows("measured") if row["case"] == "loss"}
    assert f"exchanged {loss[kind]['times_fewer_bytes']:.0f} times fewer bytes" in text
    losses = [loss[name]["held_out_loss"] for name in (kind, "data-parallel")]
    assert f"was {losses[0]:.2f} instead of {losses[1]:.2f}" in text
    (linked,) = (row for row in find_newest_rows("equal-loss") if row["kind"] == kind)
    assert f"sent {linked['times_fewer_bytes']:.0f} times fewer bytes" in text
    assert f"at {linked['loss_over_data_parallel']:.3f} times the loss" in text
    assert linked["times_fewer_bytes"] >= 20
    assert linked["loss_over_data_parallel"] <= 1.01


@pytest.mark.exhaustive
@pytest.mark.timing
def test_a_bound_lets_four_reach_the_target_before_the_slow_one_would():
    by_kind = {row["kind"]: row for row in study._measure_time_to_target(quick=False)}
    ratio = by_kind["StaleSynchronous(bound=4)"]["over_bulk_p50"]
    assert_at_most("paramserver: a bound of 4 over bulk-synchronous steps", 0.6, ratio)


@pytest.mark.exhaustive
def test_four_bits_save_400_times_the_bytes_and_cost_one_percent():
    rows = {row["kind"]: row for row in study.measure_losses("mini", 2000, 3e-3)}
    streaming = rows["DiLoCo, 4 bits, 5 fragments, overlap 5"]
    assert streaming["loss_over_data_parallel"] <= 1.01
    assert streaming["times_fewer_bytes"] >= 400


@pytest.mark.exhaustive
@pytest.mark.timing
@pytest.mark.skipif(
    bool(study.explain_refusal()), reason=study.explain_refusal() or "hosts can be emulated"
)
def test_workers_compute_95_percent_of_their_time_on_a_link_of_100_mbit():
    steps = {"data-parallel": 15, "DiLoCo, 4 bits, 5 fragments, overlap 5": 150}
    rows = {row["kind"]: row for row in study.measure_link(steps, "tiny", 3e-3, "100mbit")}
    figure = "paramserver: computing share on 100 Mbit/s"
    plain = rows["data-parallel"]["computing_share"]
    assert_at_most(f"{figure}, data-parallel", 0.8, plain, "", margin=0)
    streaming = rows["DiLoCo, 4 bits, 5 fragments, overlap 5"]["computing_share"]
    assert_at_least(f"{figure}, DiLoCo", 0.95, streaming, "", margin=0)


@pytest.mark.exhaustive
@pytest.mark.skipif(
    bool(study.explain_refusal()), reason=study.explain_refusal() or "hosts can be emulated"
)
def test_diloco_sends_20_times_fewer_bytes_over_a_link_at_equal_loss():
    rows = {row["kind"]: row for row in study.measure_equal_loss("mini", 2000, 3e-3, "100mbit")}
    streaming = rows["DiLoCo, 4 bits, 5 fragments, overlap 5"]
    assert streaming["loss_over_data_parallel"] <= 1.01
    assert streaming["times_fewer_bytes"] >= 20
