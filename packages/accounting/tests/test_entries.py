"""Tests that pass invalid values for every argument of every public function."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any

import accounting
import pytest
import torch
from accounting import (
    HARDWARE,
    MLA,
    PRECISIONS,
    Experts,
    Plan,
    Transformer,
    Window,
    Workload,
    communication,
    flops,
    kv_cache,
    peak_memory,
    step_time,
    training_memory,
)
from accounting.cli.main import main
from accounting.model.records import Compressed, LowRank

MODEL = Transformer(layers=4, d_model=64, heads=8, vocab_size=100)
RUN: dict[str, Any] = {"model": MODEL, "batch": 2, "seq": 8}
LINKS: dict[str, Any] = {"flops_per_second": 4.6e14, "axis_bytes_per_second": 1.8e11}
PEAK: dict[str, Any] = {"devices": 2, "peak_flops": 1e12}
# Arguments of each public function; the first test below fails for a function without any.
TAKES: dict[str, dict[str, Any]] = {
    "cli.questions.parse_amount": {"text": "1T"},
    "cli.questions.iter_differences": {"first": MODEL, "second": MODEL, "seq": 8},
    "cli.questions.read_model": {"text": "layers=2,d_model=8,heads=2,vocab_size=9"},
    "cli.questions.read_stored_dtype": {"text": "layers=2"},
    "cli.serving.estimate_serving": {"model": MODEL, "gpus": 1, "hardware": "H100", "seq": 8},
    "flops.flops": RUN | {"phase": "training", "attention": "full", "recompute": "none"},
    "flops.mfu": {"model": MODEL, "tokens_per_second": 5.0, "seq": 8} | PEAK,
    "flops.count_pairs": {"model": MODEL, "seq": 8, "attention": "causal"},
    "flops.compute_utilization": {"achieved_flops": 1e12, "hardware": "H100", "dtype": "bf16"},
    "hardware.find": {"hardware": "H100"},
    "kv_cache.kv_cache": RUN | {"dtype": "int8", "tensor": 2},
    "memory.activations.count_activation_bytes": RUN
    | {"plan": Plan(), "precision": "fp32", "stage": 0},
    "memory.fits.fits": {
        **{"module": torch.nn.Linear(2, 2), "sample": torch.zeros(1, 2), "device": "H100"},
        "rounding": 512,
    },
    "memory.peak.peak_memory": RUN | {"plan": Plan(), "foreach": True},
    "memory.states.count_state_bytes": {
        **{"num_parameters": 9, "data": 2, "zero": 1, "precision": "fp32"}
    },
    "memory.training.training_memory": RUN | {"plan": Plan(), "stage": 0},
    "parameters.parameters": {"model": MODEL, "active": True},
    "precision.get_itemsize": {"dtype": "fp8"},
    "precision.get_recipe": {"precision": "fp32"},
    "search.answer.plan_for": {
        **{"model": MODEL, "gpus": 2, "hardware": "H100", "tokens": 1e6, "seq": 8, "batch": 2},
        **{"memory_bytes": 1e9, "usd_per_hour": 2.0, "precision": "megatron_bf16", "tensor": 2},
    },
    "search.plans.find_fewest_devices": {
        **{"model": MODEL, "memory_bytes": 1e9},
        **{"activation_bytes": 1.0, "sharded_activations": 0.5},
    },
    "search.plans.plans_that_fit": RUN | {"hardware": "H100", "devices": 2, "most": 2},
    "time.communication.communication": RUN | {"plan": Plan(data=2), "weights": "bf16", "stage": 0},
    "time.goodput.compute_goodput": {"work_hours": 9.0, "devices": 2, "interval_hours": 1.0},
    "time.mesh.compute_bound_batch": {
        **{"fsdp": 4, "tensor": 2, "d_ff": 53248, "comms": "summed"},
        **LINKS,
    },
    "time.intervals.predict_seconds": {"seconds": 1.0},
    "time.roofline.roofline": {"hardware": "H100", "shape": (2, 3, 4), "dtype": "fp16"},
    "time.step.get_group_link": {"hardware": HARDWARE["H100"], "stride": 2, "ranks": 3},
    "time.step.step_time": RUN | {"plan": Plan(data=2), "hardware": "H100"},
}
# Internal functions, which are not documented.
INSIDE = {
    *("memory.backward", "memory.fsdp_pipeline"),
    *(
        "memory.states.list_stage_states",
        "memory.states.build_fsdp_groups",
        "memory.states.count_cast_weight_bytes",
    ),
    *("memory.states.count_tied_gradient_bytes", "memory.states.count_head_gradient_bytes"),
    "memory.states.count_head_parameters",
    *("breakdown", "checks", "cli.main", "memory.live", "model.formulas"),
    *(
        "model.transformer.list_matrices",
        "model.config",
        "model.family",
        "model.family_tables",
        "model.multimodal",
        "memory.fake_module",
        "plan",
    ),
    *("search.space", "memory.states.group_stages_by_kind"),
    *("time.efficiency", "time.collective", "workload"),
    *("time.communication.list_state_calls", "time.communication.list_token_collectives"),
    *("time.communication.count_reduced_blocks", "time.step.count_attention_flops"),
    *(
        "memory.states.alone",
        "memory.states.count_device_parameters",
        "memory.states.list_distinct_stages",
    ),
    *(
        "memory.states.find_largest_single_layer",
        "memory.activations.count_gradients_in_flight",
        "parameters.group_by_part",
    ),
    "memory.activations.count_head_activation_bytes",
    *("search.answer.explain_no_room", "search.plans.find_least_memory"),
    "time.intervals.classify_run",
    *("flops.count_attention_operations", "flops.count_entry_pairs"),
    *("time.step.iter_linked_collectives", "model.registry"),
}
# Arguments that are texts with separate rules.
FREE = {
    ("cli.questions.parse_amount", "text"),
    ("cli.questions.read_model", "text"),
    ("cli.questions.read_stored_dtype", "text"),
}


def iter_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name and the function of each public function of the package."""
    for module in pkgutil.walk_packages(accounting.__path__, "accounting."):
        path = module.name.removeprefix("accounting.")
        if path in ("__main__", "bench", "plain") or path in INSIDE:
            continue
        content = vars(importlib.import_module(module.name))
        for name, result in content.items():
            expected = inspect.isfunction(result) and result.__module__ == module.name
            if expected and not name.startswith("_") and f"{path}.{name}" not in INSIDE:
                yield f"{path}.{name}", result


