"""Every shipped tile, compiled for Hopper and Ampere without a GPU: see `shipped.py`."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import shipped
import triton
import tune
from flashattn2.kernels import configs

# The shared memory that a program may request on each architecture.
SHARED_BYTES = {90: 227 * 1024, 80: 163 * 1024}


def run_script(name, text=""):
    """Run a script of this folder in a process that does not interpret kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(name)], input=text, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def compiled(jobs):
    """Compile each job, in two processes if there are many, and return the facts."""
    parts = [jobs] if len(jobs) < 50 else [jobs[::2], jobs[1::2]]

    def work(part):
        return [json.loads(line) for line in run_script("compile_kernels.py", json.dumps(part))]

    with ThreadPoolExecutor(2) as pool:
        return [fact for facts in pool.map(work, parts) for fact in facts]


#: A tile that the tuner must reject.
REPEATS_PRODUCTS = {
    "kernel": "dkdv", "dim": 128, "arch": 90, "tma": True, "kind": "half",
    "precision": "ieee", "dtype": "bf16", "tile": [32, 64, 8, 2],
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[shipped.sample, pytest.param(shipped.exhaustive, marks=pytest.mark.exhaustive)],
    ids=["sample", "exhaustive"],
)
def every_result(request):
    jobs = [*request.param(), REPEATS_PRODUCTS, *sizes_of_one()]
    results = compiled(jobs)
    assert len(results) == len(jobs)
    return results


def sizes_of_one():
    """Return launches whose sizes are all 1, such as one head or one row.

    Triton compiles these sizes as constants.
    """
    return [
        {**job, "of_one": True, "packed": True}
        for job in shipped.sample()
        if job["arch"] == 90 and job["kind"] == "ieee"
    ]


def is_fault(result):
    """Return True for the injected fault."""
    return REPEATS_PRODUCTS.items() <= result.items()


@pytest.fixture
def results(every_result):
    """Return the results of shipped tiles, without the injected fault and sizes of 1."""
    return [r for r in every_result if not is_fault(r) and not r.get("of_one")]


# A smaller tile would spill nothing, but compute products twice.
FEW_BYTES = 48


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="the tiles were chosen with triton 3.9; the README names what triton 3.6 spills",
)
def test_no_shipped_tile_spills_more_than_a_few_bytes(results):
    assert [r for r in results if r["stack_bytes"] > FEW_BYTES] == []


def test_every_shipped_tile_fits_in_shared_memory(results):
    assert [r for r in results if r["shared_bytes"] > SHARED_BYTES[r["arch"]]] == []


def test_matrix_instructions_do_the_products_of_all_but_ieee_float32(results):
    for r in results:
        assert (r["wgmma"] + r["mma"] > 0) == (r["kind"] != "ieee"), r


def test_hopper_tiles_use_wgmma_and_tma(results):
    hopper = [r for r in results if r["tma"]]
    assert {r["kernel"] for r in hopper} == {"forward", "dq", "dkdv"}
    for r in hopper:
        assert r["wgmma"] > 0, r
        assert r["tma_loads"] > 0, r


def test_hopper_half_precision_computes_no_product_twice(results):
    """Every FLOP of the algorithm is issued once, up to head dim 128: see the README for 256."""
    half = [r for r in results if r["kind"] == "half" and r["arch"] == 90 and r["dim"] <= 128]
    assert half
    for r in half:
        assert r["work"] == pytest.approx(1.0, abs=0.02), r


def test_ampere_half_precision_computes_no_product_twice(results):
    half = [r for r in results if r["kind"] == "half" and r["arch"] == 80 and r["dim"] <= 128]
    assert {r["kernel"] for r in half} == {"forward", "dq", "dkdv"}
    for r in half:
        assert r["work"] <= tune.MOST_WORK[80], r


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [89, 120])
def test_tiles_of_ampere_pass_the_gates_of_other_architectures(arch):
    """GPUs of compute capability 8.6, 8.9 and 12 have 99 KiB of shared memory per program."""
    jobs = []
    for kernel, dim, options in itertools.product(
        ("forward", "dq", "dkdv"), (64, 128), ({}, shipped.LEFT | shipped.SOFTCAP)
    ):
        tile, _ = configs.choose(kernel, "ieee", 2, dim, ("pointers",), 99 * 1024, bool(options))
        key = "pointers", "half", kernel
        (job,) = shipped.jobs(key, dim, dataclasses.astuple(tile), options)
        jobs.append({**job, "arch": arch})
    for r in compiled(jobs):
        assert r["stack_bytes"] <= FEW_BYTES, r
        assert r["shared_bytes"] <= 99 * 1024, r
        assert r["work"] <= tune.MOST_WORK[80], r


def test_work_gate_detects_a_product_computed_twice(every_result):
    """With eight warps and 64 rows of keys, both warpgroups compute S and dP."""
    (fault,) = filter(is_fault, every_result)
    assert fault["work"] == pytest.approx(1.5, abs=0.02)


def test_kernels_compile_for_sizes_of_one(every_result):
    kernels = {r["kernel"] for r in every_result if r.get("of_one")}
    assert kernels == {"forward", "sums", "dq", "dkdv"}


def test_head_dims_without_a_tma_tile_are_loaded_by_pointers():
    hopper = ("tma", "hopper", "pointers")
    for rich, tma in ((False, True), (True, False)):
        tile, by_tma = configs.choose("dkdv", "ieee", 2, 128, hopper, 227 * 1024, rich)
        assert by_tma == tma
        path = "tma" if tma else "hopper"
        assert tile == configs.Tile(*configs.find_sizes((path, "half", "dkdv"), 128, rich))
    for key, dims in configs.RICH.items():
        for dim, tile in dims.items():
            assert tile != configs.TILES[key][dim]


def test_hopper_instructions_are_64_columns_wide_if_tile_and_head_dim_are(results):
    half = [r for r in results if r["kind"] == "half" and r["arch"] == 90 and r["dim"] <= 128]
    assert {r["kernel"] for r in half} == {"forward", "dq", "dkdv"}
    for r in half:
        block_m, block_n, *_ = r["tile"]
        side = block_m if r["kernel"] == "dkdv" else block_n
        assert min(r["widths"]) >= min(64, side, r["dim"]), r


@pytest.mark.parametrize(
    "cases", ["sample", pytest.param("exhaustive", marks=pytest.mark.exhaustive)]
)
def test_import_has_no_warnings_and_kernels_without_tables_compile(cases):
    """The two share a process, because importing torch takes seconds."""
    lines = run_script("compile_decoding.py", cases)
    kernels = ("decode_kernel", "append_kernel", "combine_kernel", "delta_kernel")
    assert {tuple(line.split()[:2]) for line in lines} == set(
        itertools.product(("80", "90"), kernels)
    )
