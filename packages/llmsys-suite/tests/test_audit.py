"""Every check of plan and train passes on an honest record and fails on a tampered one."""

import copy
import hashlib
import json
import math
import os
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import tinyml
import torch
from llmsys_suite.audit import peers, reference, training_checks
from llmsys_suite.audit.check import Check, Sources, compare_rows
from llmsys_suite.audit.inputs import compare_with_file
from llmsys_suite.audit.run import catch_errors, check_again
from llmsys_suite.audit.stage_checks import compress, parallel, timing
from llmsys_suite.audit.stage_checks import scale as scale_checks
from llmsys_suite.audit.text import iter_heldout_windows, normalize, read_bytes
from llmsys_suite.audit.training_checks import plan as plan_checks
from llmsys_suite.audit.training_checks import times
from llmsys_suite.audit.training_checks import weights as weight_checks
from llmsys_suite.audit.training_checks import wire as wire_checks
from llmsys_suite.audit.training_checks.data import get_json_values
from llmsys_suite.audit.training_checks.record import Record
from llmsys_suite.config import Layout, RunConfig, UsageError
from llmsys_suite.measure.interleaved import Interleaved
from llmsys_suite.measure.samples import (
    CORE_WAIT,
    PEER,
    PROCESSOR,
    SINGLE,
    WHOLE_STEP,
    compute_loss_curves,
    compute_utilization,
    summarize,
)
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.results import Audit, Compress, Plan, Train
from llmsys_suite.stages import scale
from llmsys_suite.stages.compress import METHODS
from llmsys_suite.text.data import read_text
from llmsys_suite.text.generation import MODEL
from llmsys_suite.variants.stored_tensors import count_stored_bytes
from run_folders import create_folder
from safetensors.torch import save_file
from tinyml.quantization.int8 import Int8Linear

CONFIG = RunConfig(world=2, rows=8, context=16, steps=3, warmup=1)
NAMES = (SINGLE, PEER, "ddp flat", "parameter server")
PLAN = Plan(
    **dict.fromkeys((field.name for field in fields(Plan)), 0)
    | {
        "parameters": 100,
        "variants_fit_together": True,
        "step_flops_full": 600,
        "step_flops_causal": 500,
        "gradient_bytes": 400,
        "ddp_wire_bytes_per_rank": 400,
        "training_peak_bytes": 1500,
        "training_bytes_by_part": {"weights": 400, "optimizer": 800, "activations": 300},
        "measured_peak_bytes": 1540,
        "peak": 1e6,
    }
)
BATCHES = [
    [hashlib.sha256(f"{s} {r}".encode()).hexdigest()[:12] for r in range(8)] for s in range(4)
]


def make_honest_samples():
    samples, clock = [], 1000.0
    for step in range(4):
        for variant in NAMES:
            ranks = 1 if variant == SINGLE else 2
            for rank in range(ranks):
                row = {
                    "stage": "train", "variant": variant, "step": step, "warmup": step < 1,
                    "rank": rank,
                }  # fmt: skip
                last = "communication" if variant == "parameter server" else "optimizer"
                parts = {"forward": 0.03, "backward": 0.05 + 0.01 * rank, last: 0.02}
                seconds = sum(parts.values()) + 0.001
                samples += [row | {"phase": k, "seconds": s} for k, s in parts.items()]
                rows_per_rank = 8 // ranks
                samples.append(
                    row
                    | {
                        "phase": "step",
                        "seconds": seconds,
                        "loss": 5.0 - step + 0.1 * (2 * rank - 1) * (ranks - 1),
                        "began": clock,
                        "ended": clock + seconds,
                        CORE_WAIT: 0.0,
                        PROCESSOR: 0.08,
                        "threads": 1,
                        "received": 0 if variant == SINGLE else 400,
                        "row_digests": BATCHES[step][
                            rank * rows_per_rank : (rank + 1) * rows_per_rank
                        ],
                    }
                )
            clock += 0.2
    return samples


def make_probed(ranks):
    return {
        "weights": [[6e-7, "q: norm 1, expected 1"]] * ranks,
        "shared": [400] * ranks,
        "digest": ["a"] * ranks,
    }


def make_final(name):
    """Return what the ranks store after the training, and the distances of their weights.

    The gradient of k consists of rounding errors, so that its change may differ by any factor.
    """
    stored = {"parameters": 400, "moments": 800, "all": 1300}
    if name == "parameter server":
        stored["moments"] = 0
    ranks = 1 if name == SINGLE else 2
    changes = {"q": [1e-5, "q"], "k": [0.9, "k"]}
    weights = {"ranks": ranks, "differ": [], "from_one_process": changes}
    return weights | {"stored": [stored] * ranks}


