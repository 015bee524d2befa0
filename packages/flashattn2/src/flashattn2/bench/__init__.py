"""Measurements: `flash` (batch 1), `train` (a full GPU), `packed`, `decode` and `naive_memory`.

The FLOPs of every implementation are 4 · batch · heads · seq² · dim forward, half of that if
causal, and 2.5 times that backward.  All implementations of a shape run interleaved, and `ratio_*`
is a row's time divided by the time of ours in the same round.
"""

import argparse
import datetime
import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn2.attention import flash_attention, flash_attention_varlen
from flashattn2.bench.measure import (
    elapsed_ms,
    memory_bytes,
    peak_extra_bytes,
    processor,
    saved_bytes,
    time_ms,
)
from flashattn2.kvcache import flash_attention_with_kvcache
from flashattn2.reference import attention_reference

Row = dict[str, float | int | str]
Attention = Callable[[Tensor, Tensor, Tensor], Any]
#: A function to time for each implementation and pass.
Runs = dict[tuple[str, str], Callable[[], Any]]
PASSES = ("forward", "backward", "both")
OUT_OF_MEMORY = "out of memory"
CASES = ("flash", "train", "packed", "decode", "naive_memory")


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """Return the rows of every case; the first row describes the machine."""
    return list(measured_rows(device, quick, CASES))


def measured_rows(device: str, quick: bool, cases: Sequence[str]) -> Iterator[Row]:
    """Yield the row of the machine and those of the cases."""
    torch.manual_seed(0)
    run = {
        "flash": flash,
        "train": train,
        "packed": packed,
        "decode": decode,
        "naive_memory": naive_memory,
    }
    yield machine(device)
    for case in cases:
        yield from run[case](device, quick)


