"""Blocks called again from a recorded stream: what a patch changes, and nothing before it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from interp.tap import expand_sites, record

Metric = Callable[[Tensor], Tensor]


class Restart:
    """Two runs' streams entering each block, and how to go on from any of them."""

    def __init__(
        self, model: nn.Module, blocks: str, clean: Tensor, corrupted: Tensor, *, batch: int
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch {batch} holds no position; give at least 1")
        if clean.shape != corrupted.shape or len(clean) != 1:
            raise ValueError(
                f"runs are {tuple(clean.shape)} and {tuple(corrupted.shape)}; both must be (1, seq)"
            )
        names = expand_sites(model, (blocks,))
        modules = [model.get_submodule(name) for name in names]
        self.names, self.layers, self.calls = tuple(names), len(modules), Calls(modules)
        inputs = [f"{name}:input" for name in names]
        with record(model, *inputs, *names, clone=True) as seen, self.calls:
            forward(model, clean)
            first = dict(seen)
            forward(model, corrupted)
        self.clean, self.corrupted = [first[i] for i in inputs], [seen[i] for i in inputs]
        self.clean_end, self.corrupted_end = first[names[-1]], seen[names[-1]]
        for name, following in zip(names, self.corrupted[1:], strict=False):
            if not torch.equal(seen[name], following):
                raise ValueError(
                    f"one of {names[0]} ... {names[-1]} does not feed the next: what {name} gives "
                    "is not what the next one gets; name the blocks of the residual stream, in "
                    "order"
                )
        self._require_no_state()

    def _require_no_state(self) -> None:
        stateful = (
            f"called again, {self.names[0]} ... {self.names[-1]} give another stream; they must "
            "not keep a state (a cache, dropout): use eval() and turn caches off"
        )
        # A cache that grew makes keys longer than masks: the error of a shape deep inside a block.
        try:
            again = self(self.corrupted[0], 0)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ValueError(stateful) from error
        last = self.corrupted_end
        if again.shape != last.shape or not torch.allclose(
            again, last, rtol=1e-3, atol=1e-4 * float(last.abs().max())
        ):
            raise ValueError(stateful)

    def __call__(self, stream: Tensor, start: int) -> Tensor:
        """The final stream of what enters block `start`."""
        for index in range(start, self.layers):
            stream = self.calls.again(index, stream)
        return stream

    def measured(self, metric: Metric, start: int, streams: Tensor) -> Tensor:
        """The metric (n,) of n streams that enter block `start`."""
        result = metric(self(streams, start))
        if result.shape != (len(streams),):
            raise ValueError(
                f"the metric gave {tuple(result.shape)} for {len(streams)} streams "
                f"{tuple(streams.shape)}; it must give one number each"
            )
        return result

    def ends(self, metric: Metric) -> tuple[float, float]:
        """The metric of the clean and of the corrupted run."""
        clean, corrupted = metric(torch.cat([self.clean_end, self.corrupted_end])).tolist()
        return clean, corrupted


def forward(model: nn.Module, tokens: Tensor) -> Any:
    """The model's output; a cache that `use_cache` turns off would make blocks remember."""
    parameters = inspect.signature(model.forward).parameters
    return model(tokens, use_cache=False) if "use_cache" in parameters else model(tokens)


class Calls:
    """The arguments that modules are called with, to call them again with another first tensor."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __enter__(self) -> None:
        self.handles = [
            module.register_forward_pre_hook(partial(self._keep, index), with_kwargs=True)
            for index, module in enumerate(self.modules)
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _keep(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.arguments[index] = (args, kwargs)

    def again(self, index: int, x: Tensor) -> Tensor:
        """What module `index` gives for `x` and the other arguments that it was called with."""
        args, kwargs = self.arguments[index]
        if args:
            args = (x, *args[1:])
        else:
            kwargs = {**kwargs, next(iter(kwargs)): x}
        out = self.modules[index](*args, **kwargs)
        result: Tensor = out if isinstance(out, Tensor) else out[0]
        return result
