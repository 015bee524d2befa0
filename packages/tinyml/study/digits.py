"""A small VGG is trained and compressed by every method: result rows and plots.

    python packages/tinyml/study/digits.py                      scikit-learn's digits, five seeds
    python packages/tinyml/study/digits.py --draw               redraw the plots from saved rows

Each seed uses another split and another initialization. Intervals are 95 % confidence intervals of
the mean over seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from plots import plot_frontier, plot_sensitivity, plot_weights, save
from tinyml import (
    IntegerModel,
    convert,
    gptq,
    kmeans_quantize,
    prepare_qat,
    prune,
    prune_channels,
    quantize,
    sensitivity,
    size_of,
)
from tinyml.pruning.sensitivity import Sensitivity
from torch import Tensor, nn

STUDY_FOLDER = Path(__file__).parent
PICTURES = STUDY_FOLDER / "pictures"
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
AMOUNTS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
BITS = (2, 3, 4, 5, 6, 7, 8)
Row = dict[str, Any]


class Task:
    """Images, labels and a split, with training and evaluation."""

    def __init__(self, images: Tensor, labels: Tensor, seed: int, epochs: int) -> None:
        self.images = images
        self.labels = labels
        self.epochs = epochs
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        self.train, self.test = order[: 4 * len(order) // 5], order[4 * len(order) // 5 :]
        torch.manual_seed(seed)

    def model(self) -> nn.Module:
        """Train four convolutions with batch normalization, two poolings and a linear layer."""
        channels, size = self.images.shape[1:3]
        layers: list[nn.Module] = []
        for index, width in enumerate((32, 64, 64, 128)):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if index % 2 else []
            channels = width
        head = nn.Linear(channels * (size // 4) ** 2, 10)
        return self.fit(nn.Sequential(*layers, nn.Flatten(), head), self.epochs, 3e-3)

    def fit(
        self, model: nn.Module, epochs: int, lr: float, after: Callable[[], None] = lambda: None
    ) -> nn.Module:
        """Train with Adam and a learning rate that decays to zero."""
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        steps = epochs * -(-len(self.train) // 64)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        model.train()
        for _ in range(epochs):
            for part in self.train[torch.randperm(len(self.train))].split(64):
                optimizer.zero_grad()
                torch.autograd.backward(
                    F.cross_entropy(model(self.images[part]), self.labels[part])
                )
                optimizer.step()
                schedule.step()
                after()
        return model.eval()

    @torch.no_grad()
    def right(self, model: nn.Module) -> int:
        """Return the number of test images that are classified correctly."""
        return int((model(self.images[self.test]).argmax(1) == self.labels[self.test]).sum())


def ways(task: Task, model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Return every compressed model by name, with its size in bytes."""
    results: dict[str, tuple[nn.Module, int]] = {"float32": (model, size_of(model).bytes)}

    def add(name: str, small: nn.Module) -> nn.Module:
        results[name] = copy.deepcopy(small), size_of(small).sparse_bytes
        return small

    tune = max(2, task.epochs // 3)
    for percent in (50, 80, 90):
        pruned, masks = prune(model, percent / 100)
        add(f"pruned {percent} %", pruned)
        task.fit(pruned, tune, 1e-3, lambda m=pruned, k=masks: k.apply(m))  # type: ignore[misc]
        add(f"pruned {percent} %, tuned", pruned)
    example = task.images[task.train[:256]]
    for percent in (30, 50):
        narrow = prune_channels(model, percent / 100, example)
        add(f"channels {percent} %", narrow)
        add(f"channels {percent} %, tuned", task.fit(narrow, tune, 1e-3))
    for bits in BITS:
        palette = add(f"palette {bits} bits", kmeans_quantize(model, bits))
        add(f"linear {bits} bits", quantize(model, bits))
        add(f"palette {bits} bits, tuned", task.fit(palette, tune, 1e-3))
        rounded = task.fit(prepare_qat(model, bits, learn_scale=True), tune, 1e-3)
        add(f"linear {bits} bits, trained", convert(rounded))
    calibration = task.images[task.train[:512]]
    add("gptq 2 bits (linear layers)", gptq(model, [calibration], 2))
    add("integers only, 8 bits", IntegerModel(model, [calibration]))
    return results


@dataclass
class Trial:
    """The results of one seed; for the first seed also the sensitivities and times."""

    right: dict[str, int]
    nbytes: dict[str, int]
    rows: list[Row]


def trial(images: Tensor, labels: Tensor, epochs: int, folder: Path, seed: int) -> Trial:
    """Train the model of one seed and compress it in every way; draw its weights in `folder`."""
    torch.set_num_threads(1)
    task = Task(images, labels, seed, epochs)
    model = task.model()
    models = ways(task, model)
    rows: list[Row] = []
    if not seed:
        rows = _layers(task, model)
        times = _times({name: models[name][0] for name in _TIMED}, images[task.test])
        for name, (ms, faster) in times.items():
            rows.append({"case": "latency", "model": name, "time_ms": ms, "times_faster": faster})
        folder.mkdir(exist_ok=True)
        save(plot_weights(model), folder / "weights.svg")
    right = {name: task.right(small) for name, (small, _) in models.items()}
    print(f"seed {seed} done", flush=True)
    return Trial(right, {name: size for name, (_, size) in models.items()}, rows)


def study(
    images: Tensor, labels: Tensor, folder: Path, seeds: int, epochs: int, processes: int = 1
) -> list[Row]:
    """Return the rows of every method over seeds, and the layers and times of the first seed.

    The weights of the first seed's model are drawn in `folder`.
    """
    run_trial = partial(trial, images, labels, epochs, folder)
    if processes == 1:
        trials = [run_trial(seed) for seed in range(seeds)]
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            trials = list(pool.map(run_trial, range(seeds)))
    rows = trials[0].rows
    nbytes = trials[-1].nbytes
    count = len(images) - 4 * len(images) // 5
    results: list[Row] = []
    for name in nbytes:
        right = [float(t.right[name]) for t in trials]
        lost = [100 * (t.right["float32"] - t.right[name]) / count for t in trials]
        low, high = _interval(right)
        least, most = _interval(lost)
        results.append(
            {
                "case": "digits", "model": name, f"right_of_{count}": statistics.mean(right),
                "low": low, "high": high, "points": statistics.mean(lost), "points_low": least,
                "points_high": most, "kib": nbytes[name] / 1024,
                "times_smaller": nbytes["float32"] / nbytes[name], "seeds": seeds,
            }
        )  # fmt: skip
    timed = [row for row in rows if row["case"] == "latency"]
    return [row for row in rows if row not in timed] + results + timed


_TIMED = ("float32", "pruned 50 %, tuned", "channels 30 %, tuned", "channels 50 %, tuned",
          "palette 4 bits, tuned", "integers only, 8 bits")  # fmt: skip


@torch.no_grad()
def _times(models: dict[str, nn.Module], images: Tensor) -> dict[str, tuple[float, float]]:
    """Return the processor milliseconds per batch, and float32's time over it, interleaved."""
    clocks: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(31):
        for name, model in models.items():
            start = time.process_time()
            model(images)
            clocks[name].append((time.process_time() - start) * 1e3)
    over = {
        name: statistics.median(a / b for a, b in zip(clocks["float32"], times, strict=True))
        for name, times in clocks.items()
    }
    return {name: (statistics.median(times), over[name]) for name, times in clocks.items()}


def _interval(values: Sequence[float]) -> tuple[float, float]:
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, mean
    half = STUDENT.get(len(values), 2.0) * statistics.stdev(values) / len(values) ** 0.5
    return mean - half, mean + half


def _layers(task: Task, model: nn.Module) -> list[Row]:
    def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.argmax(1) == targets).float().mean()

    batch = [(task.images[task.test], task.labels[task.test])]
    rows: list[Row] = []
    scan = sensitivity(model, batch, accuracy, amounts=AMOUNTS)
    for name, values in scan.values.items():
        weight = model.get_submodule(name).get_parameter("weight").detach()
        rows.append(
            {
                "case": "sensitivity",
                "layer": name,
                "weights": weight.numel(),
                "std": float(weight.std()),
                "untouched": scan.baseline,
            }
            | {str(amount): value for amount, value in values.items()}
        )
    return rows


