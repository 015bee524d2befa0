"""Shipped tiles and Gluon kernels, compiled for Hopper and Ampere without a GPU."""

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
from flashattn2.kernels import configs, launch


def compiled(request):
    """Run `compile_all.py` in a process that does not interpret kernels; return facts per part."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_all.py")], input=json.dumps(request),
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    facts = {part: [] for part in request}
    for line in done.stdout.splitlines():
        part, result = json.loads(line)
        facts[part].append(result)
    return facts


# The jobs of the Triton kernels are in `shipped.py`.
#: A tile that the tuner must reject.
REPEATS_PRODUCTS = {
    "kernel": "dkdv", "dim": 128, "arch": 90, "tma": True, "kind": "half",
    "precision": "ieee", "dtype": "bf16", "tile": [32, 64, 8, 2],
}  # fmt: skip
#: All jobs of the Gluon forward kernel.
ALL = [
    {"dim": dim, "dtype": dtype, "left": left, "right": right}
    for dim in (64, 128)
    for dtype in ("bf16", "fp16")
    for left in (False, True)
    for right in (False, True)
]
# Triton compiles sizes of 1 as constants, and specializes on multiples of 16.
ALL.append({**ALL[-1], "shape": [1, 1, 1, 1, 77], "side": 1})
ALL.append({**ALL[-1], "shape": [16, 16, 1, 4096, 4096], "side": 0})
# Three consumers.
ALL += [{**job, "shape": [1, 16, 4, 4096, 4096]} for job in ALL[:8] if not job["left"]]
SAMPLE = [{"dim": 128, "dtype": "bf16", "left": False, "right": True}]
#: All jobs of the Gluon backward kernels.
BACK = [
    {"dim": dim, "dtype": dtype, "left": left, "right": right, "deterministic": deterministic}
    for dim in (64, 128)
    for dtype in ("bf16", "fp16")
    for left in (False, True)
    for right in (False, True)
    for deterministic in (False, True)
]
BACK += [{**job, "shape": [1, 1, 1, 1, 77], "side": 1} for job in BACK[-2:]]
BACK += [{**job, "shape": [16, 16, 1, 4096, 4096], "side": 0} for job in BACK[-4:-2]]
BACK_SAMPLE = [{**SAMPLE[0], "deterministic": False}]


@pytest.fixture(
    scope="module",
    params=["sample", pytest.param("exhaustive", marks=pytest.mark.exhaustive)],
)
def facts(request):
    """Return the facts of all kernels, compiled by one process, or by two if there are many."""
    if request.param == "sample":
        tiles = [*shipped.sample(), REPEATS_PRODUCTS, *shipped.iter_sizes_of_one()]
        gluon = SAMPLE + BACK_SAMPLE
        every = compiled({"tiles": tiles, "decoding": False, "gluon": gluon})
    else:
        tiles = [*shipped.iter_exhaustive(), REPEATS_PRODUCTS, *shipped.iter_sizes_of_one()]
        gluon = ALL + BACK
        halves = {"tiles": tiles[::2], "decoding": True}, {"tiles": tiles[1::2], "gluon": gluon}
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(compiled, halves)
        every = {**first, **second, "tiles": first["tiles"] + second["tiles"]}
    assert len(every["tiles"]) == len(tiles)
    assert len(every["gluon"]) >= len(gluon)
    return every


@pytest.fixture
def every_result(facts):
    return facts["tiles"]


def is_fault(result):
    """Return True for the injected fault."""
    return REPEATS_PRODUCTS.items() <= result.items()


@pytest.fixture
def results(every_result):
    """Return the results of shipped tiles, without the injected fault and sizes of 1."""
    return [r for r in every_result if not is_fault(r) and not r.get("of_one")]


def get_table(result):
    """Return the architecture whose table has the tile; 8.6 and 8.9 share one."""
    return 86 if result["arch"] == 89 else result["arch"]


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="the tiles were chosen with triton 3.9; the README names what triton 3.6 spills",
)
def test_no_shipped_tile_spills_more_than_a_few_bytes(results):
    assert [r for r in results if r["stack_bytes"] > tune.FEW_BYTES[get_table(r)]] == []


def test_every_shipped_tile_fits_in_shared_memory(results):
    assert [r for r in results if r["shared_bytes"] > tune.SHARED_BYTES[get_table(r)]] == []


def test_matrix_instructions_do_the_products_of_all_but_ieee_float32(every_result):
    assert "ieee" in {r["kind"] for r in every_result}
    for r in every_result:
        assert (r["wgmma"] + r["mma"] + r["tcgen05"] > 0) == (r["kind"] != "ieee"), r


def test_hopper_tiles_use_wgmma_and_tma(results):
    hopper = [r for r in results if r["tma"] and r["arch"] == 90]
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


@pytest.mark.parametrize("arch", [80, 100])
def test_half_precision_of_other_architectures_computes_no_product_twice(results, arch):
    half = [r for r in results if r["kind"] == "half" and r["arch"] == arch and r["dim"] <= 128]
    assert {r["kernel"] for r in half} >= ({"forward", "dq", "dkdv"} if arch == 80 else {"dkdv"})
    for r in half:
        assert r["work"] <= tune.MOST_WORK[arch], r


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [86, 89, 100, 120])
def test_every_tile_that_an_architecture_selects_passes_its_gates(arch):
    """Half precision up to head dim 128, with the options that need the most registers.

    An architecture also selects tiles of the tables of Ampere or Hopper.
    """
    table = 86 if arch == 89 else arch
    every_path = launch.list_paths_of_capability(*divmod(arch, 10))
    without_tma = tuple(path for path in every_path if path not in configs.TMA_PATHS)
    jobs = {}
    for paths, kernel, dim, rich in itertools.product(
        {every_path, without_tma}, ("forward", "dq", "dkdv"), (16, 32, 64, 128), (False, True)
    ):
        tile, tma = configs.choose_tile(
            kernel, "ieee", 2, dim, paths, tune.SHARED_BYTES[table], rich
        )
        path = "tma" if tma else "pointers"
        for options in tune.choose_options(path, rich):
            key = path, "half", kernel
            job = next(shipped.iter_jobs(key, dim, dataclasses.astuple(tile), options))
            jobs[json.dumps(job)] = {**job, "arch": arch}
    results = compiled({"tiles": list(jobs.values())})["tiles"]
    assert len(results) == len(jobs)
    for r in results:
        assert tune.is_accepted({**r, "arch": table}), r


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
        tile, by_tma = configs.choose_tile("dkdv", "ieee", 2, 128, hopper, 227 * 1024, rich)
        assert by_tma == tma
        path = "tma" if tma else "hopper"
        assert tile == configs.TileConfig(*configs.find_sizes((path, "half", "dkdv"), 128, rich))
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


def test_import_has_no_warnings_and_kernels_without_tables_compile(facts):
    """The script raises an error for a warning of the import."""
    kernels = ("decode_kernel", "append_kernel", "combine_kernel", "delta_kernel")
    compiled_kernels = {tuple(result) for result in facts["decoding"]}
    assert compiled_kernels == set(itertools.product((80, 90), kernels))


def test_compiled_forward_spills_nothing_and_overlaps_products_with_softmax(facts):
    for result in (r for r in facts["gluon"] if "deterministic" not in r):
        # The smaller share of registers of a third consumer spills by at most 16 bytes, and a third
        # loop, for the left edge of the band, by at most 8 bytes with Triton 3.9.
        case = result["consumers"], result["left"]
        few = {(2, False): 0, (2, True): 8, (3, False): 16}[case]
        assert result["stack_bytes"] <= few, result
        # All warps share a multiprocessor's 65,536 registers.
        threads = 128 * (result["consumers"] + 1)
        assert result["registers"] <= 65536 // threads, result
        assert result["hand_over"].count(result["consumer_registers"]) >= 2, result
        assert result["stages"] >= 2
        assert result["shared_bytes"] <= 227 * 1024, result
        assert result["work"] == pytest.approx(1.0, abs=0.02), result
        assert result["widths"] == sorted({128, result["dim"]}), result
        # One of two products may still run, in PTX and in machine code.
        assert result["waits"] == [0, 1], result
        assert result["waits_in_machine_code"] == [0, 1], result
        # One exponential for each score that a thread has, and one for each of its two rows.
        assert len(result["under_products"]) == result["consumers"] * (3 if result["left"] else 2)
        assert min(result["under_products"]) >= 66, result
        # With this warning ptxas reports that it waits for each product.
        assert "C75" not in result["warnings"], result
        assert result["unguarded_arrivals"] == [], result
        order = ["write", "fence", "meet", "copy", "wait"]
        assert result["stores"] == [order] * result["consumers"], result
        assert result["tma_loads"] > 0, result


def test_compiled_backward_overlaps_products_with_exponentials(facts):
    """At most 48 bytes are spilled if dQ is computed too, and 8 bytes otherwise."""
    for result in (r for r in facts["gluon"] if "deterministic" in r):
        atomic = not result["deterministic"]
        assert result["stack_bytes"] <= (48 if atomic else 8), result
        assert result["registers"] <= 168, result
        assert 240 in result["hand_over"], result
        assert result["shared_bytes"] <= 227 * 1024, result
        assert result["work"] == pytest.approx(1.0, abs=0.02), result
        assert set(result["widths"]) <= {64, 128}, result
        assert result["waits"] == result["waits_in_machine_code"] == [0, 1], result
        # While dP is computed, a thread computes one exponential for each of its scores.
        assert max(result["under_products"]) == result["scores_of_a_thread"], result
        assert "C75" not in result["warnings"], result
        assert result["unguarded_arrivals"] == [], result
        order = result["exchanges"]
        writes = [i for i, kind in enumerate(order) if kind == "write"]
        assert len(writes) == (3 if atomic else 1), result
        assert all(order[i + 1 : i + 3] == ["fence", "meet"] for i in writes), result
        assert order[writes[-1] + 3 : writes[-1] + 5] == ["copy", "copied"], result
        if atomic:
            # dS is complete for both warpgroups, and the previous part of dQ has been read.
            assert order[writes[0] + 3] == "product", result
            assert order[writes[1] - 2 : writes[1]] == ["copied", "meet"], result
            assert order[writes[1] + 3] == "copy", result