def make_honest_run():
    """(plan, train, samples, evidence) of a run with nothing wrong."""
    samples = make_honest_samples()
    ends = {n: make_final(n) for n in NAMES}
    train = Train(summarize(samples), compute_loss_curves(samples), ends)
    for row in train.rows:
        ranks = 1 if row["variant"] == SINGLE else 2
        row["mfu"] = compute_utilization(PLAN.step_flops_causal, PLAN.peak, row["step_ms"], ranks)
    evidence = {
        "config": get_json_values(CONFIG),
        "threads": 1,
        "probe": {n: make_probed(1 if n == SINGLE else 2) for n in NAMES},
        "trajectory": [5.0, 4.0, 3.0, 2.0],
        "rounding_factors": {"q": 1.0, "k": 1e6},
        "row_digests": BATCHES,
        "split": {"ranks": [["a", "b"]] * 2, "files": ["a", "b"], "repeated": 1, "windows": 64},
        "peers": {
            PEER: {
                "needed time": {"audit": 1.02, "ddp flat": 0.98},
                "processor time": {"audit": 0.97, "ddp flat": 1.03},
            }
        },
        "saved_bytes": 300,
        "initial_scales": [[1.5, "q"]],
        "model_counts": {
            "parameters": 100,
            "block_parameters": 60,
            "tensors": 0,
            "flops_full": 600,
            "flops_causal": 500,
        },
        "product_flops_per_second": 1.1e6,
        "sockets_count": True,
        "shares_memory": True,
    }
    return copy.deepcopy((PLAN, train, samples, evidence))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"ranks": [["a", "b"], ["c", "b"]]}, "text of every rank"),
        ({"ranks": [["a", "b"], ["a", "a"]]}, "text of every rank"),
        ({"repeated": 20}, "held-out text is not training text"),
    ],
)
def test_held_out_text_in_the_training_text_fails(change, name):
    plan, train, samples, evidence = make_honest_run()
    evidence["split"] |= change
    assert list_failed_checks(plan, train, samples, evidence) == [name]


@pytest.mark.parametrize("kind", ["needed time", "processor time"])
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_a_peer_that_is_slowed_or_skips_work_fails(kind, ratio):
    plan, train, samples, evidence = make_honest_run()
    evidence["peers"][PEER][kind]["audit"] = ratio
    assert list_failed_checks(plan, train, samples, evidence) == [f"{kind} of {PEER}"]


@pytest.mark.parametrize("kind", ["needed time", "processor time"])
@pytest.mark.parametrize("ratio", [0.6, 1.7])
def test_a_peer_that_is_slowed_in_the_training_only_fails(kind, ratio):
    plan, train, samples, evidence = make_honest_run()
    evidence["peers"][PEER][kind]["ddp flat"] = ratio
    assert list_failed_checks(plan, train, samples, evidence) == [
        f"{kind} of {PEER} over that of ddp flat"
    ]


def list_failed_peers(seconds, waited, processor):
    """Return the failed comparisons of a peer whose steps take more of three clocks' seconds."""

    def change(train, samples, evidence):
        for s in list_steps(samples, PEER):
            s["seconds"] += seconds
            s[CORE_WAIT] += waited
            s[PROCESSOR] += processor

    return {name for name in check_tampered(change) if "over that of" in name}


def test_a_sleep_shows_in_needed_time_and_work_in_processor_time():
    needed, processor = (
        f"{kind} of {PEER} over that of ddp flat" for kind in ("needed time", "processor time")
    )
    assert list_failed_peers(seconds=0.2, waited=0.0, processor=0.0) == {needed}
    assert list_failed_peers(seconds=0.2, waited=0.2, processor=0.0) == set()
    assert list_failed_peers(seconds=0.2, waited=0.0, processor=0.1) == {needed, processor}
    # Another program has the core for as long as the additional work takes.
    assert list_failed_peers(seconds=0.2, waited=0.2, processor=0.1) == {processor}


def crowd_machine(train, samples, evidence):
    """Let other programs use most of the machine, and let all ranks of two variants wait for it."""
    for s in samples:
        if s["phase"] == WHOLE_STEP:
            s |= {"process_s": 0.1 * s["step"], "machine_s": 1.0 * s["step"]}
            if s["variant"] in (PEER, "ddp flat"):
                s[CORE_WAIT] = 0.1 * s["seconds"]


def test_needed_times_in_disturbed_rounds_are_not_compared():
    def change(train, samples, evidence):
        crowd_machine(train, samples, evidence)
        evidence["peers"][PEER]["needed time"]["ddp flat"] = 1.7
        evidence["peers"][PEER]["processor time"]["ddp flat"] = 1.7

    failed = {name for name in check_tampered(change) if "over that of" in name}
    assert failed == {f"processor time of {PEER} over that of ddp flat"}


@pytest.mark.parametrize("machine_s", [0.22, 1.0])
def test_a_peer_and_another_variant_are_timed_in_undisturbed_rounds(machine_s):
    """Ten rounds, of which the first six wait for a core while others may use it."""

    def rounds(seconds, rank):
        return [
            {"step": i, "rank": rank, "seconds": seconds, PROCESSOR: seconds}
            | {CORE_WAIT: 0.5 * seconds * (i < 6)}
            | {"process_s": 0.1 * i, "machine_s": machine_s * i}
            for i in range(10)
        ]

    by_call = {PEER: [rounds(2.0, r) for r in (0, 1)], "audit": [rounds(1.0, r) for r in (0, 1)]}
    by_call["ddp flat"] = [rounds(4.0, 0), rounds(4.0, 1)]
    needed = peers.MEASURES["needed time"]
    assert peers.compute_ratios(PEER, needed, by_call) == {"audit": 2.0, "ddp flat": 0.5}
    for steps in by_call[PEER]:
        for s in steps:
            s[CORE_WAIT] = 0.9 * s["seconds"] * (s["step"] < 8)
    ratios = peers.compute_ratios(PEER, needed, by_call)
    assert ratios["audit"] == pytest.approx(0.4)
    # Alone on the machine, all rounds count; otherwise two, which are too few.
    expected = {0.22: pytest.approx(0.1), 1.0: None}[machine_s]
    assert ratios.get("ddp flat") == expected
    processor = peers.compute_ratios(PEER, peers.MEASURES["processor time"], by_call)
    assert processor == {"audit": 2.0, "ddp flat": 0.5}


def test_the_bounds_of_a_median_narrow_with_the_number_of_rounds():
    ratios = [i / 100 for i in range(101)]
    assert times.compute_median_bounds(ratios) == (0.4, 0.6)
    assert times.compute_median_bounds([1.0, 3.0, 2.0]) == (1.0, 3.0)