def pictures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Return every plot that the rows contain, by name."""
    results = {row["model"]: row for row in rows if row["case"] == "digits"}

    right = next(key for key in results["float32"] if key.startswith("right_of"))
    count = int(right.rpartition("_")[2])

    def point(name: str, x: float | None = None) -> tuple[float, ...]:
        row = results[name]
        percents = (100 * row[key] / count for key in (right, "low", "high"))
        return (row["kib"] if x is None else x, *percents)

    top = 100 * results["float32"][right] / count
    curves = {
        "k-means": "palette {} bits", "k-means, trained": "palette {} bits, tuned",
        "linear": "linear {} bits", "linear, trained": "linear {} bits, trained",
    }  # fmt: skip
    by_bits = {
        name: [point(pattern.format(b), b) for b in BITS] for name, pattern in curves.items()
    }
    ways = {
        "k-means, trained": [point(f"palette {bits} bits, tuned") for bits in BITS],
        "linear, trained": [point(f"linear {bits} bits, trained") for bits in BITS],
        "weights pruned, tuned": [point(f"pruned {s} %, tuned") for s in (90, 80, 50)],
        "channels pruned, tuned": [point(f"channels {s} %, tuned") for s in (50, 30)],
        "integers only": [point("integers only, 8 bits")],
    }
    timed = {row["model"]: row["time_ms"] for row in rows if row["case"] == "latency"}
    scans = [row for row in rows if row["case"] == "sensitivity"]
    scan = Sensitivity(
        scans[0]["untouched"], {r["layer"]: {a: r[str(a)] for a in AMOUNTS} for r in scans}
    )
    return {
        "sensitivity": plot_sensitivity(scan, metric="accuracy"),
        "bits": plot_frontier(by_bits, x="bits", metric="correct images, %", level=top, log=False),
        "frontier": plot_frontier(ways, metric="correct images, %", level=top),
        "latency": plot_frontier(
            {name: [point(name, ms)] for name, ms in timed.items()},
            x="ms",
            metric="correct images, %",
        ),
    }


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 images of 8 x 8."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    return images, torch.tensor(classes).long()


def main() -> None:
    """Measure, save the rows and plot them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--processes", type=int, default=1, help="seeds at a time")
    parser.add_argument("--json", type=Path, default=STUDY_FOLDER / "rows.json")
    parser.add_argument("--draw", action="store_true")
    arguments = parser.parse_args()
    if not arguments.draw:
        rows = study(*digits(), PICTURES, arguments.seeds, arguments.epochs, arguments.processes)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    for name, picture in pictures(json.loads(arguments.json.read_text())).items():
        save(picture, PICTURES / f"{name}.svg")


if __name__ == "__main__":
    main()
