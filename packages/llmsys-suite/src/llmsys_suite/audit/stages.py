"""The checks of every stage but `plan` and `train`: each recomputes what the stage reports.

Every rank calls them, since some are collective; what they yield counts on rank 0.
"""

from __future__ import annotations

import json
import math
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accounting
import collectives
import numpy as np
import tinyml
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, closest, equal, furthest, near, none
from llmsys_suite.audit.training import GRADIENT, LOSS, MOVED, REPLAYED_LOSS
from llmsys_suite.config import SIZES
from llmsys_suite.data import read_text
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.run import Run
from llmsys_suite.stages import attention as attention_stage
from llmsys_suite.stages import compress as compress_stage
from llmsys_suite.stages import inspect as inspect_stage
from llmsys_suite.stages import learn as learn_stage
from llmsys_suite.stages import memory as memory_stage
from llmsys_suite.stages import parallel as parallel_stage
from llmsys_suite.stages import scale as scale_stage
from llmsys_suite.step.case import PHASES, STEPS

Result = dict[str, Any]
MIB = 2**20
#: Sums of two to sixteen numbers in float32 beside float64: 1e-7. Times ten.
SUMS = 1e-6
#: Attention in float32: 4e-7 at the most, its gradients 1e-6. Times five.
ATTENTION = 5e-6
#: A forward pass whose products are rounded to eight bits: 1e-3. Times ten.
BFLOAT16_LOSS = 1e-2
#: Two ways of counting live bytes without running anything.
PEAK_BYTES = 0.10


