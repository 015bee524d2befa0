"""Checks of `compress`: bytes of each saved model, and loss and weights of the model read back."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import tinyml
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys_suite import results
from llmsys_suite.audit import inputs, reference
from llmsys_suite.audit.check import Check, Sources, compare_rows, compute_loss_difference
from llmsys_suite.audit.stage_checks import timing
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.tolerances import REPLAYED_LOSS
from llmsys_suite.folder import RunFolder
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import compress

#: The methods that round to a linear grid, and the bits of the grid.
BITS = {"linear, 8 bits": 8, "linear, 4 bits": 4}
#: The methods of the stage. A method that the stage does not define must not be missing unnoticed.
METHODS = (
    "float32",
    "half pruned",
    "k-means, 4 bits",
    "k-means, 2 bits",
    "linear, 8 bits",
    "linear, 4 bits",
    "8 bits, activations too",
)
#: Number of windows of the held-out text on which the stage measures its losses.
HELDOUT_ROWS = 16
#: Rounds of the audit's own timing.
ROUNDS = 3
#: Bits of a codebook. With b bits, a weight has at most 2**b distinct values, and more than
#: 2**(b - 1).
CODEBOOK_BITS = {"k-means, 4 bits": 4, "k-means, 2 bits": 2}
#: The method that also rounds the inputs of linear layers.
ROUNDS_INPUTS = "8 bits, activations too"
#: Largest magnitude of an input that is rounded to an integer.
LARGEST_INTEGER = 127
#: Number of rows of random inputs with which the layers of this method are checked.
INPUT_ROWS = 64
#: Allowed relative distance of the outputs of these layers from float64. If inputs are not rounded,
#: or to another number of bits, the distance is at least 5e-3.
ROUNDED_INPUTS = 1e-3
#: Allowed relative distance of a weight in the file from the audit's weight for the same method.
#: Rounding downwards, or to another number of bits, causes larger distances.
STORED = 2e-3


def check_records(_: RunFolder, result: results.Compress) -> Iterator[Check]:
    """Check the rows of the table, and the figures that follow from bytes and timings."""
    yield compare_rows("methods", METHODS, [row["method"] for row in result.rows])
    rows = {row["method"]: row for row in result.rows}
    whole = rows[compress.BASELINE]["size_bytes"]
    smaller = [(whole / row["size_bytes"], row["smaller"], method) for method, row in rows.items()]
    quotient = Sources("reported", "the quotient of the bytes")
    yield quotient.check_all_equal("times smaller", smaller, 1e-9)
    yield from timing.check_totals(result.interleaved, {})
    speedups = {method: row["speedup_p50"] for method, row in rows.items()}
    yield timing.check_speedups(result.interleaved, compress.BASELINE, speedups)


def check_stage(run: Run, result: results.Compress) -> Iterator[Check]:
    """Write each compressed model to a file, read it, and check it and the row of its method."""
    if not isinstance(run.trained, Decoder):
        return
    yield inputs.compare_with_file(run, run.trained)
    tokens, targets = compress.get_heldout_batch(run)
    rows = {row["method"]: row for row in result.rows}
    float64 = Sources("reported", "float64")
    yield float64.check_loss(
        "held-out loss, uncompressed",
        _compute_exact_loss(run),
        rows[compress.BASELINE]["heldout_loss"],
        REPLAYED_LOSS,
    )
    sizes = []
    losses = []
    distances: list[tuple[float, str]] = []
    wrong_codebooks: list[str] = []
    cluster_distances: list[tuple[float, str]] = []
    output_distances: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for method, model in run.compressed.items():
            path = Path(folder, "model")
            tinyml.save(model, path)
            sizes.append((_count_data_bytes(path), rows[method]["size_bytes"], method))
            loaded = tinyml.load(run.trained, path)
            logits = loaded(tokens).double().flatten(0, 1)
            loss = float(F.cross_entropy(logits, targets.flatten()))
            reported = rows[method]["heldout_loss"]
            where = f"{method}: {reported:.9g}, {loss:.9g}"
            losses.append((compute_loss_difference(reported, loss), where))
            if method == ROUNDS_INPUTS:
                output_distances += compare_layer_outputs(run.trained, loaded)
            for name, original, weight in _iter_linear_weights(run.trained, loaded):
                where = f"{method}, {name}"
                if method in CODEBOOK_BITS:
                    values = len(weight.unique())
                    most = 2 ** CODEBOOK_BITS[method]
                    if not most / 2 < values <= most:
                        wrong_codebooks.append(f"{where}: {values} values")
                    means = compute_cluster_means(original, weight)
                    cluster_distances.append((reference.compute_distance(weight, means), where))
                    continue
                expected = _compress_weight(method, original)
                if expected is not None:
                    distances.append((reference.compute_distance(weight, expected), where))
    yield Sources("size_of", "tensors in the file").check_all_equal("bytes", sizes)
    from_file = Sources("reported", "read back from the file")
    yield from_file.check_distances("held-out loss", losses, REPLAYED_LOSS)
    weights = Sources("weights in the file", "the method")
    yield weights.check_distances("pruned and rounded weights", distances, STORED)
    yield weights.check_none("values of codebooks", wrong_codebooks)
    clusters = Sources("weights in the file", "means of the nearest trained weights")
    yield clusters.check_distances("means of codebooks", cluster_distances, STORED)
    integers = Sources("layers in the file", "float64 with inputs of 8 bits")
    yield integers.check_distances("outputs for rounded inputs", output_distances, ROUNDED_INPUTS)
    yield from _check_times(run, result, tokens)


def _check_times(run: Run, result: results.Compress, tokens: Tensor) -> Iterator[Check]:
    """Time every compressed model, and compare the stage's ratios with these times."""
    calls = {method: partial(model, tokens) for method, model in run.compressed.items()}
    compare = partial(timing.check_ratios, result.interleaved, compress.BASELINE)
    with torch.no_grad():
        checks = timing.check_against_rounds(run, calls, compare, ROUNDS)
    yield from checks


