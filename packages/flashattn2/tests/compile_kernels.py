"""Compile kernels for a GPU that need not be there, and say what the compiler made of them.

A script of its own, since a process that interprets kernels cannot compile them: it reads a list of
jobs as JSON from standard input, and writes one line of JSON for each.

A job (see `shipped.py`) names the kernel, tile, head dim, architecture and path, and the options of
attention that are compiled in: left, right (so causal), softcap, packed, splits.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from flashattn2.kernels import configs, dkdv, dq, forward, rows
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KERNELS = {
    "forward": forward.forward_kernel,
    "sums": rows.sums_kernel,
    "dq": dq.dq_kernel,
    "dkdv": dkdv.dkdv_kernel,
    "atomic": dkdv.dkdv_kernel,
}
ALIGNED = [["tt.divisibility", 16]]


def compile_job(job):
    """Registers, stack and shared memory, and how often each instruction of interest occurs."""
    kernel, tile = KERNELS[job["kernel"]], configs.Tile(*job["tile"])
    flags = {
        "D": job["dim"],
        "BLOCK_D": block_d(job),
        "DV": job["dim"],
        "BLOCK_DV": block_d(job),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "LEFT": job.get("left", False),
        "RIGHT": job.get("right", True),
        "SOFTCAP": job.get("softcap", False),
        "PACKED": job.get("packed", False),
        "TMA": job["tma"],
        "SPLITS": job.get("splits", 1),
        "PRECISION": job["precision"],
        "EXACT": job["kind"] == "ieee",
        "ATOMIC": job["kernel"] == "atomic",
    }
    constants = {name: value for name, value in flags.items() if name in kernel.arg_names}
    if not constants["PACKED"]:
        constants |= dict.fromkeys(("cu_q", "cu_k"))
    if "maxima" in kernel.arg_names:
        constants["maxima"] = None
    if "norm" in kernel.arg_names and not constants["EXACT"]:
        constants["norm"] = None
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else _type(name, job, tile)
        if name.endswith("strides"):
            attributes |= {(index, axis): ALIGNED for axis in range(3)}
        elif str(signature[name]).startswith("*"):
            attributes[index,] = ALIGNED
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attributes,
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", job["arch"], 32), options=tile.compiler_options
    )
    ptx = compiled.asm["ptx"]
    return {
        **job,
        "work": issued_flops(ptx, tile.num_warps) / (loops(constants) * flops_of_a_tile(job, tile)),
        "widths": sorted({int(n) for n in re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k", ptx)}),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tma_loads": ptx.count("cp.async.bulk.tensor"),
        "shared_bytes": compiled.metadata.shared,
        **resources(compiled.asm["cubin"]),
    }


def issued_flops(ptx, num_warps):
    """FLOPs of all matrix instructions, each once, as all of a program's warps issue them.

    `wgmma` is issued by a warpgroup of four warps, `mma.sync` by each warp.  Where a product has
    fewer rows than the warps were laid out for, several compute the same: that is work done twice.
    """
    of_groups = re.findall(r"wgmma\.mma_async\S*\.m(\d+)n(\d+)k(\d+)", ptx)
    of_warps = re.findall(r"mma\.sync\S*\.m(\d+)n(\d+)k(\d+)", ptx)
    return sum(
        2 * units * math.prod(map(int, shape))
        for units, shapes in ((num_warps // 4, of_groups), (num_warps, of_warps))
        for shape in shapes
    )


def flops_of_a_tile(job, tile):
    """FLOPs that the algorithm needs for one tile of scores: two products, three, four or five."""
    products = {"forward": 2, "sums": 2, "dq": 3, "dkdv": 4, "atomic": 5}[job["kernel"]]
    return products * 2 * tile.block_m * tile.block_n * block_d(job)


def loops(flags):
    """How many times the loop over tiles stands in a kernel: see `flashattn2.kernels.forward`."""
    return 3 if flags["LEFT"] else 2


def block_d(job):
    """The head dim rounded up as the kernels take it."""
    return triton.next_power_of_2(job["dim"])


def _type(name, job, tile):
    rows = {"q": tile.block_m, "grad_out": tile.block_m, "k": tile.block_n, "v": tile.block_n}
    if name in rows:
        shape = f"[1,1,{rows[name]},{block_d(job)}]"
        return f"tensordesc<{job['dtype']}{shape}>" if job["tma"] else f"*{job['dtype']}"
    if name.endswith("strides"):
        return ("i32",) * 3
    if name in ("lse", "delta", "norm", "p_sums", "dp_sums") or (
        name == "dq" and job["kernel"] == "atomic"
    ):
        return "*fp32"
    if name in ("out", "dq", "dk", "dv"):
        return f"*{job['dtype']}" if job.get("splits", 1) == 1 else "*fp32"
    if name in ("cu_q", "cu_k"):
        return "*i32"
    return "fp32" if name in ("scale", "inner", "outer") else "i32"


def resources(cubin):
    """Registers of a thread at launch, and bytes of its stack."""
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


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        print(json.dumps(compile_job(job)), flush=True)
