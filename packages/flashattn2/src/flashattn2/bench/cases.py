"""The cases: `flash` (batch 1), `train` (a full GPU), `packed`, `decode` and `naive_memory`."""

import datetime
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashattn2.attention import flash_attention_varlen
from flashattn2.bench.implementations import Attention, causal, fused_kernels, naive
from flashattn2.bench.measure import elapsed_ms, graph_ms, processor, saved_bytes
from flashattn2.bench.rounds import (
    FAILURES,
    OURS_FAILED,
    OUT_OF_MEMORY,
    PASSES,
    Row,
    compare,
    describe_failure,
    flops,
    interleave,
    make_failed_row,
    make_row,
    prepare_runs,
)
from flashattn2.kvcache import flash_attention_with_kvcache

DEVICES = ("cpu", "cuda")
CASES = ("flash", "train", "packed", "decode", "naive_memory")


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """Return the rows of every case; the first row describes the machine."""
    return list(measured_rows(device, quick, CASES))


def measured_rows(device: str, quick: bool, cases: Sequence[str]) -> Iterator[Row]:
    """Yield the row of the machine and those of the cases."""
    if device not in DEVICES:
        raise ValueError(
            f"expected device to be one of {', '.join(DEVICES)}, got {device!r}: other devices "
            "would be timed without waiting for their kernels"
        )
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
        grid = itertools.product([torch.bfloat16], [64, 128], [128, 1024, 4096, 16384])
    elif quick:
        grid = itertools.product([torch.float32], [64], [128, 512])
    else:
        grid = itertools.product([torch.float32, torch.bfloat16], [16, 64], [128, 1024, 4096])
    for dtype, dim, seq in grid:
        every = causal(device, quick)
        yield from compare("flash", every, (1, 1, seq, dim), dtype, device, quick)


def train(device: str, quick: bool) -> Iterator[Row]:
    """Yield rows for a batch and heads that fill the GPU: 16384 tokens of width 2048."""
    if device != "cuda":
        every = causal(device, quick)
        yield from compare("train", every, (2, 4, 512, 64), torch.float32, device, quick)
        return
    seqs = (512,) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    for dim, is_causal, seq in itertools.product(
        (64,) if quick else (64, 128), (True, False), seqs
    ):
        shape = (max(1, 16384 // seq), 2048 // dim, seq, dim)
        every = fused_kernels(is_causal)
        yield from compare("train", every, shape, torch.bfloat16, device, quick, is_causal)


def packed(device: str, quick: bool) -> Iterator[Row]:
    """Yield rows for causal attention of 16384 packed tokens, and for torch's `varlen_attn`.

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
        runs, failures, _ = prepare_runs(every, leaves, grad, device)
        times = interleave(runs, 3, device)
        for which, name in itertools.product(PASSES, every):
            head: Row = {"case": "packed", "dim": dim, "pass": which, "impl": name}
            work = sum(flops((1, 2048 // dim, n, dim), which) for n in lengths)
            if name in failures:
                yield make_failed_row(head, failures[name])
            else:
                yield make_row(head, work, times[name, which], times.get(("ours", which)))


def decode(device: str, quick: bool) -> Iterator[Row]:
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
        failures = _remove_failing(runs)
        if device == "cuda":
            times = interleave(runs, 9, device)
        else:
            rounds = [
                {n: elapsed_ms(r, 10, device) / 10 for n, r in runs.items()} for _ in range(31)
            ]
            times = {name: [round[name] for round in rounds] for name in runs}
        graph_times = {}
        if device == "cuda":
            graph_times = {name: [graph_ms(run) for _ in range(3)] for name, run in runs.items()}
        size = 2 * batch * kv_heads * (keys + 1) * dim * dtype.itemsize
        head: Row = {
            "case": "decode",
            "dtype": str(dtype).removeprefix("torch."),
            "batch": batch,
            "heads": heads,
            "kv_heads": kv_heads,
            "keys": keys,
            "dim": dim,
        }
        for name, reason in failures.items():
            columns = dict.fromkeys(("time_ms", "gbps", "ratio_p50"), reason)
            yield {**head, "impl": name, **columns}
        for group, suffix in ((times, ""), (graph_times, ", CUDA graph")):
            for name, values in group.items():
                milliseconds = statistics.median(values)
                yield {
                    **head,
                    "impl": name + suffix,
                    "time_ms": milliseconds,
                    "gbps": size / milliseconds / 1e6,
                    "ratio_p50": _median_ratio(values, group.get("ours")),
                }


def _remove_failing(runs: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Call each run once; remove those that fail and return their reasons."""
    failures = {}
    for name, run in runs.items():
        try:
            run()
        except FAILURES as error:
            failures[name] = describe_failure(error)
    for name in failures:
        del runs[name]
    return failures


def _median_ratio(times: list[float], reference_times: list[float] | None) -> float | str:
    """Return the median of the times divided by those of ours."""
    if reference_times is None:
        return OURS_FAILED
    return statistics.median(t / r for t, r in zip(times, reference_times, strict=True))


def _append_and_attend(q: Tensor, k: Tensor, v: Tensor, new: Tensor, keys: int) -> Tensor:
    """Append one key and value to the caches and call SDPA."""
    k[:, :, keys : keys + 1] = new
    v[:, :, keys : keys + 1] = new
    filled = k[:, :, : keys + 1], v[:, :, : keys + 1]
    return F.scaled_dot_product_attention(q, *filled, enable_gqa=q.shape[1] != k.shape[1])


def naive_memory(device: str, quick: bool) -> Iterator[Row]:
    """Yield time and saved memory of attention by its definition, for batch 8 and one head."""
    dims = (64,) if quick else (16, 32, 64, 128)
    seqs = [256, 512] if quick else [256, 1024, 4096, 8192, 16384]
    # Without a GPU, the scores of more tokens may not fit into the machine's memory.
    seqs = [seq for seq in seqs if device == "cuda" or seq <= 4096]
    repeats = 3 if quick or device == "cpu" else 100
    for dim, seq in itertools.product(dims, seqs):
        row: Row = {"case": "naive_memory", "batch": 8, "dim": dim, "seq": seq, "passes": repeats}
        # Autograd saves q, k, v, the output, and P, which softmax and the next product share.
        predicted = 4 * (8 * seq * seq + 4 * 8 * seq * dim)
        row["predicted_mib"] = predicted / 2**20
        try:
            q, k, v = (torch.randn(8, 1, seq, dim, device=device) for _ in range(3))
            for x in (q, k, v):
                x.requires_grad_()
            forward = functools.partial(naive, q, k, v)
            row["held_mib"] = saved_bytes(forward) / 2**20
            row["forward_ms"] = elapsed_ms(forward, repeats, device)
            both = elapsed_ms(functools.partial(_forward_and_backward, q, k, v), repeats, device)
            row["backward_ms"] = max(0.0, both - float(row["forward_ms"]))
        except torch.OutOfMemoryError:
            row.update(dict.fromkeys(("held_mib", "forward_ms", "backward_ms"), OUT_OF_MEMORY))
        yield row


def _forward_and_backward(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Run one forward and backward pass of `naive`."""
    torch.autograd.grad(naive(q, k, v).sum(), (q, k, v))
