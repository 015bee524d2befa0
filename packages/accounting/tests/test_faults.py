import contextlib
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import accounting
import pytest
from accounting import (
    HARDWARE,
    Plan,
    Transformer,
    Workload,
    communication,
    flops,
    kv_cache,
    mfu,
    parameters,
    plans_that_fit,
    training_memory,
)
from accounting.cli.main import main, read_model
from accounting.hardware import find
from accounting.model.records import Experts, Window
from accounting.time.mesh import compute_bound_batch
from figures import assert_at_most

SIZES = {"layers": 4, "d_model": 64, "heads": 8, "vocab_size": 100}
MODEL = Transformer(**SIZES)
MOE = Transformer(**SIZES, experts=Experts(count=6, per_token=2))
MAMBA = Transformer.from_hf(
    {"model_type": "mamba", "hidden_size": 80, "num_hidden_layers": 2, "vocab_size": 100}
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": -1}, "expected layers >= 1, got -1"),
        ({"d_ff": -4}, "expected d_ff >= 0, got -4"),
        ({"heads": 7}, "expected heads to divide d_model=64, got heads=7"),
        ({"kv_heads": 3}, "expected kv_heads to divide heads=8, got kv_heads=3"),
        ({"norm": "batch"}, "expected norm to be one of rmsnorm, layernorm, none, got 'batch'"),
        ({"activation": "tanh"}, "expected activation to be one of .*, got 'tanh'"),
        (
            {"window": Window(size=4, layers=(9,))},
            r"expected layers of window\.layers from 0 to 3, got 9",
        ),
        ({"attention_layers": (0, 4)}, "expected layers of attention_layers from 0 to 3, got 4"),
    ],
)
def test_invalid_sizes_are_refused_by_name(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transformer(**SIZES | wrong)


def test_sizes_must_be_whole_numbers() -> None:
    with pytest.raises(TypeError, match=r"expected layers to be an integer, got 2\.5"):
        Transformer(**SIZES | {"layers": 2.5})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"data": 0}, "expected data >= 1, got 0"),
        ({"data": 4, "expert": 3}, "expected expert to divide .* = 4, got expert=3"),
        ({"zero": 4}, "expected zero to be one of 0, 1, 2, 3, got 4"),
        ({"schedule": "zigzag"}, "expected schedule to be one of .*, got 'zigzag'"),
        ({"virtual_stages": 2}, "got virtual_stages=2 with schedule='1f1b'"),
        (
            {"pipeline": 2, "microbatches": 3, "schedule": "interleaved", "virtual_stages": 2},
            "expected a multiple of pipeline=2 .*, got microbatches=3",
        ),
        ({"tensor": 0}, "expected tensor >= 1, got 0"),
    ],
)
def test_inconsistent_plans_are_refused_by_name(plan: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**plan)


@pytest.mark.parametrize(
    ("model", "plan", "batch", "message"),
    [
        (MODEL, Plan(pipeline=5), 1, "expected pipeline x virtual_stages <= 4 layers, got 5"),
        (MODEL, Plan(tensor=3), 1, "expected tensor to divide heads=8, got 3"),
        (MODEL, Plan(data=3), 4, "expected data x microbatches = 3 to divide batch, got 4"),
        (MODEL, Plan(context=3), 1, "expected context=3 to divide seq, got seq=16"),
        (MAMBA, Plan(tensor=3), 1, r"tensor to divide the columns of 'in' in mamba=320, got 3"),
        (MAMBA, Plan(context=2), 1, "expected context=1 for mamba, got 2; .* is not modeled"),
        (MODEL, Plan(data=2, expert=2), 2, "expected expert to divide the 0 experts .*, got 2"),
        (MOE, Plan(data=4, expert=4), 4, "expected expert to divide the 6 experts .*, got 4"),
        (Transformer(**SIZES, embedding_dim=32), Plan(pipeline=2), 1, "embedding_dim=32"),
    ],
)
def test_plans_that_do_not_fit_the_model_are_named(
    model: Transformer, plan: Plan, batch: int, message: str
) -> None:
    for cost in (training_memory, communication):
        with pytest.raises(ValueError, match=message):
            cost(model, plan, batch=batch, seq=16)


