"""What a run is asked for is refused, in one line, where it cannot be done."""

import pytest
import torch
from llmsys_suite.config import STAGES, UsageError, resolve, with_dependencies
from llmsys_suite.start import execute

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


def test_a_stage_brings_what_it_reads_in_the_order_of_a_run():
    assert with_dependencies(["inspect"]) == ("plan", "train", "inspect", "report")
    assert with_dependencies(list(STAGES)) == tuple(STAGES)


@no_gpu
def test_what_is_left_open_follows_the_machine():
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
        ({"world": 0}, "--world 0"),
        ({"steps": 0}, "--steps 0"),
        ({"warmup": -1}, "--warmup -1"),
    ],
)
def test_unknown_names_and_senseless_numbers(options, complaint):
    stages = options.pop("stages", [])
    with pytest.raises(UsageError, match=complaint):
        resolve(stages, **options)


@no_gpu
@pytest.mark.parametrize("options", [{"backend": "nccl"}, {"preset": "gpu"}])
def test_a_gpu_that_is_not_there(options):
    with pytest.raises(UsageError, match="needs a CUDA device and this machine shows none"):
        resolve([], **options)


def test_missing_data_and_a_folder_that_holds_another_run(tmp_path):
    with pytest.raises(UsageError, match=r"no data at .*nowhere"):
        resolve([], data=tmp_path / "nowhere")
    (tmp_path / "summary.json").touch()
    with pytest.raises(UsageError, match="is not empty"):
        resolve([], out=tmp_path)


def test_a_launcher_decides_the_world(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert resolve([], preset="cpu").world == 3
    with pytest.raises(UsageError, match="WORLD_SIZE=3"):
        resolve([], preset="cpu", world=2)


def test_a_size_that_cannot_fit_is_known_before_anything_is_allocated(tmp_path):
    config = resolve([], preset="cpu", size="10B", out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"size 10B needs \d+\.\d GiB"):
        execute(config)
    assert not (tmp_path / "run").exists()


def test_a_world_larger_than_the_data_allows(tmp_path):
    (tmp_path / "short").write_bytes(b"to be or not to be " * 200)
    config = resolve([], preset="cpu", world=64, data=tmp_path / "short", out=tmp_path / "run")
    with pytest.raises(UsageError, match="training bytes"):
        execute(config)
    assert not (tmp_path / "run").exists()
