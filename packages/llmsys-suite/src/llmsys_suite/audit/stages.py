"""Checks of the stages that time and count, each by a second method, and the table of all stages.

Every rank calls these functions, because some use collectives; the checks that rank 0 yields
count. `plan` and `train` are checked in `training.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import accounting
import collectives
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from llmsys_suite import splits
from llmsys_suite.audit import learning, models, peers, reference
from llmsys_suite.audit.again import SUMS, clock_checks, on_device, ratio_checks, seeded, weights_of
from llmsys_suite.audit.check import Check, equal, none, worst_distance, worst_equal
from llmsys_suite.audit.rounding import allowed
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.training import GRADIENT, LOSS, REPLAYED_LOSS, WEIGHT_CHANGE
from llmsys_suite.config import SIZES
from llmsys_suite.ranks.rank import Run
from llmsys_suite.splits.split import TRAINED
from llmsys_suite.stages import attention as attention_stage
from llmsys_suite.stages import memory as memory_stage
from llmsys_suite.stages import results
from llmsys_suite.step.case import PHASES

MIB = 2**20
#: Largest honest error of attention in float32, 1e-6 for its gradients, times five.
ATTENTION = 5e-6
#: Honest error of a forward pass with bfloat16 products, 1e-3, times ten.
BFLOAT16_LOSS = 1e-2
#: Allowed difference between two methods of counting live bytes.
PEAK_BYTES = 0.10


def links(run: Run, result: results.Links) -> Iterator[Check]:
    """Compare sums with float64, columns with their formulas, and bytes with the kernel's count."""
    rows = run.gather(None if isinstance(result, results.Skipped) else result.rows)[0]
    if rows is None:
        return
    off = []
    for algorithm in dict.fromkeys(r["algorithm"] for r in rows if r["case"] == "all_reduce"):
        for size in dict.fromkeys(r["size_bytes"] for r in rows):
            where = f"{algorithm}, {size} bytes"
            off.append((_all_reduce_error(run, algorithm, size // 4), where))
    worst = run.gather(off)
    if run.rank:
        return
    yield worst_distance(
        "all-reduce",
        "every algorithm, every rank",
        "float64",
        [pair for pairs in worst for pair in pairs],
        SUMS,
    )
    yield none(
        "elements in error",
        "the bench's own count",
        "none",
        [f"{r['case']} {r['algorithm']}" for r in rows if r["wrong"]],
    )
    pairs = []
    for r in rows:
        factor = (2 if r["case"] == "all_reduce" else 1) * (run.world - 1) / run.world
        moved = factor * r["size_bytes"] / (r["time_us"] * 1e3)
        pairs.append((moved, r["busbw_gbps"], f"{r['case']} {r['algorithm']}, {r['size_bytes']}"))
    yield worst_equal("bus bandwidth", "bench", "bytes over time", pairs, 1e-6)
    if run.config.backend == "gloo":
        plan = [
            (2 * (run.world - 1) / run.world * r["size_bytes"], r["wire_bytes"], r["algorithm"])
            for r in rows
            if r["case"] == "all_reduce" and r["algorithm"] == "gloo" and r["size_bytes"] >= 2**20
        ]
        yield worst_equal(
            "wire bytes of gloo's all-reduce", "the kernel's sockets", "2 (n-1)/n", plan, 0.02
        )


def _all_reduce_error(run: Run, algorithm: str, count: int) -> float:
    def brought(rank: int) -> np.ndarray:
        return np.random.default_rng(1000 + rank).standard_normal(count)

    if algorithm == "shared_empty":
        tensor = collectives.shared_empty(count)
    else:
        tensor = torch.empty(count, device=run.device)
    tensor.copy_(torch.from_numpy(brought(run.rank)))
    if algorithm in ("gloo", "nccl"):
        dist.all_reduce(tensor)
    elif algorithm == "shared_empty":
        collectives.all_reduce(tensor)
    else:
        collectives.all_reduce(tensor, algorithm=algorithm)
    exact = sum(brought(rank).astype(np.float32).astype(np.float64) for rank in range(run.world))
    return reference.distance(tensor.cpu(), torch.from_numpy(np.asarray(exact)))


def attention(run: Run, result: results.Attention) -> Iterator[Check]:
    """Compare the output and gradients of each kernel with the formula in float64."""
    if run.rank:
        return
    q, k, v = attention_stage.inputs(run)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = reference.attention(*leaves)
    exact = [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
    off, reported = [], []
    for row in result.rows:
        kernel = attention_stage.KERNELS[row["kernel"]]
        computed = attention_stage.forward_backward(kernel, q, k, v)
        for what, ours, theirs in zip(("out", "dq", "dk", "dv"), computed, exact, strict=True):
            off.append((reference.distance(ours, theirs), f"{row['kernel']} {what}"))
        error = float((computed[0] - exact[0]).abs().max())
        reported.append((error, row["max_error"], row["kernel"]))
    tolerance = allowed(run.config, "attention", ATTENTION)
    yield worst_distance("outputs and gradients", "every kernel", "float64", off, tolerance)
    yield worst_equal("largest error", "reported", "the audit's own", reported, 0.5)
    yield from clock_checks(
        result.interleaved, {r["kernel"]: r["forward_backward_ms"] for r in result.rows}
    )
    ratios = {row["kernel"]: row["ratio_to_sdpa_p50"] for row in result.rows}
    yield from ratio_checks(result.interleaved, attention_stage.PEER, ratios, inverted=False)
    yield peers.attention_check(run)


def parallel(run: Run, result: results.Parallel) -> Iterator[Check]:
    """Compare gradients and trained weights of the splits with one process in float64."""
    rows = None if isinstance(result, results.Skipped) else result.rows
    if rows is None:
        return
    heads, total = run.model.num_heads, TRAINED
    config = run.config
    text, _ = read_parts(config.data)
    batches = [
        on_device(run, reference.batch(text, config.rows, config.context, config.seed, step))
        for step in range(total)
    ]
    start = trained = weights_of(seeded(run, run.model))
    optimizer = reference.AdamW(start, config.learning_rate)
    losses, slopes = [], []
    for tokens, targets in batches:
        loss, slope = reference.gradients(trained, tokens, targets, heads)
        trained = optimizer.step(trained, slope)
        losses.append(loss)
        slopes.append(slope)
    moved = {name: trained[name] - w for name, w in start.items()}
    for row in rows:
        name = row["split"]
        with run.in_float32():
            split = splits.SPLITS[name](run, run.model)
            split.step(*batches[0])
            first = reference.furthest(split.gradients(), slopes[0])
            split.train(run)
        after = {name: w.double() - start[name] for name, w in split.weights().items()}
        distances = run.gather((first, reference.furthest(after, moved)))
        if run.rank:
            continue
        for what, side, tolerance in (
            ("gradients", 0, GRADIENT),
            ("weight change of the training", 1, WEIGHT_CHANGE * math.sqrt(total)),
        ):
            ranks = [
                (pair[side][0], f"rank {rank} {pair[side][1]}")
                for rank, pair in enumerate(distances)
            ]
            yield worst_distance(f"{name}: {what}", "every rank", "float64", ranks, tolerance)
        for what, value in (("loss", losses[0]), ("single_loss", losses[0])):
            tolerance = allowed(config, "replayed loss", REPLAYED_LOSS)
            yield equal(f"{name}: {what}", "reported", "float64", value, row[what], tolerance)
        yield equal(
            f"{name}: trained_loss",
            "reported",
            "float64 and AdamW written out",
            losses[-1],
            row["trained_loss"],
            # After three steps the rounding of products outweighs that of Adam.
            max(LOSS * math.sqrt(total), tolerance),
        )
        yield equal(
            f"{name}: bubble",
            "reported",
            "slots of a schedule written out",
            _bubble(split, run.world),
            row["bubble"],
            1e-9,
        )
        fraction = row["total_s"] / row["clocked_s"]
        yield Check(
            f"{name}: time", "iterations", "another clock around them", 1, fraction, 0.6, 1.02
        )
        # Half of all iterations take at least the median, so it is at most twice the mean. One slow
        # iteration, which waits for another program, can put the mean far above the median.
        whole, median = row["total_s"], row["iteration_ms"] / 1e3 * row["iterations"]
        yield Check(
            f"{name}: median iteration",
            "reported",
            "the mean of all",
            whole,
            median,
            whole / 200,
            2 * whole,
        )


def _bubble(split: splits.Split, ranks: int) -> float:
    """Return the fraction of idle slots if each rank starts one slot after the one before it."""
    if not isinstance(split, splits.PipelineModel):
        return 0.0
    work = split.microbatches * split.stages_per_rank
    begun = [range(rank, rank + work) for rank in range(ranks)]
    slots = max(busy.stop for busy in begun)
    return 1 - sum(map(len, begun)) / (slots * ranks)


def ten_steps(row: dict[str, Any]) -> Iterator[Check]:
    """Compare a row of the protocol with its steps, and their clock with another one."""
    name, steps = f"{row['size']}: ten steps after {row['warmup']}", np.array(row["seconds"])
    means = 1e3 * steps.mean(axis=0)
    pairs = [(mean, row[f"{p}_mean_ms"], p) for mean, p in zip(means, PHASES, strict=True)]
    yield worst_equal(f"{name}: means", "reported", "numpy's, of the steps", pairs, 1e-9)
    # The median of the fractions, because another program may use the core between two parts.
    fraction = float(np.median(steps.sum(axis=1) / row["clocked_s"]))
    yield Check(f"{name}: a step", "its parts", "another clock around them", 1, fraction, 0.9, 1.01)


def profile(run: Run, result: results.Profile) -> Iterator[Check]:
    """Compare operators with a timer, steps with another clock and FLOPs with torch's counter."""
    if run.rank:
        return
    for row in result.operators:
        # The timer spans the profiler too; on a busy machine much lies between operators.
        name, timer = f"{row['phase']}: operators' total", row["timer_ms"]
        low = 0.01 * timer if run.device.type == "cpu" else 0.0
        high = 1.05 * timer + 0.5
        yield Check(name, "profiler", "a timer around it", timer, row["total_ms"], low, high)
    for row in result.protocol:
        if not row["note"]:
            yield from ten_steps(row)
    config = run.model
    rows = max(1, run.config.rows // run.world)
    weights = {n: w.to("meta") for n, w in weights_of(seeded(run, config)).items()}
    tokens = torch.zeros(rows, config.context, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        reference.logits(weights, tokens, config.num_heads)
    products = counter.get_flop_counts()["Global"]
    counted = sum(n for operator, n in products.items() if "bmm" in str(operator))
    # A backward pass takes twice the forward pass; T (T - 1) / 2 of T x T scores are in the future.
    executed = 3 * counter.get_total_flops()
    useful = executed - 3 * counted * (config.context - 1) / (2 * config.context)
    for row in result.protocol:
        if row["size"] == run.config.size and not row["note"]:
            name = f"{row['size']}, ten steps after {row['warmup']}"
            seconds = row["step_p50_ms"] / 1e3
            reached = seconds * row["product_rate"]
            length = rows * config.context
            yield equal(
                f"{name}: MFU", "reported", "torch's counter", useful / reached, row["mfu"], 1e-9
            )
            yield equal(
                f"{name}: HFU", "reported", "torch's counter", executed / reached, row["hfu"], 1e-9
            )
            yield equal(
                f"{name}: tokens a second",
                "reported",
                "the run's rows and context",
                length / seconds,
                row["tokens_per_s"],
                1e-9,
            )
            peak = run.results["plan"].peak
            yield Check(
                f"{name}: a product's rate",
                "its process",
                "the stage plan",
                peak,
                row["product_rate"],
                peak / 2.5,
                peak * 2.5,
            )
    row = result.operators[0]
    yield equal(
        "FLOPs of attention's products",
        "profile",
        "torch's counter",
        counted,
        row["attention_product_flops"],
    )
    scores = counted / (4 * config.d_model // config.num_heads)
    yield equal("FLOPs of softmax", "profile", "five a score", 5 * scores, row["softmax_flops"])


def precision(run: Run, result: results.Precision) -> Iterator[Check]:
    """Check known sums, the dtypes that autocast documents, and losses in float64."""
    if run.rank:
        return
    for row in result.accumulation:
        known = _sum_rounded(row["sum_in"], row["term_in"], 1000, 0.01)
        name = f"0.01 a thousand times, {row['term_in']} in {row['sum_in']}"
        yield equal(name, "torch", "rounded by hand", known, row["sum"])
        error = abs(known - 10.0) / 10.0
        yield equal(f"{name}: error", "reported", "by hand", error, row["relative_error"], 1e-9)
    documented = {
        "parameters": "float32",
        "linear output": "bfloat16",
        # Autocast keeps more operators in float32 on GPUs.
        "norm output": "float32" if run.device.type == "cuda" else "bfloat16",
        "logits": "bfloat16",
        "loss": "float32",
        "gradients": "float32",
    }
    dtypes = result.autocast_dtypes
    wrong = [f"{p}: {dtypes.get(p)}" for p in documented if dtypes.get(p) != documented[p]]
    yield none("dtypes under autocast", "torch", "its documentation", wrong)
    config = run.model
    rows = max(1, run.config.rows // run.world)
    text, _ = read_parts(run.config.data)
    batch = reference.batch(text, rows, config.context, run.config.seed, 0)
    weights = weights_of(seeded(run, config))
    exact = reference.mean_loss(weights, *on_device(run, batch), config.num_heads)
    for row in result.timing:
        tolerance = REPLAYED_LOSS if row["dtype"] == "float32" else BFLOAT16_LOSS
        yield equal(f"loss in {row['dtype']}", "reported", "float64", exact, row["loss"], tolerance)
    apart = abs(result.timing[1]["loss"] / result.timing[0]["loss"] - 1)
    yield Check(
        "bfloat16 rounds", "its loss over float32's", "one", 0.0, apart, 1e-7, BFLOAT16_LOSS
    )
    times = {row["dtype"]: row["forward_backward_ms"] for row in result.timing}
    yield from clock_checks(result.interleaved, times)
    speeds = {row["dtype"]: row["speedup_p50"] for row in result.timing}
    yield from ratio_checks(result.interleaved, "float32", speeds, inverted=True)


def memory(run: Run, result: results.Memory) -> Iterator[Check]:
    """Compare counted peaks with those that accounting predicts."""
    if run.rank:
        return
    off = []
    for size, model in result.models.items():
        shape = SIZES[size]
        described = shape.described(vocabulary=256 if size in ("mini", "tiny") else 10_000)
        for peaks in model["peaks"]:
            for key, checkpointed in (("training", False), ("checkpointed", True)):
                predicted = accounting.peak_memory(
                    described,
                    batch=memory_stage.ROWS,
                    seq=peaks["context"],
                    flash=False,
                    fused_norm=False,
                    foreach=False,
                    checkpointed=checkpointed,
                ).total
                where = f"{size}, {peaks['context']} tokens, {key}"
                off.append((predicted / MIB, peaks[f"{key}_peak_mib"], where))
        parameters = 4 * accounting.parameters(described).total / MIB
        inference = [peaks["inference_peak_mib"] for peaks in model["peaks"]]
        trained = [peaks["training_peak_mib"] for peaks in model["peaks"]]
        yield Check(
            f"{size}: peak of inference",
            "counted",
            "parameters to training's peak",
            parameters,
            min(inference),
            parameters,
            min(trained),
        )
        stream = [
            (
                memory_stage.ROWS * p["context"] * shape.d_model * 4 / MIB,
                p["residual_stream_mib"],
                "",
            )
            for p in model["peaks"]
        ]
        yield worst_equal(f"{size}: residual stream", "reported", "4 bytes a number", stream, 1e-9)
        drawn = max(mib for _, mib in model["training_timeline"])
        # The page draws the second of three contexts.
        context, peak = (model["peaks"][1][key] for key in ("context", "training_peak_mib"))
        # Scores of each head and values as the product reads them; gate, up, silu and product.
        numbers = {
            "softmax(-1)": shape.num_heads * context + shape.d_model,
            "F.silu": 4 * shape.d_ff,
        }
        tokens = memory_stage.ROWS * context * shape.num_layers
        saved = [
            (4 * tokens * numbers_per_token / MIB, row["total_mib"], row["line"])
            for code, numbers_per_token in numbers.items()
            for row in model["saved"]
            if code in row["line"]
        ]
        yield worst_equal(
            f"{size}: held for the backward pass", "counted by line", "numbers by hand", saved, 1e-9
        )
        yield equal(f"{size}: height of the timeline", "drawn", "the peak", peak, drawn, 1e-9)
    yield worst_equal("peaks of training", "counted", "accounting", off, PEAK_BYTES)


def _sum_rounded(sum_in: str, term_in: str, terms: int, term: float) -> float:
    rounded, total = ROUND[term_in](term), 0.0
    for _ in range(terms):
        total = ROUND[sum_in](total + ROUND[sum_in](rounded))
    return total


def _to_bfloat16(x: float) -> float:
    """Round to eight bits of significand, ties to even."""
    if x == 0:
        return 0.0
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(fraction * 2**8), exponent - 8)


ROUND: dict[str, Callable[[float], float]] = {
    "float32": lambda x: float(np.float32(x)),
    "float16": lambda x: float(np.float16(x)),
    "bfloat16": _to_bfloat16,
}


STAGES: dict[str, Callable[[Run, Any], Iterator[Check]]] = {
    "links": links,
    "learn": learning.checks,
    "attention": attention,
    "parallel": parallel,
    "profile": profile,
    "precision": precision,
    "memory": memory,
    "scale": models.scale,
    "inspect": models.inspect,
    "compress": models.compress,
}
#: Stages whose checks use collectives.
COLLECTIVE = ("links", "parallel")
