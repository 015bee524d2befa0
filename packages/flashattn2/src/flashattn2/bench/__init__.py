"""Measurements: `flash` (batch 1), `train` (a full GPU), `decode`, `naive_memory` (its limits).

Notable: one formula for the work, 4 · batch · heads · seq² · dim FLOPs forward, half of it if
causal, 2.5 times that backward, whatever an implementation really does.  All implementations of a
shape take turns, and ``ratio_*`` is a row's time by that of ours in the same turn.
"""

import argparse
import datetime
import functools
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn2.attention import flash_attention
from flashattn2.bench import record
from flashattn2.bench.measure import elapsed_ms, held_bytes, memory_bytes, peak_extra_bytes, time_ms
from flashattn2.bench.record import Row
from flashattn2.kvcache import flash_attention_with_kvcache
from flashattn2.reference import attention_reference

Attention = Callable[[Tensor, Tensor, Tensor], Any]
OUT_OF_MEMORY = "out of memory"


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """Rows of every case; the first says on what they were measured."""
    torch.manual_seed(0)
    return [
        machine(device),
        *flash(device, quick),
        *train(device, quick),
        *decode(device, quick),
        *naive_memory(device, quick),
    ]


def machine(device: str) -> Row:
    """What was measured on, and when."""
    name = torch.cuda.get_device_name() if device == "cuda" else record.processor()
    return {
        "case": "machine",
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def flash(device: str, quick: bool) -> Iterator[Row]:
    """Batch 1, one head, causal."""
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
        yield from _compare("flash", (1, 1, seq, dim), dtype, device, quick)


def train(device: str, quick: bool) -> Iterator[Row]:
    """Batch and heads that fill the GPU: 16384 tokens of width 2048."""
    seqs: tuple[int, ...] = (512, 2048, 8192, 16384) if device == "cuda" else (512,)
    dims = (64, 128) if device == "cuda" else (64,)
    for dim, seq in itertools.product(dims[:1] if quick else dims, seqs[:1] if quick else seqs):
        if device == "cuda":
            shape = (max(1, 16384 // seq), 2048 // dim, seq, dim)
            yield from _compare("train", shape, torch.bfloat16, device, quick)
        else:
            yield from _compare("train", (2, 4, seq, dim), torch.float32, device, quick)


def decode(device: str, quick: bool) -> Iterator[Row]:
    """One token: its key and value are written into the caches, and all keys so far attended to.

    SDPA is asked for the same: two copies into the caches, then its call on views of what is filled
    (``enable_gqa`` where heads are grouped).
    """
    shapes = [(1, 8, 8, 100), (1, 32, 8, 2000), (4, 32, 32, 2000)]
    for batch, heads, kv_heads, keys in shapes[:1] if quick else shapes:
        q = torch.randn(batch, heads, 1, 64, device=device)
        k, v = torch.randn(2, batch, kv_heads, 2 * keys, 64, device=device)
        new = torch.randn(batch, kv_heads, 1, 64, device=device)
        runs: dict[str, Callable[[], Any]] = {
            "ours": functools.partial(
                flash_attention_with_kvcache, q, k, v, new, new, cache_seqlens=keys
            ),
            "sdpa": functools.partial(_append_and_attend, q, k, v, new, keys),
        }
        turns = [
            {name: elapsed_ms(run, 10, device) for name, run in runs.items()} for _ in range(31)
        ]
        for name in runs:
            yield {
                "case": "decode", "batch": batch, "heads": heads, "kv_heads": kv_heads,
                "keys": keys, "dim": 64, "impl": name,
                "time_ms": statistics.median(turn[name] for turn in turns) / 10,
                "ratio_p50": statistics.median(turn[name] / turn["ours"] for turn in turns),
            }  # fmt: skip


def _append_and_attend(q: Tensor, k: Tensor, v: Tensor, new: Tensor, keys: int) -> Tensor:
    k[:, :, keys : keys + 1] = new
    v[:, :, keys : keys + 1] = new
    filled = k[:, :, : keys + 1], v[:, :, : keys + 1]
    return F.scaled_dot_product_attention(q, *filled, enable_gqa=q.shape[1] != k.shape[1])


def naive_memory(device: str, quick: bool) -> Iterator[Row]:
    """Attention written out, batch 8, one head: time, and memory held before the backward."""
    dims = (64,) if quick else (16, 32, 64, 128)
    seqs = (256, 512) if quick else (256, 1024, 4096, 8192, 16384)
    passes = 3 if quick or device == "cpu" else 100
    for dim, seq in itertools.product(dims, seqs):
        row: Row = {"case": "naive_memory", "batch": 8, "dim": dim, "seq": seq, "passes": passes}
        # P is what softmax and the product after it both keep; q, k, v and the output besides.
        predicted = 4 * (8 * seq * seq + 4 * 8 * seq * dim)
        row["predicted_mib"] = predicted / 2**20
        # Scores, scaled scores and P stand together for a moment.
        if 3 * 4 * 8 * seq * seq > memory_bytes(device):
            yield {**row, **dict.fromkeys(("held_mib", "forward_ms", "backward_ms"), OUT_OF_MEMORY)}
            continue
        try:
            q, k, v = (torch.randn(8, 1, seq, dim, device=device) for _ in range(3))
            for x in (q, k, v):
                x.requires_grad_()
            forward = functools.partial(naive, q, k, v)
            row["held_mib"] = held_bytes(forward) / 2**20
            row["forward_ms"] = elapsed_ms(forward, passes, device)
            both = elapsed_ms(functools.partial(_forward_and_backward, q, k, v), passes, device)
            row["backward_ms"] = max(0.0, both - float(row["forward_ms"]))
        except torch.OutOfMemoryError:
            row.update(dict.fromkeys(("held_mib", "forward_ms", "backward_ms"), OUT_OF_MEMORY))
        yield row


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as it is written in the textbook."""
    p: Tensor = ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1)
    return p @ v


def _forward_and_backward(q: Tensor, k: Tensor, v: Tensor) -> None:
    torch.autograd.grad(naive(q, k, v).sum(), (q, k, v))


def flops(shape: tuple[int, int, int, int], which: str, is_causal: bool = True) -> float:
    """4 · batch · heads · seq² · dim forward, half if causal; 2.5 times that backward."""
    batch, heads, seq, dim = shape
    forward = 4.0 * batch * heads * seq * seq * dim * (0.5 if is_causal else 1.0)
    return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[which]


@functools.cache
def implementations(device: str, quick: bool, dim: int, dtype: torch.dtype) -> dict[str, Attention]:
    """Causal attention by everyone who can do it here, ours first; compiled ones for this kind."""
    torch._dynamo.reset()

    def sdpa(*backends: SDPBackend) -> Attention:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(list(backends)):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return run

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
        return {**every, "sdpa": sdpa(SDPBackend.FLASH_ATTENTION)}
    return {
        **every,
        "ours atomic": lambda q, k, v: flash_attention(
            q, k, v, is_causal=True, deterministic=False
        ),
        "ours gluon": lambda q, k, v: flash_attention(q, k, v, is_causal=True, backend="gluon"),
        "ours tf32": lambda q, k, v: flash_attention(q, k, v, is_causal=True, precision="tf32"),
        "ours tf32x3": lambda q, k, v: flash_attention(q, k, v, is_causal=True, precision="tf32x3"),
        "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "sdpa efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
        "flex": _flex(),
    }


def _flex() -> Attention:
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


def _takes(name: str, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> bool:
    """Whether it is worth asking: the half-precision kernels, and Python loops over long inputs."""
    if name in ("sdpa flash", "sdpa cudnn"):
        return dtype != torch.float32
    if name == "ours gluon":
        hopper = torch.cuda.get_device_capability() == (9, 0)
        return hopper and dtype != torch.float32 and shape[3] in (64, 128)
    if name in ("ours tf32", "ours tf32x3"):
        return dtype == torch.float32
    return name != "tiled" or shape[2] <= 16384


def _compare(
    case: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, quick: bool
) -> Iterator[Row]:
    """All implementations of one shape, taking turns."""
    q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    batch, heads, seq, dim = shape
    every = implementations(device, quick, dim, dtype)
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    failures: dict[str, str] = {}
    peaks: dict[str, float] = {}
    for name, attention in every.items():
        if not _takes(name, dtype, shape):
            continue
        try:
            runs.update(_passes(name, attention, leaves, grad))
            peaks[name] = peak_extra_bytes(runs[name, "both"], device) / 2**20
        except torch.OutOfMemoryError:
            failures[name] = OUT_OF_MEMORY
        except RuntimeError as error:
            failures[name] = str(error).splitlines()[0][:60]
        for which in ("forward", "backward", "both"):
            if name in failures:
                runs.pop((name, which), None)
    turns: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(3 if quick else 5):
        for key, run in runs.items():
            turns[key].append(time_ms(run, device))
    head: Row = {
        "case": case, "dtype": str(dtype).removeprefix("torch."), "batch": batch, "heads": heads,
        "seq": seq, "dim": dim,
    }  # fmt: skip
    for which, name in itertools.product(("forward", "backward", "both"), every):
        row: Row = {**head, "pass": which, "impl": name}
        if name in failures:
            columns = ("time_ms", "tflops", "ratio_p50", "ratio_p10", "ratio_p90", "peak_mib")
            yield {**row, **dict.fromkeys(columns, failures[name])}
        elif (name, which) in turns:
            times = turns[name, which]
            ratios = sorted(t / o for t, o in zip(times, turns["ours", which], strict=True))
            milliseconds = statistics.median(times)
            yield {
                **row,
                "time_ms": milliseconds,
                "tflops": flops(shape, which) / milliseconds / 1e9,
                "ratio_p50": statistics.median(ratios),
                "ratio_p10": ratios[len(ratios) // 10],
                "ratio_p90": ratios[math.ceil(0.9 * len(ratios)) - 1],
                "peak_mib": peaks[name],
            }


def _passes(
    name: str, attention: Attention, leaves: tuple[Tensor, ...], grad: Tensor
) -> dict[tuple[str, str], Callable[[], Any]]:
    """Forward, backward and both, each once run."""
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
    """Print one table; write the rows as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m flashattn2.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes")
    parser.add_argument("--json", type=Path, help="write the rows, and nothing else, to this file")
    parser.add_argument(
        "--out", type=Path,
        help="write OUT/DATE-cpu or -gpu/flashattn2.json, with the machine, and plots of the rows; "
        "a full run with neither option does so in docs/results, or results where that is not",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    rows = bench(device=arguments.device, quick=arguments.quick)
    print(table(rows))
    out = arguments.out
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    elif out is None and not arguments.quick:
        docs = Path("docs/results")
        out = docs if docs.is_dir() else Path("results")
    if out:
        given = sys.argv[1:] if argv is None else argv
        command = ["python", "-m", "flashattn2.bench", *given]
        for path in record.write(rows, out, command, arguments.device):
            print(path)


def table(rows: list[Row]) -> str:
    """Rows as aligned text, a block for each set of columns."""
    blocks = []
    for columns, group in itertools.groupby(rows, key=tuple):
        cells = [columns, *(tuple(_cell(v) for v in row.values()) for row in group)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
