"""Which activation carries the answer: put one run's into another and see what comes back.

- `patch_streams`: every (layer, position) of the residual stream, exactly. Each layer restarts from
  the recorded stream with all positions as one batch, and the metric sees the final stream alone.
- `patch_parts`: the same for every head's queries, keys, values or result at every position.
- `ablate_parts`: every head or MLP without what it does: zero, its mean, or another prompt's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from interp.patching.restart import (
    Metric,
    Prompt,
    Restart,
    forward,
    measure,
    require_a_pair,
    tokens_of,
)
from interp.tap import patch, record

Kind = Literal["zero", "mean", "resample"]


@dataclass(frozen=True, eq=False)
class StreamScan:
    """The metric after each patch, (layers, positions), and in the two runs themselves.

    `patch_parts` gives (layers, heads, positions).
    """

    names: tuple[str, ...]
    values: Tensor
    clean: float
    corrupted: float

    @property
    def recovered(self) -> Tensor:
        """The share of the gap that each patch closes: 0 as corrupted, 1 as clean."""
        if self.clean == self.corrupted:
            raise ValueError(
                f"the metric is {self.clean:.6g} in both runs: there is no gap to recover; give "
                "prompts that it tells apart"
            )
        return (self.values - self.corrupted) / (self.clean - self.corrupted)


@dataclass(frozen=True, eq=False)
class Ablations:
    """The metric without each part, (layers, heads), and with all of them."""

    names: tuple[str, ...]
    values: Tensor
    whole: float

    @property
    def effect(self) -> Tensor:
        """What each part contributes: the metric with it less the metric without."""
        return self.whole - self.values


@torch.no_grad()
def patch_streams(
    model: nn.Module,
    blocks: str,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metric,
    *,
    batch: int = 64,
) -> StreamScan:
    """Put the clean stream into the corrupted run, at each block's input and position in turn.

    `blocks` names the blocks in order ("blocks.*"): modules that take the stream first and give
    it back, each the next one's input. `clean` and `corrupted` are (1, seq), or mappings of what
    the model is called with, an `attention_mask` or `past_key_values` among it; `metric` maps
    final streams (n, seq, d_model), as they leave the last block, to (n,), see
    `logit_difference`. `batch` positions run together.

    Raises ValueError if a block does not feed the next one, or gives something else when called
    again.
    """
    scan = patch_parts(model, blocks, ":input", clean, corrupted, metric, batch=batch)
    return replace(scan, values=scan.values[:, 0])


@torch.no_grad()
def patch_parts(
    model: nn.Module,
    blocks: str,
    part: str,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metric,
    *,
    heads: int = 1,
    batch: int = 64,
) -> StreamScan:
    """Put the clean value of one head at one position into the corrupted run, for all of them.

    `part` is a site inside each block whose last dimension is `heads` heads one after the other:
    of a `Decoder` "attention.o:input" for z, "attention.q", or with its kv_heads "attention.k" and
    "attention.v"; "mlp_out" with one head. The rest is as in `patch_streams`; `values` are
    (layers, heads, positions).

    Raises ValueError where `patch_streams` does, and if the site does not have that many heads.
    """
    require_a_pair(clean, corrupted)
    run = Restart(model, blocks, corrupted, batch=batch)
    sites = _sites(run, part)
    with record(model, *sites, run.names[-1], clone=True) as seen:
        forward(model, clean)
    length, device = run.end.shape[1], run.end.device
    places = torch.arange(max(heads, 1) * length, device=device)
    values = []
    for layer, site in enumerate(sites):
        source = _by_head(site, seen[site], heads, length)
        effects = _scan(run, layer, site, source, places // length, places % length, metric)
        values.append(effects.view(heads, length))
    ends = measure(metric, torch.cat([seen[run.names[-1]], run.end])).tolist()
    return StreamScan(run.names, torch.stack(values), *ends)


@torch.no_grad()
def ablate_parts(
    model: nn.Module,
    blocks: str,
    part: str,
    prompt: Prompt,
    metric: Metric,
    *,
    how: Kind = "zero",
    reference: Tensor | None = None,
    heads: int = 1,
    batch: int = 64,
) -> Ablations:
    """Take each head's (or MLP's) activation out of a run at all positions: the metric without it.

    `part` and `metric` are as in `patch_parts`. `how` says what stands in its place: "zero";
    "mean", its mean over the prompts and positions of `reference`; "resample", what it is at the
    same positions of each prompt of `reference`, (n, seq) token ids, and the metric is their mean.
    """
    if how not in ("zero", "mean", "resample"):
        raise ValueError(f"how {how!r} is not one of 'zero', 'mean', 'resample'")
    if (how == "zero") != (reference is None):
        raise ValueError(f"how={how!r} {'takes no' if how == 'zero' else 'needs a'} reference=")
    require_a_pair(prompt, prompt)
    tokens = tokens_of(prompt)
    if how == "resample" and reference is not None and reference.shape[1:] != tokens.shape[1:]:
        raise ValueError(
            f"reference is {tuple(reference.shape)}; to resample from it give "
            f"(n, {tokens.shape[1]}) tokens"
        )
    run = Restart(model, blocks, prompt, batch=batch)
    sites = _sites(run, part)
    with record(model, *sites, clone=True) as seen:
        forward(model, prompt if reference is None else reference)
    length, device = run.end.shape[1], run.end.device
    head = torch.arange(heads, device=device)
    everywhere = torch.arange(length, device=device)[None].expand(heads, -1)
    values = []
    for layer, site in enumerate(sites):
        there = _by_head(site, seen[site], heads, None)
        if how == "zero":
            sources = [torch.zeros_like(there[0])]
        elif how == "mean":
            sources = [there.mean((0, 1)).expand(length, -1, -1)]
        else:
            sources = list(there)
        each = [_scan(run, layer, site, one[None], head, everywhere, metric) for one in sources]
        values.append(torch.stack(each).mean(0))
    return Ablations(run.names, torch.stack(values), float(measure(metric, run.end)))


def _sites(run: Restart, part: str) -> list[str]:
    return [name + part if part.startswith(":") else f"{name}.{part}" for name in run.names]


def _by_head(site: str, value: Tensor, heads: int, length: int | None) -> Tensor:
    """(..., seq, heads, d_head) of what a site gave."""
    length = value.shape[1] if length is None and value.ndim == 3 else length
    if heads < 1:
        raise ValueError(f"heads {heads} is less than 1")
    if value.ndim != 3 or value.shape[1] != length or value.shape[2] % heads:
        raise ValueError(
            f"{site!r} is {tuple(value.shape)}; for {heads} heads and {length} tokens it must "
            f"be (1, {length}, heads * d_head)"
        )
    by_head: Tensor = value.unflatten(-1, (heads, -1))
    return by_head


def _scan(
    run: Restart,
    layer: int,
    site: str,
    source: Tensor,
    head: Tensor,
    position: Tensor,
    metric: Metric,
) -> Tensor:
    """The metric (n,) with `source` (1, seq, heads, d_head) put at n places, `batch` at a time.

    Place i is head[i] at position[i], one or several.
    """
    results = []
    for i in range(0, len(head), run.batch):
        heads, positions = head[i : i + run.batch], position[i : i + run.batch]
        row = torch.arange(len(heads), device=heads.device)
        if positions.ndim == 2:
            row, heads = row[:, None], heads[:, None]
        put = partial(
            put_heads, (row, positions, heads), source[0, positions, heads], source.shape[2]
        )
        with patch(run.model, {site: put}):
            results.append(measure(metric, run(run.streams[layer].repeat(len(row), 1, 1), layer)))
    return torch.cat(results)


def put_heads(
    places: tuple[Tensor | slice | int, ...], new: Tensor, heads: int, old: Tensor
) -> Tensor:
    """`old` (n, seq, heads * d_head) with `new` at places (row, position, head)."""
    changed = old.unflatten(-1, (heads, -1)).clone()
    changed[places] = new
    joined: Tensor = changed.flatten(-2)
    return joined


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


def drop_heads(*dropped: int, heads: int, to: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """A patch for the input of an output projection: some of its `heads` heads give 0.

    Or what they have in `to`, a tensor that broadcasts to that input: a mean, another prompt's.
    """
    if not all(0 <= head < heads for head in dropped):
        raise ValueError(f"heads {dropped} are not all within 0 and {heads - 1}")

    def drop(mixed: Tensor) -> Tensor:
        other = torch.zeros_like(mixed) if to is None else to.to(mixed).expand_as(mixed)
        parts = zip(mixed.chunk(heads, -1), other.chunk(heads, -1), strict=True)
        return torch.cat([o if i in dropped else m for i, (m, o) in enumerate(parts)], -1)

    return drop
