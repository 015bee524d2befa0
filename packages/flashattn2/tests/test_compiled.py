"""Every shipped tile, compiled for Hopper and Ampere where there is no GPU: see `shipped.py`."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import shipped
import torch
from flashattn2.kernels import configs, launch
from flashattn2.problem import UNBOUNDED, Score

# The opt-in limit a block has: 227 KiB on sm_90, 163 KiB on sm_80.
SHARED_BYTES = {90: 227 * 1024, 80: 163 * 1024}


def compiled(jobs):
    """What the compiler made of each job, by two processes that do not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name("compile_kernels.py")

    def work(share):
        done = subprocess.run(
            [sys.executable, script], input=json.dumps(share), env=environment,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, (jobs[::2], jobs[1::2]))
    return first + second


@pytest.fixture(
    scope="module",
    params=[shipped.sample, pytest.param(shipped.exhaustive, marks=pytest.mark.exhaustive)],
    ids=["sample", "exhaustive"],
)
def results(request):
    jobs = list(request.param())
    results = compiled(jobs)
    assert len(results) == len(jobs)
    return results


def test_no_shipped_tile_spills_registers(results):
    assert [r for r in results if r["stack_bytes"]] == []


def test_every_shipped_tile_fits_in_shared_memory(results):
    assert [r for r in results if r["shared_bytes"] > SHARED_BYTES[r["arch"]]] == []


def test_matrix_instructions_do_the_products_of_all_but_ieee_float32(results):
    for r in results:
        assert (r["wgmma"] + r["mma"] > 0) == (r["kind"] != "ieee"), r


def test_hopper_s_tiles_use_its_own_matrix_instructions_and_load_by_tma(results):
    hopper = [r for r in results if r["tma"]]
    assert {r["kernel"] for r in hopper} == {"forward", "dq", "dkdv", "atomic"}
    for r in hopper:
        assert r["wgmma"] > 0, r
        assert r["tma_loads"] > 0, r


def test_smaller_tiles_stand_in_for_one_that_is_there_each_from_a_higher_burden_on():
    for key, dims in configs.CROWDED.items():
        for dim, tiles in dims.items():
            assert list(tiles) == sorted(tiles)
            chosen = [configs.TILES[key][dim], *tiles.values()]
            assert len(set(chosen)) == len(chosen)
            assert configs.sizes(key, dim, min(tiles) - 1)[:4] == configs.TILES[key][dim]


def test_what_tma_has_no_tile_for_is_loaded_by_pointers_or_not_split(monkeypatch):
    heavy = configs.SPLIT_BURDEN + 2
    tile, tma, _ = configs.choose("atomic", "ieee", 2, 128, True, 227 * 1024, heavy)
    assert not tma
    assert tile == configs.Tile(*configs.sizes(("pointers", "half", "atomic"), 128, heavy))
    assert configs.choose("atomic", "ieee", 2, 256, True, 227 * 1024, heavy) is None

    hopper = launch.Device("Hopper", 227 * 1024, 132, True)
    monkeypatch.setattr(launch, "device_of", lambda _: hopper)
    x = torch.empty(1, 1, 512, 256, dtype=torch.bfloat16)
    for left, is_split in ((UNBOUNDED, True), (100, False)):
        score = Score(1.0, left=left)
        plan = launch.plan("atomic", "ieee", score, x, x, x, packed=False)
        assert (plan.splits > 1) == is_split


def test_a_smaller_shared_memory_prunes_stages_then_rows():
    tile = configs.Tile(128, 128, 8, 2)
    whole = configs.buffers("forward", tile, 2, 128)
    assert configs.prune("forward", tile, 2, 128, whole) == tile
    assert configs.prune("forward", tile, 2, 128, whole - 1) == configs.Tile(128, 128, 8, 1)
    small = configs.prune("forward", tile, 2, 128, 64 * 1024)
    assert configs.buffers("forward", small, 2, 128) <= 64 * 1024
    assert min(small.block_m, small.block_n) >= 16