def machine(device: str) -> Row:
    """Return the row that describes the machine and the date."""
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    return {
        "case": "machine",
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def flash(device: str, quick: bool) -> Iterator[Row]:
    """Yield rows for batch 1, one head, causal."""
    if device == "cuda":
        seqs = [2**n for n in range(7, 17)]
        grid = itertools.product((torch.bfloat16, torch.float32), (16, 32, 64, 128), seqs)
    elif quick:
        grid = itertools.product((torch.float32,), (64,), (128, 512))
    else:
        grid = itertools.product((torch.float32, torch.bfloat16), (16, 64), (128, 1024, 4096))
    for dtype, dim, seq in grid:
        if quick and device == "cuda" and (dim, seq) not in ((64, 1024), (128, 8192)):
            continue
        every = implementations(device, quick, dim, dtype)
        yield from _compare("flash", every, (1, 1, seq, dim), dtype, device, quick)


def train(device: str, quick: bool) -> Iterator[Row]:
    """Yield rows for a batch and heads that fill the GPU: 16384 tokens of width 2048."""
    if device != "cuda":
        every = implementations(device, quick, 64, torch.float32)
        yield from _compare("train", every, (2, 4, 512, 64), torch.float32, device, quick)
        return
    seqs = (512,) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    for dim, is_causal, seq in itertools.product(
        (64,) if quick else (64, 128), (True, False), seqs
    ):
        shape = (max(1, 16384 // seq), 2048 // dim, seq, dim)
        every = fused_kernels(is_causal)
        yield from _compare("train", every, shape, torch.bfloat16, device, quick, is_causal)


def packed(device: str, quick: bool) -> Iterator[Row]:
    """Yield rows for causal attention of 16384 packed tokens, beside torch's `varlen_attn`.

    The lengths are those of documents: many short ones and a few long ones.  There are
    no rows for a CPU, on which torch lacks this function.
    """
    if device != "cuda":
        return
    from torch.nn.attention.varlen import varlen_attn

    lengths = [*(16 * [128]), *(8 * [512]), *(3 * [2048]), 4096]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    tokens, longest = sum(lengths), max(lengths)
    for dim in (64,) if quick else (64, 128):
        every: dict[str, Attention] = {
            "ours": lambda q, k, v: flash_attention_varlen(q, k, v, cu, cu, is_causal=True),
            "varlen_attn": lambda q, k, v: varlen_attn(
                q, k, v, cu, cu, longest, longest, window_size=(-1, 0)
            ),
        }
        q, k, v, grad = (
            torch.randn(tokens, 2048 // dim, dim, device=device, dtype=torch.bfloat16)
            for _ in range(4)
        )
        leaves = tuple(x.requires_grad_() for x in (q, k, v))
        runs = {
            key: run
            for name, attention in every.items()
            for key, run in _passes(name, attention, leaves, grad).items()
        }
        times = _interleave(runs, 3, device)
        for which, name in itertools.product(PASSES, every):
            head: Row = {"case": "packed", "dim": dim, "pass": which, "impl": name}
            work = sum(flops((1, 2048 // dim, n, dim), which) for n in lengths)
            yield _row(head, work, times[name, which], times["ours", which])


def decode(device: str, quick: bool) -> Iterator[Row]:
    """Yield rows for one decoded token: append its key and value, then attend to all keys.

    SDPA does the same work: two copies into the caches, and a call on views of the filled part with
    `enable_gqa` for grouped heads.  `gbps` is the size of the keys and values, each read once,
    divided by the time.
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
        if device == "cuda":
            times = _interleave(runs, 9, device)
        else:
            rounds = [
                {n: elapsed_ms(r, 10, device) / 10 for n, r in runs.items()} for _ in range(31)
            ]
            times = {name: [round[name] for round in rounds] for name in runs}
        size = 2 * batch * kv_heads * (keys + 1) * dim * dtype.itemsize
        for name in runs:
            ratios = [t / ours for t, ours in zip(times[name], times["ours"], strict=True)]
            milliseconds = statistics.median(times[name])
            yield {
                "case": "decode",
                "dtype": str(dtype).removeprefix("torch."),
                "batch": batch,
                "heads": heads,
                "kv_heads": kv_heads,
                "keys": keys,
                "dim": dim,
                "impl": name,
                "time_ms": milliseconds,
                "gbps": size / milliseconds / 1e6,
                "ratio_p50": statistics.median(ratios),
            }


def _append_and_attend(q: Tensor, k: Tensor, v: Tensor, new: Tensor, keys: int) -> Tensor:
    """Append one key and value to the caches and call SDPA."""
    k[:, :, keys : keys + 1] = new
    v[:, :, keys : keys + 1] = new
    filled = k[:, :, : keys + 1], v[:, :, : keys + 1]
    return F.scaled_dot_product_attention(q, *filled, enable_gqa=q.shape[1] != k.shape[1])


def naive_memory(device: str, quick: bool) -> Iterator[Row]:
    """Yield time and saved memory of attention by its definition, for batch 8 and one head."""
    dims = (64,) if quick else (16, 32, 64, 128)
    seqs = (256, 512) if quick else (256, 1024, 4096, 8192, 16384)
    passes = 3 if quick or device == "cpu" else 100
    for dim, seq in itertools.product(dims, seqs):
        row: Row = {"case": "naive_memory", "batch": 8, "dim": dim, "seq": seq, "passes": passes}
        # Autograd saves P, once for softmax and the product after it, and q, k, v and the output.
        predicted = 4 * (8 * seq * seq + 4 * 8 * seq * dim)
        row["predicted_mib"] = predicted / 2**20
        # Scores, scaled scores and P are allocated at the same time.
        if 3 * 4 * 8 * seq * seq > memory_bytes(device):
            yield {**row, **dict.fromkeys(("held_mib", "forward_ms", "backward_ms"), OUT_OF_MEMORY)}
            continue
        try:
            q, k, v = (torch.randn(8, 1, seq, dim, device=device) for _ in range(3))
            for x in (q, k, v):
                x.requires_grad_()
            forward = functools.partial(naive, q, k, v)
            row["held_mib"] = saved_bytes(forward) / 2**20
            row["forward_ms"] = elapsed_ms(forward, passes, device)
            both = elapsed_ms(functools.partial(_forward_and_backward, q, k, v), passes, device)
            row["backward_ms"] = max(0.0, both - float(row["forward_ms"]))
        except torch.OutOfMemoryError:
            row.update(dict.fromkeys(("held_mib", "forward_ms", "backward_ms"), OUT_OF_MEMORY))
        yield row


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention from its definition."""
    p: Tensor = ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1)
    return p @ v


def _forward_and_backward(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Run one forward and backward pass of `naive`."""
    torch.autograd.grad(naive(q, k, v).sum(), (q, k, v))


def flops(shape: tuple[int, int, int, int], which: str, is_causal: bool = True) -> float:
    """Return the FLOPs of one pass by the formula in the module docstring."""
    batch, heads, seq, dim = shape
    forward = 4.0 * batch * heads * seq * seq * dim * (0.5 if is_causal else 1.0)
    return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[which]


def sdpa(is_causal: bool, backend: SDPBackend) -> Attention:
    """Return torch's attention by one of its kernels."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return run


@functools.cache
def implementations(device: str, quick: bool, dim: int, dtype: torch.dtype) -> dict[str, Attention]:
    """Return the available implementations of causal attention, ours first."""
    torch._dynamo.reset()

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention_reference(q, k, v, is_causal=True)

    every: dict[str, Attention] = {
        "ours": lambda q, k, v: flash_attention(q, k, v, is_causal=True),
        "tiled": lambda q, k, v: flash_attention(q, k, v, is_causal=True, backend="torch"),
        "plain": plain,
    }
    if not quick:
        every["compiled"] = torch.compile(plain)
    if device == "cpu":
        return {**every, "sdpa": sdpa(True, SDPBackend.FLASH_ATTENTION)}
    return {
        **every,
        "ours atomic": lambda q, k, v: flash_attention(
            q, k, v, is_causal=True, deterministic=False
        ),
        "ours gluon": lambda q, k, v: flash_attention(q, k, v, is_causal=True, backend="gluon"),
        "ours tf32": lambda q, k, v: flash_attention(q, k, v, is_causal=True, precision="tf32"),
        "ours tf32x3": lambda q, k, v: flash_attention(q, k, v, is_causal=True, precision="tf32x3"),
        "sdpa flash": sdpa(True, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": sdpa(True, SDPBackend.CUDNN_ATTENTION),
        "sdpa efficient": sdpa(True, SDPBackend.EFFICIENT_ATTENTION),
        "flex": _flex(),
    }


def fused_kernels(is_causal: bool) -> dict[str, Attention]:
    """Return the kernels of a GPU for training in half precision, ours first."""
    ours = functools.partial(flash_attention, is_causal=is_causal)
    return {
        "ours": ours,
        "ours atomic": functools.partial(ours, deterministic=False),
        "ours triton": functools.partial(ours, backend="triton"),
        "sdpa flash": sdpa(is_causal, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": sdpa(is_causal, SDPBackend.CUDNN_ATTENTION),
    }


def _flex() -> Attention:
    """Return compiled FlexAttention with one cached block mask per sequence length."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention)
    masks: dict[int, Any] = {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        seq = q.shape[2]
        if seq not in masks:
            masks[seq] = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, seq, seq, device=str(q.device)
            )
        return compiled(q, k, v, block_mask=masks[seq])

    return run


def _is_supported(name: str, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> bool:
    """Return True if the implementation supports the input in reasonable time."""
    if name in ("sdpa flash", "sdpa cudnn"):
        return dtype != torch.float32
    if name == "ours gluon":
        hopper = torch.cuda.get_device_capability() == (9, 0)
        return hopper and dtype != torch.float32 and shape[3] in (64, 128)
    if name in ("ours tf32", "ours tf32x3"):
        return dtype == torch.float32
    return name != "tiled" or shape[2] <= 16384


def _compare(
    case: str,
    every: dict[str, Attention],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    quick: bool,
    is_causal: bool = True,
) -> Iterator[Row]:
    """Yield the rows of all implementations of one shape, timed in interleaved rounds."""
    batch, heads, seq, dim = shape
    runs, failures, peaks = _prepare_runs(every, shape, dtype, device)
    # On a GPU, each time is already a median of many.
    times = _interleave(runs, 3 if quick or device == "cuda" else 5, device)
    for which, name in itertools.product(PASSES, every):
        head: Row = {
            "case": case,
            "dtype": str(dtype).removeprefix("torch."),
            "batch": batch,
            "heads": heads,
            "seq": seq,
            "dim": dim,
            "causal": str(is_causal).lower(),
            "pass": which,
            "impl": name,
        }
        if name in failures:
            columns = ("time_ms", "tflops", "ratio_p50", "ratio_p10", "ratio_p90", "peak_mib")
            yield {**head, **dict.fromkeys(columns, failures[name])}
        elif (name, which) in times:
            work = flops(shape, which, is_causal)
            row = _row(head, work, times[name, which], times["ours", which])
            yield {**row, "peak_mib": peaks[name]}


def _interleave(runs: Runs | dict[str, Callable[[], Any]], rounds: int, device: str) -> Any:
    """Return the times in milliseconds of each run, one per round."""
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            times[key].append(time_ms(run, device))
    return times


def _row(head: Row, work: float, times: list[float], reference_times: list[float]) -> Row:
    """Return the row of one implementation and pass, which takes `work` FLOPs."""
    ratios = sorted(t / r for t, r in zip(times, reference_times, strict=True))
    milliseconds = statistics.median(times)
    return {
        **head,
        "time_ms": milliseconds,
        "tflops": work / milliseconds / 1e9,
        "ratio_p50": statistics.median(ratios),
        "ratio_p10": ratios[len(ratios) // 10],
        "ratio_p90": ratios[math.ceil(0.9 * len(ratios)) - 1],
    }


def _prepare_runs(
    every: dict[str, Attention],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
) -> tuple[Runs, dict[str, str], dict[str, float]]:
    """Return the runs of each implementation, the failures and the peak memory in MiB."""
    q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    runs: Runs = {}
    failures: dict[str, str] = {}
    peaks: dict[str, float] = {}
    for name, attention in every.items():
        if not _is_supported(name, dtype, shape):
            continue
        try:
            runs.update(_passes(name, attention, leaves, grad))
            peaks[name] = peak_extra_bytes(runs[name, "both"], device) / 2**20
        except torch.OutOfMemoryError:
            failures[name] = OUT_OF_MEMORY
        except RuntimeError as error:
            failures[name] = str(error).splitlines()[0][:60]
        if name in failures:
            for which in PASSES:
                runs.pop((name, which), None)
    return runs, failures, peaks


def _passes(
    name: str, attention: Attention, leaves: tuple[Tensor, ...], grad: Tensor
) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return the forward pass, the backward pass and both, after one run of each."""
    out = attention(*leaves)
    torch.autograd.grad(out, leaves, grad, retain_graph=True)

    def forward() -> Any:
        with torch.no_grad():
            return attention(*leaves)

    forward()
    return {
        (name, "forward"): forward,
        (name, "backward"): lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
        (name, "both"): lambda: torch.autograd.grad(attention(*leaves), leaves, grad),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table and write the rows as JSON if requested."""
    parser = argparse.ArgumentParser(prog="python -m flashattn2.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--json", type=Path, help="write the rows, and nothing else, to this file")
    arguments = parser.parse_args(argv)
    rows = []
    for row in measured_rows(arguments.device, arguments.quick, arguments.cases):
        rows.append(row)
        if arguments.json:
            # After every row, so that a run that is ended leaves what it measured.
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def table(rows: list[Row]) -> str:
    """Return the rows as aligned text, with one block per set of columns."""
    blocks = []
    for columns, group in itertools.groupby(rows, key=tuple):
        cells = [columns, *(tuple(_cell(v) for v in row.values()) for row in group)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(value: float | int | str) -> str:
    """Return one cell of the table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