def _compute_exact_loss(run: Run) -> float:
    assert isinstance(run.trained, Decoder)
    config = run.config
    heldout = reference.build_evenly_spaced_batch(
        read_parts(config)[1], HELDOUT_ROWS, config.context
    )
    weights = inputs.get_float64_parameters(run.trained)
    return reference.compute_mean_loss(
        weights, *inputs.move_to_device(run, heldout), inputs.get_num_heads(config)
    )


def _iter_linear_weights(model: Decoder, small: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each linear layer, its weight, and the weight of the compressed model."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            weight = small.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            yield name, layer.weight, weight


def compare_layer_outputs(model: Decoder, small: nn.Module) -> Iterator[tuple[float, str]]:
    """Yield the distance of each linear layer's output from float64 with rounded inputs."""
    generator = torch.Generator().manual_seed(0)
    for name, _, weight in _iter_linear_weights(model, small):
        x = torch.randn(INPUT_ROWS, weight.shape[1], generator=generator).to(weight.device)
        step = x.abs().amax(1, keepdim=True).double() / LARGEST_INTEGER
        expected = (x / step).round() * step @ weight.double().T
        yield reference.compute_distance(small.get_submodule(name)(x), expected), name


def _compress_weight(method: str, weight: Tensor) -> Tensor | None:
    """Return the weight after the method's pruning or rounding.

    The result is None for `ROUNDS_INPUTS`, whose layers are checked by their outputs.
    """
    if method in BITS:
        step = 2 * weight.abs().amax(1, keepdim=True) / (2 ** BITS[method] - 2)
        return (weight / step).round() * step
    if method == "half pruned":
        magnitudes = weight.abs()
        return weight * (magnitudes > magnitudes.flatten().kthvalue(weight.numel() // 2).values)
    return weight if method == compress.BASELINE else None


def compute_cluster_means(original: Tensor, weight: Tensor) -> Tensor:
    """Return one iteration of Lloyd's algorithm, which does not change the result of k-means.

    Each original weight is assigned to the nearest value in `weight`, and replaced by the mean of
    all weights that are assigned to this value.
    """
    values = weight.double().unique()
    flat = original.double().flatten()
    nearest = torch.bucketize(flat, (values[1:] + values[:-1]) / 2)
    sums = torch.zeros_like(values).index_add_(0, nearest, flat)
    means = sums / nearest.bincount(minlength=len(values))
    return means[nearest].view_as(original)


def _count_data_bytes(path: Path) -> int:
    """Return the number of bytes after the header of a safetensors file.

    The result is -1 if the header describes a file of another length.
    """
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if path.stat().st_size != 8 + header_bytes + max(ends):
        return -1
    return int(max(ends))
