"""How much does the model lose if one layer alone is compressed, and by how much?

Notable: what comes before the layer does not change, so it is computed once. The model is traced
(torch.fx), and each trial starts at its layer from the inputs that a single pass leaves there: for
L layers of equal cost that is (L + 1) / 2 passes a trial amount instead of L, with the same numbers
to the bit. A model that cannot be traced is run whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from tinyml.layers import PRUNABLE, check_finite, evaluating, layers_of
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
    method: Literal["auto", "prefix", "whole"] = "auto",
    protect: Sequence[str] = (),
) -> Sensitivity:
    """Scan every layer alone over `amounts`; the model is as before afterwards.

    `batches` are pairs (inputs, targets), `metric(model(inputs), targets)` a number; batches count
    by their length. `compress(weight, amount)` makes the trial weight: sparsity by default, but any
    function will do, such as rounding to `amount` bits. method="prefix" raises where the model
    cannot be traced, "auto" runs it whole then.
    """
    if method not in ("auto", "prefix", "whole"):
        raise ValueError(f"method is {method!r}; 'auto', 'prefix' or 'whole'")
    if not batches:
        raise ValueError("a scan needs at least one (inputs, targets) batch")
    chosen = layers_of(model, layers, protect)
    for name, layer in chosen.items():
        check_finite(f"{name}.weight".lstrip("."), layer.get_parameter("weight"))
    trials = {
        name: {amount: compress(layer.get_parameter("weight"), amount) for amount in amounts}
        for name, layer in chosen.items()
    }
    with evaluating(model):
        if method == "whole":
            return _scan(_whole(model), chosen, trials, batches, metric)
        try:
            return _scan(_Prefix(model, chosen), chosen, trials, batches, metric)
        except NotTraceable as error:
            if method == "prefix":
                raise ValueError(f"{error}; use method='whole'") from error
            return _scan(_whole(model), chosen, trials, batches, metric)


class NotTraceable(Exception):
    """The model's forward depends on values, or changes its inputs in place."""


Trials = dict[str, dict[float, Tensor]]
Outputs = Iterator[tuple[str, float, Any]]
Runner = Callable[[Any, dict[str, nn.Module], Trials], Outputs]


def _scan(
    runner: Runner,
    layers: dict[str, nn.Module],
    trials: Trials,
    batches: Sequence[Batch],
    metric: Metric,
) -> Sensitivity:
    total: dict[tuple[str, float], float] = {}
    samples = calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handles = [layer.register_forward_hook(count) for layer in layers.values()]
    try:
        for inputs, targets in batches:
            samples += len(targets)
            for name, amount, outputs in runner(inputs, layers, trials):
                value = float(metric(outputs, targets)) * len(targets)
                total[name, amount] = total.get((name, amount), 0.0) + value
    finally:
        for handle in handles:
            handle.remove()
    values = {n: {a: total[n, a] / samples for a in amounts} for n, amounts in trials.items()}
    return Sensitivity(total["", 0.0] / samples, values, calls)


def _whole(model: nn.Module) -> Runner:
    def run(inputs: Any, layers: dict[str, nn.Module], trials: Trials) -> Outputs:
        for name, layer in layers.items():
            for amount, weight in trials[name].items():
                with _weight(layer, weight):
                    outputs = model(inputs)
                yield name, amount, outputs
        yield "", 0.0, model(inputs)

    return run


class _Prefix:
    """One pass that stops at every layer to run the rest of the model with each trial weight."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        try:
            self._traced = fx.GraphModule(model, fx.Tracer().trace(model))
        except Exception as error:  # tracing runs the model's own code, which may raise anything
            raise NotTraceable(f"{type(model).__name__} cannot be traced: {error}") from error
        self._nodes = list(self._traced.graph.nodes)
        missing = layers.keys() - {n.target for n in self._nodes if n.op == "call_module"}
        if missing:
            raise NotTraceable(f"the trace does not show the layers {sorted(missing)}")
        last = {used: node for node in self._nodes for used in node.all_input_nodes}
        self._dead: dict[fx.Node, list[fx.Node]] = {}
        for used, node in last.items():
            self._dead.setdefault(node, []).append(used)

    def __call__(self, inputs: Any, layers: dict[str, nn.Module], trials: Trials) -> Outputs:
        run = fx.Interpreter(self._traced, garbage_collect_values=False)
        run.args_iter = iter((inputs,))
        environment: dict[fx.Node, Any] = {}
        pending = dict(layers)
        for position, node in enumerate(self._nodes):
            if node.op == "call_module" and node.target in pending:
                layer = pending.pop(node.target)
                before = _versions(environment)
                for amount, weight in trials[node.target].items():
                    with _weight(layer, weight):
                        outputs = self._rest(run, dict(environment), position)
                    if _versions(environment) != before:
                        raise NotTraceable("the model changes an earlier result in place")
                    yield node.target, amount, outputs
            result = self._step(run, environment, node)
        yield "", 0.0, result

    def _rest(self, run: fx.Interpreter, environment: dict[fx.Node, Any], position: int) -> Any:
        for node in self._nodes[position:]:
            result = self._step(run, environment, node)
        return result

    def _step(self, run: fx.Interpreter, environment: dict[fx.Node, Any], node: fx.Node) -> Any:
        run.env = environment
        environment[node] = run.run_node(node)
        for dead in self._dead.get(node, ()):
            environment.pop(dead, None)
        return environment[node]


def _versions(environment: dict[fx.Node, Any]) -> list[int]:
    return [value._version for value in environment.values() if isinstance(value, Tensor)]


@contextmanager
def _weight(layer: nn.Module, weight: Tensor) -> Iterator[None]:
    parameter = layer.get_parameter("weight")
    kept = parameter.data
    parameter.data = weight
    try:
        yield
    finally:
        parameter.data = kept
