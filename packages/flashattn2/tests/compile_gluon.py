"""Compile the Gluon kernels as a launch would, for a Hopper GPU that need not exist.

A process that interprets kernels cannot import this module: see `compile_all.py`.  A job has dim,
dtype, left and right, and may have a shape (batch, heads, key heads, queries, keys) and the length
of the sides.  With deterministic, true or false, it is the backward pass, and there is a result for
each of its kernels.
"""

import hashlib
import itertools
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from compile_kernels import count_issued_flops, read_resources
from flashattn2.experimental import backward, forward
from flashattn2.kernels import row_sums
from flashattn2.spec import AttentionSpec
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
FLAGS = "-v -arch=sm_90a -o /dev/null"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Hopper:
    """The part of a GPU's driver that compiling a launch uses."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class Launch:
    """A replacement of a kernel that compiles the launch."""

    def __init__(self, kernel):
        self.kernel, self.launched = kernel, []

    def __getitem__(self, grid):
        def launch(*args, **options):
            compiled = self.kernel.warmup(*args, grid=grid, **options)
            self.launched.append((compiled, options))

        return launch


driver.set_active(Hopper())
LAUNCH = forward.forward_kernel = Launch(forward.forward_kernel)
LAUNCH_BACK = backward.backward_kernel = Launch(backward.backward_kernel)
# A kernel of Triton's, and no GPU to run it on.
row_sums.compute_padded_statistics = lambda out, grad_out, grad_lse, lse: [
    torch.zeros(lse[..., 0].numel(), -(-lse.shape[-1] // 4) * 4)[:, : lse.shape[-1]] for _ in "LD"
]


def compile_job(job):
    """Compile the kernels of a job with Triton and ptxas, and yield facts of the machine code."""
    dim = job["dim"]
    batch, heads, kv_heads, seq_q, seq_k = job.get("shape", (2, 4, 2, 300, 500))
    q = torch.zeros(batch, heads, seq_q, dim, dtype=DTYPES[job["dtype"]])
    k = v = torch.zeros(batch, kv_heads, seq_k, dim, dtype=q.dtype)
    side = job.get("side", 100)
    spec = AttentionSpec(dim**-0.5, side if job["left"] else -1, side if job["right"] else -1)
    if "deterministic" in job:
        lse = torch.zeros(q.shape[:-1])
        backward.backward(q, k, v, q, lse, q, None, spec, job["deterministic"])
        while LAUNCH_BACK.launched:
            compiled, options = LAUNCH_BACK.launched.pop(0)
            products = 4 if options["BY_KEY"] else 3
            if options["ATOMIC"]:
                products = 5
            tile = options["RESIDENT"] * options["ROWS"]
            code = collect_facts(compiled, 2, products * tile * dim)
            yield {**job, **code, "scores_of_a_thread": tile // 256}
    else:
        forward.forward(q, k, v, spec)
        tile = forward.choose_tile(dim, seq_q, spec)
        # S of the first tile, P V of the last, and both in each loop: of 64 rows in each consumer.
        loops = 3 if job["left"] else 2
        products = (loops + 1) * 2 * tile.consumers * forward.ROWS * tile.keys * dim
        # The code contains each consumer separately, issued by one warpgroup.
        code = collect_facts(LAUNCH.launched.pop()[0], 1, products)
        yield {**job, **code, **tile._asdict()}


def collect_facts(compiled, warpgroups, products):
    """Return facts of one compiled kernel, whose products need `products` multiplications."""
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    code = run(BIN / "cuobjdump", "-sass", cubin, ".cubin")
    return {
        "work": count_issued_flops(ptx, 4 * warpgroups) / (2 * products),
        "widths": sorted({int(n) for n in re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k", ptx)}),
        "waits": sorted({int(n) for n in re.findall(r"wgmma\.wait_group\S* (\d+)", ptx)}),
        "waits_in_machine_code": sorted(
            {int(n, 16) for n in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)", code)}
        ),
        "local": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "under_products": [*count_exponentials_under_products(code)],
        "hand_over": sorted(int(n) for n in re.findall(r"setmaxnreg\S*\s+(\d+)", ptx)),
        "tma_loads": ptx.count("cp.async.bulk.tensor"),
        "unguarded_arrivals": list_unguarded_arrivals(ptx),
        "stores": [*list_stores(ptx)],
        "exchanges": list_exchanges(ptx),
        "shared_bytes": compiled.metadata.shared,
        "warnings": read_warnings(ptx),
        **read_resources(cubin),
    }


def list_unguarded_arrivals(ptx):
    """Return the arrivals of one thread without a barrier of its warps since a product.

    `wgmma.wait_group` waits for the products of the warp that executes it: if one thread arrives
    for four warps, the warps must synchronize after the wait.
    """
    steps, is_synchronized = [], True
    for line in ptx.splitlines():
        if "wgmma.wait_group" in line:
            is_synchronized = False
        elif re.search(r"\bbar(rier)?\.sync|\bbarrier\.cta", line):
            is_synchronized = True
        elif "mbarrier.arrive.shared" in line and not is_synchronized:
            steps.append(line.strip())
    return steps


def list_stores(ptx):
    """Return the steps of O from registers to global memory in order, without repetitions.

    Every thread makes its writes visible to TMA, then all synchronize, then one issues the copy.
    """
    kinds = {
        "stmatrix": "write",
        "fence.proxy.async": "fence",
        "bar.sync": "meet",
        "cp.async.bulk.tensor.4d.global": "copy",
        "cp.async.bulk.wait_group": "wait",
    }
    for piece in re.findall(r"stmatrix.*?cp\.async\.bulk\.wait_group", ptx, re.DOTALL):
        steps = re.findall("|".join(map(re.escape, kinds)), piece)
        yield [kind for kind, _ in itertools.groupby(kinds[x] for x in steps)]


def list_exchanges(ptx):
    """Return the steps of data that consumers write for TMA or a product, without repetitions.

    The steps are in the order of the code, from the first such write on.
    """
    kinds = {
        "write": r"m8n8\.x4|st\.shared\.v2",
        "fence": r"fence\.proxy\.async",
        "meet": r"bar(?:rier)?\.sync|barrier\.cta",
        "copy": r"cp\.(?:reduce\.)?async\.bulk\.tensor\.\dd\.global",
        "copied": r"cp\.async\.bulk\.wait_group",
        "product": r"wgmma\.mma_async[^;]*}, %rd\d+, %rd\d+, [^;]*, 1, 1;",
    }
    pattern = "|".join(f"(?P<{kind}>{text})" for kind, text in kinds.items())
    steps = (match.lastgroup for match in re.finditer(pattern, ptx[ptx.index("m8n8.x4") :]))
    return [kind for kind, _ in itertools.groupby(steps)]


def count_exponentials_under_products(code):
    """Return the exponentials between each wait for all products but one and the next wait for all.

    The softmax must be there in machine code as well, because ptxas moves instructions.  None of
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


def read_warnings(ptx):
    """Return the messages of ptxas, which Triton's cache stores beside the compiled kernels."""
    ptxas = get_ptxas(90)
    key = f"{ptxas.version} {FLAGS} {ptx}"
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    path = cache.get_file("messages.txt")
    if path is None:
        messages = run(ptxas.path, FLAGS, ptx.encode(), ".ptx")
        path = cache.put(messages, "messages.txt", binary=False)
    return Path(path).read_text()


def run(tool, options, content, suffix):
    """Return the output of a tool in Triton's wheel for a file."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        done = subprocess.run([tool, *options.split(), file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr + done.stdout)
    return done.stdout + done.stderr
