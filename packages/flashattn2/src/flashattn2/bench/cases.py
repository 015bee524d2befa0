"""The cases: `flash` (batch 1), `train` (a full GPU), `packed` and `decode`.

A forward pass counts as 4 · batch · heads · seq² · dim FLOPs, or half as many if it is causal.  A
backward pass counts as 2.5 times as many FLOPs.
"""

import datetime
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn2.attention import flash_attention, flash_attention_varlen
from flashattn2.bench.measure import (
    measure_graph_ms,
    measure_mean_ms,
    measure_ms,
    measure_peak_extra_bytes,
    read_cpu_name,
)
from flashattn2.bench.rounds import Rate, Row, attempt, measure_rows
from flashattn2.kvcache import flash_attention_with_kvcache
from flashattn2.reference import attention_reference

Attention = Callable[[Tensor, Tensor, Tensor], Any]
DEVICES = ("cpu", "cuda")
PASSES = ("forward", "backward", "both")


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """Return the rows of every case; the first row describes the machine."""
    return list(measure_cases(device, quick, tuple(CASES)))


def measure_cases(device: str, quick: bool, cases: Sequence[str]) -> Iterator[Row]:
    """Yield a row that describes the machine, and then the rows of each case."""
    if device not in DEVICES:
        raise ValueError(
            f"expected device to be one of {', '.join(DEVICES)}, got {device!r}: other devices "
            "would be timed without waiting for their kernels"
        )
    torch.manual_seed(0)
    yield describe_machine(device)
    for case in cases:
        yield from CASES[case](device, quick)