FUNCTIONS = dict(iter_functions())
FERMI = {
    name: {
        parameter.name: 2 if parameter.annotation is int else 2.0
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    }
    for name, function in FUNCTIONS.items()
    if name.startswith("fermi.")
}
ENTRIES = TAKES | FERMI
RECORDS: dict[type, dict[str, Any]] = {
    Transformer: {"layers": 4, "d_model": 64, "heads": 8, "vocab_size": 100, "tied": False},
    Plan: {f.name: getattr(Plan(), f.name) for f in dataclasses.fields(Plan)},
    Workload: dict(vars(Workload(batch=1, seq=8))),
    MLA: {"kv_rank": 8, "rope_head_dim": 4, "q_rank": 2, "index_heads": 0},
    LowRank: {"q_rank": 4, "out_groups": 2, "out_rank": 4},
    Compressed: {"rate": 4, "overlaps": False},
    Experts: {"count": 4, "per_token": 2, "width": 8, "shared": 0, "shared_gate": False},
    Window: {"size": 4, "layers": (0,)},
    type(PRECISIONS["fp32"]): dict(vars(PRECISIONS["fp32"])),
    type(HARDWARE["H100"]): vars(HARDWARE["H100"]) | {"power_watts": 700.0},
    type(HARDWARE["H100"].network): dict(vars(HARDWARE["H100"].network)),
}
# Arguments that may be zero.
MAY_BE_ZERO = {
    *("batch", "stage", "num_parameters", "zero", "usd_per_hour", "tp"),
    *("activation_bytes", "sharded_activations", "latency"),
    *("heads", "vocab_size", "devices", "data", "seq"),
    *("q_rank", "index_heads", "width", "shared", "moment_block", "power_watts", "pod"),
    *("torus_axes",),
}


def list_wrong_values(name: str, value: object, *, optional: bool) -> list[object]:
    """Return values that are invalid in place of `value`."""
    nothing = [] if optional else [None]
    if isinstance(value, bool):
        return [1, "yes", 0.0, *nothing]
    if isinstance(value, int):
        zero = [] if name in MAY_BE_ZERO else [0]
        return [-1, 2.5, float("nan"), float("inf"), True, "8", [], *zero, *nothing]
    if isinstance(value, float):
        zero = [] if name in MAY_BE_ZERO else [0.0]
        return [-1.0, float("nan"), float("-inf"), 10**400, True, "8", [], *zero, *nothing]
    if isinstance(value, str):
        return [3, "no such thing", [], *nothing]
    if isinstance(value, tuple):
        return ["abc", 3, (-1,), (2.5,), ("no such thing",)]
    return ["no such thing", 3, {}]


