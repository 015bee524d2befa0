"""Blocks called again from a recorded stream: what a patch changes, and nothing before it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder, DecoderBlock
from interp.tap import expand_sites, record

Metric = Callable[[Tensor], Tensor]
Metrics = Metric | Sequence[Metric]  # of several pairs: that of all, or one for each
Result = TypeVar("Result", bound=Any)
# Token ids (1, seq), or (pairs, seq), or what else the model is called with: attention_mask, ...
Prompt = Tensor | Mapping[str, Any]
_KINDS = ("linear", "normalization", "container")
# What a Decoder's blocks are made of: attention alone looks at other positions.
_PARTS = ("interp.decoder.decoder", *(f"torch.nn.modules.{m}" for m in _KINDS))


def tokens_of(prompt: Prompt) -> Tensor:
    """The token ids of a prompt."""
    if isinstance(prompt, Tensor):
        return prompt
    if not isinstance(tokens := prompt.get("input_ids"), Tensor):
        raise ValueError(f"a prompt has {', '.join(map(str, prompt)) or 'nothing'}; give input_ids")
    return tokens


def several(
    clean: Prompt, corrupted: Prompt, metric: Metrics
) -> list[tuple[Prompt, Prompt, Metric]]:
    """The pairs of a batch, one by one, with the metric of all or one for each; [] of one pair."""
    one, other = tokens_of(clean), tokens_of(corrupted)
    rows = len(one)
    if one.shape != other.shape or not rows:
        raise ValueError(
            f"runs are {tuple(one.shape)} and {tuple(other.shape)}; both must be (1, seq), or "
            "(pairs, seq)"
        )
    if not isinstance(metric, Sequence):
        metric = [metric] * rows if rows > 1 else []
    elif len(metric) != rows:
        raise ValueError(f"{len(metric)} metrics for {rows} pairs; give one, or one for each")
    return [(_row(clean, i, rows), _row(corrupted, i, rows), m) for i, m in enumerate(metric)]


def _row(prompt: Prompt, i: int, rows: int) -> Prompt:
    if isinstance(prompt, Tensor):
        return prompt[i : i + 1]
    if rows > 1 and any(map(_is_cache, prompt.values())):
        raise ValueError("a cache that the prompts bring goes with one pair a call")
    of_batch = {k: v for k, v in prompt.items() if isinstance(v, Tensor) and v.ndim > 1}
    return {**prompt, **{k: v[i : i + 1] for k, v in of_batch.items() if len(v) == rows}}


def mean_of(results: Sequence[Result]) -> Result:
    """Of the results of several pairs: the mean of all numbers, and `each` of their values."""
    numbers: dict[str, Any] = {"each": torch.stack([result.values for result in results])}
    for field in fields(results[0]):
        of_all = [getattr(result, field.name) for result in results]
        if isinstance(of_all[0], float):
            numbers[field.name] = sum(of_all) / len(of_all)
        elif isinstance(of_all[0], Tensor) and of_all[0].is_floating_point():
            numbers[field.name] = torch.stack(of_all).mean(0)
    return replace(results[0], **numbers)


def forward(model: nn.Module, prompt: Prompt) -> Any:
    """The model's output without a cache of its own; one that the prompt brings is copied."""
    options = (
        {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    )
    if isinstance(prompt, Tensor):
        return model(prompt, **options)
    return model(
        **{k: copy.deepcopy(v) if _is_cache(v) else v for k, v in prompt.items()}, **options
    )


class Restart:
    """One run's streams entering each block, and how to go on from any of them."""

    def __init__(self, model: nn.Module, blocks: str, prompt: Prompt, *, batch: int) -> None:
        if batch < 1:
            raise ValueError(f"batch {batch} holds no position; give at least 1")
        self.model, self.batch = model, batch
        self.names = tuple(expand_sites(model, (blocks,)))
        modules = [model.get_submodule(name) for name in self.names]
        self.layers, self.calls = len(modules), Calls(modules)
        self.sites = [f"{name}:input" for name in self.names]
        # Queries, keys and values of a Decoder: what a patch after them does not change is kept.
        kept = [f"{name}.attention.{x}" for name in self.names for x in "qkv"]
        kept = kept if _is_causal(model, modules) else []
        with record(model, *self.sites, *self.names, *kept, clone=True) as seen, self.calls:
            forward(model, prompt)
        self.held = {site: seen[site] for site in kept}
        self.streams, self.end = [seen[site] for site in self.sites], seen[self.names[-1]]
        for name, following in zip(self.names, self.streams[1:], strict=False):
            if not torch.equal(seen[name], following):
                raise ValueError(
                    f"one of {self.names[0]} ... {self.names[-1]} does not feed the next: what "
                    f"{name} gives is not what the next one gets; name the blocks of the residual "
                    "stream, in order"
                )
        if not kept:  # a Decoder keeps no state
            self._require_no_state()

    def _require_no_state(self) -> None:
        stateful = (
            f"called again, {self.names[0]} ... {self.names[-1]} give another stream; they must "
            "not keep a state (a cache, dropout): use eval() and turn caches off"
        )
        # A cache that grew makes keys longer than masks: the error of a shape deep inside a block.
        try:
            again = self(self.streams[0], 0)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ValueError(stateful) from error
        if not alike(again, self.end):
            raise ValueError(stateful)

    def __call__(self, stream: Tensor, start: int) -> Tensor:
        """The final stream of what enters block `start`."""
        for index in range(start, self.layers):
            stream = self.calls.again(index, stream)
        return stream


def _is_causal(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether the blocks are a `Decoder`'s own, and nobody else has a hand in them."""
    return (
        isinstance(model, Decoder)
        and all(type(block) is DecoderBlock for block in blocks)
        and all(type(m).__module__ in _PARTS for block in blocks for m in block.modules())
        and not any(
            m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m)
            for m in model.modules()
        )
    )


def alike(again: Tensor, old: Tensor) -> bool:
    """Whether a run that was repeated gave the same, but for rounding."""
    atol = 1e-4 * float(old.abs().max())
    return again.shape == old.shape and torch.allclose(again, old, rtol=1e-3, atol=atol)


def measure(metric: Metrics, streams: Tensor) -> Tensor:
    """The metric (n,) of n final streams."""
    assert not isinstance(metric, Sequence)
    result = metric(streams)
    if not isinstance(result, Tensor) or result.shape != (len(streams),):
        given = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"the metric gave {given} for {len(streams)} streams {tuple(streams.shape)}; it must "
            "give one number each"
        )
    return result