def test_a_cold_first_step_does_not_count_as_a_slowed_peer():
    plan, train, samples, evidence = make_honest_run()
    for s in samples:
        s["warmup"] = False
    for s in list_steps(samples, PEER):
        s["seconds"] += 5.0 * (s["step"] == 0)
    config = replace(CONFIG, warmup=0, steps=4)
    checks = training_checks.check_training(config, plan, train, samples, evidence)
    (ratio,) = (c for c in checks if c.name == f"needed time of {PEER} over that of ddp flat")
    assert ratio.passed
    assert ratio.high < 2


def test_a_folder_with_a_duplicated_file_has_held_out_text_in_the_training_text(tmp_path):
    random = np.random.default_rng(0)
    text = random.integers(97, 123, 20_000, dtype=np.uint8).tobytes()
    (tmp_path / "a").write_bytes(text)
    train, heldout = read_bytes(tmp_path)
    assert train + heldout == text
    assert not any(window in train for window in iter_heldout_windows(heldout))
    (tmp_path / "b").write_bytes(text)
    read_bytes.cache_clear()
    train, heldout = read_bytes(tmp_path)
    assert all(window in train for window in iter_heldout_windows(heldout))


@pytest.mark.parametrize("change", [bytes.upper, lambda text: text.replace(b"\n", b"\r\n\t")])
def test_held_out_text_is_found_in_other_case_or_with_other_white_space(change):
    text = bytes(np.random.default_rng(0).choice([10, *range(97, 123)], 20_000).tolist())
    train, heldout = normalize(text), normalize(change(text[-5000:]))
    assert all(window in train for window in iter_heldout_windows(heldout))


def test_white_space_is_compared_if_the_text_has_nothing_else():
    assert normalize(b" \n" * 9) == b" \n" * 9


@pytest.mark.parametrize("bits", [2, 4])
def test_k_means_is_a_fixed_point_and_values_of_other_weights_are_not(bits):
    torch.manual_seed(0)
    layer = torch.nn.Linear(300, 500).requires_grad_(False)
    palette = tinyml.kmeans_quantize(torch.nn.Sequential(layer), bits)[0].weight.detach()
    means = compress.compute_cluster_means(layer.weight, palette)
    assert reference.compute_distance(palette, means) < compress.STORED / 10
    moved = compress.compute_cluster_means(layer.weight + 0.01, palette)
    assert reference.compute_distance(palette, moved) > compress.STORED


@pytest.mark.parametrize(("layout", "elements"), [
    (Layout(data=2), 2 * 1005),
    (Layout(pipeline=2), 1005),
    (Layout(tensor=2), 1000 + 2 * 5),
    (Layout(data=2, pipeline=2, tensor=4), 2 * (1000 + 4 * 5)),
])  # fmt: skip
def test_expected_elements_of_a_layout(layout, elements):
    weights = {
        "blocks.0.ffn.up.weight": torch.zeros(10, 100),
        "blocks.0.norm.weight": torch.zeros(5),
    }
    assert parallel.count_expected_elements(weights, layout) == elements


def test_links_to_missing_files_and_pipes_are_no_part_of_a_text(tmp_path):
    (tmp_path / "a").write_bytes(b"to be or not to be")
    (tmp_path / ".#a").symlink_to("missing")
    os.mkfifo(tmp_path / "pipe")
    read_bytes.cache_clear()
    text = read_text(tmp_path)
    assert read_bytes(tmp_path) == (bytes(text.train), bytes(text.heldout))


@pytest.mark.parametrize(("largest", "passes"), [(127, True), (63, False), (1e9, False)])
def test_inputs_that_are_not_rounded_to_eight_bits_fail(monkeypatch, largest, passes):
    torch.manual_seed(0)
    model = Decoder(ModelConfig.from_size("mini", context=16))
    small = tinyml.quantize(model, 8, activations="dynamic")

    def multiply(layer, inputs):
        step = inputs.abs().amax(-1, keepdim=True) / largest
        return (inputs / step).round() * step @ layer.weight.T

    for name in ("int8", "float32"):
        monkeypatch.setitem(Int8Linear.implementations, name, multiply)
    with torch.no_grad():
        distances = [distance for distance, _ in compress.compare_layer_outputs(model, small)]
    assert len(distances) == 15
    assert all((distance < compress.ROUNDED_INPUTS) == passes for distance in distances)


def list_failed_checks(plan, train, samples, evidence):
    return [
        c.name
        for c in training_checks.check_training(CONFIG, plan, train, samples, evidence)
        if not c.passed
    ]


