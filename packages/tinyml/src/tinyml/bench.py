"""Benchmarks of compression, compared with the standard implementations.

Ratios are quantiles over rounds in which both implementations alternate. A ratio "over ours" above
1 means that this package is faster. With activations="auto", errors and bytes depend on the
selected implementation. Other errors and bytes do not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tinyml.export.atomic_file import atomic_file
from tinyml.integer.model import IntegerModel
from tinyml.integer.to_c import to_c
from tinyml.quantization.fastest_linear import FastestLinear
from tinyml.quantization.kmeans import kmeans
from tinyml.quantization.linear import quantize
from tinyml.size import size_of

Row = dict[str, float | int | str]
_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """Return all rows: k-means, linear layers of 8 and 4 bits, and an integer network."""
    return [*_bench_kmeans(device, quick), *_bench_linear(device, quick), *_bench_integer(quick)]


def _bench_kmeans(device: str, quick: bool) -> list[Row]:
    """Cluster normally distributed weights into 16 values."""
    rows: list[Row] = []
    for count in (20_000,) if quick else (100_000, 10_000_000):
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(count, generator=generator).mul(0.02).to(device)
        start = time.perf_counter()
        centroids, codes = kmeans(values, 16)
        seconds = time.perf_counter() - start
        row: Row = {
            "case": "kmeans",
            "weights": count,
            "clusters": 16,
            "ours_ms": seconds * 1e3,
            "squared_error": _compute_squared_error(values, centroids, codes),
        }
        row["sklearn_ms"], row["sklearn_error"] = _run_sklearn(values)
        rows.append(row)
    return rows


def _run_sklearn(values: Tensor) -> tuple[float, float]:
    """Return milliseconds and squared error of scikit-learn; both are -1 if it is not installed."""
    if not importlib.util.find_spec("sklearn"):
        return -1.0, -1.0
    kmeans_class: Any = importlib.import_module("sklearn.cluster").KMeans
    start = time.perf_counter()
    fitted = kmeans_class(16, random_state=0, n_init="auto").fit(values.cpu().numpy()[:, None])
    milliseconds = (time.perf_counter() - start) * 1e3
    centroids, labels = (torch.from_numpy(a) for a in (fitted.cluster_centers_, fitted.labels_))
    # scikit-learn sums its `inertia_` in float32. For 10^7 weights, that was 1.5 % too low.
    return milliseconds, _compute_squared_error(values.cpu(), centroids.flatten(), labels)


def _compute_squared_error(values: Tensor, centroids: Tensor, codes: Tensor) -> float:
    """Return the sum over `values` of the squared distance to their centroid, in float64."""
    nearest = centroids.double().index_select(0, codes.int())
    return float((values.double() - nearest).square().sum())


def _bench_linear(device: str, quick: bool) -> list[Row]:
    """Compare linear layers of 8 and 4 bits with float32 and, if installed, with torchao."""
    shapes: tuple[tuple[int, int, int], ...] = ((1, 256, 256), (32, 256, 256))
    if not quick:
        shapes = (
            (1, 1024, 1024),
            (32, 1024, 1024),
            (1, 4096, 4096),
            (32, 4096, 4096),
            (256, 1024, 4096),
            (512, 1024, 1024),
        )
    rows: list[Row] = []
    for tokens, inputs, outputs in shapes:
        torch.manual_seed(0)
        linear: Any = nn.Sequential(nn.Linear(inputs, outputs, device=device)).requires_grad_(False)
        x = torch.randn(tokens, inputs, device=device)
        rounds = 2 if quick else 21
        for name, bits, activations in _LAYERS:
            ours: Any = quantize(linear, bits, activations=activations)
            layer = ours[0]
            row: Row = {
                "case": "linear",
                "layer": name,
                "tokens": tokens,
                "in": inputs,
                "out": outputs,
                "processor": _describe_processor(),
                "chosen": _get_chosen(layer, tokens),
                **_measure_ratio(partial(linear, x), partial(ours, x), rounds),
                "relative_error": float((ours(x) - linear(x)).norm() / linear(x).norm()),
                "weight_bytes_ratio": linear[0].weight.nbytes / size_of(ours).bytes,
            }
            peer = _quantize_with_torchao(linear) if name == "int8 dynamic" else None
            if peer is not None:
                torchao_ratio = _measure_ratio(partial(peer, x), partial(ours, x), rounds)
                row["torchao_over_ours_p50"] = torchao_ratio["float32_over_ours_p50"]
                error = (peer(x) - linear(x)).norm() / linear(x).norm()
                row["torchao_relative_error"] = float(error)  # sums saturate without VNNI
            rows.append(row)
    return rows


def _get_chosen(layer: nn.Module, tokens: int) -> str:
    """Return the implementation that is used for this number of tokens."""
    if isinstance(layer, FastestLinear):
        return layer.get_timing(layer.make_example(tokens)).selected
    return "float32"


_LAYERS: tuple[tuple[str, int, Literal["dynamic", "auto"]], ...] = (
    ("int8 dynamic", 8, "dynamic"), ("int8 auto", 8, "auto"), ("int4 auto", 4, "auto"),
)  # fmt: skip


def _quantize_with_torchao(linear: nn.Module) -> nn.Module | None:
    """Return the layer with int8 weights and inputs by torchao, or None without torchao."""
    if not importlib.util.find_spec("torchao"):
        return None
    library: Any = importlib.import_module("torchao.quantization")
    peer = copy.deepcopy(linear)
    library.quantize_(peer, library.Int8DynamicActivationInt8WeightConfig())
    return peer


def _describe_processor() -> str:
    """Return the vector instructions that torch and oneDNN may use."""
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return f"{torch.backends.cpu.get_cpu_capability()}{allowed and f' (oneDNN: {allowed})'}"


@torch.no_grad()
def _bench_integer(quick: bool) -> list[Row]:
    """Compare an integer VGG with the float model on images of 32 x 32."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32) if quick else (64, 128, 256, 256):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = width
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)).eval()
    images = torch.randn(4 if quick else 16, 3, 32, 32)
    model(images)
    integer = IntegerModel(model, [images])
    exact = model(images)
    ratio = _measure_ratio(partial(model, images), partial(integer, images), 2 if quick else 21)
    program = to_c(integer)
    return [
        {
            "case": "integer_vgg",
            "images": len(images),
            "processor": _describe_processor(),
            **ratio,
            "relative_error": float((integer(images) - exact).norm() / exact.norm()),
            "c_flash_kib": program.flash_bytes / 1024,
            "c_ram_kib": program.ram_bytes / 1024,
        }
    ]


