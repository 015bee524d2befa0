"""Every shipped tile, compiled for Hopper and Ampere where there is no GPU."""

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flashattn2.kernels import configs

# The opt-in limit a block has: 227 KiB on sm_90, 163 KiB on sm_80.
SHARED_BYTES = {90: 227 * 1024, 80: 163 * 1024}


def shipped():
    """One job for each tile and architecture that uses it."""
    for (path, kind, kernel), tiles in configs.TILES.items():
        for (dim, tile), arch in itertools.product(tiles.items(), (90, 80)):
            if path == "tma" and arch == 80:
                continue
            yield {
                "kernel": kernel,
                "tile": tile,
                "dim": dim,
                "arch": arch,
                "tma": path == "tma",
                "kind": kind,
                "precision": "ieee" if kind == "half" else kind,
                "dtype": "bf16" if kind == "half" else "fp32",
            }


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


def with_options():
    """Each kernel with every option in it: packed sequences, both sides, a softcap, splits."""
    for kernel, options in itertools.product(
        ("forward", "dq", "dkdv", "atomic"),
        ({"packed": True}, {"left": True, "softcap": True, "splits": 2}, {"right": False}),
    ):
        yield {
            "kernel": kernel,
            "tile": (64, 64, 4, 2),
            "dim": 64,
            "arch": 90,
            "tma": False,
            "precision": "ieee",
            "dtype": "fp16",
            "options": True,
            **options,
        }


@pytest.fixture(scope="module")
def everything():
    jobs = [*shipped(), *with_options()]
    results = compiled(jobs)
    assert len(results) == len(jobs)
    return results


@pytest.fixture
def results(everything):
    return [r for r in everything if "options" not in r]


def test_every_option_compiles_to_matrix_instructions(everything):
    optional = [r for r in everything if "options" in r]
    assert len(optional) == 12
    assert all(r["wgmma"] for r in optional)


def test_no_shipped_tile_spills_registers(results):
    assert [r for r in results if r["stack_bytes"]] == []


def test_every_shipped_tile_fits_in_shared_memory(results):
    assert [r for r in results if r["shared_bytes"] > SHARED_BYTES[r["arch"]]] == []


def test_matrix_instructions_do_the_products_of_all_but_ieee_float32(results):
    for r in results:
        assert (r["wgmma"] + r["mma"] > 0) == (r["kind"] != "ieee"), r


def test_hopper_s_tiles_use_its_own_matrix_instructions_and_load_by_tma(results):
    hopper = [r for r in results if r["tma"]]
    assert len(hopper) >= 30
    for r in hopper:
        assert r["wgmma"] > 0, r
        assert r["tma_loads"] > 0, r


def test_a_smaller_shared_memory_prunes_stages_then_rows():
    tile = configs.Tile(128, 128, 8, 2)
    whole = configs.buffers("forward", tile, 2, 128)
    assert configs.prune("forward", tile, 2, 128, whole) == tile
    assert configs.prune("forward", tile, 2, 128, whole - 1) == configs.Tile(128, 128, 8, 1)
    small = configs.prune("forward", tile, 2, 128, 64 * 1024)
    assert configs.buffers("forward", small, 2, 128) <= 64 * 1024
    assert min(small.block_m, small.block_n) >= 16
