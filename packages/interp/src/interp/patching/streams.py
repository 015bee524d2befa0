"""Which activation carries the answer: put one run's into another and see what comes back.

- `patch_streams`: every (layer, position) of the residual stream, exactly. A patch entering block l
  changes nothing before it, so each layer restarts from the recorded stream with all positions as
  one batch, and the metric sees the final stream alone, not a whole vocabulary of logits.
- `attribution_patching`: all sites at once, to first order, from one backward pass.
- `path_patching`: the effect of one component through chosen readers alone.

Nanda 2023, "Attribution Patching"; Goldowsky-Dill et al. 2023, "Path Patching".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from interp.tap import Replacement, expand_sites, patch, record

Metric = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class StreamScan:
    """The metric after each patch, (layers, positions), and in the two runs themselves."""

    names: tuple[str, ...]
    values: Tensor
    clean: float
    corrupted: float

    @property
    def recovered(self) -> Tensor:
        """The share of the gap that each patch closes: 0 as corrupted, 1 as clean."""
        return (self.values - self.corrupted) / (self.clean - self.corrupted)


@torch.no_grad()
def patch_streams(
    model: nn.Module,
    blocks: str,
    clean: Tensor,
    corrupted: Tensor,
    metric: Metric,
    *,
    batch: int = 64,
) -> StreamScan:
    """Put the clean stream into the corrupted run, at each block's input and position in turn.

    `blocks` names the blocks in order ("blocks.*"): modules that take the stream first and give
    it back, each the next one's input. `clean` and `corrupted` are (1, seq); `metric` maps final
    streams (n, seq, d_model), as they leave the last block, to (n,), see `logit_difference`.
    `batch` positions run together.

    Raises ValueError if a block does not feed the next one, or gives something else when called
    again.
    """
    if batch < 1:
        raise ValueError(f"batch {batch} holds no position; give at least 1")
    if clean.shape != corrupted.shape or len(clean) != 1:
        raise ValueError(
            f"runs are {tuple(clean.shape)} and {tuple(corrupted.shape)}; both must be (1, seq)"
        )
    names = expand_sites(model, (blocks,))
    modules = [model.get_submodule(name) for name in names]
    calls = _Calls(modules)
    with record(model, *(f"{name}:input" for name in names), *names, clone=True) as seen, calls:
        _forward(model, clean)
        clean_streams = dict(seen)
        _forward(model, corrupted)
    streams, last = [seen[f"{name}:input"] for name in names], seen[names[-1]]
    for name, following in zip(names, streams[1:], strict=False):
        if not torch.equal(seen[name], following):
            raise ValueError(
                f"one of {names[0]} ... {names[-1]} does not feed the next: what {name} gives is "
                "not what the next one gets; name the blocks of the residual stream, in order"
            )

    def run(x: Tensor, start: int) -> Tensor:
        for index in range(start, len(modules)):
            x = calls.again(index, x)
        return x

    stateful = (
        f"called again, {names[0]} ... {names[-1]} give another stream; they must not keep "
        "a state (a cache, dropout): use eval() and turn caches off"
    )
    # A cache that grew makes keys longer than masks: the error of a shape deep inside a block.
    try:
        again = run(streams[0], 0)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(stateful) from error
    if again.shape != last.shape or not torch.allclose(
        again, last, rtol=1e-3, atol=1e-4 * float(last.abs().max())
    ):
        raise ValueError(stateful)
    positions = torch.arange(clean.shape[1], device=last.device)
    values = []
    for start, (name, stream) in enumerate(zip(names, streams, strict=True)):
        results = []
        for chosen in torch.split(positions, batch):
            patched = stream.repeat(len(chosen), 1, 1)
            rows = torch.arange(len(chosen), device=last.device)
            patched[rows, chosen] = clean_streams[f"{name}:input"][0, chosen]
            result = metric(run(patched, start))
            if result.shape != (len(chosen),):
                raise ValueError(
                    f"the metric gave {tuple(result.shape)} for {len(chosen)} streams "
                    f"{tuple(patched.shape)}; it must give one number each"
                )
            results.append(result)
        values.append(torch.cat(results))
    ends = metric(torch.cat([clean_streams[names[-1]], last]))
    return StreamScan(tuple(names), torch.stack(values), ends[0].item(), ends[1].item())


def logit_difference(
    norm: Callable[[Tensor], Tensor] | None,
    unembed: nn.Linear | Tensor,
    right: int,
    wrong: int,
    *,
    position: int = -1,
) -> Metric:
    """The metric logit(right) - logit(wrong), from two rows of the unembedding alone."""
    weight = unembed if isinstance(unembed, Tensor) else unembed.weight
    bias = None if isinstance(unembed, Tensor) else unembed.bias
    direction = weight[right] - weight[wrong]
    constant = 0.0 if bias is None else bias[right] - bias[wrong]

    def metric(stream: Tensor) -> Tensor:
        x = stream[:, position]
        return (x if norm is None else norm(x)) @ direction + constant

    return metric


def attribution_patching(
    model: nn.Module,
    sites: Sequence[str],
    clean: Tensor,
    corrupted: Tensor,
    metric: Metric,
) -> dict[str, Tensor]:
    """The effect of each activation to first order: (clean - corrupted) * d metric / d activation.

    Summed over the last dimension, so (batch, seq) for streams. `metric` maps the model's output
    to one number. The error against real patches is of second order in clean - corrupted.
    """
    with torch.no_grad(), record(model, *sites, clone=True) as seen:
        _forward(model, clean)
        before = dict(seen)
        _forward(model, corrupted)
    _require_equal_shapes(before, seen)
    # An added zero is a place to differentiate at, also where no parameter asks for gradients.
    zeros = {site: torch.zeros_like(x, requires_grad=True) for site, x in seen.items()}
    added: dict[str, Replacement] = {site: partial(torch.add, zero) for site, zero in zeros.items()}
    with torch.enable_grad(), patch(model, added), record(model, *sites, clone=True) as again:
        result = metric(_forward(model, corrupted))
        _require_repeatable(seen, again)
        _require_one_number(result)
        gradients = torch.autograd.grad(result, list(zeros.values()))
    return {
        site: ((before[site] - seen[site]) * gradient).sum(-1)
        for (site, gradient) in zip(zeros, gradients, strict=True)
    }


@torch.no_grad()
def path_patching(
    model: nn.Module, sender: str, receivers: Sequence[str], clean: Tensor, corrupted: Tensor
) -> Tensor:
    """The corrupted run's output, had `receivers` read `sender` as it is in the clean run.

    `sender` is a module whose output is added to the stream, `receivers` are inputs that read the
    stream before any norm ("blocks.3.norm1:input"). The stream is a sum, so the direct path is
    the difference of the sender's output, added at the receivers alone; everything between still
    sees the corrupted run.
    """
    with record(model, sender, clone=True) as seen:
        _forward(model, clean)
        before = seen[sender]
        _forward(model, corrupted)
    _require_equal_shapes({sender: before}, seen)
    change = before - seen[sender]
    with (
        patch(model, {site: partial(torch.add, change) for site in receivers}),
        record(model, sender, clone=True) as again,
    ):
        out: Tensor = _forward(model, corrupted)
    _require_repeatable(seen, again)
    return out


def drop_heads(*dropped: int, heads: int) -> Callable[[Tensor], Tensor]:
    """A patch for the input of an output projection: some of its `heads` heads give 0."""
    if not all(0 <= head < heads for head in dropped):
        raise ValueError(f"heads {dropped} are not all within 0 and {heads - 1}")

    def drop(mixed: Tensor) -> Tensor:
        parts = mixed.chunk(heads, -1)
        return torch.cat([p * (i not in dropped) for i, p in enumerate(parts)], -1)

    return drop


def _forward(model: nn.Module, tokens: Tensor) -> Any:
    """The model's output; a cache that `use_cache` turns off would make blocks remember."""
    parameters = inspect.signature(model.forward).parameters
    return model(tokens, use_cache=False) if "use_cache" in parameters else model(tokens)


