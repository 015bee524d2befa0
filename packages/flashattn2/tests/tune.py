"""Choose tiles for an architecture and write its table: `python tests/tune.py 90 [--out FILE]`.

Every candidate tile is compiled with the options that need the most registers.  A tile is rejected
if it computes a product twice, spills, exceeds the shared memory or does not use the matrix units.
Among the other tiles the fastest is selected: by its time with --measure on a GPU of that
architecture, otherwise by a model of its cost.  An entry without a valid tile is not changed.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import shipped
from compile_kernels import compile_job
from flashattn2.kernels import configs

PATHS = {
    80: ("pointers",),
    86: ("pointers_86",),
    90: ("tma", "hopper"),
    100: ("tma_100", "pointers_100"),
    120: ("pointers_120",),
}
# The shared memory that a program may request, and the work of a multiprocessor per cycle: FLOPs of
# its matrix units in half precision, exponentials, and bytes from the L2 cache.
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
FLOPS = {80: 2048, 86: 1024, 90: 4096, 100: 8192, 120: 1024}
EXPONENTIALS = 16
BYTES = 32
REGISTERS = 65536
#: The maximum number of registers per thread for tiles that would spill at fewer.
ALL_REGISTERS = 255
#: Upper bounds of the bytes that a tile spills and of the FLOPs that it issues per needed FLOP.
FEW_BYTES = {80: 48, 86: 0, 90: 48, 100: 0, 120: 0}
MOST_WORK = {80: 1.05, 86: 1.05, 90: 1.02, 100: 1.05, 120: 1.05}


def iter_entries(arch):
    """Yield each table and head dim, with True for the tile of the options with most registers."""
    for key, tiles in configs.TILES.items():
        if key[0] in PATHS[arch]:
            for block_d in tiles:
                for rich in (False, True):
                    yield key, block_d, rich


def choose_options(path, rich):
    """Return the options that need the most registers, with which a tile is compiled."""
    choices = [{}, shipped.NOT_CAUSAL]
    if rich:
        choices = [shipped.LEFT | shipped.SOFTCAP, shipped.SOFTCAP | shipped.SPLITS, shipped.LEFT]
    packed = [choice | shipped.PACKED for choice in choices if "splits" not in choice]
    return choices if path in configs.TMA_PATHS else choices + packed


def iter_candidates(key, block_d, arch):
    """Yield the tiles whose buffers fit and whose products no warpgroup repeats."""
    path, kind, kernel = key
    element_bytes = 2 if kind == "half" else 4
    sides = (16, 32, 64, 128)
    for m, n, warps, stages in itertools.product(sides, sides, (4, 8), (1, 2, 3)):
        tile = configs.TileConfig(m, n, warps, stages)
        first = n if kernel == "dkdv" else m
        if arch in (90, 100) and kind == "half" and first < 16 * warps:
            continue
        # A thread has 255 registers for its float32 sums and scores.
        rows, sums = first, 2 if kernel == "dkdv" else 1
        if (sums * rows * block_d + m * n) / (32 * warps) > ALL_REGISTERS:
            continue
        if configs.count_shared_bytes(kernel, tile, element_bytes, block_d) <= SHARED_BYTES[arch]:
            is_float32 = path == "pointers" and kind != "half"
            yield (m, n, warps, stages, *([ALL_REGISTERS] if is_float32 else []))


def is_accepted(result):
    """Return True if the compiled tile passes every gate."""
    half = result["kind"] == "half" and result["dim"] <= 128
    return (
        result["stack_bytes"] <= FEW_BYTES[result["arch"]]
        and result["shared_bytes"] <= SHARED_BYTES[result["arch"]]
        and (result["kind"] == "ieee" or result["wgmma"] + result["mma"] + result["tcgen05"] > 0)
        and (not half or result["work"] <= MOST_WORK[result["arch"]])
    )


def compute_cost(result):
    """Return the modeled cycles of a multiprocessor per FLOP that the algorithm needs.

    The time of a tile of scores consists of its products, at the rate of their narrowest
    instruction below 64 columns, its exponentials and its loads.  Products and exponentials of one
    program wait for each other; those of several programs overlap.  Loads overlap if the pipeline
    has several stages.
    """
    tile, dim = configs.TileConfig(*result["tile"]), result["dim"]
    products = {"forward": 2, "dq": 3, "dkdv": 4, "sums": 2}[result["kernel"]]
    flops = products * 2 * tile.block_m * tile.block_n * dim
    width = min(1.0, min(result["widths"], default=64) / 64)
    multiply = flops * result["work"] / (FLOPS[result["arch"]] * width)
    exponentiate = tile.block_m * tile.block_n / EXPONENTIALS
    by_key = result["kernel"] == "dkdv"
    streamed = 2 * (tile.block_m if by_key else tile.block_n) * dim
    load = streamed * (2 if result["dtype"] == "bf16" else 4) / BYTES
    programs = min(
        REGISTERS // (32 * tile.num_warps * max(32, result["registers"])),
        SHARED_BYTES[result["arch"]] // max(1, result["shared_bytes"]),
        64 // tile.num_warps,
    )
    if programs <= 1:
        cycles = multiply + exponentiate
    else:
        cycles = max(multiply, exponentiate, (multiply + exponentiate) / programs)
    cycles = max(cycles, load) if tile.num_stages > 1 else cycles + load
    return cycles / flops


def measure_milliseconds(result, rounds=5):
    """Return the time of the pass with this tile on this GPU."""
    import torch
    from flashattn2 import flash_attention, flash_attention_varlen
    from flashattn2.kernels import launch
    from triton.testing import do_bench

    dtype = torch.bfloat16 if result["dtype"] == "bf16" else torch.float32
    dim = result["dim"]
    shape, attention = (4, 2048 // dim, 4096, dim), flash_attention
    if result.get("packed"):
        lengths = torch.tensor([0, 300, 1200, 2500, 100, 3900, 3000, 5384], device="cuda")
        cu = lengths.cumsum(0).int()
        shape = (16384, 2048 // dim, dim)
        attention = functools.partial(flash_attention_varlen, cu_seqlens_q=cu, cu_seqlens_k=cu)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in "qkv")
    # Otherwise the Gluon kernels, which have other tiles, would run and be timed.
    requested = {
        "backend": "triton",
        "is_causal": True,
        "window": (1024, None) if result.get("left") else None,
        "softcap": 30.0 if result.get("softcap") else None,
    }  # fmt: skip
    chosen = launch.choose_tile

    def choose(kernel, precision, *rest):
        if kernel != result["kernel"]:
            return chosen(kernel, precision, *rest)
        return configs.TileConfig(*result["tile"]), result["tma"]

    launch.choose_tile = choose
    torch.set_float32_matmul_precision("high" if result["kind"] == "tf32" else "highest")
    try:
        out = attention(q, k, v, **requested)
        if result["kernel"] == "forward":
            run = functools.partial(attention, q, k, v, **requested)
        else:
            run = functools.partial(torch.autograd.grad, out, (q, k, v), out, retain_graph=True)
        return statistics.median(do_bench(run, warmup=5, rep=20) for _ in range(rounds))
    finally:
        launch.choose_tile = chosen


def find_best(key, block_d, rich, arch, compiled, speed):
    """Return the valid tile of the lowest cost, or None."""
    path, _, kernel = key
    ranked = []
    for tile in iter_candidates(key, block_d, arch):
        jobs = [
            job
            for option in choose_options(path, rich)
            for job in shipped.iter_jobs(key, block_d, tile, option)
            if job["arch"] == arch and job["kernel"] == kernel
        ]
        results = [compiled(job) for job in jobs]
        if all(result is not None and is_accepted(result) for result in results):
            ranked.append((speed(results[0]), tile))
    return min(ranked)[1] if ranked else None


def build_table(arch, compiled, speed, wanted=lambda entry: True):
    """Return a new table with a tile for every entry, in the form of a file in `tables`."""
    choices = {}
    for key, block_d, rich in iter_entries(arch):
        tile = configs.TILES.get(key, {}).get(block_d)
        if rich:
            tile = configs.RICH.get(key, {}).get(block_d, tile)
        if wanted((key, block_d, rich)):
            chosen = find_best(key, block_d, rich, arch, compiled, speed)
            if chosen is None:
                print(*key, block_d, "has no valid tile and is unchanged", file=sys.stderr)
            tile = chosen or tile
        entry = choices.setdefault(" ".join(key), {"tiles": {}, "rich": {}})
        if not rich and tile:
            entry["tiles"][str(block_d)] = tile
        elif tile != entry["tiles"].get(str(block_d)):
            entry["rich"][str(block_d)] = tile
    parts = {key: {name: part for name, part in e.items() if part} for key, e in choices.items()}
    return {key: part for key, part in parts.items() if part}


def format_table(table):
    """Return the table as text, with one line per part of an entry."""
    entries = []
    for key, parts in table.items():
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(x)}" for name, x in parts.items())
        entries.append(f"  {json.dumps(key)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def compile_tile(job):
    """Return the facts of the compiled tile, or None if it does not compile."""
    try:
        return compile_job(job)
    except Exception:
        return None


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", type=int, choices=sorted(PATHS))
    parser.add_argument("--measure", action="store_true", help="take times on this machine's GPU")
    parser.add_argument("--only", default="", help="entries whose key has this in it")
    parser.add_argument("--default", action="store_true", help="only tiles for default options")
    parser.add_argument("--jobs", type=int, help="compilers at a time")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)

    def wanted(entry):
        key, block_d, rich = entry
        is_named = arguments.only in " ".join((*key, str(block_d)))
        return is_named and not (rich and arguments.default)

    jobs = [
        job
        for key, block_d, rich in filter(wanted, iter_entries(arguments.arch))
        for tile in iter_candidates(key, block_d, arguments.arch)
        for option in choose_options(key[0], rich)
        for job in shipped.iter_jobs(key, block_d, tile, option)
        if job["arch"] == arguments.arch
    ]
    names = [json.dumps(job) for job in jobs]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        known = dict(zip(names, pool.map(compile_tile, jobs, chunksize=4), strict=True))
    speed = measure_milliseconds if arguments.measure else compute_cost
    text = format_table(
        build_table(arguments.arch, lambda job: known[json.dumps(job)], speed, wanted)
    )
    (arguments.out.write_text if arguments.out else print)(text)


if __name__ == "__main__":
    main()
