"""All patches at once, to first order: (clean - corrupted) * d metric / d activation.

- `attribution_patching`: any sites of any model, from one backward pass.
- `attribute_parts`: what `patch_parts` measures, corrected as in AtP*. A saturated softmax has no
  gradient, so that of queries and keys is computed again and what follows is held linear.
- `edge_attribution`: what `patch_edges` measures, with the same correction.

Nanda 2023, "Attribution Patching"; Syed et al. 2023, "Attribution Patching Outperforms Automated
Circuit Discovery"; Kramar et al. 2024, "AtP*".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder, DecoderAttention
from interp.patching.paths import (
    Edges,
    Node,
    patch_edges,
    projection,
    require_equal_shapes,
    require_repeatable,
    sent,
)
from interp.patching.restart import Metrics, Prompt, forward, mean_of, measure, several
from interp.tap import Replacement, patch, record

# Where a prompt is padded, and its position ids; both (1, seq) or None.
Layout = tuple[Tensor | None, Tensor | None]


def attribution_patching(
    model: nn.Module,
    sites: Sequence[str],
    clean: Prompt,
    corrupted: Prompt,
    metric: Callable[[Any], Tensor],
) -> dict[str, Tensor]:
    """The effect of each activation to first order.

    Summed over the last dimension, so (batch, seq) for streams. `metric` maps the model's output
    to one number. The error against real patches is of second order in clean - corrupted.
    """
    with torch.no_grad(), record(model, *sites, clone=True) as seen:
        forward(model, clean)
        before = dict(seen)
        forward(model, corrupted)
    require_equal_shapes(before, seen)
    gradients = _gradients(model, corrupted, lambda out, end: metric(out), seen)
    return {site: ((before[site] - seen[site]) * gradients[site]).sum(-1) for site in seen}


def attribute_parts(
    model: Decoder,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metrics,
    *,
    corrected: bool = True,
) -> dict[str, Tensor]:
    """Estimates of what `patch_parts` measures, less the corrupted run: q, k, v, z and mlp.

    Each is (layers, heads, positions); k and v have the heads that are shared, mlp one. `metric`
    maps final streams (n, seq, d_model) to (n,). `corrected`: with the softmax of q and k again.
    """
    if pairs := several(clean, corrupted, metric):
        each = [attribute_parts(model, *pair, corrected=corrected) for pair in pairs]
        return {part: torch.stack([found[part] for found in each]).mean(0) for part in each[0]}
    names = {"q": "attention.q", "k": "attention.k", "v": "attention.v", "z": "attention.o:input"}
    names["mlp"] = "mlp_out"
    layers = range(len(model.layers))
    sites = [f"blocks.{i}.{name}" for i in layers for name in names.values()]
    sites += [f"blocks.{i}.attention.pattern" for i in layers]
    with torch.no_grad(), record(model, *sites, clone=True) as seen:
        forward(model, clean)
        before = dict(seen)
        forward(model, corrupted)

    slopes = _gradients(model, corrupted, lambda out, end: measure(metric, end), seen)
    parts: dict[str, list[Tensor]] = {part: [] for part in names}
    for i, block in enumerate(model.layers):
        attention, at = block.attention, f"blocks.{i}."
        queries, keys = seen[at + "attention.q"], seen[at + "attention.k"]
        counts = {"q": attention.heads, "z": attention.heads, "mlp": 1}
        for part, name in names.items():
            old, new, slope = seen[at + name], before[at + name], slopes[at + name]
            if corrected and part in ("q", "k"):
                slope = slopes[at + "attention.pattern"]
                layout = _layout(corrupted)
                values = _through_softmax(attention, part, new, (queries, keys), slope, layout)
            else:
                heads = counts.get(part, attention.kv_heads)
                values = ((new - old) * slope)[0].unflatten(-1, (heads, -1)).sum(-1).T
            parts[part].append(values)
    return {part: torch.stack(values) for part, values in parts.items()}


def edge_attribution(
    model: Decoder,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metrics,
    *,
    senders: Sequence[Node] | None = None,
    receivers: Sequence[Node] | None = None,
    exact: bool = False,
    batch: int = 64,
) -> Edges:
    """Estimates of what `patch_edges` measures, from one backward pass.

    What a receiver reads goes through its norm, projection and softmax as it is, what follows is
    held linear. `exact` measures each edge too, so that `.error` shows what the
    estimate is worth.
    """
    if pairs := several(clean, corrupted, metric):
        estimated = partial(edge_attribution, model, senders=senders, receivers=receivers)
        return mean_of([estimated(*pair, exact=exact, batch=batch) for pair in pairs])
    with torch.no_grad():
        edges, changes = sent(model, clean, corrupted, senders, receivers)
    layers = range(len(model.layers))
    inner = ("attention.q", "attention.k", "attention.v", "attention.pattern", "norm2:input")
    final, layout = f"blocks.{len(layers) - 1}", _layout(corrupted)
    sites = [final, *(f"blocks.{i}.{s}" for i in layers for s in inner)]
    streams = [f"blocks.{i}:input" for i in layers]
    with torch.no_grad(), record(model, *sites, *streams, clone=True) as seen:
        forward(model, corrupted)
    at_sites = {site: seen[site] for site in sites}
    slopes = _gradients(model, corrupted, lambda out, end: measure(metric, end), at_sites)
    found: dict[tuple[str, int], Tensor] = {}  # (senders, heads) of each kind and layer
    for column, receiver in enumerate(edges.receivers):
        rows = edges.exists[:, column].nonzero()[:, 0]
        key, at = (receiver.kind, receiver.layer), f"blocks.{receiver.layer}."
        if key not in found:
            site = {"final": final, "mlp": at + "norm2:input"}.get(receiver.kind, at + "attention")
            found[key] = torch.cat(
                [
                    _read(model, receiver, site, changes[chosen], seen, slopes, metric, layout)
                    for chosen in torch.split(rows, batch)
                ]
            )
        edges.values[rows, column] = found[key][:, receiver.head]
    if not exact:
        return edges
    measured = patch_edges(
        model, clean, corrupted, metric, senders=senders, receivers=receivers, batch=batch
    )
    return replace(edges, exact=measured.values)


@torch.no_grad()
def _read(
    model: Decoder,
    receiver: Node,
    site: str,
    change: Tensor,
    seen: Mapping[str, Tensor],
    slopes: Mapping[str, Tensor],
    metric: Metrics,
    layout: Layout,
) -> Tensor:
    """The effect (n, heads) of changes (n, seq, d_model) in what all such receivers read."""
    if receiver.kind == "final":
        return (measure(metric, seen[site] + change) - measure(metric, seen[site]))[:, None]
    if receiver.kind == "mlp":
        return torch.einsum("nsd,xsd->n", change, slopes[site])[:, None]
    block = model.layers[receiver.layer]
    attention = block.attention
    linear, heads = projection(attention, receiver.kind)
    stream = seen[f"blocks.{receiver.layer}:input"]
    new, old = linear(block.norm1(stream + change)), seen[f"{site}.{receiver.kind}"]
    if receiver.kind == "v":
        moved = (new - old) * slopes[f"{site}.v"]
        effects: Tensor = moved.unflatten(-1, (heads, -1)).sum((1, 3))
    else:
        q, k = (seen[f"{site}.{part}"].expand(len(new), -1, -1) for part in "qk")
        q, k = (new, k) if receiver.kind == "q" else (q, new)
        after = attention.scores(q, k, *layout).softmax(-1)
        # By query head; those that share a key head all change with it.
        moved = (after - seen[f"{site}.pattern"]) * slopes[f"{site}.pattern"]
        effects = moved.sum((2, 3)).unflatten(-1, (heads, -1)).sum(-1)
    return effects


def _through_softmax(
    attention: DecoderAttention,
    part: str,
    new: Tensor,
    old: tuple[Tensor, Tensor],
    slope: Tensor,
    layout: Layout,
) -> Tensor:
    """The effect (heads, seq) of one position's queries or keys, exact up to the pattern."""
    q, k = old
    scores = attention.scores(q, k, *layout)[0].double()
    slope = slope[0].double()  # d metric / d pattern, [heads, seq_q, seq_k]
    if part == "q":
        after = attention.scores(new, k, *layout)[0].double().softmax(-1)
        return ((after - scores.softmax(-1)) * slope).sum(-1).to(q.dtype)
    # A key changes one score of each later query. With e = exp(score) of it and R, G the sums over
    # the other keys of e and e * slope, the row's sum goes from one (G + e slope) / (R + e) to
    # another. Sums of others, not all less one: a key that has all the weight leaves no rounding.
    changed = attention.scores(q, new, *layout)[0].double()
    most = scores.amax(-1, keepdim=True)
    e, e_new = (scores - most).exp(), (changed - most).clamp(-700, 300).exp()
    rest, weighed = _others(e), _others(e * slope)
    before = (weighed + e * slope) / (rest + e)
    effect = (weighed + e_new * slope) / (rest + e_new) - before
    by_head = torch.where(scores > float("-inf"), effect, 0).sum(-2)
    shared: Tensor = by_head.unflatten(0, (attention.kv_heads, -1)).sum(1)
    return shared.to(q.dtype)


