"""Compile the Triton kernels without a GPU, and report facts of the compiled code.

A process that interprets kernels cannot import this module: see `compile_all.py`.

A job (see `shipped.py`) names the kernel, tile, head dim, architecture and path, and the options of
attention that are compiled in: left, right (so causal), softcap, packed, splits; of_one says that
all sizes are 1, which Triton compiles in by itself.
"""

import math
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from flashattn2.kernels import backward, configs, forward, launch, row_sums
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KERNELS = {
    "forward": forward.forward_kernel,
    "sums": row_sums.sums_kernel,
    "dq": backward.dq_kernel,
    "dkdv": backward.dkdv_kernel,
}
ALIGNED = [["tt.divisibility", 16]]


def compile_job(job):
    """Return registers, stack, shared memory and the number of each relevant instruction."""
    kernel, tile = KERNELS[job["kernel"]], configs.TileConfig(*job["tile"])
    meta = launch.Meta(
        job["dim"],
        round_up_head_dim(job),
        job["dim"],
        round_up_head_dim(job),
        tile.block_m,
        tile.block_n,
        job.get("left", False),
        job.get("right", True),
        job.get("softcap", False),
        job.get("splits", 1),
        job.get("packed", False),
        job["tma"],
        job["precision"],
        EXACT=job["kind"] == "ieee",
    )
    signature = {name: list_types(job, meta)[name] for name in kernel.arg_names}
    places = dict(iter_leaves(tuple(signature.values())))
    # Constants are arguments that are None, sizes of 1, and compile-time constants.
    has_unit_sizes = job.get("of_one", False)
    sizes = kernel.arg_names.index("sizes")
    constants = {
        index: 1 if has_unit_sizes and index[0] == sizes else None
        for index, kind in places.items()
        if kind == "constexpr"
    }
    constants[kernel.arg_names.index("meta"),] = meta
    strides = kernel.arg_names.index("strides")
    source = ASTSource(
        kernel,
        signature,
        constants,
        {at: ALIGNED for at, kind in places.items() if at[0] == strides or kind.startswith("*")},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", job["arch"], 32), options=tile.compiler_options
    )
    ptx = compiled.asm["ptx"]
    return {
        **job,
        "work": count_issued_flops(ptx, tile.num_warps)
        / (count_loops(meta) * count_tile_flops(job, tile)),
        "widths": sorted({int(n) for n in re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k", ptx)}),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tcgen05": ptx.count("tcgen05.mma"),
        "tma_loads": ptx.count("cp.async.bulk.tensor"),
        "shared_bytes": compiled.metadata.shared,
        **read_resources(compiled.asm["cubin"]),
    }


def count_issued_flops(ptx, num_warps):
    """Return the FLOPs of one execution of each matrix instruction by all warps of a program.

    A warpgroup of four warps issues a `wgmma`, and each warp an `mma.sync`.  If a product has fewer
    rows than the layout of the warps, several warps compute the same rows, and each is counted.
    One thread issues a `tcgen05.mma` for the whole program.
    """
    of_groups = re.findall(r"wgmma\.mma_async\S*\.m(\d+)n(\d+)k(\d+)", ptx)
    of_warps = re.findall(r"mma\.sync\S*\.m(\d+)n(\d+)k(\d+)", ptx)
    return sum(
        2 * units * math.prod(map(int, shape))
        for units, shapes in (
            (num_warps // 4, of_groups),
            (num_warps, of_warps),
            (1, list_tcgen05_shapes(ptx)),
        )
        for shape in shapes
    )


def list_tcgen05_shapes(ptx):
    """Return the shape (m, n, k) of each `tcgen05.mma` in the innermost loops.

    Triton issues some products of the first tiles before the loop and those of the last tiles after
    it, so the loop alone has each product once.  The instruction descriptor is a constant in a
    register: bits 17 to 22 are n / 8, and bits 24 to 28 are m / 16.
    """
    constants = dict(re.findall(r"mov\.b32\s+(%\w+), (\d+);", ptx))
    shapes = []
    for body in find_innermost_loops(ptx):
        issued = re.findall(r"tcgen05\.mma\S*kind::(\w+) \[[^]]*\], [^,]+, [^,]+, (%\w+)", body)
        for kind, register in issued:
            descriptor = int(constants[register])
            m, n = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
            shapes.append((m, n, {"f16": 16, "tf32": 8}[kind]))
    return shapes


def find_innermost_loops(ptx):
    """Return the text of each loop with a `tcgen05.mma` that contains no other such loop."""
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith("$")}
    ends = {}
    for at, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if target and labels[target[1]] < at:
            ends[labels[target[1]]] = at
    loops = [(start, end) for start, end in ends.items() if "tcgen05.mma" in str(lines[start:end])]
    return [
        "\n".join(lines[start:end])
        for start, end in loops
        if not any(start < first and last <= end for first, last in loops)
    ]


def count_tile_flops(job, tile):
    """Return the FLOPs that the algorithm needs for one tile of scores: two to four products."""
    products = {"forward": 2, "sums": 2, "dq": 3, "dkdv": 4}[job["kernel"]]
    return products * 2 * tile.block_m * tile.block_n * round_up_head_dim(job)


def count_loops(meta):
    """Return how often a kernel contains the loop over tiles: see `flashattn2.kernels.forward`."""
    return 3 if meta.LEFT else 2


def round_up_head_dim(job):
    """Return the head dim rounded up to a power of two."""
    return triton.next_power_of_2(job["dim"])


def list_types(job, meta):
    """Return the types of the arguments by name; "constexpr" for None and for constants."""
    operands = {"q": meta.BLOCK_M, "grad_out": meta.BLOCK_M, "k": meta.BLOCK_N, "v": meta.BLOCK_N}
    for name, block in operands.items():
        tile = f"tensordesc<{job['dtype']}[1,1,{block},{meta.BLOCK_D}]>"
        operands[name] = tile if meta.TMA else f"*{job['dtype']}"
    result = f"*{job['dtype']}" if meta.SPLITS == 1 else "*fp32"
    tensors = {"forward": 4, "sums": 4, "dq": 5, "dkdv": 6}[job["kernel"]]
    return operands | {
        "out": result,
        "dq": result,
        "dk": result,
        "dv": result,
        "lse": "*fp32",
        "p_sums": "*fp32",
        "dp_sums": "*fp32",
        "statistics": ("*fp32", "*fp32", "*fp32" if meta.EXACT else "constexpr"),
        "strides": (("i32",) * 3,) * tensors,
        "sequence_bounds": ("*i32",) * 2 if meta.PACKED else "constexpr",
        "sizes": ("constexpr" if job.get("of_one") else "i32",) * 5,
        "factors": ("fp32",) * 3 + ("i32",) * 2,
        "meta": "constexpr",
    }


def iter_leaves(types, at=()):
    """Yield each type that is not a tuple, with the indices that lead to it."""
    for index, kind in enumerate(types):
        if isinstance(kind, tuple):
            yield from iter_leaves(kind, (*at, index))
        else:
            yield (*at, index), kind


def read_resources(cubin):
    """Return the registers per thread at launch and the bytes of stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
    }