def describe_machine(device: str) -> Row:
    """Return the row that describes the machine and the date."""
    return {
        "case": "machine",
        "device": torch.cuda.get_device_name() if device == "cuda" else read_cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def count_flops(shape: tuple[int, int, int, int], pass_name: str, is_causal: bool = True) -> float:
    """Return the FLOPs of one pass, or of both, by the formula in the module docstring."""
    batch, heads, seq, dim = shape
    forward = 4.0 * batch * heads * seq * seq * dim * (0.5 if is_causal else 1.0)
    return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[pass_name]


def measure_flash(device: str, quick: bool) -> Iterator[Row]:
    """Yield the rows of causal attention with batch 1 and one head."""
    if device == "cuda":
        grid = itertools.product([torch.bfloat16], [64, 128], [128, 1024, 4096, 16384])
    elif quick:
        grid = itertools.product([torch.float32], [64], [128, 512])
    else:
        grid = itertools.product([torch.float32, torch.bfloat16], [16, 64], [128, 1024, 4096])
    for dtype, dim, seq in grid:
        attentions = make_causal_kernels(device, quick)
        yield from compare("flash", attentions, (1, 1, seq, dim), dtype, device, quick)


def measure_train(device: str, quick: bool) -> Iterator[Row]:
    """Yield rows for a full GPU (16384 tokens of width 2048), or for a small batch on a CPU."""
    if device != "cuda":
        attentions = make_causal_kernels(device, quick)
        yield from compare("train", attentions, (2, 4, 512, 64), torch.float32, device, quick)
        return
    seqs = (512,) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    for dim, is_causal, seq in itertools.product(
        (64,) if quick else (64, 128), (True, False), seqs
    ):
        shape = (max(1, 16384 // seq), 2048 // dim, seq, dim)
        attentions = make_fused_kernels(is_causal)
        yield from compare("train", attentions, shape, torch.bfloat16, device, quick, is_causal)


@functools.cache
def make_causal_kernels(device: str, quick: bool) -> dict[str, Attention]:
    """Return the available implementations of causal attention, ours first."""
    plain = functools.partial(attention_reference, is_causal=True)
    attentions: dict[str, Attention] = {
        "ours": functools.partial(flash_attention, is_causal=True),
        "tiled": functools.partial(flash_attention, is_causal=True, backend="torch"),
        "plain": plain,
    }
    if not quick:
        attentions["compiled"] = torch.compile(plain)
    if device == "cpu":
        return {**attentions, "sdpa": restrict_torch_sdpa(True, SDPBackend.FLASH_ATTENTION)}
    return {**attentions, **make_fused_kernels(True)}


def make_fused_kernels(is_causal: bool) -> dict[str, Attention]:
    """Return the GPU kernels for training in half precision, ours first."""
    ours = functools.partial(flash_attention, is_causal=is_causal)
    return {
        "ours": ours,
        "ours atomic": functools.partial(ours, deterministic=False),
        "ours triton": functools.partial(ours, backend="triton"),
        "sdpa flash": restrict_torch_sdpa(is_causal, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": restrict_torch_sdpa(is_causal, SDPBackend.CUDNN_ATTENTION),
    }


def restrict_torch_sdpa(is_causal: bool, backend: SDPBackend) -> Attention:
    """Return torch's attention, restricted to one backend."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return run


def compare(
    case: str,
    attentions: dict[str, Attention],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    quick: bool,
    is_causal: bool = True,
) -> Iterator[Row]:
    """Yield the rows of all implementations for one shape, with the peak memory of both passes."""
    batch, heads, seq, dim = shape
    q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    labels: Row = {
        "case": case,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": batch,
        "heads": heads,
        "seq": seq,
        "dim": dim,
        "causal": str(is_causal).lower(),
    }
    prepared, failures = prepare_passes(attentions, (q, k, v), grad)
    both = {name: runs["both"] for name, runs in prepared.items()}
    peaks = {name: measure_peak_extra_bytes(run, device) / 2**20 for name, run in both.items()}
    # On a GPU, each time is already a median of many runs.
    rounds = 3 if quick or device == "cuda" else 5
    for pass_name in PASSES:
        rate = Rate("tflops", count_flops(shape, pass_name, is_causal) / 1e9)
        runs = {name: passes[pass_name] for name, passes in prepared.items()}
        timer = functools.partial(measure_ms, device=device)
        for row in measure_rows({**labels, "pass": pass_name}, runs, failures, rate, rounds, timer):
            yield {**row, "peak_mib": peaks.get(str(row["impl"]), row["time_ms"])}


def prepare_passes(
    attentions: dict[str, Attention], inputs: tuple[Tensor, ...], grad: Tensor
) -> tuple[dict[str, dict[str, Callable[[], Any]]], dict[str, str]]:
    """Run each pass of each implementation once; return the passes, and the reasons of failures."""
    leaves = tuple(x.requires_grad_() for x in inputs)

    def prepare(attention: Attention) -> dict[str, Callable[[], Any]]:
        out = attention(*leaves)

        def forward() -> Any:
            with torch.no_grad():
                return attention(*leaves)

        passes: dict[str, Callable[[], Any]] = {
            "forward": forward,
            "backward": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
            "both": lambda: torch.autograd.grad(attention(*leaves), leaves, grad),
        }
        for run in passes.values():
            run()
        return passes

    return attempt({name: functools.partial(prepare, f) for name, f in attentions.items()})


def measure_packed(device: str, quick: bool) -> Iterator[Row]:
    """Yield rows for causal attention of 16384 packed tokens, and for torch's `varlen_attn`.

    As in a batch of documents, many sequences are short and a few are long.  On a CPU there are no
    rows, because torch has no `varlen_attn` there.
    """
    if device != "cuda":
        return
    from torch.nn.attention.varlen import varlen_attn

    lengths = [*(16 * [128]), *(8 * [512]), *(3 * [2048]), 4096]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    tokens, longest = sum(lengths), max(lengths)
    attentions: dict[str, Attention] = {
        "ours": lambda q, k, v: flash_attention_varlen(q, k, v, cu, cu, is_causal=True),
        "varlen_attn": lambda q, k, v: varlen_attn(
            q, k, v, cu, cu, longest, longest, window_size=(-1, 0)
        ),
    }
    for dim in (64,) if quick else (64, 128):
        heads = 2048 // dim
        q, k, v, grad = (
            torch.randn(tokens, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(4)
        )
        prepared, failures = prepare_passes(attentions, (q, k, v), grad)
        for pass_name in PASSES:
            work = sum(count_flops((1, heads, n, dim), pass_name) for n in lengths)
            labels: Row = {"case": "packed", "dim": dim, "pass": pass_name}
            runs = {name: passes[pass_name] for name, passes in prepared.items()}
            timer = functools.partial(measure_ms, device=device)
            yield from measure_rows(labels, runs, failures, Rate("tflops", work / 1e9), 3, timer)


def measure_decode(device: str, quick: bool) -> Iterator[Row]:
    """Yield rows for one decoded token: append its key and value, then attend to all keys.

    SDPA does the same work: two copies into the caches, and a call on views of the filled part with
    `enable_gqa` for grouped heads.  `gbps` is the size of the keys and values, each read once,
    divided by the time.  On a GPU, further rows have the time of a replayed CUDA graph, which does
    not depend on Python.
    """
    shapes = [(1, 8, 8, 100), (1, 32, 8, 2000), (4, 32, 32, 2000)]
    dtype, dim = torch.float32, 64
    if device == "cuda":
        shapes = [(16, 32, 8, 8192), (1, 32, 8, 65536), (64, 32, 32, 2048)]
        dtype, dim = torch.bfloat16, 128
    for batch, heads, kv_heads, keys in shapes[:1] if quick else shapes:
        q = torch.randn(batch, heads, 1, dim, device=device, dtype=dtype)
        k, v = torch.randn(2, batch, kv_heads, keys + 16, dim, device=device, dtype=dtype)
        new = torch.randn(batch, kv_heads, 1, dim, device=device, dtype=dtype)
        runs: dict[str, Callable[[], Any]] = {
            "ours": functools.partial(
                flash_attention_with_kvcache, q, k, v, new, new, cache_seqlens=keys
            ),
            "sdpa": functools.partial(_append_and_attend, q, k, v, new, keys),
        }
        results, failures = attempt(runs)
        runs = {name: runs[name] for name in results}
        labels: Row = {
            "case": "decode",
            "dtype": str(dtype).removeprefix("torch."),
            "batch": batch,
            "heads": heads,
            "kv_heads": kv_heads,
            "keys": keys,
            "dim": dim,
        }
        rate = Rate("gbps", 2 * batch * kv_heads * (keys + 1) * dim * dtype.itemsize / 1e6)
        if device == "cpu":
            # One run on a CPU is too short to be timed.
            timer = functools.partial(measure_mean_ms, passes=10)
            yield from measure_rows(labels, runs, failures, rate, 31, timer)
            continue
        timer = functools.partial(measure_ms, device=device)
        yield from measure_rows(labels, runs, failures, rate, 9, timer)
        for row in measure_rows(labels, runs, {}, rate, 3, measure_graph_ms):
            yield {**row, "impl": f"{row['impl']}, CUDA graph"}


def _append_and_attend(q: Tensor, k: Tensor, v: Tensor, new: Tensor, keys: int) -> Tensor:
    """Append one key and value to the caches and call SDPA."""
    k[:, :, keys : keys + 1] = new
    v[:, :, keys : keys + 1] = new
    filled = k[:, :, : keys + 1], v[:, :, : keys + 1]
    return F.scaled_dot_product_attention(q, *filled, enable_gqa=q.shape[1] != k.shape[1])


#: The function of each case.
CASES = {
    "flash": measure_flash,
    "train": measure_train,
    "packed": measure_packed,
    "decode": measure_decode,
}
