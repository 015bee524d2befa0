"""What compression costs and gives, beside the plain way of doing the same.

Ratios are medians over rounds in which both take turns; "over ours" above 1 means that ours is
faster. Errors, bytes and counts do not depend on the machine's mood.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyml.adapters.lora import LoRA
from tinyml.integer.model import IntegerModel
from tinyml.integer.to_c import to_c
from tinyml.pruning.magnitude import prune
from tinyml.pruning.sensitivity import sensitivity
from tinyml.quantization.gptq import gptq
from tinyml.quantization.int8 import Int8Linear
from tinyml.quantization.kmeans import kmeans, kmeans_quantize
from tinyml.quantization.linear import quantize
from tinyml.quantization.qat import convert, prepare_qat
from tinyml.size import size_of

Row = dict[str, float | int | str]


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """All rows: k-means, int8 linear, LoRA, sensitivity scan, a compressed digits classifier."""
    return [
        *_kmeans(device, quick),
        *_int8(device, quick),
        *_integer(quick),
        *_lora(device),
        *_sensitivity(device, quick),
        *_digits(device, quick),
    ]


def _kmeans(device: str, quick: bool) -> list[Row]:
    """16 clusters of normal weights to the fixed point; a plain iteration timed and multiplied."""
    rows: list[Row] = []
    for count in (100_000,) if quick else (100_000, 10_000_000):
        values = torch.randn(count, generator=_generator(0)).mul(0.02).to(device)
        sort = _seconds(partial(torch.sort, values), 1)
        start = time.perf_counter()
        centroids, codes = kmeans(values, 16)
        ours = time.perf_counter() - start
        row: Row = {
            "case": "kmeans",
            "weights": count,
            "clusters": 16,
            "ours_ms": ours * 1e3,
            "ours_over_one_sort": ours / sort,
            "squared_error": _squared_error(values, centroids, codes),
        }
        even = torch.linspace(float(values.min()), float(values.max()), 16, dtype=torch.float64)
        row["even_start_error"] = _squared_error(values, *kmeans(values, 16, init=even.to(device)))
        row["plain_iteration_ms"] = _seconds(partial(_plain_lloyd, values, even), 1) * 1e3
        row["sklearn_ms"], row["sklearn_error"] = _sklearn(values)
        rows.append(row)
    return rows


def _plain_lloyd(values: Tensor, centroids: Tensor) -> Tensor:
    """One iteration with all distances, a million values at a time."""
    centroids = centroids.to(values)
    codes = torch.cat(
        [(v[:, None] - centroids).abs().argmin(1) for v in torch.split(values, 1 << 20)]
    )
    count = torch.bincount(codes, minlength=len(centroids))
    return torch.bincount(codes, weights=values, minlength=len(centroids)) / count


def _sklearn(values: Tensor) -> tuple[float, float]:
    """Milliseconds and squared error of scikit-learn's default; -1 if it is absent or too slow."""
    if values.numel() > 1_000_000:
        return -1.0, -1.0
    if not importlib.util.find_spec("sklearn"):
        return -1.0, -1.0
    kmeans_of: Any = importlib.import_module("sklearn.cluster").KMeans
    start = time.perf_counter()
    fitted = kmeans_of(16, random_state=0, n_init="auto").fit(values.cpu().numpy()[:, None])
    return (time.perf_counter() - start) * 1e3, float(fitted.inertia_)


def _int8(device: str, quick: bool) -> list[Row]:
    """A dynamic int8 linear, and one that may stay in float, beside nn.Linear in float32."""
    shapes: tuple[tuple[int, int, int], ...] = ((1, 1024, 1024), (32, 1024, 1024))
    if not quick:
        shapes += ((1, 4096, 4096), (32, 4096, 4096), (256, 1024, 4096))
    rows: list[Row] = []
    for tokens, inputs, outputs in shapes:
        torch.manual_seed(0)
        linear = nn.Linear(inputs, outputs, device=device).requires_grad_(False)
        ours, auto = Int8Linear(linear), Int8Linear(linear, may_stay_float=True)
        x = torch.randn(tokens, inputs, device=device)
        chosen: nn.Module = auto if auto.gains() else linear
        exact = linear(x)
        rounds = 5 if quick else 21
        ratio = _ratio(partial(linear, x), partial(ours, x), rounds)
        rows.append(
            {
                "case": "int8_linear",
                "tokens": tokens,
                "in": inputs,
                "out": outputs,
                "processor": _processor(),
                "way": ours.way(x),
                **ratio,
                "float32_over_auto_p50": _ratio(partial(linear, x), partial(chosen, x), rounds)[
                    "float32_over_ours_p50"
                ],
                "relative_error": float((ours(x) - exact).norm() / exact.norm()),
                "weight_bytes_ratio": linear.weight.nbytes
                / (ours.weight_codes.nbytes + ours.scale.nbytes),
            }
        )
    return rows


def _processor() -> str:
    """The vector instructions that int8 products depend on, as torch and oneDNN may use them."""
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return f"{torch.backends.cpu.get_cpu_capability()}{allowed and f' (oneDNN: {allowed})'}"