def list_steps(samples, variant, *, rank=None):
    return [
        s
        for s in samples
        if s["variant"] == variant and s["phase"] == "step" and rank in (None, s["rank"])
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_heads_of_messages_and_whole_bytes_are_no_alarm_at_any_number_of_ranks(world):
    plan, train, samples, evidence = make_honest_run()
    wire = 2 * (world - 1) / world * 400
    heads = 1000 * 20 * (world - 1)  # of twenty tensors, as often as a ring passes them on
    evidence["model_counts"]["tensors"] = 20
    for s in samples:
        if s["variant"] != SINGLE and "received" in s:
            s["received"] = wire + heads
    config = replace(CONFIG, world=world)

    def passed(planned):
        changed = replace(plan, ddp_wire_bytes_per_rank=planned)
        record = Record(config, changed, train, samples, evidence)
        checks = (
            *plan_checks.check_communication(record),
            *wire_checks.check_sockets(record),
        )
        return {check.name: check.passed for check in checks}

    assert passed(int(wire))["DDP's wire bytes per rank"]
    assert passed(int(wire))["ddp flat: bytes received per step of training"]
    assert not passed(int(wire) + 2)["DDP's wire bytes per rank"]


def test_an_honest_record_passes_every_check_and_each_names_two_sources():
    checks = list(training_checks.check_training(CONFIG, *make_honest_run()))
    assert [str(check) for check in checks if not check.passed] == []
    assert len({check.name for check in checks}) == len(checks) > 40
    assert all(check.source and check.against and check.source != check.against for check in checks)


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("parameters", 101, "parameters"),
        ("step_flops_full", 601, "FLOPs per step, full attention"),
        ("step_flops_causal", 501, "FLOPs per step, causal"),
        ("training_peak_bytes", 900, "peak memory of a step"),
        ("training_bytes_by_part", {"weights": 400, "optimizer": 0}, "moment bytes"),
        ("training_bytes_by_part", {"weights": 400, "optimizer": 801}, "parts of the peak"),
        ("gradient_bytes", 1200, "gradient bytes"),
        ("ddp_wire_bytes_per_rank", 1200, "DDP's wire bytes per rank"),
        ("peak", 2.2e6, "rate of a product"),
    ],
)
def test_a_wrong_prediction_fails(key, value, name):
    plan, *rest = make_honest_run()
    assert name in list_failed_checks(replace(plan, **{key: value}), *rest)


def check_tampered(change):
    plan, train, samples, evidence = make_honest_run()
    change(train, samples, evidence)
    return list_failed_checks(plan, train, samples, evidence)


def test_a_gradient_that_is_off_names_variant_rank_parameter_and_both_numbers():
    plan, train, samples, evidence = make_honest_run()
    where = "blocks.0.attention.q.weight: norm 0.25, expected 0.125"
    evidence["probe"]["ddp flat"]["weights"][1] = [1.0, where]
    (check,) = (
        c
        for c in training_checks.check_training(CONFIG, plan, train, samples, evidence)
        if not c.passed
    )
    assert "ddp flat: weight change of one SGD step" in str(check)
    assert f"rank 1 {where}" in str(check)


@pytest.mark.parametrize("distance", [1e-5, float("nan"), float("inf")])
def test_weights_that_a_probe_moved_wrongly_fail(distance):
    def change(train, samples, evidence):
        evidence["probe"]["parameter server"]["weights"][0] = [distance, "q"]

    assert check_tampered(change) == ["parameter server: weight change of one SGD step"]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"differ": ["rank 1 norm.weight"]}, "trained weights, bit by bit"),
        ({"ranks": 1}, "trained weights, bit by bit"),
        (
            {"from_one_process": {"q": [0.04, "q"], "k": [0.9, "k"]}},
            "weight change of the training",
        ),
        # The weights were compared with themselves.
        ({"from_one_process": {"q": [0.0, "q"], "k": [0.0, "k"]}}, "weight change of the training"),
        # A weight was left out.
        ({"from_one_process": {"q": [1e-5, "q"]}}, "weight change of the training"),
    ],
)
def test_wrong_trained_weights_fail(wrong, name):
    def change(train, samples, evidence):
        train.final_weights["ddp flat"] |= wrong

    assert check_tampered(change) == [f"ddp flat: {name}"]


def test_ranks_whose_probed_weights_differ_in_a_bit_fail():
    def change(train, samples, evidence):
        evidence["probe"]["ddp flat"]["digest"][1] = "b"

    assert check_tampered(change) == ["ddp flat: weights after two steps, bit by bit"]


@pytest.mark.parametrize("saved", [-300, 1500])
def test_a_measured_peak_that_is_not_the_saved_bytes_fails(saved):
    def change(train, samples, evidence):
        evidence["saved_bytes"] = saved

    assert check_tampered(change) == ["measured peak memory of a step"]


def test_rows_that_are_not_the_samplers_fail():
    def change(train, samples, evidence):
        list_steps(samples, "ddp flat", rank=1)[2]["row_digests"][0] = "000000000000"

    assert check_tampered(change) == ["ranks' rows are the global batch"]


def test_a_missing_rank_fails():
    def change(train, samples, evidence):
        samples.remove(list_steps(samples, "ddp flat", rank=1)[2])

    assert check_tampered(change) == ["results and samples of every step"]


def test_a_warm_up_step_that_is_counted_fails():
    def change(train, samples, evidence):
        list_steps(samples, "ddp flat", rank=1)[0]["warmup"] = False

    assert check_tampered(change) == ["results and samples of every step"]


def test_a_rank_that_reports_half_its_time_fails():
    def change(train, samples, evidence):
        for sample in list_steps(samples, "ddp flat", rank=1):
            sample["seconds"] /= 2

    assert "time of a step" in check_tampered(change)


def test_a_variant_with_more_threads_than_the_others_fails():
    def change(train, samples, evidence):
        for sample in list_steps(samples, SINGLE):
            sample["threads"] = 2

    assert check_tampered(change) == ["threads"]


def test_times_of_one_rank_that_another_rank_reports_too_fail():
    def change(train, samples, evidence):
        for rank in (0, 1):
            for sample in list_steps(samples, "ddp flat", rank=rank):
                sample["seconds"], sample["ended"] = 0.101, sample["began"] + 0.101

    assert "copied times" in check_tampered(change)


def test_ranks_may_begin_and_end_one_step_at_the_same_reading():
    def change(train, samples, evidence):
        first, second = (list_steps(samples, "ddp flat", rank=rank)[0] for rank in (0, 1))
        for key in ("began", "ended", "seconds"):
            second[key] = first[key]

    assert "copied times" not in check_tampered(change)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("copied_steps", "passes"), [(1, True), (2, True), (3, False), (4, False)])
