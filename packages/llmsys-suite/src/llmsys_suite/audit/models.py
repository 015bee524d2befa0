"""Checks of the stages that train, analyze and compress a model.

Every rank calls these functions; the checks that rank 0 yields count.
"""

from __future__ import annotations

import json
import math
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tinyml
import torch
from torch import Tensor

from llmsys_suite.audit import reference
from llmsys_suite.audit.again import (
    SUMS,
    clock_checks,
    cross_entropy,
    on_device,
    ratio_checks,
    seeded,
    weights_of,
)
from llmsys_suite.audit.check import Check, equal, near, none, worst_distance, worst_equal
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.training import GRADIENT, LOSS, REPLAYED_LOSS
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import compress as compress_stage
from llmsys_suite.stages import inspect as inspect_stage
from llmsys_suite.stages import results
from llmsys_suite.stages import scale as scale_stage


def scale(run: Run, result: results.Scale) -> Iterator[Check]:
    """Recompute sizes, tokens and FLOPs, retrain the shortest run in float64 and repeat the fit."""
    if run.rank:
        return
    batch = scale_stage.ROWS * scale_stage.CONTEXT
    sizes = []
    tokens = []
    flops = []
    for row in result.runs:
        width = row["width"]
        by_hand = 2 * (4 * width**2 + 3 * width * 3 * width + 2 * width) + width + 256 * width
        where = f"width {width}, {row['compute_flops']:.2g} FLOPs"
        sizes.append((by_hand, row["parameters"], where))
        tokens.append((batch * row["steps"], row["tokens"], where))
        spent = 6 * row["parameters"] * row["tokens"] / row["compute_flops"]
        # The number of steps is rounded, so the budget may be missed by half a step.
        room = 0.5 / row["steps"] * spent + 1e-9
        flops.append((max(0.0, abs(spent - 1) - room), where))
    yield worst_equal("parameters of every run", "reported", "by hand", sizes, 0.0)
    yield worst_equal("tokens of every run", "reported", "steps x rows x context", tokens, 0.0)
    yield worst_distance("FLOPs of every run", "6 N D", "its budget", flops, 0.0)
    shortest = min(result.runs, key=lambda row: row["steps"])
    loss = _trained_again(run, shortest)
    yield equal(
        f"held-out loss of {shortest['steps']} steps",
        "reported",
        "float64, trained again",
        loss,
        shortest["loss"],
        LOSS * shortest["steps"],
    )
    # A short run may have no valley to fit, so known valleys are fitted as well.
    for what, rows, fitted in (
        ("the runs", result.runs, result),
        ("known valleys", KNOWN_VALLEYS, scale_stage.fit(KNOWN_VALLEYS)),
    ):
        if fitted.law:
            scale_, exponent = _parabolas(rows)
            at, against = fitted.extrapolated, "polynomials by numpy"
            yield equal(
                f"exponent of {what}", "scaling", against, exponent, fitted.law["exponent"], 1e-6
            )
            size = scale_ * at["compute_flops"] ** exponent
            name = f"extrapolated size of {what}"
            yield equal(name, "scaling", against, size, at["parameters"], 1e-5)


def _valleys() -> list[dict[str, float]]:
    """Return runs of four budgets with parabolas in log N and best sizes near C^0.4."""
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
    width = int(row["width"])
    steps = int(row["steps"])
    seed = int(row["seed"])
    heads = scale_stage.HEADS
    shape = ModelConfig(
        d_model=width, d_ff=3 * width, num_layers=2, num_heads=heads, context=scale_stage.CONTEXT
    )
    weights = weights_of(seeded(run, shape, seed))
    train, held_out = read_parts(run.config.data)
    peak = 6e-3 * (64 / width) ** 0.5
    optimizer = reference.AdamW(weights, peak, decay=0.0)
    for step in range(steps):
        turn = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        optimizer.rate = peak * min(1.0, (step + 1) / 10) * turn
        batch = reference.batch(train, scale_stage.ROWS, scale_stage.CONTEXT, seed, step)
        _, gradients = reference.gradients(weights, *on_device(run, batch), heads)
        weights = optimizer.step(weights, gradients)
    heldout = reference.spread(held_out, scale_stage.HELDOUT_ROWS, scale_stage.CONTEXT)
    return reference.mean_loss(weights, *on_device(run, heldout), heads)