@torch.no_grad()
def _integer(quick: bool) -> list[Row]:
    """An integer VGG beside the float one, images of 32 x 32."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128) if quick else (64, 128, 256, 256):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = width
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)).eval()
    images = torch.randn(16, 3, 32, 32)
    model(images)
    integer = IntegerModel(model, [images])
    exact = model(images)
    ratio = _ratio(partial(model, images), partial(integer, images), 5 if quick else 21)
    program = to_c(integer)
    return [
        {
            "case": "integer_vgg",
            "images": len(images),
            "processor": _processor(),
            **ratio,
            "relative_error": float((integer(images) - exact).norm() / exact.norm()),
            "c_flash_kib": program.flash_bytes / 1024,
            "c_ram_kib": program.ram_bytes / 1024,
        }
    ]


def _lora(device: str) -> list[Row]:
    """Weights that do not come back from merge and unmerge: ours, and by adding and subtracting."""
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        base = nn.Linear(1024, 1024, device=device, dtype=dtype)
        layer = LoRA(base, 8)
        layer.lora_B.data.normal_(std=0.02)
        before = base.weight.detach().clone()
        layer.merge()
        layer.unmerge()
        delta = layer.update.detach()
        rows.append(
            {
                "case": "lora_unmerge",
                "dtype": str(dtype).removeprefix("torch."),
                "ours_changed_share": float((base.weight != before).float().mean()),
                "subtracting_changed_share": float(
                    ((before + delta) - delta != before).float().mean()
                ),
            }
        )
    return rows


def _sensitivity(device: str, quick: bool) -> list[Row]:
    """A scan of ten equal layers, from cached prefixes and whole."""
    torch.manual_seed(0)
    width = 256 if quick else 512
    layers = [module for _ in range(10) for module in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    batches = [(torch.randn(256, width, device=device), torch.zeros(256, device=device).long())]

    def scan(method: str) -> tuple[float, int, dict[str, dict[float, float]]]:
        start = time.perf_counter()
        found = sensitivity(
            model,
            batches,
            F.cross_entropy,
            amounts=(0.5, 0.9),
            compress=torch.mul,  # costs nothing, so that what is timed is the scan
            method=method,  # type: ignore[arg-type]
        )
        return time.perf_counter() - start, found.layer_calls, found.values

    pairs = [(scan("whole"), scan("prefix")) for _ in range(3 if quick else 5)]
    ratios = [whole[0] / prefix[0] for whole, prefix in pairs]
    whole, prefix = pairs[0]
    return [
        {
            "case": "sensitivity",
            "layers": 10,
            "whole_layer_calls": whole[1],
            "prefix_layer_calls": prefix[1],
            "same_numbers": str(whole[2] == prefix[2]),
            **_quantiles("whole_over_ours", ratios),
        }
    ]


def _digits(device: str, quick: bool) -> list[Row]:
    """Handwritten digits (scikit-learn's 1797 images of 8 x 8): what each compression leaves."""
    if not importlib.util.find_spec("sklearn"):
        return []
    images, labels = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels, device=device).long()
    order = torch.randperm(len(x), generator=_generator(0)).to(device)
    train, test = order[:1437], order[1437:]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10),
    ).to(device)  # fmt: skip

    def fit(model: nn.Module, epochs: int, after: Callable[[], None] = lambda: None) -> nn.Module:
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        model.train()
        for _ in range(epochs):
            for part in torch.split(train[torch.randperm(len(train), device=device)], 64):
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(model(x[part]), y[part]))
                optimizer.step()
                after()
        return model.eval()

    def row(name: str, compressed: nn.Module, size: int) -> Row:
        with torch.no_grad():
            right = int((compressed(x[test]).argmax(1) == y[test]).sum())
        return {
            "case": "digits",
            "model": name,
            "right_of_360": right,
            "kib": size / 1024,
            "times_smaller": dense / size,
        }

    dense = size_of(model).bytes
    fit(model, 4 if quick else 10)
    rows = [row("float32", model, dense)]
    pruned, masks = prune(model, 0.8)
    rows.append(row("pruned 80 %", pruned, size_of(pruned).sparse_bytes))
    fit(pruned, 2, lambda: masks.apply(pruned))
    rows.append(row("pruned 80 %, tuned", pruned, size_of(pruned).sparse_bytes))
    for bits in (4, 2):
        palette = kmeans_quantize(model, bits)
        rows.append(row(f"palette {bits} bits", palette, size_of(palette).bytes))
        tuned = fit(palette, 2)
        rows.append(row(f"palette {bits} bits, tuned", tuned, size_of(tuned).bytes))
    for bits in (8, 4, 2):
        linear = quantize(model, bits)
        rows.append(row(f"linear {bits} bits", linear, size_of(linear).bytes))
    trained = convert(fit(prepare_qat(model, 2, learn_scale=True), 2))
    rows.append(row("linear 2 bits, trained", trained, size_of(trained).bytes))
    calibrated = gptq(model, [x[train[:512]]], 2)
    rows.append(row("gptq 2 bits (linear layers)", calibrated, size_of(calibrated).bytes))
    integer = IntegerModel(model, [x[train[:512]]])
    rows.append(row("integers only, 8 bits", integer, size_of(integer).bytes))
    return rows


def _squared_error(values: Tensor, centroids: Tensor, codes: Tensor) -> float:
    return float((values - centroids.index_select(0, codes.flatten().int())).square().sum())


def _ratio(peer: Callable[[], object], ours: Callable[[], object], rounds: int) -> Row:
    """Seconds of the peer over seconds of ours, in turns, warmed up."""
    repeats = max(1, round(0.01 / _seconds(ours, 3)))
    pairs = [(_seconds(peer, repeats), _seconds(ours, repeats)) for _ in range(rounds)]
    return {
        "ours_ms": statistics.median(pair[1] for pair in pairs) * 1e3,
        **_quantiles("float32_over_ours", [a / b for a, b in pairs]),
    }


def _seconds(call: Callable[[], object], repeats: int) -> float:
    _finish()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _finish()
    return (time.perf_counter() - start) / repeats


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    shares = {"p50": 0.5, "p10": 0.1, "p90": 0.9}
    return {f"{name}_{k}": ordered[round(s * (len(ordered) - 1))] for k, s in shares.items()}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table; write the rows as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m tinyml.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args(argv)
    rows = bench(device=arguments.device, quick=arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


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


if __name__ == "__main__":
    main()