def test_times_of_one_rank_that_another_reports_fail_at_any_number_of_ranks(
    ranks, copied_steps, passes
):
    samples = []
    for step in range(4):
        for rank in range(ranks):
            began = step + (0.0 if rank == 1 and step < copied_steps else 0.01 * rank)
            sample = {"variant": PEER, "phase": WHOLE_STEP, "step": step, "rank": rank}
            sample |= {"seconds": 0.5, "began": began, "ended": began + 0.5, "threads": 1}
            samples.append(sample)
    record = Record(replace(CONFIG, world=ranks), None, None, samples, {"threads": 1})
    (check,) = (check for check in times.check_steps(record) if check.name == "copied times")
    assert check.passed == passes


@pytest.mark.parametrize(
    ("column", "factor", "name"),
    [
        ("step_ms", 0.9, "reported step time"),
        ("ratio_p50", 0.8, "reported ratio to the peer"),
        ("ratio_p90", 1.01, "reported spread of ratios"),
        ("mfu", 2, "reported utilization"),
    ],
)
def test_a_wrong_column_of_the_table_fails(column, factor, name):
    def change(train, samples, evidence):
        train.rows[2][column] *= factor

    assert check_tampered(change) == [name]


def test_a_row_without_its_ratio_to_the_peer_fails():
    def change(train, samples, evidence):
        del train.rows[2]["ratio_p50"]

    assert check_tampered(change) == ["reported ratio to the peer"]


def test_a_clock_that_another_program_delays_in_one_step_does_not_fail_the_spread():
    def change(train, samples, evidence):
        list_steps(samples, "ddp flat", rank=0)[-1]["ended"] += 0.5

    assert "reported spread of ratios" not in check_tampered(change)


@pytest.mark.parametrize(("together", "failed"), [(True, True), (False, False)])
def test_variants_that_ran_one_after_another_fail_unless_the_plan_says_so(together, failed):
    plan, train, samples, evidence = make_honest_run()
    for s in samples:
        if "began" in s:
            # One variant after the other, in hours.
            later = 3600.0 * NAMES.index(s["variant"])
            s["began"], s["ended"] = s["began"] + later, s["ended"] + later
    names = list_failed_checks(
        replace(plan, variants_fit_together=together), train, samples, evidence
    )
    assert ("variants are interleaved step by step" in names) is failed


def test_a_phase_that_is_not_recorded_fails():
    def change(train, samples, evidence):
        samples[:] = [s for s in samples if s["phase"] != "optimizer"]

    assert check_tampered(change) == [
        "phases of every step",
        "reported shares of phases",
    ]


def test_a_step_that_lost_its_core_between_two_phases_is_no_failure():
    def change(train, samples, evidence):
        late = list_steps(samples, "ddp flat", rank=0)[1]
        late["seconds"] *= 3
        late["ended"] = late["began"] + late["seconds"]

    def longer(train, samples, evidence):
        next(s for s in samples if s["phase"] == "forward" and not s["warmup"])["seconds"] *= 3

    assert "time in the phases of a step" in check_tampered(longer)
    assert not any("phases of a step" in name for name in check_tampered(change))


def test_a_core_that_is_lost_between_two_clocks_is_no_part_of_a_step():
    def late(waited):
        def change(train, samples, evidence):
            for s in list_steps(samples, "ddp flat", rank=1)[1:]:
                s["ended"], s[CORE_WAIT] = s["ended"] + 0.05, waited

        return change

    assert set(check_tampered(late(0.05))) == {"time of a step"}
    assert "reported step time" in check_tampered(late(0.0))


@pytest.mark.parametrize(("waited", "halved", "passes"), [(0.05, 1, 1), (0.0, 1, 0), (0.01, 2, 0)])
def test_a_core_that_is_lost_between_two_clocks_of_a_single_step_is_no_part_of_it(
    waited, halved, passes
):
    plan, train, samples, evidence = make_honest_run()
    samples = [s | {"warmup": False} for s in samples if s["step"] == 0]
    (late,) = list_steps(samples, "ddp flat", rank=1)
    late["seconds"] /= halved
    late["ended"], late[CORE_WAIT] = late["ended"] + (0.05 if halved == 1 else 0.0), waited
    config = replace(CONFIG, warmup=0, steps=1)
    checks = times.check_steps(Record(config, plan, train, samples, evidence))
    assert {c.name: c.passed for c in checks}["time of a step"] == bool(passes)


@pytest.mark.parametrize("nbytes", [0, 200, 1200])
def test_bytes_that_the_kernel_did_not_count_fail(nbytes):
    def change(train, samples, evidence):
        for s in list_steps(samples, "ddp flat"):
            s["received"] = nbytes
        (row,) = (row for row in train.rows if row["variant"] == "ddp flat")
        row["wire_bytes"] = nbytes

    assert check_tampered(change) == ["ddp flat: bytes received per step of training"]


def test_reported_bytes_that_no_sample_has_fail():
    def change(train, samples, evidence):
        for s in list_steps(samples, "ddp flat"):
            s["received"] = 401

    assert check_tampered(change) == ["reported bytes received per step"]


def build_removal(*path):
    def change(train, samples, evidence):
        owner = {"train": vars(train), "samples": samples, "evidence": evidence}
        for key in path[:-1]:
            owner = owner[key]
        del owner[path[-1]]

    return change


def remove_rank(train, samples, evidence):
    samples[:] = [s for s in samples if s["rank"] == 0]


