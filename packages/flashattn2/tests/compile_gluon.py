"""Compile the Gluon kernel as a launch would, for a Hopper GPU that need not be there.

It reads a list of jobs as JSON from standard input, and writes one line of JSON for each: see
`compile_kernels.py`.  A job has dim, dtype, left and right, and may have a shape (batch, heads,
key heads, queries, keys) and the length of the sides.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from compile_kernels import issued_flops, resources
from flashattn2.gluon import forward
from flashattn2.problem import Score
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Hopper:
    """As much of a GPU's driver as compiling a launch asks for."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class Launch:
    """Stands in the kernel's place, and compiles what would be launched."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, None

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.compiled = self.kernel.warmup(*args, grid=grid, **options)

        return launch


driver.set_active(Hopper())
LAUNCH = forward.forward_kernel = Launch(forward.forward_kernel)


def compile_job(job):
    """What the compilers made of it: Triton's PTX, and of that ptxas's machine code."""
    dim, tile = job["dim"], forward.TILES[job["dim"]]
    batch, heads, kv_heads, seq_q, seq_k = job.get("shape", (2, 4, 2, 300, 500))
    q = torch.zeros(batch, heads, seq_q, dim, dtype=DTYPES[job["dtype"]])
    k = v = torch.zeros(batch, kv_heads, seq_k, dim, dtype=q.dtype)
    side = job.get("side", 100)
    score = Score(dim**-0.5, side if job["left"] else -1, side if job["right"] else -1)
    forward.forward(q, k, v, score)
    compiled = LAUNCH.compiled
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    # S of the first tile, P V of the last, and both in each loop: of 64 rows in each consumer.
    loops = 3 if job["left"] else 2
    algorithm = (loops + 1) * 2 * 2 * forward.CONSUMERS * tile.rows * tile.keys * dim
    code = run(BIN / "cuobjdump", "-sass", cubin, ".cubin")
    return {
        **job,
        # Each consumer is a copy of its own in the code, issued by one warpgroup.
        "work": issued_flops(ptx, 4) / algorithm,
        "widths": sorted({int(n) for n in re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k", ptx)}),
        "waits": sorted({int(n) for n in re.findall(r"wgmma\.wait_group\S* (\d+)", ptx)}),
        "waits_in_machine_code": sorted(
            {int(n, 16) for n in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)", code)}
        ),
        "local": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "under_products": [*under_products(code)],
        "hand_over": sorted(int(n) for n in re.findall(r"setmaxnreg\S*\s+(\d+)", ptx)),
        "tma_loads": ptx.count("cp.async.bulk.tensor"),
        "stages": tile.stages,
        "unguarded_arrivals": unguarded_arrivals(ptx),
        "stores": [*stores(ptx)],
        "shared_bytes": compiled.metadata.shared,
        "warnings": run(get_ptxas(90).path, "-v -arch=sm_90a -o /dev/null", ptx.encode(), ".ptx"),
        **resources(cubin),
    }


def unguarded_arrivals(ptx):
    """Arrivals at a barrier that one thread makes, with no barrier of its warps since a product.

    `wgmma.wait_group` waits for the products of the warp that executes it: where one thread speaks
    for four warps, they have to meet after that.
    """
    found, met = [], True
    for line in ptx.splitlines():
        if "wgmma.wait_group" in line:
            met = False
        elif re.search(r"\bbar(rier)?\.sync|\bbarrier\.cta", line):
            met = True
        elif "mbarrier.arrive.shared" in line and not met:
            found.append(line.strip())
    return found


def stores(ptx):
    """What happens to O from registers to global memory, in order, each run of one kind once.

    Every thread makes what it wrote visible to TMA, then all meet, then one orders the copy.
    """
    kinds = {
        "stmatrix": "write",
        "fence.proxy.async": "fence",
        "bar.sync": "meet",
        "cp.async.bulk.tensor.4d.global": "copy",
        "cp.async.bulk.wait_group": "wait",
    }
    for piece in re.findall(r"stmatrix.*?cp\.async\.bulk\.wait_group", ptx, re.DOTALL):
        found = re.findall("|".join(map(re.escape, kinds)), piece)
        yield [kind for kind, _ in itertools.groupby(kinds[x] for x in found)]


def under_products(code):
    """Exponentials between each wait for all products but one and the next wait for all.

    That is where the softmax is to be in machine code as well: ptxas moves what it likes.  None of
    its instructions may write registers of the product that still runs, whose sum and left operand
    are there.
    """
    flying, count = set(), None
    for name, operands in re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)\s+([^;]*?)\s*;", code):
        target = re.match(r"R(\d+)", operands)
        if name.startswith("HGMMA"):
            columns = int(re.search(r"64x(\d+)x16", name)[1])
            total, left = re.match(r"R(\d+), (?:R(\d+))?", operands).groups()
            flying = {*flying, *range(int(total), int(total) + columns // 2)} if left else set()
            flying |= {*range(int(left), int(left) + 4)} if left else set()
        elif name.startswith("WARPGROUP.DEPBAR"):
            if operands.endswith("0x1"):
                count = 0
            elif count is not None:
                yield count
                flying, count = set(), None
        elif count is not None:
            count += name == "MUFU.EX2"
            if target and int(target[1]) in flying and not name.startswith("ST"):
                raise RuntimeError(f"{name} {operands} writes to a product that runs")


def run(tool, options, content, suffix):
    """All that one of the tools in Triton's wheel says of a file."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        done = subprocess.run([tool, *options.split(), file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr + done.stdout)
    return done.stdout + done.stderr


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        print(json.dumps(compile_job(job)), flush=True)
