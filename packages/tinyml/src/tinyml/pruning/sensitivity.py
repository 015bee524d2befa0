"""Sensitivity: the change of a metric if a single layer is compressed.

The part of the model before the compressed layer does not change, so it is computed once. A first
pass records what every layer returns; in a trial, the layers before the first use of the compressed
weight return these records. For L layers of equal cost, a trial runs (L + 1) / 2 layers on average
instead of L. The results are identical to those of full runs, because the model's own code between
the layers runs in every trial.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tinyml.conversion import dense_copy
from tinyml.layers import PRUNABLE, layers_of
from tinyml.pruning.magnitude import importance, smallest_mask
from tinyml.validation import check_finite

Batch = tuple[Any, Any]
Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Sensitivity:
    """The metric of the unchanged model, and with each layer compressed by each amount."""

    baseline: float
    values: dict[str, dict[float, float]]
    #: The number of scanned layers that were run: the cost of the scan.
    layer_calls: int


def prune_weight(weight: Tensor, sparsity: float) -> Tensor:
    """Return the weight with its smallest values set to zero; the default of a scan."""
    return weight * smallest_mask(importance(weight), sparsity)


@torch.no_grad()
def sensitivity(
    model: nn.Module,
    batches: Sequence[Batch],
    metric: Metric,
    *,
    amounts: Sequence[float] = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    compress: Callable[[Tensor, float], Tensor] = prune_weight,
    layers: Sequence[type[nn.Module]] = PRUNABLE,
    protect: Sequence[str] = (),
) -> Sensitivity:
    """Scan every layer separately over `amounts`, on a copy of the model.

    `batches` are pairs (inputs, targets), and `metric(model(inputs), targets)` is a number. Batches
    are weighted by their length. `compress(weight, amount)` returns the trial weight: pruned to a
    sparsity by default, but any function is possible, such as rounding to `amount` bits.
    """
    if not batches:
        raise ValueError("expected at least one (inputs, targets) batch, got none")
    model = dense_copy(model).eval()
    weights = {
        name: layer.get_parameter("weight")
        for name, layer in layers_of(model, layers, protect).items()
    }
    for name, weight in weights.items():
        check_finite(f"{name}.weight".lstrip("."), weight)
    trials = [
        (name, amount, compress(weight.detach(), amount))
        for name, weight in weights.items()
        for amount in amounts
    ]
    runs = _Runs(layers_of(model, layers).values(), weights.values())
    baseline, total = 0.0, {(name, amount): 0.0 for name, amount, _ in trials}
    for inputs, targets in batches:
        with runs.recorded():
            baseline += float(metric(model(inputs), targets)) * len(targets)
        for name, amount, trial in trials:
            weight = weights[name]
            dense, weight.data = weight.data, trial
            with runs.from_first_use_of(weight):
                total[name, amount] += float(metric(model(inputs), targets)) * len(targets)
            weight.data = dense
    samples = sum(len(targets) for _, targets in batches)
    values = {name: {a: total[name, a] / samples for a in amounts} for name in weights}
    return Sensitivity(baseline / samples, values, runs.layers)


class _Runs(TorchFunctionMode):
    """Runs of one model on one batch: a recorded run, and later runs that return its records.

    The mode is active in all runs, because some modules, such as `nn.TransformerEncoderLayer`, call
    other layers under a mode than without one.
    """

    def __init__(self, layers: Iterable[nn.Module], weights: Iterable[nn.Parameter]) -> None:
        super().__init__()
        #: The number of layers that were run in total.
        self.layers = 0
        self._weights = {id(weight) for weight in weights}
        self._returned: list[Any] = []
        self._used: dict[int, int] = {}  # layers that run before a weight's first use
        self._at = self._start = 0
        self._first = False
        for layer in layers:
            layer.forward = self._watched(layer.forward)

    def recorded(self) -> _Runs:
        """Return the context of a run that records what the layers return."""
        self._returned, self._used = [], {}
        self._first, self._at, self._start = True, 0, 0
        return self

    def from_first_use_of(self, weight: nn.Parameter) -> _Runs:
        """Return the context of a run in which layers before this weight return their records."""
        self._first, self._at, self._start = False, 0, self._used.get(id(weight), 0)
        return self

    def __torch_function__(
        self,
        function: Any,
        _: Any,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        for value in (*arguments, *options.values()):
            if self._first and id(value) in self._weights:
                self._used.setdefault(id(value), self._at)
        return function(*arguments, **options)

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            if self._at < self._start:  # a copy, because the model may write into it
                result = copy.deepcopy(self._returned[self._at])
            else:
                result = forward(*arguments, **options)
                self.layers += 1
                if self._first:
                    self._returned.append(copy.deepcopy(result))
            self._at += 1
            return result

        return watched