def _require_equal_shapes(clean: Mapping[str, Tensor], corrupted: Mapping[str, Tensor]) -> None:
    for site, x in clean.items():
        if x.shape != corrupted[site].shape:
            raise ValueError(
                f"at {site!r} the runs are {tuple(x.shape)} and {tuple(corrupted[site].shape)}; "
                "give prompts of the same number and length"
            )


def _require_repeatable(seen: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    """The same tokens must give the same activations: not so with a cache or dropout."""
    for site, x in again.items():
        old = seen[site]
        if x.shape != old.shape or not torch.allclose(
            x, old, rtol=1e-3, atol=1e-4 * float(old.abs().max())
        ):
            raise ValueError(
                f"{site!r} differs when the corrupted run is repeated: either the model keeps a "
                "state (a cache, dropout): use eval() and turn caches off, or a receiver comes "
                "before its sender"
            )


def _require_one_number(result: object) -> None:
    if not isinstance(result, Tensor) or result.numel() != 1:
        given = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"the metric gave {given}; it must give one number, a tensor: sum it")


class _Calls:
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
        args, kwargs = self.arguments[index]
        if args:
            args = (x, *args[1:])
        else:
            kwargs = {**kwargs, next(iter(kwargs)): x}
        out = self.modules[index](*args, **kwargs)
        result: Tensor = out if isinstance(out, Tensor) else out[0]
        return result
