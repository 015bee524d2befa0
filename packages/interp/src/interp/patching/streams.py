"""Which activation carries the answer: put one run's into another and see what comes back.

- `patch_streams`: every (layer, position) of the residual stream, exactly, restarted at the layer.
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

from interp.patching.restart import Metrics, Prompt, Restart, forward, mean_of, measure, several
from interp.patching.waves import scan
from interp.tap import record

Kind = Literal["zero", "mean", "resample"]


@dataclass(frozen=True, eq=False)
class StreamScan:
    """The metric after each patch, (layers, positions), and in the two runs themselves.

    `patch_parts` gives (layers, heads, positions). Of several pairs all are means, and `each` has
    their values, (pairs, layers, ...).
    """

    names: tuple[str, ...]
    values: Tensor
    clean: float
    corrupted: float
    each: Tensor | None = None

    @property
    def recovered(self) -> Tensor:
        """The share of the gap that each patch closes: 0 as corrupted, 1 as clean."""
        if self.clean == self.corrupted:
            same = f"the metric is {self.clean:.6g} in both runs"
            raise ValueError(f"{same}: there is no gap to recover; give prompts that differ in it")
        return (self.values - self.corrupted) / (self.clean - self.corrupted)


@dataclass(frozen=True, eq=False)
class Ablations:
    """The metric without each part, (layers, heads), and with all of them; `each` by prompt."""

    names: tuple[str, ...]
    values: Tensor
    whole: float
    each: Tensor | None = None

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
    metric: Metrics,
    *,
    batch: int = 64,
) -> StreamScan:
    """Put the clean stream into the corrupted run, at each block's input and position in turn.

    `blocks` names the blocks in order ("blocks.*"): modules that take the stream first and give
    it back, each the next one's input. `clean` and `corrupted` are (1, seq), or mappings of what
    the model is called with, an `attention_mask` or `past_key_values` among it; `metric` maps
    final streams (n, seq, d_model), as they leave the last block, to (n,), see
    `logit_difference`. `batch` positions run together. Of several pairs, (pairs, seq), with one
    metric or one for each, values are means.

    Raises ValueError if a block does not feed the next one, or gives something else when called
    again.
    """
    found = patch_parts(model, blocks, ":input", clean, corrupted, metric, batch=batch)
    each = None if found.each is None else found.each[:, :, 0]
    return replace(found, values=found.values[:, 0], each=each)


@torch.no_grad()
def patch_parts(
    model: nn.Module,
    blocks: str,
    part: str,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metrics,
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
    if pairs := several(clean, corrupted, metric):
        scanned = partial(patch_parts, model, blocks, part, heads=heads, batch=batch)
        return mean_of([scanned(*pair) for pair in pairs])
    run = Restart(model, blocks, corrupted, batch=batch)
    sites = _sites(run, part)
    with record(model, *sites, run.names[-1], clone=True) as seen:
        forward(model, clean)
    length, device = run.end.shape[1], run.end.device
    sources = [_by_head(site, seen[site], heads, length)[0] for site in sites]
    places = torch.ones(len(sites), heads, length, device=device).nonzero()
    values = scan(run, sites, sources, places[:, 0], places[:, 1], places[:, 2:], metric)
    ends = measure(metric, torch.cat([seen[run.names[-1]], run.end])).tolist()
    return StreamScan(run.names, values.view(len(sites), heads, length), *ends)


@torch.no_grad()
def ablate_parts(
    model: nn.Module,
    blocks: str,
    part: str,
    prompt: Prompt,
    metric: Metrics,
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
    if prompts := several(prompt, prompt, metric):
        ablate = partial(ablate_parts, model, blocks, part, how=how, reference=reference)
        return mean_of([ablate(one, m, heads=heads, batch=batch) for one, _, m in prompts])
    run = Restart(model, blocks, prompt, batch=batch)
    length, device = run.end.shape[1], run.end.device
    if how == "resample" and reference is not None and reference.shape[1] != length:
        raise ValueError(
            f"reference is {tuple(reference.shape)}; to resample from it give (n, {length}) tokens"
        )
    sites = _sites(run, part)
    with record(model, *sites, clone=True) as seen:
        forward(model, prompt if reference is None else reference)
    there = [_by_head(site, seen[site], heads, None) for site in sites]
    if how == "zero":
        there = [torch.zeros_like(x[:1]) for x in there]
    elif how == "mean":
        there = [x.mean((0, 1)).expand(1, length, -1, -1) for x in there]
    layer, head = torch.ones(len(sites), heads, device=device).nonzero().mT
    everywhere = torch.arange(length, device=device).expand(len(head), -1)
    each = [
        scan(run, sites, sources, layer, head, everywhere, metric)
        for sources in zip(*there, strict=True)
    ]
    values = torch.stack(each).mean(0).view(len(sites), heads)
    return Ablations(run.names, values, float(measure(metric, run.end)))


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


def logit_difference(
    norm: Callable[[Tensor], Tensor] | None,
    unembed: nn.Linear | Tensor,
    right: int,
    wrong: int,
    *,
    position: int = -1,
) -> Callable[[Tensor], Tensor]:
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
