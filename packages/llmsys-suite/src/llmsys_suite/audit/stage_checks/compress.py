"""Checks of `compress`: bytes in the file, and the loss and structure of the model read back."""

from __future__ import annotations

import json
import math
import struct
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import tinyml
import torch
from torch import Tensor, nn

from llmsys_suite import results
from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, Sources, same_rows
from llmsys_suite.audit.inputs import cross_entropy, in_float64, on_device
from llmsys_suite.audit.peers import Rounds
from llmsys_suite.audit.stage_checks import timing
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.tolerances import REPLAYED_LOSS
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import compress

#: The methods that round to a linear grid, and the bits of the grid.
BITS = {"linear, 8 bits": 8, "linear, 4 bits": 4}
#: Allowed squared error of codebooks relative to that of a linear grid. Measured: 0.83 for the rows
#: of 32 weights in the smallest model, 0.67 for rows of 128 weights.
OVER_GRID = 0.95
#: Rounds of the audit's own timing.
ROUNDS = 3
#: Bits of a codebook. With b bits, a weight has at most 2**b distinct values, and more than
#: 2**(b - 1).
CODEBOOK_BITS = {"k-means, 4 bits": 4, "k-means, 2 bits": 2}
#: Range of the largest rounding error of all weights, in steps of a grid. Of hundreds of weights,
#: one is close to the middle between two values, unless the grid has more bits.
ROUNDING = (0.4, 0.51)
#: Fraction of zeros in a weight that is pruned by half.
PRUNED = (0.49, 0.51)


def checks(run: Run, result: results.Compress) -> Iterator[Check]:
    """Write each compressed model to a file, read it, and compare it with the method's row."""
    if not isinstance(run.trained, Decoder):
        return
    tokens, targets = compress.heldout(run)
    yield same_rows("methods", compress.METHODS, [row["method"] for row in result.rows])
    rows = {row["method"]: row for row in result.rows}
    whole = rows[compress.BASELINE]
    float64 = Sources("reported", "float64")
    yield float64.equal(
        "held-out loss, uncompressed", _exact_loss(run), whole["heldout_loss"], REPLAYED_LOSS
    )
    sizes = []
    losses = []
    errors = []
    rounding: list[tuple[float, str]] = []
    structure: list[str] = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for method, model in run.compressed.items():
            path = Path(folder, "model")
            tinyml.save(model, path)
            sizes.append((_data_bytes(path), rows[method]["size_bytes"], method))
            loaded = tinyml.load(run.trained, path)
            loss = float(cross_entropy(loaded(tokens), targets))
            losses.append((loss, rows[method]["heldout_loss"], method))
            structure += _structure(method, run.trained, loaded)
            if method in BITS:
                errors.append((_grid_error(run.trained, loaded, BITS[method]), method))
            if method in CODEBOOK_BITS:
                rounding.append((_over_grid(run.trained, loaded, CODEBOOK_BITS[method]), method))
    yield Sources("size_of", "tensors in the file").all_equal("bytes", sizes)
    from_file = Sources("reported", "read back from the file")
    yield from_file.all_equal("held-out loss", losses, REPLAYED_LOSS)
    weights = Sources("weights in the file", "the method")
    yield weights.none("sparsity and codebooks", structure)
    grids = Sources("every weight, in steps", "half a step")
    yield grids.all_near("rounding of linear grids", errors, ROUNDING[1])
    finer = [f"{method}: {error:.2g}" for error, method in errors if error < ROUNDING[0]]
    yield grids.none("grids of more bits", finer)
    codebooks = Sources("squared error of the weights", "that of a linear grid of as many bits")
    yield codebooks.all_near("rounding to codebooks", rounding, OVER_GRID)
    # Both methods round the weights alike, so only rounded activations change the loss.
    weights_only = rows["linear, 8 bits"]["heldout_loss"]
    moved = abs(rows["8 bits, activations too"]["heldout_loss"] / weights_only - 1)
    activations = Sources("reported", "the loss with float32 activations")
    yield activations.between("rounded activations move the loss", 0.0, moved, 1e-7, math.inf)
    smaller = [
        (whole["size_bytes"] / row["size_bytes"], row["smaller"], method)
        for method, row in rows.items()
    ]
    quotient = Sources("reported", "the quotient of the bytes")
    yield quotient.all_equal("times smaller", smaller, 1e-9)
    yield from _times(run, result, tokens)


def _times(run: Run, result: results.Compress, tokens: Tensor) -> Iterator[Check]:
    """Time every compressed model, and check the reported times."""
    timings = result.interleaved
    yield from timing.totals(timings, {})
    speedups = {row["method"]: row["speedup_p50"] for row in result.rows}
    yield timing.speedups(timings, compress.BASELINE, speedups)
    calls = {method: partial(model, tokens) for method, model in run.compressed.items()}

    def compare(timed: Rounds) -> list[Check]:
        return [*timing.ratios(timings, compress.BASELINE, timed)]

    with torch.no_grad():
        checks = timing.timed_again(run, calls, compare, ROUNDS)
    yield from checks


def _exact_loss(run: Run) -> float:
    assert isinstance(run.trained, Decoder)
    config = run.trained.config
    _, text = read_parts(run.config)
    heldout = reference.spread(text, compress.HELDOUT_ROWS, config.context)
    return reference.mean_loss(in_float64(run.trained), *on_device(run, heldout), config.num_heads)


def _structure(method: str, original: Decoder, model: nn.Module) -> list[str]:
    """Return the linear weights that are not as sparse or as coarse as their method requires."""
    wrong = []
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or "embedding" in name:
            continue
        if method in CODEBOOK_BITS:
            values = len(weight.detach().unique())
            bits = CODEBOOK_BITS[method]
            if not 2 ** (bits - 1) < values <= 2**bits:
                wrong.append(f"{method}, {name}: {values} values")
        if method == "half pruned":
            zero = weight == 0
            fraction = float(zero.float().mean())
            if not PRUNED[0] <= fraction <= PRUNED[1]:
                wrong.append(f"{method}, {name}: {fraction:.0%} zeros")
            magnitudes = original.get_submodule(name).get_parameter("weight").abs()
            if magnitudes[zero].max() > magnitudes[~zero].min():
                wrong.append(f"{method}, {name}: a larger weight than others is pruned")
    return wrong


def _over_grid(model: Decoder, small: nn.Module, bits: int) -> float:
    """Return the squared error of all linear weights over that of a linear grid."""
    error = grid_error = 0.0
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            rounded = small.get_submodule(name).weight
            assert isinstance(rounded, Tensor)
            step = 2 * layer.weight.abs().amax(1, keepdim=True) / (2**bits - 2)
            error += float((layer.weight - rounded).square().sum())
            on_grid = (layer.weight / step).round() * step
            grid_error += float((layer.weight - on_grid).square().sum())
    return error / grid_error


def _grid_error(model: Decoder, small: nn.Module, bits: int) -> float:
    """Return the largest error of a weight, in steps of a grid over the range of its row."""
    worst = 0.0
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            rounded = small.get_submodule(name).weight
            assert isinstance(rounded, Tensor)
            step = 2 * layer.weight.abs().amax(1, keepdim=True) / (2**bits - 2)
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