def remove_received(train, samples, evidence):
    for s in samples:
        s.pop("received", None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (remove_rank, "torch DDP does not have one sample per step on rank 1"),
        (remove_received, "single process does not have one sample per step on rank 0"),
        (lambda train, samples, evidence: samples.clear(), "single process does not have one"),
        (build_removal("train", "rows", 2, "step_ms"), "KeyError: 'step_ms'"),
        (build_removal("train", "losses", "ddp flat"), "ddp flat has 0 losses for 4 steps"),
        (build_removal("train", "final_weights", "ddp flat"), "KeyError: 'ddp flat'"),
        (build_removal("evidence", "trajectory"), "KeyError: 'trajectory'"),
        (build_removal("samples", 3, "row_digests"), "KeyError: 'row_digests'"),
    ],
)
def test_a_part_of_the_record_that_is_missing_is_named(change, named):
    plan, train, samples, evidence = make_honest_run()
    change(train, samples, evidence)
    checks = catch_errors(
        "train", training_checks.check_training(CONFIG, plan, train, samples, evidence)
    )
    (failed,) = (check for check in checks if not check.passed)
    assert named in failed.where or "more" in failed.where


def test_a_configuration_that_was_edited_fails():
    plan, train, samples, evidence = make_honest_run()
    edited = replace(CONFIG, learning_rate=1.0)
    checks = training_checks.check_training(edited, plan, train, samples, evidence)
    assert [check.where for check in checks if not check.passed] == ["learning_rate"]


@pytest.mark.parametrize("factor", [0, 0.5, 1.02, 2])
def test_bytes_that_were_not_announced_in_shared_memory_fail(factor):
    *_, evidence = make_honest_run()
    evidence["model_counts"]["parameters"] = 25_000
    evidence["probe"]["ddp shared memory"] = make_probed(2) | {"shared": [factor * 1e5, 1e5]}
    record = Record(CONFIG, *make_honest_run()[:3], evidence)
    failed = [check.name for check in wire_checks.check_shared_memory(record) if not check.passed]
    assert failed == ["ddp shared memory: bytes summed in shared memory, rank 0"]


@pytest.mark.parametrize("loss", [5.01, float("nan")])
def test_a_loss_that_departs_fails(loss):
    def change(train, samples, evidence):
        list_steps(samples, "ddp flat", rank=0)[1]["loss"] = loss

    assert {"losses, trained again", "all losses"} <= set(check_tampered(change))


def test_a_rate_that_rises_in_every_variant_after_the_first_steps_fails():
    def change(train, samples, evidence):
        for sample in samples:
            if sample.get("step") == 3 and "loss" in sample:
                sample["loss"] *= 0.99

    assert "losses, trained again" in check_tampered(change)


def test_a_reported_loss_that_no_sample_has_fails():
    def change(train, samples, evidence):
        train.losses["ddp flat"][1] += 0.1

    assert check_tampered(change) == ["reported losses"]


@pytest.mark.parametrize(
    ("kind", "nbytes", "name"),
    [
        ("moments", 1600, "ddp flat: stored moments"),
        ("moments", 804, "ddp flat: stored moments"),
        ("parameters", 396, "ddp flat: stored parameters"),
        ("parameters", 800, "ddp flat: stored parameters"),
        ("all", 1700, "ddp flat: all that is stored"),
    ],
)
def test_tensors_that_a_variant_should_not_store_fail(kind, nbytes, name):
    def change(train, samples, evidence):
        stored = train.final_weights["ddp flat"]["stored"]
        stored[1] = stored[1] | {kind: nbytes}

    assert check_tampered(change) == [name]


@pytest.mark.parametrize(("variant", "nbytes", "passes"), [
    ("zero 1", 408, True), ("zero 2", 408, True), ("zero 2", 412, False), ("ddp flat", 408, False),
])  # fmt: skip
def test_a_flat_buffer_of_zero_may_be_padded_to_a_multiple_of_the_ranks(variant, nbytes, passes):
    moments = 800 if variant == "ddp flat" else 272
    stored = {"parameters": nbytes, "moments": moments, "all": nbytes + moments}
    record = SimpleNamespace(
        config=replace(CONFIG, world=3),
        evidence={"model_counts": {"parameters": 100}},
        train=SimpleNamespace(
            rows=[{"variant": variant}], final_weights={variant: {"stored": [stored] * 3}}
        ),
    )
    checks = {check.name: check.passed for check in weight_checks.check_stored_tensors(record)}
    assert checks[f"{variant}: stored parameters"] is passes


@pytest.mark.parametrize(("change", "failed"), [(0.0, SINGLE), (1e-4, "")])
def test_a_variant_whose_losses_are_not_rounded_to_bf16_fails(change, failed):
    trajectory = [5.0 - 0.1 * step for step in range(12)]
    curves = {SINGLE: [loss + change for loss in trajectory], PEER: [5.1] * 12}
    rows = [{"variant": name, "final_loss": curve[-1]} for name, curve in curves.items()]
    record = SimpleNamespace(
        config=replace(CONFIG, dtype="bf16"),
        losses=curves,
        evidence={"trajectory": trajectory},
        train=SimpleNamespace(rows=rows, losses=curves),
    )
    checks = {check.name: check for check in weight_checks.check_losses(record)}
    assert checks["rounding of bf16 in the losses"].where == failed


def test_a_model_that_is_not_the_trained_one_fails(tmp_path):
    model = Decoder(ModelConfig.from_size("mini"))
    save_file(model.state_dict(), tmp_path / MODEL)
    run = SimpleNamespace(out=tmp_path)
    assert compare_with_file(run, model).passed
    assert not compare_with_file(run, Decoder(ModelConfig.from_size("mini"))).passed


def test_initial_weights_of_another_scale_fail():
    def change(train, samples, evidence):
        evidence["initial_scales"][0][0] = 40.0

    assert check_tampered(change) == ["scale of the initial weights"]


