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


LARGEST = {"left": True, "softcap": True}
# With those it spills 24 bytes on sm_90 with triton 3.6, as every other tile tried does: a limit.
SPILLS = ("pointers", "tf32", "dkdv", 128)


def shipped():
    """One job for each tile and architecture.

    Half precision and tf32 are compiled with a left window bound, causal and with a softcap, all at
    once: three loops, two masks.  Where another tile serves that, and in the slow float32 ones,
    which take longest to compile, it is plain causal attention.
    """
    for table, crowded in ((configs.TILES, False), (configs.CROWDED, True)):
        for (path, kind, kernel), tiles in table.items():
            for dim, tile in tiles.items():
                elsewhere = not crowded and dim in configs.CROWDED.get((path, kind, kernel), {})
                slow = not crowded and kind in ("ieee", "tf32x3")
                spills = (path, kind, kernel, dim) == SPILLS
                options = {} if elsewhere or slow or spills else LARGEST
                for arch in (90,) if path == "tma" else (90, 80):
                    yield job(path, kind, kernel, dim, tile, arch, **options)


def with_other_options():
    """The tiles that do most of the work: attention to all keys, splits, packed sequences."""
    for kernel, dim in itertools.product(("forward", "dq", "dkdv", "atomic"), (64, 128)):
        key = ("tma", "half", kernel)
        tile = configs.TILES[key][dim]
        yield job(*key, dim, tile, 90, right=False)
        yield job(*key, dim, configs.CROWDED.get(key, {}).get(dim, tile), 90, splits=2)
    for kernel in ("forward", "dq", "dkdv"):
        key = ("pointers", "half", kernel)
        yield job(*key, 64, configs.TILES[key][64], 90, packed=True)


def job(path, kind, kernel, dim, tile, arch, **options):
    """As `compile_kernels.py` takes it."""
    half = kind == "half"
    return {
        "kernel": kernel, "tile": tile, "dim": dim, "arch": arch, "tma": path == "tma",
        "kind": kind, "precision": "ieee" if half else kind, "dtype": "bf16" if half else "fp32",
        **options,
    }  # fmt: skip


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


@pytest.fixture(scope="module")
def results():
    jobs = [*shipped(), *with_other_options()]
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
    assert len(hopper) >= 50
    for r in hopper:
        assert r["wgmma"] > 0, r
        assert r["tma_loads"] > 0, r


def test_a_tile_for_a_window_and_a_softcap_stands_in_for_one_that_is_there():
    for key, tiles in configs.CROWDED.items():
        assert tiles.keys() <= configs.TILES[key].keys()
        for dim, tile in tiles.items():
            assert tile != configs.TILES[key][dim]


def test_a_smaller_shared_memory_prunes_stages_then_rows():
    tile = configs.Tile(128, 128, 8, 2)
    whole = configs.buffers("forward", tile, 2, 128)
    assert configs.prune("forward", tile, 2, 128, whole) == tile
    assert configs.prune("forward", tile, 2, 128, whole - 1) == configs.Tile(128, 128, 8, 1)
    small = configs.prune("forward", tile, 2, 128, 64 * 1024)
    assert configs.buffers("forward", small, 2, 128) <= 64 * 1024
    assert min(small.block_m, small.block_n) >= 16