def _others(x: Tensor) -> Tensor:
    """The sum over the last dimension of all other entries, without subtracting."""
    before = nn.functional.pad(x.cumsum(-1), (1, -1))
    after = nn.functional.pad(x.flip(-1).cumsum(-1), (1, -1)).flip(-1)
    return before + after


def _layout(prompt: Prompt) -> Layout:
    if isinstance(prompt, Tensor):
        return None, None
    mask = prompt.get("attention_mask")
    return None if mask is None else mask == 0, prompt.get("position_ids")


def _gradients(
    model: nn.Module,
    prompt: Prompt,
    metric: Callable[[Any, Tensor], Tensor],
    seen: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """d metric(output, final stream) / d activation at each site, in the run of `prompt`."""
    # An added zero is a place to differentiate at, also where no parameter asks for gradients.
    zeros = {site: torch.zeros_like(x, requires_grad=True) for site, x in seen.items()}
    added: dict[str, Replacement] = {site: partial(torch.add, zero) for site, zero in zeros.items()}
    # The last block's output, not the norm's input: a metric may call the norm itself.
    end = (f"blocks.{len(model.blocks) - 1}",) if isinstance(model, Decoder) else ()
    with torch.enable_grad():
        with (
            patch(model, added),
            record(model, *end, detach=False) as last,
            record(model, *seen, clone=True) as again,
        ):
            out = forward(model, prompt)
        result = metric(out, last[end[0]] if end else torch.empty(0))
        require_repeatable(seen, again)
        if not isinstance(result, Tensor) or result.numel() != 1:
            given = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"the metric gave {given}; it must give one number, a tensor: sum it")
        gradients = torch.autograd.grad(result, list(zeros.values()), allow_unused=True)
    return {
        site: torch.zeros_like(zero) if gradient is None else gradient
        for (site, zero), gradient in zip(zeros.items(), gradients, strict=True)
    }