def _measure_ratio(peer: Callable[[], object], ours: Callable[[], object], rounds: int) -> Row:
    """Return quantiles of the ratio of the peer's time to ours, from interleaved measurements."""
    repeats = max(1, round(0.01 / _measure(ours, 3)))
    pairs = [(_measure(peer, repeats), _measure(ours, repeats)) for _ in range(rounds)]
    low, middle, high = np.quantile([a / b for a, b in pairs], [0.1, 0.5, 0.9])
    return {
        "ours_ms": statistics.median(pair[1] for pair in pairs) * 1e3,
        "float32_over_ours_p50": float(middle),
        "float32_over_ours_p10": float(low),
        "float32_over_ours_p90": float(high),
    }


def _measure(call: Callable[[], object], repeats: int) -> float:
    _synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _synchronize()
    return (time.perf_counter() - start) / repeats


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmarks and print the rows; also write them to a file if requested."""
    parser = argparse.ArgumentParser(prog="python -m tinyml.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="run for seconds instead of minutes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--without-vnni", action="store_true", help="disable int8 dot products")
    arguments = parser.parse_args(argv)
    if arguments.without_vnni and not _AVX2.items() <= os.environ.items():
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tinyml.bench", *(sys.argv[1:] if argv is None else argv)],
            os.environ | _AVX2,  # torch and oneDNN read these variables when they are loaded
        )
    rows = bench(device=arguments.device, quick=arguments.quick)
    for row in rows:
        print(json.dumps(row))
    if arguments.json:
        with atomic_file(arguments.json) as part:
            part.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