def test_every_public_function_has_test_arguments() -> None:
    assert FUNCTIONS.keys() == ENTRIES.keys()
    public = {name for name in accounting.__all__ if inspect.isfunction(getattr(accounting, name))}
    assert public <= {name.rpartition(".")[2] for name in ENTRIES}
    for name in accounting.__all__:
        result = getattr(accounting, name)
        if dataclasses.is_dataclass(result) and result is not accounting.Breakdown:
            assert result in RECORDS


def check_refusal(
    call: Callable[..., object], arguments: dict[str, Any], name: str, bad: object
) -> None:
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as caught:
        call(**arguments | {name: bad})
    # The message names the argument or the value, and is not an error of Python itself.
    message = str(caught.value)
    assert name in message or repr(bad) in message or str(bad) in message, message
    assert not any(word in message for word in ("NoneType", "unsupported operand", "has no attri"))


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_argument_of_public_functions_is_checked(entry: str) -> None:
    call, arguments = FUNCTIONS[entry], ENTRIES[entry]
    call(**arguments)
    parameters = inspect.signature(call).parameters
    for name, value in arguments.items():
        if (entry, name) in FREE:
            continue
        default = parameters[name].default if name in parameters else ""
        for bad in list_wrong_values(name, value, optional=default is None or name == "plan"):
            check_refusal(call, arguments, name, bad)


@pytest.mark.parametrize("entry", ENTRIES)
def test_unknown_keyword_is_refused(entry: str) -> None:
    with pytest.raises((TypeError, ValueError), match="'bacth'"):
        FUNCTIONS[entry](**ENTRIES[entry], bacth=1)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_of_every_record_is_checked(record: type) -> None:
    arguments = RECORDS[record]
    built = record(**arguments)
    for field in dataclasses.fields(record):
        if field.name in ("name", "chip", "source", "products") or field.name not in arguments:
            continue
        value = arguments[field.name]
        for bad in list_wrong_values(field.name, value, optional="None" in str(field.type)):
            check_refusal(record, arguments, field.name, bad)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        dataclasses.replace(built, **{max(arguments, key=len)[:-1]: 1})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan MODEL --gpus 8 --recompute ful", "to be one of none, selective, full, got 'ful'"),
        ("plan MODEL --gpus 8 --hardware H10", "expected hardware to be one of .*, got 'H10'"),
        ("plan MODEL --gpus 8 --tokens -1", "expected 0 < tokens < inf, got -1"),
        ("plan MODEL --gpus 8 --tokens nan", "expected 0 < tokens < inf, got nan"),
        ("plan MODEL --gpus 0", "expected gpus >= 1, got 0"),
        ("plan MODEL --gpus 8 --seq 0", "expected seq >= 1, got 0"),
        ("plan MODEL --gpus 8 --memory -1", "expected 0 < memory_bytes < inf, got -1"),
        ("plan MODEL --gpus 8 --price nan", "expected 0 <= usd_per_hour < inf, got nan"),
        ("plan MODEL --gpus 8 --tp 3", "expected tensor = 3 to divide devices, got devices=8"),
        ("serve MODEL --seq 0", "expected seq >= 1, got 0"),
        ("serve MODEL --gpus -1", "expected gpus >= 1, got -1"),
        ("serve MODEL --weights bf61", "expected dtype to be one of .*, got 'bf61'"),
        ("diff MODEL MODEL --seq -1", "expected seq >= 1, got -1"),
        ("serve layers=2,d_model=8,heads=2,vocab_size=9,kv_head=1", "argument 'kv_head'"),
        ("serve layers=2,d_model=8,heads=2,vocab_size=9,window.sise=1", "Window.* 'sise'"),
    ],
)
def test_every_word_of_the_command_line_is_checked(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "layers=4,d_model=64,heads=8,vocab_size=100"
    assert main(words.replace("MODEL", model).split()) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert re.search(message, shown.err), shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "arguments are required: COMMAND"),
        ("plan MODEL", "arguments are required: --gpus"),
        ("plan MODEL --gpus 8 --gpsu 8", "unrecognized arguments: --gpsu 8"),
        ("serve MODEL --cach int8", "unrecognized arguments: --cach int8"),
        ("serve MODEL --cp 2", "unrecognized arguments: --cp 2"),
        ("plna MODEL --gpus 8", "invalid choice: 'plna'"),
        ("serve MODEL --seq 128k", "--seq: invalid int value: '128k'"),
        ("plan MODEL --gpus 8 --tp two", "--tp: invalid int value: 'two'"),
    ],
)
def test_words_that_are_not_parsed_end_with_status_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "layers=4,d_model=64,heads=8,vocab_size=100"
    with pytest.raises(SystemExit) as caught:
        main(words.replace("MODEL", model).split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Window(size=4, layers=()),
            r"expected window.layers with at least one layer, got \(\)",
        ),
        (lambda: Experts(count=2, per_token=1, layers=()), "expected experts.layers with"),
        (
            lambda: _make_shape(window=Window(size=4), attention_layers=()),
            "expected window in a layer with attention",
        ),
        (
            lambda: _make_shape(window=Window(size=4, layers=(9,))),
            r"expected layers of window.layers from 0 to 3, got 9",
        ),
        (lambda: Window(size=4, layers="01"), "expected window.layers to list layers"),
        (lambda: MLA(kv_rank=4, rope_head_dim=2, index_heads=2), "index_top and q_rank together"),
        (lambda: _make_shape(qk_norm=1), "expected qk_norm to be one of .*, got 1"),
        (
            lambda: _make_shape(window=Window(size=4, chunked=True), causal=False),
            r"expected window\.chunked=False for an encoder, got True",
        ),
        (
            lambda: _make_shape(heads=0, attention_layers=(1,)),
            "expected heads >= 1 with attention_layers",
        ),
        (
            lambda: accounting.flops(_make_shape(causal=False), seq=4, phase="decode"),
            "expected phase 'forward' or 'training' for the encoder",
        ),
    ],
)
def test_invalid_combinations_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def _make_shape(**more: Any) -> Transformer:
    return Transformer(**{"layers": 4, "d_model": 64, "heads": 8, "vocab_size": 100} | more)