def test_unknown_options_list_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expected dtype to be one of fp64, fp32.*, got 'fp12'"):
        kv_cache(MODEL, dtype="fp12")
    with pytest.raises(ValueError, match="expected precision to be one of fp32, amp_bf16"):
        training_memory(MODEL, batch=1, seq=1, precision="half")
    with pytest.raises(ValueError, match=r"expected hardware to be one of V100, A100.*, got 'K80'"):
        find("K80")
    with pytest.raises(ValueError, match=r"expected a dtype that H100 lists .*, got 'fp4'"):
        find("H100").peak("fp4")
    with pytest.raises(ValueError, match=r"expected phase to be one of .*, got 'dream'"):
        flops(MODEL, seq=4, phase="dream")
    with pytest.raises(ValueError, match="expected seq >= 1, got 0"):
        flops(MODEL, seq=0)
    with pytest.raises(ValueError, match="expected exactly one of hardware and peak_flops"):
        mfu(MODEL, tokens_per_second=1, seq=1)
    with pytest.raises(ValueError, match=r"utilization <= 1, got .* of devices=2; pass the number"):
        mfu(MODEL, tokens_per_second=1e9, seq=1, devices=2, peak_flops=1e3)
    links = {"flops_per_second": 4.6e14, "axis_bytes_per_second": 1.8e11}
    with pytest.raises(ValueError, match=r"expected tensor < .*, got 64; no batch is"):
        compute_bound_batch(fsdp=1, tensor=64, d_ff=1024, **links)


@pytest.mark.parametrize("missing", [field for field in LLAMA if field != "model_type"])
def test_config_with_missing_size_is_refused_by_name(missing: str) -> None:
    config = {field: value for field, value in LLAMA.items() if field != missing}
    with pytest.raises(ValueError, match=rf"{missing} is missing from this llama config\.json"):
        Transformer.from_hf(config)


@pytest.mark.parametrize("wrong", [10**30, "64", -1, 2.5, [], {}])
def test_invalid_size_in_config_is_refused(wrong: object) -> None:
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        if wrong == 10**30 and field == "hidden_size":
            continue
        with pytest.raises((ValueError, TypeError), match=r"expected|missing| is "):
            Transformer.from_hf(LLAMA | {field: wrong})