def test_schedules_are_distinguished_by_their_events():
    gpipe = ["forward"] * 4 + ["backward"] * 4
    last_of_1f1b = ["forward", "backward"] * 4
    name = "pipeline ({})".format
    assert parallel.count_max_in_flight(gpipe) == 4
    assert parallel.count_max_in_flight(last_of_1f1b) == 1
    assert parallel.compute_expected_in_flight(name("GPipe"), 1, 2, 4) == 4
    assert parallel.compute_expected_in_flight(name("1F1B"), 1, 2, 4) == 1
    assert parallel.compute_expected_in_flight(name("1F1B"), 0, 2, 4) == 2
    assert parallel.compute_expected_in_flight("tensor (Megatron)", 0, 2, 4) is None


@pytest.mark.parametrize(
    ("stage_rounds", "passed"),
    [
        ([2.0, 2.1, 1.9], True),
        ([0.6, 0.7, 0.65], False),
        ([1.0, 2.0, 6.0], True),  # another program had the cores
    ],
)
def test_a_contender_that_is_faster_in_the_stage_than_in_the_audit_fails(stage_rounds, passed):
    stage = Interleaved({"SDPA": [1.0] * 3, "ours": stage_rounds}, 9.0)
    audits = {"SDPA": [0.5] * 5, "ours": [1.0] * 5}
    (check,) = timing.check_ratios(stage, "SDPA", audits)
    assert check.passed is passed


ON_CPU = SimpleNamespace(device=torch.device("cpu"))


def build_matmul(rows):
    """Return a call whose n-th call has as many rows as the n-th of `rows`, and 4 at the end."""
    rows, matrix = iter(rows), torch.ones(400, 400)
    return lambda: matrix[: next(rows, 4)] @ matrix


def test_the_audit_repeats_rounds_that_another_program_disturbed():
    stage = Interleaved(timing.time_rounds(ON_CPU, {"ours": build_matmul([])}), 1.0)

    def compare(timed):
        return [*timing.check_shortest(stage, timed)]

    calls = {"ours": build_matmul([400] * 6)}
    (check,) = timing.check_against_rounds(ON_CPU, calls, compare, rounds=5)
    assert check.passed


def test_a_contender_that_stays_slower_than_in_the_stage_fails(monkeypatch):
    monkeypatch.setattr(timing, "MAX_RETIMING_S", 0.1)
    stage = Interleaved({"ours": [1e-6]}, 1.0)

    def compare(timed):
        return [*timing.check_shortest(stage, timed)]

    calls = {"ours": build_matmul([400] * 1000)}
    (check,) = timing.check_against_rounds(ON_CPU, calls, compare, rounds=1)
    assert not check.passed


def test_every_tensor_that_a_variant_refers_to_is_counted_once():
    model = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    variant = SimpleNamespace(model=model, optimizer=optimizer)
    view = model.weight.detach()[:5]
    variant.stored = {"in": [(view, torch.zeros(25))], "closure": lambda: hidden}
    hidden = torch.zeros(50)
    assert count_stored_bytes(variant) == {
        "parameters": 400,
        "moments": 800,
        # Weights, gradients, two moments, the step count, and two tensors.
        "all": 400 + 400 + 800 + 4 + 100 + 200,
    }


def test_a_check_with_nothing_recorded_is_red():
    sources = Sources("b", "c")
    assert not sources.check_distances("a", [], 1.0).passed
    assert not sources.check_all_equal("a", [], 1.0).passed
    assert not sources.check_factor("a", 1.0, float("nan"), 2.0).passed
    assert not sources.check_none("a", ["x"]).passed
    assert not Check("a", "b", "c", 0, float("inf"), 0, float("inf")).passed


def make_scaling_result():
    """Return a fit to runs of four budgets: parabolas in log N with minima near N = C^0.4."""
    runs = []
    for i, compute in enumerate((1e10, 3e10, 1e11, 3e11)):
        best = 0.4 * math.log(compute) + 0.1 * (i % 2)
        for step in range(-2, 3):
            size = math.exp(best + 0.5 * step + 0.1)
            loss = 3 - 0.1 * i + 0.05 * (math.log(size) - best) ** 2
            row = {"parameters": size, "tokens": compute / (6 * size), "loss": loss}
            runs.append(row | {"compute_flops": compute})
    return scale.fit_law(runs)


def test_a_scaling_law_that_is_not_the_one_of_its_runs_fails():
    def failed(result):
        return [check.name for check in scale_checks.check_fit(result) if not check.passed]

    result = make_scaling_result()
    assert failed(result) == []
    law = result.law | {"exponent": 1 - result.law["exponent"]}
    assert failed(replace(result, law=law)) == ["exponent"]
    extrapolated = result.extrapolated | {"parameters": 1.01 * result.extrapolated["parameters"]}
    assert failed(replace(result, extrapolated=extrapolated)) == ["extrapolated size"]


def test_runs_that_fix_no_scaling_law_have_the_reason_and_no_law():
    result = make_scaling_result()
    rising = [row | {"loss": row["parameters"] / 1e9} for row in result.runs]
    without = scale.fit_law(rising)
    assert without.law == {}
    assert "fewer than two budgets have a valley" in without.warnings[0]


def make_finished(path, change=lambda samples: None):
    plan, train, samples, evidence = make_honest_run()
    config = RunConfig(**{**vars(CONFIG), "stages": ("plan", "train", "audit"), "out": path})
    folder = create_folder(config, {})
    change(samples)
    folder.append_samples(samples)
    folder.add_stage("plan", plan)
    folder.add_stage("train", train)
    folder.write_json("evidence.json", evidence | {"config": get_json_values(config)})
    checks = [
        check.to_json() for check in training_checks.check_training(CONFIG, *make_honest_run())
    ]
    folder.write_json("checks.json", checks)
    folder.add_stage("audit", Audit(len(checks), []))
    folder.finish()
    return folder