def _predict_memory(**more: Any) -> object:
    return training_memory(**RUN, **more)


def test_serve_reports_required_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    large = "layers=80,d_model=8192,heads=64,kv_heads=8,d_ff=28672,vocab_size=128256"
    assert main(["serve", large, "--hardware", "H100", "--seq", "8192"]) == 1
    text = capsys.readouterr().out
    # 141 GB of weights, and 72 GB that a device has for them.
    assert "DOES NOT FIT: 131.4 GiB of weights and 2.5 GiB of one sequence's cache" in text
    assert main(["serve", large, "--hardware", "H100", "--seq", "8192", "--gpus", "2"]) == 0
    assert "NOT FIT" not in capsys.readouterr().out


def test_an_encoder_keeps_no_cache() -> None:
    assert kv_cache(_make_shape(causal=False, lm_head=False), seq=100).total == 0


def test_workload_record_equals_keywords() -> None:
    plan = Plan(data=2, tensor=2, zero=1)
    work = Workload(batch=4, seq=16, precision="mixed_bf16", flash=False, dropout=True)
    fields: dict[str, Any] = {"batch": 4, "seq": 16, "precision": "mixed_bf16"}
    fields |= {"flash": False, "dropout": True}
    assert training_memory(MODEL, plan, work) == training_memory(MODEL, plan, **fields)
    seconds = step_time(MODEL, plan, work, hardware="H100")
    assert seconds == step_time(MODEL, plan, hardware="H100", **fields)
    # A field beside the record replaces the record's.
    longer = training_memory(MODEL, plan, work, seq=32)
    assert longer == training_memory(MODEL, plan, **fields | {"seq": 32})


@pytest.mark.parametrize("wrong", [None, "llama", {"layers": 2}])
def test_wrong_model_or_plan_type_is_refused(wrong: object) -> None:
    run = {"batch": 2, "seq": 8}
    for cost in (flops, kv_cache, training_memory, peak_memory):
        with pytest.raises(TypeError, match=r"expected model to be a Transformer"):
            cost(wrong, **run)
    if wrong is not None:
        for cost in (training_memory, communication):
            with pytest.raises(TypeError, match=r"expected plan to be a Plan or None"):
                cost(MODEL, wrong, **run)
