"""Compile the kernels that have no table of tiles without a GPU.

A process that interprets kernels cannot import this module: see `compile_all.py`.
"""

import triton
from flashattn2.kernels import decode, forward, launch, row_sums
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FOUR, THREE = ("i64",) * 4, ("i64",) * 3
SCORE = ("fp32", "fp32", "fp32", "i32", "i32")


def iter_jobs(paged, kind, dim):
    """Yield the kernels, their argument types and their constants for a head dim."""
    table, cell = "*i32" if paged else "constexpr", f"*{kind}"
    # Packed queries are compiled for pages, and dense ones for a contiguous cache.
    meta = launch.Meta(dim, dim, dim, dim, 16, 64, True, True, True, 4, paged, EXACT=kind == "fp32")
    yield (
        decode.decode_kernel,
        {
            **dict.fromkeys(("q", "k", "v"), cell),
            "out": "*fp32",
            "lse": "*fp32",
            "lengths": "*i32",
            "table": table,
            "strides": (THREE,) * 4,
            "sequence_bounds": ("*i32",) * 2 if paged else "constexpr",
            "table_shape": ("i32", "i32"),
            "sizes": ("i32",) * 7,
            "factors": SCORE,
            "meta": "constexpr",
        },
        {"meta": meta},
    )
    yield (
        decode.append_kernel,
        {
            **dict.fromkeys(("k_cache", "v_cache", "k", "v"), cell),
            "lengths": "*i32",
            "table": table,
            "strides": (FOUR,) * 4,
            "table_shape": ("i32", "i32"),
            "sizes": ("i32",) * 3,
            **dict.fromkeys(("D", "BLOCK_D", "DV", "BLOCK_DV"), "constexpr"),
        },
        {"D": 96, "BLOCK_D": 128, "DV": 64, "BLOCK_DV": 64},
    )
    yield (
        forward.combine_kernel,
        {
            "parts": "*fp32",
            "part_lse": "*fp32",
            "out": cell,
            "lse": "*fp32",
            "strides": THREE,
            "sizes": ("i32",) * 5,
            **dict.fromkeys(("D", "BLOCK_D", "BLOCK_M", "SPLITS"), "constexpr"),
        },
        {"D": 96, "BLOCK_D": 128, "BLOCK_M": 4, "SPLITS": 16},
    )
    # The Gluon kernels read the scaled log-sum-exp, and the Triton kernels scale it themselves.
    scaled = "constexpr" if paged else "*fp32"
    yield (
        row_sums.delta_kernel,
        {
            **dict.fromkeys(("out", "grad_out"), cell),
            "grad_lse": "*fp32",
            "lse": scaled,
            "delta": "*fp32",
            "scaled": scaled,
            "strides": (THREE,) * 2,
            "sizes": ("i32",) * 4,
            **dict.fromkeys(("D", "BLOCK_D", "BLOCK_M"), "constexpr"),
        },
        {"D": 96, "BLOCK_D": 128, "BLOCK_M": 32},
    )


def compile_every(is_exhaustive):
    """Compile every kernel for a contiguous cache, whose sizes are all 1, and for a paged one.

    Each cache is compiled for one architecture, or for both if `is_exhaustive` is True.  Yields
    the architecture and the name of each kernel.
    """
    for arch in (80, 90):
        for paged, kind in ((False, "bf16"), (True, "fp32")):
            if paged == (arch == 90) and not is_exhaustive:
                continue
            # Products without matrix units take long to compile for a large head dim.
            dim = 32 if kind == "fp32" and not is_exhaustive else 128
            for kernel, signature, values in iter_jobs(paged, kind, dim):
                names = kernel.arg_names
                constants = {(names.index(name),): value for name, value in values.items()}
                for name in names:
                    if signature[name] == "constexpr" and name not in values:
                        constants[names.index(name),] = None
                if not paged:
                    bundles = {"sizes", "table_shape"} & set(names)
                    for name in bundles:
                        for at in range(len(signature[name])):
                            constants[names.index(name), at] = 1
                ordered = {name: signature[name] for name in names}
                triton.compile(
                    ASTSource(kernel, ordered, constants),
                    target=GPUTarget("cuda", arch, 32),
                    options={"num_warps": 4, "num_stages": 4},
                )
                yield arch, kernel.__name__