def list_checks_failed_again(folder):
    folder.seal()
    return [check.name for check in check_again(folder) if not check.passed]


def test_a_folder_is_audited_once_more_from_its_records(tmp_path):
    def wrong(samples):
        list_steps(samples, "ddp flat", rank=0)[1]["loss"] = 7.0

    assert not list_checks_failed_again(make_finished(tmp_path / "a"))
    assert {"losses, trained again", "all losses"} <= {
        *list_checks_failed_again(make_finished(tmp_path / "b", wrong))
    }


def test_a_folder_without_checks_evidence_or_a_stage_fails(tmp_path):
    folder = make_finished(tmp_path)
    checks, summary = folder.read_json("checks.json"), folder.summary
    folder.write_json("checks.json", checks[:-1])
    assert list_checks_failed_again(folder) == ["number of checks"]
    folder.write_json("checks.json", checks)
    del summary["stages"]["train"]
    folder.write_json("summary.json", summary)
    (failed,) = (check for check in check_again_sealed(folder) if not check.passed)
    assert failed.where == "train"
    folder.write_json("evidence.json", {})
    assert list_checks_failed_again(folder) == ["results of every stage"]


def check_again_sealed(folder):
    folder.seal()
    return check_again(folder)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda rows, _: rows[3].update(speedup_p50=1.03), "compress: reported ratios"),
        (lambda rows, _: rows[3].update(smaller=4.1), "compress: times smaller"),
        (lambda rows, _: rows[3].update(size_bytes=103), "compress: times smaller"),
        (lambda rows, _: rows.pop(3), "compress: methods"),
        (lambda rows, _: rows[3].pop("smaller"), "compress: what the audit reads"),
        (lambda _, timings: list(map(list.pop, timings.seconds.values())), "compress: rounds"),
    ],
)
def test_a_figure_of_another_stage_that_is_edited_after_the_run_fails(tmp_path, change, name):
    rows = [
        {"method": method, "size_bytes": 100, "heldout_loss": 3.0, "smaller": 4.0}
        | {"speedup_p50": 1.0}
        for method in METHODS
    ]
    rows[0] |= {"size_bytes": 400, "smaller": 1.0}
    timings = Interleaved({method: [0.1] * 7 for method in METHODS}, 0.7 * len(METHODS))
    folder = make_finished(tmp_path)
    folder.add_stage("compress", Compress(rows, timings))
    assert list_checks_failed_again(folder) == []
    change(rows, timings)
    folder.add_stage("compress", Compress(rows, timings))
    assert list_checks_failed_again(folder) == [name]


def test_a_figure_of_another_type_is_a_failed_check(tmp_path):
    folder = make_finished(tmp_path)
    summary = folder.summary
    summary["stages"]["train"]["rows"][1]["step_ms"] = "12"
    folder.write_json("summary.json", summary)
    assert list_checks_failed_again(folder) == ["what the audit reads"]


def test_a_run_without_an_audit_is_refused(tmp_path):
    folder = create_folder(RunConfig(out=tmp_path / "run"), {})
    with pytest.raises(UsageError, match="is an incomplete run"):
        check_again(folder)
    folder.finish()
    with pytest.raises(UsageError, match="was not audited"):
        check_again(folder)


def test_a_check_of_numpys_numbers_can_be_kept():
    for actual in (1.0, 2.0):
        expected = np.float64(1.0)
        stored = json.loads(
            json.dumps(
                Sources("s", "a").check_all_equal("n", [(expected, actual, "")], 1e-9).to_json()
            )
        )
        assert stored["passed"] is (actual == 1.0)


def test_a_check_that_the_folder_has_not_stored_is_reported(tmp_path):
    def wrong(samples):
        list_steps(samples, "ddp flat", rank=0)[1]["loss"] = 7.0

    folder = make_finished(tmp_path, wrong)
    stored = [row for row in folder.read_json("checks.json") if row["name"] != "all losses"]
    folder.write_json("checks.json", stored)
    folder.add_stage("audit", Audit(len(stored), []))
    assert "all losses" in list_checks_failed_again(folder)


def test_a_variant_that_is_left_out_fails():
    assert "variants" in check_tampered(lambda train, *_: train.rows.pop())
    assert "variants" in check_tampered(lambda train, *_: train.rows.append(train.rows[1]))


def test_rates_that_are_all_wrong_by_the_same_factor_fail():
    plan, train, *rest = make_honest_run()
    for row in train.rows:
        row["mfu"] /= 4
    assert list_failed_checks(replace(plan, peak=4 * plan.peak), train, *rest) == [
        "rate of a product"
    ]


def test_the_first_step_may_exchange_more_bytes_if_it_is_not_a_warm_up_step():
    def fsdp_received(warmup):
        plan, train, samples, evidence = make_honest_run()
        for s in list_steps(samples, "ddp flat"):
            s["received"] = 700
        (row,) = (row for row in train.rows if row["variant"] == "ddp flat")
        row["wire_bytes"] = 700.0
        record = Record(replace(CONFIG, warmup=warmup), plan, train, samples, evidence)
        return all(check.passed for check in wire_checks.check_sockets(record))

    assert fsdp_received(0)
    assert not fsdp_received(1)


def test_rows_that_are_missing_or_twice_or_not_expected_fail():
    expected = {"a": 1, "b": 2}
    assert compare_rows("rows", expected, ["b", "a"]).passed
    for reported in (["a"], ["a", "b", "b"], ["a", "b", "c"], []):
        assert not compare_rows("rows", expected, reported).passed