class Calls:
    """The arguments that modules are called with, to call them again with another first tensor."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        # Caches as they were before the first block added to them; a block reads its own layer.
        self.caches: dict[int, Any] = {}

    def __enter__(self) -> None:
        self.handles = [
            module.register_forward_pre_hook(partial(self._keep, index), with_kwargs=True)
            for index, module in enumerate(self.modules)
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _keep(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if _is_cache(value) and id(value) not in self.caches:
                self.caches[id(value)] = copy.deepcopy(value)
        self.arguments[index] = (args, kwargs)

    def again(self, index: int, x: Tensor) -> Tensor:
        """What module `index` gives for `x` and the other arguments that it was called with."""
        args, kwargs = self.arguments[index]
        args = tuple(self._fresh(value, len(x)) for value in args)
        kwargs = {name: self._fresh(value, len(x)) for name, value in kwargs.items()}
        kwargs = kwargs if args else {**kwargs, next(iter(kwargs)): x}
        args = (x, *args[1:]) if args else ()
        out = self.modules[index](*args, **kwargs)
        result: Tensor = out if isinstance(out, Tensor) else out[0]
        return result

    def _fresh(self, value: Any, rows: int) -> Any:
        if id(value) not in self.caches:
            return value
        cache = copy.deepcopy(self.caches[id(value)])
        if rows > 1:
            cache.batch_repeat_interleave(rows)
        return cache


def _is_cache(value: object) -> bool:
    """Hugging Face's caches: blocks append keys and values to them."""
    return hasattr(value, "batch_repeat_interleave")
