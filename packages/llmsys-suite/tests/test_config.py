"""Configurations that cannot be run raise an error of one line, which says what to write."""

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from llmsys_suite import cli
from llmsys_suite.config import (
    STAGES,
    RunConfig,
    Size,
    UsageError,
    add_dependencies,
    get_size,
)
from llmsys_suite.config_file import MEANING, read_toml, to_toml
from llmsys_suite.resolution import resolve
from llmsys_suite.stages.plan import PROCESS_BYTES, predict
from llmsys_suite.start import execute
from llmsys_suite.text.data import read_text, require_text

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


def test_a_stage_brings_what_it_reads_in_the_order_of_a_run():
    assert add_dependencies(["inspect"]) == ("plan", "train", "learn", "inspect", "report")
    assert add_dependencies(list(STAGES)) == tuple(STAGES)


@no_gpu
def test_missing_options_follow_from_the_machine():
    config = resolve([])
    assert (config.preset, config.device, config.backend, config.world) == ("cpu", "cpu", "gloo", 2)
    assert config.rows % config.world == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stages": ["trane"]}, "stage 'trane' is unknown.*train"),
        ({"size": "huge"}, "size 'huge' is unknown.*tiny"),
        ({"preset": "tpu"}, "preset 'tpu' is unknown"),
        ({"backend": "mpi"}, "backend 'mpi' is unknown"),
        ({"world": 0}, "expected world to be an integer >= 1, got 0"),
        ({"steps": 0}, "expected steps .* got 0"),
        ({"warmup": -1}, "expected warmup .* got -1"),
        ({"seed": 10**13}, "expected seed <= .* got 10000000000000"),
    ],
)
def test_unknown_names_and_impossible_numbers_are_refused(options, complaint):
    stages = options.pop("stages", [])
    with pytest.raises(UsageError, match=complaint):
        resolve(stages, **options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rows": 7}, "expected rows to be a multiple of .*, 2, got 7"),
        ({"rows": 0}, "expected rows .* got 0"),
        ({"context": 1}, "^expected context to be an integer >= 8, got 1"),
        ({"steps": 2.5}, r"expected steps to be an integer >= 1, got 2\.5"),
        ({"learning_rate": 0.0}, "expected a finite learning_rate > 0, got 0.0"),
        (
            {"resume": Path(__file__).parent},
            "expected --resume to be a checkpoint.*tests",
        ),
        ({"learning_rate": float("nan")}, "learning_rate > 0, got nan"),
        (
            {"stages": ("train",)},
            "expected the stages plan, train, report, in this order, got train",
        ),
        ({"size": "huge"}, "size 'huge' is unknown"),
        ({"preset": "tpu"}, "preset 'tpu' is unknown"),
        ({"backend": "nccl"}, "expected backend gloo for preset cpu, got nccl"),
    ],
)
def test_a_configuration_made_by_hand_is_checked_before_anything_starts(
    tmp_path, options, complaint
):
    with pytest.raises(UsageError, match=complaint):
        execute(RunConfig(**{"out": tmp_path / "run", **options}))
    assert list(tmp_path.iterdir()) == []


@no_gpu
def test_a_missing_gpu_is_refused():
    with pytest.raises(UsageError, match="needs a CUDA device, and torch finds none"):
        resolve([], preset="gpu")
    with pytest.raises(UsageError, match="expected backend gloo for preset cpu, got nccl"):
        resolve([], backend="nccl")


@pytest.mark.parametrize(
    ("stages", "options", "stage"),
    [
        (["train"], {"learn": 24}, "learn"),
        (["train"], {"clip": 1.0}, "learn"),
        (["attention"], {"steps": 50}, "train or scale"),
        (["attention"], {"warmup": 1}, "train"),
    ],
)
def test_an_option_whose_stage_is_left_out_is_refused(stages, options, stage):
    (name,) = options
    with pytest.raises(UsageError, match=f"--{name} needs the stage {stage}"):
        resolve(stages, **options)


def test_steps_also_set_the_budgets_of_scale_alone():
    assert resolve(["scale"], preset="cpu", steps=50).steps == 50


def test_paths_may_be_strings(tmp_path):
    (tmp_path / "text").write_text("some text")
    config = resolve([], preset="cpu", out=f"{tmp_path}/run", data=f"{tmp_path}/text")
    assert (config.out, config.data) == (tmp_path / "run", tmp_path / "text")
    with pytest.raises(UsageError, match="expected --resume to be a checkpoint"):
        resolve(["learn"], preset="cpu", resume=f"{tmp_path}/checkpoint")