def test_fixed_fields_of_search_are_checked_first() -> None:
    question = {"hardware": "H100", "devices": 8, "batch": 8, "seq": 16}
    for arguments, message in (
        ({"zero": 7}, "expected zero to be one of 0, 1, 2, 3, got 7"),
        ({"expert": "2"}, "expected expert to be an integer, got '2'"),
        ({"expert": 2}, "expected expert=1 for a model without experts, got expert=2"),
        ({"pipeline": 3, "tensor": 2}, "expected tensor x pipeline = 6 to divide .* devices=8"),
        ({"recompute": "some"}, "expected recompute to be one of .*, got 'some'"),
        ({"tensr": 2}, "expected a fixed field to be one of data, .*, got 'tensr'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            plans_that_fit(MODEL, **question, **arguments)


def test_the_command_names_the_sizes_that_are_missing() -> None:
    for text, message in (
        ("layers=4", "missing 3 required .*: 'd_model', 'heads', and 'vocab_size'"),
        (f"{SHAPE},experts.count=4", r"Experts.*missing 1 required .*: 'per_token'"),
        (f"{SHAPE},layers=3", "expected layers once"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            read_model(text)


def test_invalid_model_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a config.json with model_type"):
        Transformer.from_hf({"hidden_size": 64})
    with pytest.raises(
        ValueError, match=r"expected model_type to be one of .*, got 'bret'; describe another"
    ):
        Transformer.from_hf({"model_type": "bret"})
    with pytest.raises(ValueError, match=r"expected hidden_act to be one of .*, got 'mish'"):
        Transformer.from_hf(LLAMA | {"hidden_act": "mish"})
    with pytest.raises(ValueError, match=r"expected one size for all layers of llama, got per_lay"):
        Transformer.from_hf(LLAMA | {"per_layer_config": {"1": {"intermediate_size": 64}}})
    assert Transformer.from_hf(LLAMA | {"per_layer_config": {}}) == Transformer.from_hf(LLAMA)
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(ValueError, match="is not JSON"):
        Transformer.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-16")
    with pytest.raises(ValueError, match=r"config\.json is not JSON .*utf-8"):
        Transformer.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="expected a JSON object in a model config, got list"):
        Transformer.from_hf(tmp_path)
    with pytest.raises(TypeError, match=r"expected model to be a Transformer, got {'model_type'"):
        accounting.parameters(LLAMA)


def measure_import(bytecode: Path | None = None) -> list[str]:
    """Return the CPU seconds of an import, followed by the names of the loaded modules.

    All bytecode is read from the folder `bytecode`, or from its usual place for None.
    """
    code = (
        "import sys, time; t = time.process_time(); import accounting; "
        "print(time.process_time() - t, *sys.modules)"
    )
    ready = os.environ | {"PYTHONPATH": str(Path(accounting.__file__).parents[1])}
    if bytecode is not None:
        # Bytecode is written on the first run, as in an installation.
        ready |= {"PYTHONPYCACHEPREFIX": str(bytecode), "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run([sys.executable, "-c", code], env=ready, capture_output=True, text=True)
    return done.stdout.split()


def test_importing_needs_the_standard_library_alone() -> None:
    loaded = measure_import()[1:]
    assert "accounting.fermi" in loaded
    assert not {"torch", "numpy", "scipy", "matplotlib"} & set(loaded)


@pytest.mark.timing
def test_importing_takes_at_most_one_tenth_second(tmp_path: Path) -> None:
    seconds = min(float(measure_import(tmp_path)[0]) for _ in range(6))
    assert_at_most("accounting: import", 0.1, seconds, "s")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main([*arguments])
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())


def test_package_runs_as_module_and_returns_exit_code() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(accounting.__file__).parents[1])}
    command = [sys.executable, "-m", "accounting", "diff", "depth=3", "depth=3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unexpected keyword argument 'depth'" in done.stderr


def test_command_prints_table_or_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    plan = ("plan", str(tmp_path), "--gpus", "8", "--tp", "2", "--zero", "1", "--seq", "128")
    shown = run(*plan)
    assert shown.returncode == 0, shown.stderr
    assert "llama on 8 H100" in shown.stdout
    assert "data 4, tensor 2" in shown.stdout
    result = json.loads(run(*plan, "--json").stdout)
    for cost in ("memory", "step_time"):
        parts = result[cost]["parts"]
        assert sum(part["value"] for part in parts) == pytest.approx(result[cost]["value"])


def test_help_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "python -m accounting plan MODEL" in capsys.readouterr().out


SHAPE = "layers=8,d_model=4096,heads=32,kv_heads=8,d_ff=14336,vocab_size=128256"
FITTING = {
    "--tp": ("2", "tensor", 2),
    "--pp": ("2", "pipeline", 2),
    "--cp": ("2", "context", 2),
    "--zero": ("1", "zero", 1),
    "--microbatches": ("2", "microbatches", 2),
    "--recompute": ("full", "recompute", "full"),
}


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Return a function that returns the plan of a command line."""

    def call(*arguments: str) -> dict[str, Any]:
        assert main([*arguments, "--json"]) in (0, 1)
        return json.loads(capsys.readouterr().out)["plan"]

    return call


Planned = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("option", FITTING)
def test_search_keeps_every_fixed_field(option: str, planned: Planned) -> None:
    text, field, value = FITTING[option]
    plan = planned("plan", SHAPE, "--batch", "8", "--gpus", "8", option, text)
    assert plan[field] == value
    assert math.prod(plan[name] for name in ("data", "tensor", "pipeline", "context")) == 8


def test_search_keeps_expert_parallelism_and_reports_if_nothing_fits(planned: Planned) -> None:
    experts = SHAPE + ",experts.count=8,experts.per_token=2,experts.width=1024"
    assert planned("plan", experts, "--gpus", "8", "--ep", "4", "--batch", "8")["expert"] == 4
    refused = run("plan", SHAPE.replace("layers=8", "layers=800"), "--gpus", "1", "--batch", "1")
    assert refused.returncode == 2
    assert "no plan over 1 H100" in refused.stderr


def test_search_finds_context_parallel_plans() -> None:
    result = plans_that_fit(
        Transformer(layers=32, d_model=4096, heads=32, kv_heads=8, vocab_size=128256),
        hardware="H100",
        devices=64,
        batch=1,
        seq=2**18,
        tensor=8,
        recompute="none",
    )
    assert result
    assert all(candidate.plan.context > 1 for candidate in result)


@pytest.mark.parametrize("spelled", ["False", "false", "FALSE"])
def test_the_command_reads_false_as_false(spelled: str) -> None:
    assert read_model(f"{SHAPE},tied={spelled}").tied is False
    assert read_model(f"{SHAPE},tied=true,head_bias={spelled}").head_bias is False
    with pytest.raises(TypeError, match="expected tied to be True or False, got 'no'"):
        read_model(f"{SHAPE},tied=no")
    with pytest.raises(TypeError, match="unexpected keyword argument 'layer'"):
        read_model("layer=3")


def test_interleaving_and_older_devices_work_from_the_command_line(planned: Planned) -> None:
    few = ("--gpus", "8", "--batch", "16")
    plan = planned("plan", SHAPE, *few, "--pp", "4", "--schedule", "interleaved")
    assert plan["schedule"] == "interleaved"
    assert plan["virtual_stages"] > 1
    v100 = ("plan", SHAPE, *few, "--hardware", "V100", "--zero", "3")
    done = run(*v100, "--json")
    assert json.loads(done.stdout)["precision"] == "mixed_fp16"
    wrong = run(*v100, "--precision", "mixed_bf16")
    assert wrong.stderr.startswith("error: expected a dtype that V100 lists")
    small = "layers=2,d_model=64,heads=4,vocab_size=99"
    single_batch = ["--gpus", "4", "--tp", "4", "--batch", "1", "--recompute", "none"]
    for hardware in HARDWARE:
        assert main(["plan", small, *single_batch, "--hardware", hardware]) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: flops(MODEL, seq=8, phase="decode", recompute="full"),
            "expected recompute='none' for phase='decode', got 'full'",
        ),
        (
            lambda: accounting.roofline("H100", shape=(8, 8, 8), flops=3),
            r"expected either shape=\(m, k, n\), or flops and bytes",
        ),
    ],
)
def test_options_without_effect_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("field", Transformer.derived_sizes)
def test_explicit_zero_is_not_a_missing_size(field: str) -> None:
    sizes: dict[str, Any] = {"layers": 2, "d_model": 64, "heads": 4, "vocab_size": 100}
    with pytest.raises(ValueError, match=f"expected {field} >= 1, got 0"):
        Transformer(**sizes, **{field: 0})
    sizes_text = f"layers=2,d_model=64,heads=4,vocab_size=100,{field}=0"
    assert main(["serve", sizes_text]) == 2


@pytest.mark.parametrize("option", ["--batch", "--gpus"])
def test_an_explicit_zero_on_the_command_line_is_refused(option: str) -> None:
    sizes = "layers=2,d_model=64,heads=4,vocab_size=100"
    assert main(["plan", sizes, "--gpus", "8", option, "0"]) == 2
    assert main(["plan", sizes, "--gpus", "8", "--precision", ""]) == 2


def test_list_of_many_layers_is_not_the_name_of_a_file() -> None:
    layers = "+".join(map(str, range(100)))
    sizes = "layers=100,d_model=64,heads=4,vocab_size=9,experts.count=4,experts.per_token=2"
    assert read_model(f"{sizes},experts.layers={layers}").expert_layers == set(range(100))
    single = read_model(f"{SHAPE},window.size=4,window.layers=3,attention_layers=3")
    assert single.windowed_layers == set(single.attention_layers) == {3}
    with pytest.raises(TypeError, match=r"expected window\.layers to list layers, .*got True"):
        read_model(f"{SHAPE},window.size=4,window.layers=true")


def test_replaced_sizes_do_not_leave_layers_of_the_original_model() -> None:
    with pytest.raises(ValueError, match=r"expected attention, an MLP, .* got none in layer 4"):
        replace(MODEL, layers=6)
    with pytest.raises(
        ValueError, match=r"expected a dense MLP or experts .*, got both in layer 0"
    ):
        replace(MODEL, experts=Experts(count=4, per_token=2))
    larger = replace(MODEL, layers=6, attention_layers=None, mlp_layers=None)
    assert larger == Transformer(**SIZES | {"layers": 6})


def test_replaced_sizes_are_derived_again() -> None:
    for sizes in ({"d_model": 2 * MODEL.d_model}, {"heads": 2 * MODEL.heads}, {"d_ff": 8}):
        assert replace(MODEL, **sizes) == Transformer(**SIZES | sizes)
    mixture = Transformer(**SIZES, experts=Experts(count=4, per_token=2))
    wider = replace(mixture, d_ff=8)
    assert wider == Transformer(**SIZES, d_ff=8, experts=Experts(count=4, per_token=2))
    explicit = replace(MODEL, d_ff=8, head_dim=4)
    wide = replace(explicit, d_model=2 * MODEL.d_model)
    assert (wide.d_ff, wide.head_dim) == (8, 4)


def test_devices_of_a_plan_are_the_product_of_its_degrees() -> None:
    assert Plan(data=2, tensor=3, pipeline=5, context=7, expert=2).devices == 210
    assert replace(Plan(data=2), data=4, tensor=2).devices == 8
    with pytest.raises(TypeError, match="devices"):
        Plan(devices=8)  # type: ignore[call-arg]


def test_replaced_workload_is_the_one_of_its_fields() -> None:
    compiled = Workload(batch=8, seq=16, compiled=True)
    eager = training_memory(MODEL, batch=8, seq=16)
    assert training_memory(MODEL, None, compiled, compiled=False).total == eager.total
    states = Workload(batch=0)
    with pytest.raises(ValueError, match="expected seq >= 1 with batch=8, got 0"):
        training_memory(MODEL, None, states, batch=8)


def test_config_of_another_type_reports_what_it_is() -> None:
    class Config:
        def to_dict(self) -> dict[str, object]:
            return LLAMA

    assert Transformer.from_hf(Config()) == Transformer.from_hf(LLAMA)
    with pytest.raises(TypeError, match="got the class Config"):
        Transformer.from_hf(Config)
    with pytest.raises(ValueError, match=r"got its text; pass json\.loads"):
        Transformer.from_hf(json.dumps(LLAMA | {"name": "long" * 99}))


def test_index_of_a_breakdown_is_a_name() -> None:
    with pytest.raises(TypeError, match=r"expected the name of a part of .*, got 0"):
        parameters(MODEL)[0]
