"""How much does the model lose if one layer alone is compressed, and by how much?

Notable: what comes before the layer does not change, so it is computed once. A first pass keeps
what every layer returns; in a trial those before the first use of the compressed weight hand that
out again. For L layers of equal cost that is (L + 1) / 2 layers a trial instead of L, with the same
numbers to the bit, whatever the model's own code does between them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tinyml.layers import PRUNABLE, check_finite, dense_copy, layers_of
from tinyml.pruning.magnitude import importance, smallest_mask

Batch = tuple[Any, Any]
Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Sensitivity:
    """The metric of the untouched model, and with each layer compressed by each amount."""

    baseline: float
    values: dict[str, dict[float, float]]
    layer_calls: int
    """Layers (of the kinds scanned) that were run: what the scan cost."""


def prune_weight(weight: Tensor, sparsity: float) -> Tensor:
    """The weight without its smallest share: the default of a scan."""
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
    """Scan every layer alone over `amounts`, on a copy of the model.

    `batches` are pairs (inputs, targets), `metric(model(inputs), targets)` a number; batches count
    by their length. `compress(weight, amount)` makes the trial weight: sparsity by default, but any
    function will do, such as rounding to `amount` bits.
    """
    if not batches:
        raise ValueError("a scan needs at least one (inputs, targets) batch")
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
        with runs:
            baseline += float(metric(model(inputs), targets)) * len(targets)
        for name, amount, trial in trials:
            weight = weights[name]
            kept, weight.data = weight.data, trial
            runs.begin(weight)
            total[name, amount] += float(metric(model(inputs), targets)) * len(targets)
            weight.data = kept
    samples = sum(len(targets) for _, targets in batches)
    values = {name: {a: total[name, a] / samples for a in amounts} for name in weights}
    return Sensitivity(baseline / samples, values, runs.layers)


class _Runs(TorchFunctionMode):
    """Runs of one model on one batch. Inside `with` is the first, which the others start from."""

    def __init__(self, layers: Iterable[nn.Module], weights: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.layers = 0
        """How many layers were run in all."""
        self._weights = {id(weight) for weight in weights}
        self._returned: list[Any] = []
        self._used: dict[int, int] = {}  # how many layers were run before a weight's first use
        self._at = self._start = 0
        self._first = False
        for layer in layers:
            layer.forward = self._watched(layer.forward)

    def __enter__(self) -> _Runs:
        self._returned, self._used, self._first = [], {}, True
        self._at = self._start = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._first = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def begin(self, weight: nn.Parameter) -> None:
        """The next run: what was run before this weight's first use returns what it returned."""
        self._at, self._start = 0, self._used.get(id(weight), 0)

    def __torch_function__(
        self, function: Any, _: Any, arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        options = options or {}
        for value in (*arguments, *options.values()):
            if id(value) in self._weights:
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
