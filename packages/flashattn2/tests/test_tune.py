"""The tuner without a GPU: its gates, its preferences and the tables that it writes."""

import json
import os
import subprocess
import sys
from importlib.resources import files

import flashattn2
import pytest
import torch
import triton.testing
import tune
from flashattn2.kernels import configs, launch

ENTRY = ("tma", "half", "forward"), 64, False


def make_compiler_facts(job, **facts):
    """Return facts as a compiler may report them."""
    return {
        **job, "registers": 168, "stack_bytes": 0, "shared_bytes": 100000, "work": 1.0,
        "widths": [64, 128], "wgmma": 8, "mma": 0, "tcgen05": 0, **facts,
    }  # fmt: skip


@pytest.mark.parametrize("arch", sorted(tune.PATHS))
def test_tables_have_the_format_of_the_tuner(arch):
    text = files("flashattn2.kernels").joinpath(f"tables/sm_{arch}.json").read_text()
    current = tune.build_table(arch, None, None, wanted=lambda entry: False)
    assert tune.format_table(current) == text
    assert len(current) == len([key for key in configs.TILES if key[0] in tune.PATHS[arch]])


@pytest.mark.parametrize(
    "fault",
    [{"stack_bytes": 49}, {"shared_bytes": 2**18}, {"work": 1.5}, {"wgmma": 0}, None],
    ids=str,
)
def test_tile_that_fails_a_gate_is_not_selected(fault):
    """Every tile except for one has a fault."""
    faultless = (128, 64, 8, 2)

    def compiled(job):
        if tuple(job["tile"]) == faultless or fault is None:
            return make_compiler_facts(job)
        return make_compiler_facts(job, **fault)

    chosen = tune.find_best(*ENTRY, 90, compiled, lambda result: result["tile"][0])
    assert (chosen == faultless) == (fault is not None)
    assert tune.find_best(*ENTRY, 90, lambda job: None, tune.compute_cost) is None


def test_entry_without_a_valid_tile_is_unchanged(capsys):
    table = tune.build_table(90, lambda job: None, tune.compute_cost)
    assert "tma half dq 64 has no valid tile and is unchanged" in capsys.readouterr().err
    text = files("flashattn2.kernels").joinpath("tables/sm_90.json").read_text()
    assert json.loads(tune.format_table(table)) == json.loads(text)


def test_times_are_those_of_the_triton_kernels_with_the_tile(monkeypatch):
    """On Hopper, "auto" would select the Gluon kernels, whose time does not depend on the tile."""
    chosen = []

    def attention(q, k, v, backend, **options):
        chosen.append((backend, launch.choose_tile("forward", "ieee", 2, 64, ("tma",), 2**17)))
        return q

    randn = torch.randn
    monkeypatch.setattr(flashattn2, "flash_attention", attention)
    monkeypatch.setattr(triton.testing, "do_bench", lambda run, **_: run() is None)
    monkeypatch.setattr(torch, "randn", lambda shape, device, **options: randn(2, **options))
    job = {"kernel": "forward", "tile": (64, 32, 4, 2), "dim": 64, "dtype": "bf16", "tma": True}
    tune.measure_milliseconds(make_compiler_facts(job, kind="half"))
    assert set(chosen) == {("triton", (configs.TileConfig(64, 32, 4, 2), True))}


def test_cost_model_prefers_less_work_wider_instructions_and_more_stages():
    job = {
        "kernel": "forward", "tile": (128, 128, 8, 2), "dim": 64, "arch": 90, "dtype": "bf16",
        "kind": "half",
    }  # fmt: skip
    least = tune.compute_cost(make_compiler_facts(job))
    for worse in ({"work": 1.5}, {"widths": [16, 64]}, {"tile": (128, 16, 8, 1)}):
        assert tune.compute_cost(make_compiler_facts(job, **worse)) > least


@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", ["tma half forward 256", "tma half dq 256"])
def test_tuner_regenerates_a_sample_of_the_table_with_the_real_compiler(entry, tmp_path):
    """All candidates of the entry are compiled in a process that does not interpret.

    The whole table takes thousands of compilations, which is hours: see the README.
    """
    out = tmp_path / "table.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, tune.__file__, "90", "--only", entry, "--default", "--out", str(out)]
    done = subprocess.run(command, env=environment, check=True, stderr=subprocess.PIPE, text=True)
    assert "unchanged" not in done.stderr
    shipped = files("flashattn2.kernels").joinpath("tables/sm_90.json").read_text()
    assert out.read_text() == shipped