def _parabolas(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Fit a parabola in log N around the best run of each budget, and a line through the minima."""
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


def inspect(run: Run, result: results.Inspect) -> Iterator[Check]:
    """Compare patterns, lens, attribution and ablation with the weights in float64."""
    if run.rank or not isinstance(run.trained, Decoder):
        return
    model, heads = run.trained, run.trained.config.num_heads
    weights, context = weights_of(model), min(64, model.config.context)
    heldout = reference.spread(read_parts(run.config.data)[1], 4, context)
    tokens, targets = (t.to(run.device) for t in heldout)
    exact = reference.patterns(weights, tokens, heads)
    with torch.no_grad():
        patterns = inspect_stage.attention_patterns(model, tokens)
    yield near(
        "rows of the patterns",
        "their sums",
        "one",
        max(float((p.double().sum(-1) - 1).abs().max()) for p in patterns),
        SUMS,
    )
    off = [
        (reference.distance(ours, theirs), f"layer {i}")
        for i, (ours, theirs) in enumerate(zip(patterns, exact, strict=True))
    ]
    yield worst_distance("patterns", "inspect", "float64", off, GRADIENT)
    loss = reference.mean_loss(weights, tokens, targets, heads)
    lens = result.lens[-1]["target_loss"]
    yield equal(
        "lens after the last layer", "interp", "the loss in float64", loss, lens, REPLAYED_LOSS
    )
    z = reference.logits(weights, tokens, heads).gather(-1, targets[..., None]).mean()
    credit = sum(row["mean_logit"] for row in result.attribution)
    spread = sum(abs(row["mean_logit"]) for row in result.attribution)
    yield near(
        "attributions", "their sum", "the logit in float64", abs(credit - float(z)) / spread, SUMS
    )
    off_scores = []
    repeated = inspect_stage.repeated(context, model.config.vocabulary).to(run.device)
    on_repeated = reference.patterns(weights, repeated, heads)
    for head in result.heads:
        pattern = on_repeated[head["layer"]][:, head["head"]]
        if head["kind"] == "previous":
            by_hand = float(pattern.diagonal(-1, 1, 2).mean())
            off_scores.append((by_hand, head["score"], "previous"))
    yield worst_equal(
        "score of the head for the token before",
        "interp",
        "its pattern's diagonal",
        off_scores,
        1e-4,
    )
    ablation = result.ablation
    cut = dict(weights)
    name = f"blocks.{ablation['layer']}.attention.v.weight"
    width = model.config.d_model // heads
    cut[name] = cut[name].clone()
    cut[name][ablation["head"] * width : (ablation["head"] + 1) * width] = 0
    without = reference.mean_loss(cut, tokens, targets, heads)
    yield equal(
        "loss without a head",
        "interp",
        "its values set to zero in float64",
        without,
        ablation["loss"],
        REPLAYED_LOSS,
    )
    yield Check(
        "the ablation moves the loss",
        "interp",
        "the loss with the head",
        loss,
        abs(ablation["loss"] / loss - 1),
        1e-6,
        math.inf,
    )


def compress(run: Run, result: results.Compress) -> Iterator[Check]:
    """Check each method's bytes on disk and the loss of the model that is read back."""
    if run.rank or not isinstance(run.trained, Decoder):
        return
    tokens, targets = compress_stage.heldout(run)
    _, text = read_parts(run.config.data)
    heldout = reference.spread(text, compress_stage.HELDOUT_ROWS, run.trained.config.context)
    weights, heads = weights_of(run.trained), run.trained.config.num_heads
    exact = reference.mean_loss(weights, *on_device(run, heldout), heads)
    rows = {row["method"]: row for row in result.rows}
    yield equal(
        "held-out loss, uncompressed",
        "reported",
        "float64",
        exact,
        rows[compress_stage.BASELINE]["heldout_loss"],
        REPLAYED_LOSS,
    )
    sizes = []
    losses = []
    errors = []
    structure: list[str] = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for method, model in compress_stage.compressed(run).items():
            path = Path(folder, "model")
            tinyml.save(model, path)
            sizes.append((_data_bytes(path), rows[method]["size_bytes"], method))
            loaded = tinyml.load(run.trained, path)
            loss = float(cross_entropy(loaded(tokens), targets))
            losses.append((loss, rows[method]["heldout_loss"], method))
            structure += _structure(method, loaded)
            if method in BITS:
                errors.append((_grid_error(run.trained, loaded, BITS[method]), method))
    yield worst_equal("bytes", "size_of", "tensors in the file", sizes, 0.0)
    yield worst_equal("held-out loss", "reported", "read back from the file", losses, REPLAYED_LOSS)
    yield none("sparsity and codebooks", "weights in the file", "the method", structure)
    yield worst_distance(
        "rounding of linear grids", "every weight, in steps", "half a step", errors, 0.51
    )
    smaller = [
        (rows[compress_stage.BASELINE]["size_bytes"] / row["size_bytes"], row["smaller"], method)
        for method, row in rows.items()
    ]
    yield worst_equal("times smaller", "reported", "the quotient of the bytes", smaller, 1e-9)
    yield from clock_checks(result.interleaved, {})
    speeds = {method: row["speedup_p50"] for method, row in rows.items()}
    yield from ratio_checks(result.interleaved, compress_stage.BASELINE, speeds, inverted=True)


#: The methods that round to a linear grid, and the bits of the grid.
BITS = {"linear, 8 bits": 8, "linear, 4 bits": 4}


#: Largest number of distinct values per row of a weight, by method.
CODEBOOKS = {"k-means, 4 bits": 16, "k-means, 2 bits": 4}


def _structure(method: str, model: torch.nn.Module) -> list[str]:
    """Return the linear weights that are not as sparse or as coarse as their method requires."""
    wrong = []
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or "embedding" in name:
            continue
        if method in CODEBOOKS:
            values = max(len(row.unique()) for row in weight.detach())
            if values > CODEBOOKS[method]:
                wrong.append(f"{method}, {name}: {values} values")
        if method == "half pruned" and float((weight == 0).float().mean()) < 0.45:
            wrong.append(f"{method}, {name}: {float((weight == 0).float().mean()):.0%} zeros")
    return wrong


def _grid_error(model: Decoder, small: torch.nn.Module, bits: int) -> float:
    """Return the largest error of a weight, in steps of a grid over the range of its row."""
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
    """Return the number of bytes of a safetensors file after its header."""
    with path.open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
        described = json.loads(file.read(header))
    ends = [d["data_offsets"][1] for name, d in described.items() if name != "__metadata__"]
    if path.stat().st_size != 8 + header + max(ends):
        return -1
    return int(max(ends))