def test_missing_data_and_a_folder_that_holds_another_run(tmp_path):
    with pytest.raises(UsageError, match=r"expected --data .*nowhere"):
        resolve([], data=tmp_path / "nowhere")
    (tmp_path / "summary.json").touch()
    with pytest.raises(UsageError, match="is not empty"):
        execute(resolve(["plan"], preset="cpu", out=tmp_path))


def test_a_launcher_decides_the_world(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert resolve([], preset="cpu").world == 3
    with pytest.raises(UsageError, match="WORLD_SIZE=3"):
        resolve([], preset="cpu", world=2)


@pytest.mark.parametrize(("rank", "size"), [("0", None), ("0", "two"), ("zero", "2"), ("2", "2")])
def test_a_part_of_the_environment_of_torchrun_is_refused(monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UsageError, match=f"got RANK='{rank}' and .* or unset RANK"):
        resolve(["plan"], preset="cpu")


def test_a_size_that_cannot_fit_is_known_before_anything_is_allocated(tmp_path):
    config = resolve([], preset="cpu", size="10B", out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"size 10B needs \d+\.\d GiB"):
        execute(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", [b"to be or not to be " * 3, b"x" * 200])
def test_text_that_holds_no_row_is_refused(tmp_path, text):
    (tmp_path / "short").write_bytes(text)
    config = resolve([], preset="cpu", data=tmp_path / "short", out=tmp_path / "run")
    with pytest.raises(UsageError, match="pass more text with --data"):
        execute(config)
    assert not (tmp_path / "run").exists()


def test_text_shorter_than_the_run_is_read_more_than_once(tmp_path):
    (tmp_path / "short").write_bytes(b"to be or not to be, that is the question " * 300)
    config = resolve([], preset="cpu", world=2, steps=1000, data=tmp_path / "short")
    text = read_text(config.data)
    assert len(text.train) < config.rows * config.context * config.steps
    require_text(text, context=config.context)


def test_each_rank_of_a_host_has_a_whole_model_in_train(monkeypatch):
    def host_bytes(world, stages):
        config = resolve(stages, preset="cpu", size="small", world=world, rows=8)
        return predict(config).host_peak_bytes - world * PROCESS_BYTES

    whole_model = 16 * predict(resolve([], preset="cpu", size="small")).parameters
    assert host_bytes(4, ["train"]) - host_bytes(1, ["train"]) == 3 * whole_model
    assert host_bytes(4, ["parallel"]) == host_bytes(1, ["train"])
    # The audit times two models beside a variant.
    assert host_bytes(4, ["audit"]) - host_bytes(4, ["train"]) == 8 * whole_model
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    config = resolve(["train"], preset="cpu", size="small", world=4, rows=8)
    assert predict(config).host_peak_bytes - PROCESS_BYTES == host_bytes(1, ["train"])


@pytest.mark.parametrize("world", [1, 8, 16, 64])
def test_the_gpu_preset_fits_eighty_gigabytes_at_any_world_size(monkeypatch, world):
    monkeypatch.setattr("llmsys_suite.resolution.count_gpus", lambda: world)
    config = resolve([], preset="gpu")
    assert config.world == world
    assert predict(config).host_peak_bytes < 79e9
    assert config.rows % config.parts == config.rows % world == 0
    # Two nodes of eight ranks read more tokens than the standard library contains.
    require_text(read_text(), context=config.context)


@pytest.mark.parametrize("out", ["/proc/llmsys/run", "/dev/null/run", "file/run", "n" * 300])
def test_an_out_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written \(.*name another folder"):
        execute(resolve(["plan"], preset="cpu", out=Path(out)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def read_printed_config(capsys, *arguments):
    cli.app(["config", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_the_printed_file_has_every_field_and_describes_the_default_run(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(read_printed_config(capsys, "--preset", "cpu"))
    values = read_toml(path)
    stages = values.pop("stages")
    assert resolve(stages, **values) == resolve([], preset="cpu")
    names = {field.name for field in fields(RunConfig)}
    assert {*MEANING} == names
    for name in names:
        assert re.search(rf"^# .+\n(# )?{name} = ", path.read_text(), re.MULTILINE)


def test_a_file_of_paths_with_any_characters_describes_the_same_run(tmp_path):
    text = tmp_path / 'a "text" \\ é 😀'
    text.write_text("x" * 20_000)
    config = resolve(["train"], preset="cpu", data=text)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    values = read_toml(path)
    assert resolve(values.pop("stages"), **values) == config


def test_options_override_the_fields_of_the_file(tmp_path, monkeypatch):
    path = tmp_path / "run.toml"
    path.write_text('stages = ["plan"]\nsize = "mini"\nworld = 1\nrows = 6\nlearning_rate = 1\n')
    path.write_text(path.read_text() + "trace = true\nrecompute = true\n")
    received = []

    def execute(config):
        received.append(config)
        return 0, tmp_path

    monkeypatch.setattr("llmsys_suite.start.execute", execute)
    arguments = ["--config", str(path), "--world", "2", "--no-trace", "--no-recompute", "--compile"]
    monkeypatch.setattr(sys, "argv", ["llmsys", "run", "learn", "--preset", "cpu", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 0
    (config,) = received
    assert config.stages == ("plan", "train", "learn", "report")
    assert (config.size, config.world) == ("mini", 2)
    assert (config.trace, config.recompute, config.compile) == (False, False, True)
    assert (config.rows, config.learning_rate) == (6, 1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("step = 3", "unknown field 'step'; `llmsys config` prints all fields"),
        ("steps = 2.5", "expected steps to be an integer, got 2.5"),
        ("steps = true", "expected steps to be an integer, got True"),
        ('stages = "plan"', "expected stages to be an array of strings, got 'plan'"),
        ("stages = [1]", "expected stages to be an array of strings"),
        ("clip = true", "expected clip to be a number, got True"),
        ("size = [", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, complaint):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=complaint):
        read_toml(path)


@pytest.mark.parametrize(
    "name", ["256x768x6", "256x768x6x0", "256x768x6x08", "ax8x1x1", "256 x8x1x1"]
)
def test_a_size_that_is_neither_a_name_nor_a_shape_is_refused(name):
    with pytest.raises(UsageError, match=r"is unknown.*256x768x6x8"):
        get_size(name)


def test_a_shape_is_a_size_if_heads_have_an_even_width():
    assert get_size("64x96x3x4") == Size(64, 96, 3, 4)
    assert get_size("xl") == Size(1600, 6400, 48, 25)
    config = resolve(["plan"], preset="cpu", size="64x96x3x4")
    assert predict(config).parameters == 2 * 256 * 64 + 3 * (4 * 64**2 + 3 * 64 * 96 + 128) + 64
    for name in ("64x96x3x5", "60x96x3x4"):
        with pytest.raises(UsageError, match=r"twice the number of heads, got"):
            get_size(name)


def test_a_size_that_accounting_refuses_is_refused_with_its_name():
    with pytest.raises(UsageError, match=r"size 2x1x1000000x1: expected layers <= 100,000, got"):
        resolve(["memory"], preset="cpu", size="2x1x1000000x1")


@pytest.mark.parametrize("out", [None, "text/run", "link/run"])
def test_a_run_folder_inside_the_text_is_refused(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "link").symlink_to("text")
    options = {"data": Path("text" if out else "."), "out": out and Path(out)}
    with pytest.raises(
        UsageError, match=r"is inside the folder .*name a folder elsewhere with --out"
    ):
        resolve(["plan"], preset="cpu", **options)
    resolve(["plan"], preset="cpu", data=Path("text"), out=tmp_path / "run")


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), float("inf")])
def test_a_gradient_is_clipped_to_a_positive_norm(clip):
    assert resolve(["learn"], preset="cpu", clip=0.5).clip == 0.5
    with pytest.raises(UsageError, match=r"expected a finite --clip > 0, got"):
        resolve(["learn"], preset="cpu", clip=clip)
    with pytest.raises(UsageError, match="--clip needs the stage learn"):
        resolve(["train"], preset="cpu", clip=0.5)


@pytest.mark.parametrize("option", ["--data", "--resume", "--out"])
def test_an_empty_path_is_refused_and_does_not_name_the_current_folder(option, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["llmsys", "run", "plan", option, ""])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    assert "Invalid value" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["data", "resume", "out"])
def test_an_empty_path_in_a_file_is_refused(name, tmp_path):
    (tmp_path / "run.toml").write_text(f'{name} = ""\n')
    with pytest.raises(UsageError, match=f"expected {name} to be a path"):
        read_toml(tmp_path / "run.toml")