def links(run: Run, result: Result) -> Iterator[Check]:
    """Sums against float64, columns against their formulas, bytes against the kernel's count."""
    rows = run.gather(result.get("rows"))[0]
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
    yield furthest("all-reduce", "every algorithm, every rank", "float64",
                   [pair for share in worst for pair in share], SUMS)  # fmt: skip
    yield none("elements in error", "the bench's own count", "none",
               [f"{r['case']} {r['algorithm']}" for r in rows if r["wrong"]])  # fmt: skip
    pairs = []
    for r in rows:
        factor = (2 if r["case"] == "all_reduce" else 1) * (run.world - 1) / run.world
        moved = factor * r["size_bytes"] / (r["time_us"] * 1e3)
        pairs.append((moved, r["busbw_gbps"], f"{r['case']} {r['algorithm']}, {r['size_bytes']}"))
    yield closest("bus bandwidth", "bench", "bytes over time", pairs, 1e-6)
    if run.config.backend == "gloo":
        plan = [
            (2 * (run.world - 1) / run.world * r["size_bytes"], r["wire_bytes"], r["algorithm"])
            for r in rows
            if r["case"] == "all_reduce" and r["algorithm"] == "gloo" and r["size_bytes"] >= 2**20
        ]
        yield closest(
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


def attention(run: Run, result: Result) -> Iterator[Check]:
    """Each kernel's output and gradients against the formula in float64, row by row."""
    if run.rank:
        return
    q, k, v = attention_stage.inputs(run)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = reference.attention(*leaves)
    exact = [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
    off, reported = [], []
    for row in result["rows"]:
        kernel = attention_stage.KERNELS[row["kernel"]]
        found = attention_stage.forward_backward(kernel, q, k, v)
        for what, ours, theirs in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
            off.append((reference.distance(ours, theirs), f"{row['kernel']} {what}"))
        error = float((found[0] - exact[0]).abs().max())
        reported.append((error, row["max_error"], row["kernel"]))
    yield furthest("outputs and gradients", "every kernel", "float64", off, ATTENTION)
    yield closest("largest error", "reported", "the audit's own", reported, 0.5)
    yield from _clocks(result, {r["kernel"]: r["forward_backward_ms"] for r in result["rows"]})
    ratios = {row["kernel"]: row["ratio_to_sdpa_p50"] for row in result["rows"]}
    yield from _ratios(result, attention_stage.PEER, ratios, inverted=False)


def parallel(run: Run, result: Result) -> Iterator[Check]:
    """Gradients and trained weights of both splits against one process in float64; the clock."""
    skipped = run.gather("skipped" in result)
    if any(skipped):
        return
    heads, total = run.model.num_heads, parallel_stage.TRAINED
    text, config = read_text(run.config.data).train, run.config
    batches = [
        _on(run, reference.batch(text, config.rows, config.context, config.seed, step))
        for step in range(total)
    ]
    start = trained = _weights(_seeded(run, run.model))
    optimizer, losses, slopes = reference.AdamW(start, config.learning_rate), [], []
    for tokens, targets in batches:
        loss, slope = reference.gradients(trained, tokens, targets, heads)
        trained = optimizer.step(trained, slope)
        losses.append(loss)
        slopes.append(slope)
    moved = {name: trained[name] - w for name, w in start.items()}
    for row in run.gather(result.get("rows"))[0]:
        name, split = row["split"], parallel_stage.SPLITS[row["split"]](run, run.model)
        split.step(*batches[0])
        first = reference.furthest(split.gradients(), slopes[0])
        split.train(run)
        after = {name: w.double() - start[name] for name, w in split.weights().items()}
        found = run.gather((first, reference.furthest(after, moved)))
        if run.rank:
            continue
        for what, side, tolerance in (
            ("gradients", 0, GRADIENT), ("what training moved", 1, MOVED * math.sqrt(total)),
        ):  # fmt: skip
            ranks = [
                (pair[side][0], f"rank {rank} {pair[side][1]}") for rank, pair in enumerate(found)
            ]
            yield furthest(f"{name}: {what}", "every rank", "float64", ranks, tolerance)
        for what, value in (("loss", losses[0]), ("single_loss", losses[0])):
            yield equal(f"{name}: {what}", "reported", "float64", value, row[what], REPLAYED_LOSS)
        yield equal(f"{name}: trained_loss", "reported", "float64 and AdamW written out",
                    losses[-1], row["trained_loss"], LOSS * math.sqrt(total))  # fmt: skip
        yield equal(f"{name}: bubble", "reported", "slots of a schedule written out",
                    _bubble(split, run.world), row["bubble"], 1e-9)  # fmt: skip
        share = row["total_s"] / row["clocked_s"]
        yield Check(f"{name}: time", "iterations", "another clock around them", 1, share, 0.6, 1.02)
        # Half of all take the median or longer, so it is at most twice the mean; how far below the
        # mean it lies is for the slowest iteration to say, which may wait for another program.
        whole, median = row["total_s"], row["iteration_ms"] / 1e3 * row["iterations"]
        yield Check(f"{name}: median iteration", "reported", "the mean of all", whole, median,
                    whole / 200, 2 * whole)  # fmt: skip


def _bubble(split: parallel_stage.Split, ranks: int) -> float:
    """Idle slots over all: each rank begins one after the last, and ends one after the last."""
    if not isinstance(split, parallel_stage.PipelineModel):
        return 0.0
    work = split.microbatches * split.stages_a_rank
    begun = [range(rank, rank + work) for rank in range(ranks)]
    slots = max(busy.stop for busy in begun)
    return 1 - sum(map(len, begun)) / (slots * ranks)


def profile(run: Run, result: Result) -> Iterator[Check]:
    """Operators against a timer, steps against another clock, FLOPs against torch's counter."""
    if run.rank:
        return
    for row in result["operators"]:
        # The timer spans the profiler too; on a busy machine much lies between operators.
        name, timer = f"{row['phase']}: operators' total", row["timer_ms"]
        low = 0.01 * timer if run.device.type == "cpu" else 0.0
        high = 1.05 * timer + 0.5
        yield Check(name, "profiler", "a timer around it", timer, row["total_ms"], low, high)
    for row in result["protocol"]:
        if not row["note"]:
            total = sum(row[f"{phase}_mean_ms"] / 1e3 * STEPS for phase in PHASES)
            name = f"{row['size']}: ten steps after {row['warmup']}"
            yield equal(name, "their means", "another clock", row["clocked_s"], total, 0.1)
    config = run.model
    rows = max(1, run.config.rows // run.world)
    weights = {n: w.to("meta") for n, w in _weights(_seeded(run, config)).items()}
    tokens = torch.zeros(rows, config.context, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        reference.logits(weights, tokens, config.num_heads)
    products = counter.get_flop_counts()["Global"]
    counted = sum(n for operator, n in products.items() if "bmm" in str(operator))
    # A backward pass takes twice the forward pass; T (T - 1) / 2 of T x T scores are in the future.
    executed = 3 * counter.get_total_flops()
    useful = executed - 3 * counted * (config.context - 1) / (2 * config.context)
    for row in result["protocol"]:
        if row["size"] == run.config.size and not row["note"]:
            name = f"{row['size']}, ten steps after {row['warmup']}"
            seconds = row["step_p50_ms"] / 1e3
            reached = seconds * row["product_rate"]
            length = rows * config.context
            yield equal(f"{name}: MFU", "reported", "torch's counter", useful / reached,
                        row["mfu"], 1e-9)  # fmt: skip
            yield equal(f"{name}: HFU", "reported", "torch's counter", executed / reached,
                        row["hfu"], 1e-9)  # fmt: skip
            yield equal(f"{name}: tokens a second", "reported", "the run's rows and context",
                        length / seconds, row["tokens_per_s"], 1e-9)  # fmt: skip
            peak = run.results["plan"]["peak"]
            yield Check(f"{name}: a product's rate", "its process", "the stage plan", peak,
                        row["product_rate"], peak / 2.5, peak * 2.5)  # fmt: skip
    row = result["operators"][0]
    yield equal("FLOPs of attention's products", "profile", "torch's counter", counted,
                row["attention_product_flops"])  # fmt: skip
    scores = counted / (4 * config.d_model // config.num_heads)
    yield equal("FLOPs of softmax", "profile", "five a score", 5 * scores, row["softmax_flops"])


def precision(run: Run, result: Result) -> Iterator[Check]:
    """Known sums, what autocast documents, losses in float64."""
    if run.rank:
        return
    for row in result["accumulation"]:
        known = _sum_rounded(row["sum_in"], row["term_in"], 1000, 0.01)
        name = f"0.01 a thousand times, {row['term_in']} in {row['sum_in']}"
        yield equal(name, "torch", "rounded by hand", known, row["sum"])
        error = abs(known - 10.0) / 10.0
        yield equal(f"{name}: error", "reported", "by hand", error, row["relative_error"], 1e-9)
    documented = {
        "parameters": "float32",
        "linear output": "bfloat16",
        # The list of what stays in float32 is longer for GPUs.
        "norm output": "float32" if run.device.type == "cuda" else "bfloat16",
        "logits": "bfloat16",
        "loss": "float32",
        "gradients": "float32",
    }
    found = result["autocast_dtypes"]
    wrong = [f"{p}: {found.get(p)}" for p in documented if found.get(p) != documented[p]]
    yield none("dtypes under autocast", "torch", "its documentation", wrong)
    config = run.model
    rows = max(1, run.config.rows // run.world)
    text = read_text(run.config.data).train
    batch = reference.batch(text, rows, config.context, run.config.seed, 0)
    weights = _weights(_seeded(run, config))
    exact = float(reference.loss(weights, *_on(run, batch), config.num_heads))
    for row in result["timing"]:
        tolerance = REPLAYED_LOSS if row["dtype"] == "float32" else BFLOAT16_LOSS
        yield equal(f"loss in {row['dtype']}", "reported", "float64", exact, row["loss"], tolerance)
    apart = abs(result["timing"][1]["loss"] / result["timing"][0]["loss"] - 1)
    yield Check(
        "bfloat16 rounds", "its loss over float32's", "one", 0.0, apart, 1e-7, BFLOAT16_LOSS
    )
    yield from _clocks(result, {r["dtype"]: r["forward_backward_ms"] for r in result["timing"]})
    speeds = {row["dtype"]: row["speedup_p50"] for row in result["timing"]}
    yield from _ratios(result, "float32", speeds, inverted=True)


def memory(run: Run, result: Result) -> Iterator[Check]:
    """Counted peaks against accounting's."""
    if run.rank:
        return
    off = []
    for size, model in result["models"].items():
        shape = SIZES[size]
        described = accounting.Transformer(
            layers=shape.num_layers,
            d_model=shape.d_model,
            heads=shape.num_heads,
            vocab_size=256 if size in ("mini", "tiny") else 10_000,
            d_ff=shape.d_ff,
        )
        for peaks in model["peaks"]:
            for key, checkpointed in (("training", False), ("checkpointed", True)):
                predicted = accounting.peak_memory(
                    described, batch=memory_stage.ROWS, seq=peaks["context"], flash=False,
                    fused_norm=False, foreach=False, checkpointed=checkpointed,
                ).total  # fmt: skip
                where = f"{size}, {peaks['context']} tokens, {key}"
                off.append((predicted / MIB, peaks[f"{key}_peak_mib"], where))
        parameters = 4 * accounting.parameters(described).total / MIB
        inference = [peaks["inference_peak_mib"] for peaks in model["peaks"]]
        trained = [peaks["training_peak_mib"] for peaks in model["peaks"]]
        yield Check(f"{size}: peak of inference", "counted", "parameters to training's peak",
                    parameters, min(inference), parameters, min(trained))  # fmt: skip
        stream = [
            (
                memory_stage.ROWS * p["context"] * shape.d_model * 4 / MIB,
                p["residual_stream_mib"],
                "",
            )
            for p in model["peaks"]
        ]
        yield closest(f"{size}: residual stream", "reported", "4 bytes a number", stream, 1e-9)
        drawn = max(mib for _, mib in model["training_timeline"])
        yield equal(f"{size}: height of the timeline", "drawn", "the peak", max(
            p["training_peak_mib"] for p in model["peaks"] if p["context"] == run.config.context
        ), drawn, 1e-9)  # fmt: skip
    yield closest("peaks of training", "counted", "accounting", off, PEAK_BYTES)


def learn(run: Run, result: Result) -> Iterator[Check]:
    """The loss of the file that was left, and of the first batch, in float64."""
    if run.folder is None:
        return
    config, text, heads = run.config, read_text(run.config.data), run.model.num_heads
    held = reference.spread(text.heldout, learn_stage.HELDOUT_ROWS, config.context)
    stored = load_file(run.folder.path / "model.safetensors")
    weights = {name: w.to(run.device).double() for name, w in stored.items()}
    yield equal("held-out loss", "reported", "the file's weights in float64",
                float(reference.loss(weights, *_on(run, held), heads)),
                result["heldout"][-1][1], REPLAYED_LOSS)  # fmt: skip
    if result["begun_at"] == 0:
        first = reference.batch(text.train, config.rows, config.context, config.seed + 1, 0)
        exact = float(reference.loss(_weights(_seeded(run, run.model)), *_on(run, first), heads))
        yield equal("first loss", "reported", "float64", exact, result["losses"][0], REPLAYED_LOSS)


def scale(run: Run, result: Result) -> Iterator[Check]:
    """Each run's size, tokens and FLOPs; its loss once more in float64; the fit once more."""
    if run.rank:
        return
    batch = scale_stage.ROWS * scale_stage.CONTEXT
    sizes, tokens, flops = [], [], []
    for row in result["runs"]:
        width = row["width"]
        by_hand = 2 * (4 * width**2 + 3 * width * 3 * width + 2 * width) + width + 256 * width
        where = f"width {width}, {row['compute_flops']:.2g} FLOPs"
        sizes.append((by_hand, row["parameters"], where))
        tokens.append((batch * row["steps"], row["tokens"], where))
        spent = 6 * row["parameters"] * row["tokens"] / row["compute_flops"]
        # Steps are whole: half of one either way.
        room = 0.5 / row["steps"] * spent + 1e-9
        flops.append((max(0.0, abs(spent - 1) - room), where))
    yield closest("parameters of every run", "reported", "by hand", sizes, 0.0)
    yield closest("tokens of every run", "reported", "steps x rows x context", tokens, 0.0)
    yield furthest("FLOPs of every run", "6 N D", "its budget", flops, 0.0)
    shortest = min(result["runs"], key=lambda row: row["steps"])
    loss = _trained_again(run, shortest)
    yield equal(f"held-out loss of {shortest['steps']} steps", "reported", "float64, trained again",
                loss, shortest["loss"], LOSS * shortest["steps"])  # fmt: skip
    # A short run may have no valley to fit: the same fit of valleys that are known, then.
    for what, rows, fitted in (
        ("the runs", result["runs"], result),
        ("known valleys", KNOWN_VALLEYS, scale_stage.fit(KNOWN_VALLEYS)),
    ):
        if fitted["law"]:
            scale_, exponent = _parabolas(rows)
            at, against = fitted["extrapolated"], "polynomials by numpy"
            yield equal(f"exponent of {what}", "scaling", against, exponent,
                        fitted["law"]["exponent"], 1e-6)  # fmt: skip
            size = scale_ * at["compute_flops"] ** exponent
            name = f"extrapolated size of {what}"
            yield equal(name, "scaling", against, size, at["parameters"], 1e-5)


def _valleys() -> list[dict[str, float]]:
    """Four budgets whose best sizes lie about C^0.4, each a parabola in log N."""
    rows = []
    for i, compute in enumerate((1e10, 3e10, 1e11, 3e11)):
        best = 0.4 * math.log(compute) + 0.1 * (i % 2)
        for step in range(-2, 3):
            n = math.exp(best + 0.5 * step + 0.1)
            loss = 3 - 0.1 * i + 0.05 * (math.log(n) - best) ** 2
            row = {"parameters": n, "tokens": compute / (6 * n), "loss": loss}
            rows.append(row | {"compute_flops": compute})
    return rows


KNOWN_VALLEYS = _valleys()


def _trained_again(run: Run, row: dict[str, Any]) -> float:
    width, steps, seed = int(row["width"]), int(row["steps"]), int(row["seed"])
    shape = ModelConfig(
        d_model=width, d_ff=3 * width, num_layers=2, num_heads=2, context=scale_stage.CONTEXT
    )
    weights = _weights(_seeded(run, shape, seed))
    text = read_text(run.config.data)
    peak = 6e-3 * (64 / width) ** 0.5
    optimizer = reference.AdamW(weights, peak, decay=0.0)
    for step in range(steps):
        turn = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        optimizer.rate = peak * min(1.0, (step + 1) / 10) * turn
        batch = reference.batch(text.train, scale_stage.ROWS, scale_stage.CONTEXT, seed, step)
        _, gradients = reference.gradients(weights, *_on(run, batch), 2)
        weights = optimizer.step(weights, gradients)
    held = reference.spread(text.heldout, scale_stage.HELDOUT_ROWS, scale_stage.CONTEXT)
    return float(reference.loss(weights, *_on(run, held), 2))


def _parabolas(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """A parabola in log N through the four runs about each budget's best; a line through them."""
    budgets: dict[float, list[tuple[float, float]]] = {}
    for row in rows:
        budgets.setdefault(row["compute_flops"], []).append(
            (math.log(row["parameters"]), row["loss"])
        )
    points = []
    for budget, runs in budgets.items():
        best = min(runs, key=lambda pair: pair[1])[0]
        close = sorted(runs, key=lambda pair: abs(pair[0] - best))[:4]
        a, b, _ = np.polyfit([x for x, _ in close], [y for _, y in close], 2)
        inside = min(x for x, _ in close) <= -b / (2 * a) <= max(x for x, _ in close)
        if a > 0 and inside:
            points.append((math.log(budget), -b / (2 * a)))
    exponent, height = np.polyfit([x for x, _ in points], [y for _, y in points], 1)
    return math.exp(height), float(exponent)


def inspect(run: Run, result: Result) -> Iterator[Check]:
    """Patterns, lens, attribution and ablation against the weights in float64."""
    if run.rank or not isinstance(run.trained, Decoder):
        return
    model, heads = run.trained, run.trained.config.num_heads
    weights, context = _weights(model), min(64, model.config.context)
    held = reference.spread(read_text(run.config.data).heldout, 4, context)
    tokens, targets = (t.to(run.device) for t in held)
    exact = reference.patterns(weights, tokens, heads)
    with torch.no_grad():
        found = inspect_stage.attention_patterns(model, tokens)
    yield near("rows of the patterns", "their sums", "one",
               max(float((p.double().sum(-1) - 1).abs().max()) for p in found), SUMS)  # fmt: skip
    off = [
        (reference.distance(ours, theirs), f"layer {i}")
        for i, (ours, theirs) in enumerate(zip(found, exact, strict=True))
    ]
    yield furthest("patterns", "inspect", "float64", off, GRADIENT)
    loss = float(reference.loss(weights, tokens, targets, heads))
    lens = result["lens"][-1]["target_loss"]
    yield equal(
        "lens after the last layer", "interp", "the loss in float64", loss, lens, REPLAYED_LOSS
    )
    z = reference.logits(weights, tokens, heads).gather(-1, targets[..., None]).mean()
    credit = sum(row["mean_logit"] for row in result["attribution"])
    spread = sum(abs(row["mean_logit"]) for row in result["attribution"])
    yield near(
        "attributions", "their sum", "the logit in float64", abs(credit - float(z)) / spread, SUMS
    )
    off_scores = []
    repeated = inspect_stage.repeated(context, model.config.vocabulary).to(run.device)
    on_repeated = reference.patterns(weights, repeated, heads)
    for head in result["heads"]:
        pattern = on_repeated[head["layer"]][:, head["head"]]
        if head["kind"] == "previous":
            by_hand = float(pattern.diagonal(-1, 1, 2).mean())
            off_scores.append((by_hand, head["score"], "previous"))
    yield closest("score of the head for the token before", "interp", "its pattern's diagonal",
                  off_scores, 1e-4)  # fmt: skip
    ablation = result["ablation"]
    cut = dict(weights)
    name = f"blocks.{ablation['layer']}.attention.v.weight"
    width = model.config.d_model // heads
    cut[name] = cut[name].clone()
    cut[name][ablation["head"] * width : (ablation["head"] + 1) * width] = 0
    without = float(reference.loss(cut, tokens, targets, heads))
    yield equal("loss without a head", "interp", "its values set to zero in float64", without,
                ablation["loss"], REPLAYED_LOSS)  # fmt: skip
    yield Check("the ablation moves the loss", "interp", "the loss with the head",
                loss, abs(ablation["loss"] / loss - 1), 1e-6, math.inf)  # fmt: skip


def compress(run: Run, result: Result) -> Iterator[Check]:
    """Each way's bytes on disk, and the loss of what is read back from there."""
    if run.rank or not isinstance(run.trained, Decoder):
        return
    tokens, targets = compress_stage.heldout(run)
    text = read_text(run.config.data).heldout
    held = reference.spread(text, compress_stage.HELDOUT_ROWS, run.trained.config.context)
    weights, heads = _weights(run.trained), run.trained.config.num_heads
    exact = float(reference.loss(weights, *_on(run, held), heads))
    rows = {row["method"]: row for row in result["rows"]}
    yield equal("held-out loss, uncompressed", "reported", "float64", exact,
                rows[compress_stage.BASELINE]["heldout_loss"], REPLAYED_LOSS)  # fmt: skip
    sizes, losses, errors = [], [], []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for method, model in compress_stage.compressed(run).items():
            path = Path(folder, "model")
            tinyml.save(model, path)
            sizes.append((_data_bytes(path), rows[method]["size_bytes"], method))
            again = tinyml.load(run.trained, path)
            loss = float(_cross_entropy(again(tokens), targets))
            losses.append((loss, rows[method]["heldout_loss"], method))
            if method in BITS:
                errors.append((_grid_error(run.trained, again, BITS[method]), method))
    yield closest("bytes", "size_of", "tensors in the file", sizes, 0.0)
    yield closest("held-out loss", "reported", "read back from the file", losses, REPLAYED_LOSS)
    yield furthest(
        "rounding of linear grids",
        "every weight, in steps",
        "half a step",
        errors,
        0.51,
    )
    smaller = [
        (rows[compress_stage.BASELINE]["size_bytes"] / row["size_bytes"], row["smaller"], method)
        for method, row in rows.items()
    ]
    yield closest("times smaller", "reported", "the quotient of the bytes", smaller, 1e-9)
    yield from _clocks(result, {})
    speeds = {method: row["speedup_p50"] for method, row in rows.items()}
    yield from _ratios(result, compress_stage.BASELINE, speeds, inverted=True)


#: Methods that round to a grid of so many bits.
BITS = {"linear, 8 bits": 8, "linear, 4 bits": 4}


def _grid_error(model: Decoder, small: torch.nn.Module, bits: int) -> float:
    """The largest error of any weight, in steps of a grid over its row's range."""
    worst = 0.0
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            rounded = small.get_submodule(name).weight
            assert isinstance(rounded, Tensor)
            span = 2 * layer.weight.abs().amax(1, keepdim=True)
            step = span / (2**bits - 2)
            worst = max(worst, float(((layer.weight - rounded).abs() / step).max()))
    return worst


def _data_bytes(path: Path) -> int:
    """What a safetensors file holds besides its header."""
    with path.open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
        described = json.loads(file.read(header))
    ends = [d["data_offsets"][1] for name, d in described.items() if name != "__metadata__"]
    if path.stat().st_size != 8 + header + max(ends):
        return -1
    return int(max(ends))


def _clocks(result: Result, medians_ms: dict[str, float]) -> Iterator[Check]:
    """All turns together by another clock, and what is reported of each contender's."""
    rounds, clocked = result["clocks"]["rounds_s"], result["clocks"]["clocked_s"]
    total = sum(map(sum, rounds.values()))
    yield Check(
        "time of all turns", "their sum", "another clock", clocked, total,
        0.8 * clocked, 1.001 * clocked,
    )  # fmt: skip
    pairs = [(1e3 * float(np.median(rounds[n])), ms, n) for n, ms in medians_ms.items()]
    if pairs:
        yield closest("reported times", "medians in ms", "numpy's, of the rounds", pairs, 1e-9)


def _ratios(
    result: Result, peer: str, reported: dict[str, float], *, inverted: bool
) -> Iterator[Check]:
    rounds, pairs = result["clocks"]["rounds_s"], []
    for name, value in reported.items():
        over = np.array(rounds[name]) / np.array(rounds[peer])
        pairs.append((float(np.median(1 / over if inverted else over)), value, name))
    yield closest("reported ratios", "pairs of one round", "numpy's medians", pairs, 0.05)


def _sum_rounded(sum_in: str, term_in: str, terms: int, term: float) -> float:
    rounded, total = ROUND[term_in](term), 0.0
    for _ in range(terms):
        total = ROUND[sum_in](total + ROUND[sum_in](rounded))
    return total


def _to_bfloat16(x: float) -> float:
    """To the nearest of those with eight bits of significand, ties to even."""
    if x == 0:
        return 0.0
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(fraction * 2**8), exponent - 8)


ROUND: dict[str, Callable[[float], float]] = {
    "float32": lambda x: float(np.float32(x)),
    "float16": lambda x: float(np.float16(x)),
    "bfloat16": _to_bfloat16,
}


def _on(run: Run, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].to(run.device), batch[1].to(run.device)


def _seeded(run: Run, config: ModelConfig, seed: int | None = None) -> Decoder:
    torch.manual_seed(run.config.seed if seed is None else seed)
    return Decoder(config).to(run.device)


def _weights(model: Decoder) -> dict[str, Tensor]:
    return {name: p.detach().double() for name, p in model.named_parameters()}


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats a token, in float64."""
    z = logits.double()
    own = z.gather(-1, targets[..., None])[..., 0]
    mean: Tensor = (torch.logsumexp(z, -1) - own).mean()
    return mean


STAGES: dict[str, Callable[[Run, Result], Iterator[Check]]] = {
    "links": links,
    "learn": learn,
    "attention": attention,
    "parallel": parallel,
    "profile": profile,
    "precision": precision,
    "memory": memory,
    "scale": scale,
    "inspect": inspect,
    "compress": compress,
}
#: Those in which every rank takes part.
COLLECTIVE = ("links", "parallel")
