"""First-order estimates of patching: (clean - corrupted) * d metric / d activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder
from interp.decoder.modules.attention import DecoderAttention
from interp.patching.paths import (
    EdgeEffects,
    Node,
    measured,
    projection,
    sender_changes,
)
from interp.positions import Replacement
from interp.prompts import (
    Metric,
    Metrics,
    Prompt,
    forward,
    is_close,
    mean_over_pairs,
    measure,
    require_equal_shapes,
    require_repeatable,
    require_several_pairs,
    split_pairs,
    tensors_of,
    tokens_of,
)
from interp.tap import patch, record

#: The padding and the position ids of a prompt, both (1, seq) or None.
Layout = tuple[Tensor | None, Tensor | None]


class PartEffects(dict[str, Tensor]):
    """Effects by part, which are means over `pairs` if there are several pairs of prompts."""

    def __init__(self, effects: Mapping[str, Tensor], pairs: Sequence[PartEffects] = ()) -> None:
        super().__init__(effects)
        #: The effects of each pair of prompts; () for a single pair.
        self.pairs = pairs

    @property
    def standard_error(self) -> dict[str, Tensor]:
        """The standard error of each effect over pairs of prompts."""
        require_several_pairs(len(self.pairs))
        root = len(self.pairs) ** 0.5
        return {
            part: torch.stack([pair[part] for pair in self.pairs]).std(0) / root for part in self
        }


def attribution_patching(
    model: nn.Module,
    sites: Sequence[str],
    clean: Prompt,
    corrupted: Prompt,
    metric: Callable[[Any], Tensor],
) -> dict[str, Tensor]:
    """Estimate the effect of patching each activation, from one backward pass.

    `metric` maps the model's output to one number. Effects are summed over the last dimension, so
    those of streams are (batch, seq). The error is of second order in clean - corrupted.
    """
    with torch.no_grad(), record(model, *sites, clone=True) as seen:
        forward(model, clean)
        seen.require_calls(1)
        before = dict(seen)
        expected = tensors_of(forward(model, corrupted))
    require_equal_shapes(before, seen)

    def metric_of_repeated(out: Any, final_stream: Tensor) -> Tensor:
        # A dropout after the sites would make the gradients random.
        require_repeatable(expected, tensors_of(out))
        return metric(out)

    gradients = _gradients(model, corrupted, metric_of_repeated, seen)
    effects = {}
    for site, corrupted_values in seen.items():
        # Scores that are masked in both runs are -inf, and their difference would be NaN.
        is_equal = before[site] == corrupted_values
        change = (before[site] - corrupted_values).masked_fill(is_equal, 0.0)
        effects[site] = (change * gradients[site]).sum(-1)
    return effects


def attribute_parts(
    model: Decoder,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metrics,
) -> PartEffects:
    """Estimate the effects that `patch_parts` measures, for "q", "k", "v", "z" and "mlp".

    An effect is the metric of the patched run minus that of the corrupted run. Each tensor is
    (layers, heads, positions), with key-value heads for "k" and "v" and one head for "mlp".
    `metric` maps final streams (n, seq, d_model) to (n,). The softmax of patched queries and keys
    is recomputed, because a saturated one has almost no gradient.
    """
    if pairs := split_pairs(clean, corrupted, metric):
        results = [attribute_parts(model, *pair) for pair in pairs]
        means = {part: torch.stack([r[part] for r in results]).mean(0) for part in results[0]}
        return PartEffects(means, results)
    names = {
        "q": "attention.q",
        "k": "attention.k",
        "v": "attention.v",
        "z": "attention.o:input",
        "mlp": "mlp_out",
    }
    layers = range(len(model.layers))
    sites = [f"blocks.{i}.{name}" for i in layers for name in names.values()]
    sites += [f"blocks.{i}.attention.pattern" for i in layers]
    with torch.no_grad(), record(model, *sites, clone=True) as seen:
        forward(model, clean)
        before = dict(seen)
        forward(model, corrupted)

    gradients = _gradients(
        model, corrupted, lambda out, final_stream: measure(metric, final_stream), seen
    )
    layout = _layout(model, corrupted)
    _require_unpatched_patterns(model, seen, layout)
    parts: dict[str, list[Tensor]] = {part: [] for part in names}
    for i, block in enumerate(model.layers):
        attention = block.attention
        queries, keys = seen[f"blocks.{i}.attention.q"], seen[f"blocks.{i}.attention.k"]
        pattern_gradient = gradients[f"blocks.{i}.attention.pattern"]
        heads = {"q": attention.heads, "z": attention.heads, "mlp": 1}
        for part, name in names.items():
            site = f"blocks.{i}.{name}"
            if part in ("q", "k"):
                values = _effect_through_softmax(
                    attention, part, before[site], (queries, keys), pattern_gradient, layout
                )
            else:
                effects = ((before[site] - seen[site]) * gradients[site])[0]
                count = heads.get(part, attention.kv_heads)
                values = effects.unflatten(-1, (count, -1)).sum(-1).T
            parts[part].append(values)
    return PartEffects({part: torch.stack(values) for part, values in parts.items()})


def edge_attribution(
    model: Decoder,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metrics,
    *,
    senders: Sequence[Node] | None = None,
    receivers: Sequence[Node] | None = None,
    exact: int | None = 8,
    batch: int = 64,
) -> EdgeEffects:
    """Estimate the effects that `patch_edges` measures, from one backward pass.

    The norm, projection and softmax of an attention receiver are computed; everything after them,
    and everything after the input of an MLP's norm, is linearized. The `exact` edges with the
    largest estimates, or all edges if it is None, are measured too: `.error` is the estimate minus
    the measurement.
    """
    if batch < 1 or (exact is not None and exact < 0):
        raise ValueError(f"expected batch >= 1 and exact >= 0, got batch={batch}, exact={exact}")
    pairs = split_pairs(clean, corrupted, metric) or [(clean, corrupted, cast(Metric, metric))]
    results, changes = [], []
    for pair in pairs:
        result, change = _estimated_edges(model, *pair, senders, receivers, batch)
        results.append(result)
        changes.append(change)
    edges = mean_over_pairs(results) if len(pairs) > 1 else results[0]
    wanted = _largest(edges, exact)
    measured_results = []
    for (_, prompt, of_pair), result, change in zip(pairs, results, changes, strict=True):
        values = measured(model, prompt, of_pair, edges, wanted, change, batch=batch)
        exact_values = torch.where(wanted | ~edges.exists, values, float("nan"))
        measured_results.append(replace(result, exact=exact_values))
    return mean_over_pairs(measured_results) if len(pairs) > 1 else measured_results[0]


def _largest(edges: EdgeEffects, count: int | None) -> Tensor:
    """Return a mask of the `count` edges with the largest absolute values; None selects all."""
    if count is None or count >= int(edges.exists.sum()):
        return edges.exists
    sizes = torch.where(edges.exists, edges.values.abs(), -1.0).flatten()
    wanted = torch.zeros_like(sizes, dtype=torch.bool)
    wanted[sizes.topk(count).indices] = True
    return wanted.view_as(edges.exists)


def _estimated_edges(
    model: Decoder,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metrics,
    senders: Sequence[Node] | None,
    receivers: Sequence[Node] | None,
    batch: int,
) -> tuple[EdgeEffects, Tensor]:
    """Return the estimates for one pair of prompts, and the changes of the senders' outputs."""
    with torch.no_grad():
        edges, changes = sender_changes(model, clean, corrupted, senders, receivers)
    layers = range(len(model.layers))
    inner = ("attention.q", "attention.k", "attention.v", "attention.pattern", "norm2:input")
    final, layout = f"blocks.{len(layers) - 1}", _layout(model, corrupted)
    sites = [final, *(f"blocks.{i}.{site}" for i in layers for site in inner)]
    inputs = [f"blocks.{i}:input" for i in layers]
    with torch.no_grad(), record(model, *sites, *inputs, clone=True) as seen:
        forward(model, corrupted)
    _require_unpatched_patterns(model, seen, layout)
    at_sites = {site: seen[site] for site in sites}
    gradients = _gradients(
        model, corrupted, lambda out, final_stream: measure(metric, final_stream), at_sites
    )
    # Effects (senders, heads) of each kind of receiver and layer.
    effects: dict[tuple[str, int], Tensor] = {}
    for column, receiver in enumerate(edges.receivers):
        rows = edges.exists[:, column].nonzero()[:, 0]
        key, block = (receiver.kind, receiver.layer), f"blocks.{receiver.layer}"
        if key not in effects:
            site = {"final": final, "mlp": f"{block}.norm2:input"}.get(
                receiver.kind, f"{block}.attention"
            )
            chunks = [
                _receiver_effects(
                    model, receiver, site, changes[chosen], seen, gradients, metric, layout
                )
                for chosen in torch.split(rows, batch)
            ]
            effects[key] = torch.cat(chunks)
        edges.values[rows, column] = effects[key][:, receiver.head]
    return edges, changes


@torch.no_grad()
def _receiver_effects(
    model: Decoder,
    receiver: Node,
    site: str,
    change: Tensor,
    seen: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    metric: Metrics,
    layout: Layout,
) -> Tensor:
    """Return the effects (n, heads) of input changes (n, seq, d_model) on a kind of receiver."""
    if receiver.kind == "final":
        return (measure(metric, seen[site] + change) - measure(metric, seen[site]))[:, None]
    if receiver.kind == "mlp":
        return torch.einsum("nsd,xsd->n", change, gradients[site])[:, None]
    block = model.layers[receiver.layer]
    attention = block.attention
    linear, heads = projection(attention, receiver.kind)
    stream = seen[f"blocks.{receiver.layer}:input"]
    new, old = linear(block.norm1(stream + change)), seen[f"{site}.{receiver.kind}"]
    if receiver.kind == "v":
        value_effects = (new - old) * gradients[f"{site}.v"]
        effects: Tensor = value_effects.unflatten(-1, (heads, -1)).sum((1, 3))
        return effects
    q, k = (seen[f"{site}.{part}"].expand(len(new), -1, -1) for part in "qk")
    q, k = (new, k) if receiver.kind == "q" else (q, new)
    old_pattern = seen[f"{site}.pattern"]
    pattern = attention.scores(q, k, *layout).softmax(-1)[..., : old_pattern.shape[-1]]
    pattern_effects = (pattern - old_pattern) * gradients[f"{site}.pattern"]
    # A key head changes the patterns of all query heads that share it.
    effects = pattern_effects.sum((2, 3)).unflatten(-1, (heads, -1)).sum(-1)
    return effects


def _effect_through_softmax(
    attention: DecoderAttention,
    part: str,
    new: Tensor,
    old: tuple[Tensor, Tensor],
    gradient: Tensor,
    layout: Layout,
) -> Tensor:
    """Return the effect (heads, seq) of each position's queries or keys, exact up to the pattern.

    `gradient` is d metric / d pattern.
    """
    q, k = old
    scores = attention.scores(q, k, *layout)[0].double()
    gradient = gradient[0].double()  # [heads, seq_q, seq_k]
    gradient = nn.functional.pad(gradient, (0, scores.shape[-1] - gradient.shape[-1]))  # a sink
    if part == "q":
        after = attention.scores(new, k, *layout)[0].double().softmax(-1)
        return ((after - scores.softmax(-1)) * gradient).sum(-1).to(q.dtype)
    # Note [Effect of one key]
    # A key changes one score of each later query. Let e = exp(score) for this key, and let R and G
    # be the sums of e and of e * gradient over the other keys. The row's contribution changes from
    # (G + e gradient) / (R + e) to the same expression with the new e. R and G are summed over the
    # other keys: if one key has almost all the weight, subtracting it would leave only rounding
    # errors.
    changed = attention.scores(q, new, *layout)[0].double()
    largest = scores.amax(-1, keepdim=True)
    e, e_new = (scores - largest).exp(), (changed - largest).clamp(-700, 300).exp()
    rest, weighted_rest = _sum_of_others(e), _sum_of_others(e * gradient)
    before = (weighted_rest + e * gradient) / (rest + e)
    effect = (weighted_rest + e_new * gradient) / (rest + e_new) - before
    by_head = torch.where(scores > float("-inf"), effect, 0).sum(-2)[..., : k.shape[1]]
    by_key_head: Tensor = by_head.unflatten(0, (attention.kv_heads, -1)).sum(1)
    return by_key_head.to(q.dtype)


def _sum_of_others(x: Tensor) -> Tensor:
    """Return the sum over the last dimension of all other entries, without subtraction."""
    before = nn.functional.pad(x.cumsum(-1), (1, -1))
    after = nn.functional.pad(x.flip(-1).cumsum(-1), (1, -1)).flip(-1)
    return before + after


@torch.no_grad()
def _require_unpatched_patterns(model: Decoder, seen: Mapping[str, Tensor], layout: Layout) -> None:
    """Raise ValueError if a recorded pattern is not the softmax of its scores."""
    for i, block in enumerate(model.layers):
        site = f"blocks.{i}.attention"
        pattern = seen[f"{site}.pattern"]
        scores = block.attention.scores(seen[f"{site}.q"], seen[f"{site}.k"], *layout)
        wide = torch.promote_types(scores.dtype, torch.float32)
        expected = scores.softmax(-1, dtype=wide)[..., : pattern.shape[-1]].to(pattern)
        if not is_close(pattern, expected):
            raise ValueError(
                f"{site}.pattern is not the softmax of its scores, as if it was patched; estimates "
                "recompute the softmax: use patch_parts() or patch_edges() inside such a patch"
            )


def _layout(model: Decoder, prompt: Prompt) -> Layout:
    """Return the padding and the positions that the model's attention uses for a prompt."""
    if isinstance(prompt, Tensor):
        return None, None
    mask, position_ids = prompt.get("attention_mask"), prompt.get("position_ids")
    padding = None if mask is None else mask == 0
    return padding, model.positions(tokens_of(prompt), padding, position_ids)


def _gradients(
    model: nn.Module,
    prompt: Prompt,
    metric: Callable[[Any, Tensor], Tensor],
    seen: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return d metric(output, final stream) / d activation at each site, in the run of `prompt`."""
    # Zeros are added to the activations, because possibly no parameter requires a gradient.
    with torch.inference_mode(False):
        zeros = {site: torch.zeros_like(x, requires_grad=True) for site, x in seen.items()}
    added: dict[str, Replacement] = {site: partial(torch.add, zero) for site, zero in zeros.items()}
    # Record the last block's output, not the norm's input: a metric may call the norm itself.
    last_block = (f"blocks.{len(model.blocks) - 1}",) if isinstance(model, Decoder) else ()
    with torch.inference_mode(False), torch.enable_grad():
        with (
            patch(model, added),
            record(model, *last_block, detach=False) as last,
            record(model, *seen, clone=True) as repeated,
        ):
            out = forward(model, prompt)
        result = metric(out, last[last_block[0]] if last_block else torch.empty(0))
        require_repeatable(seen, repeated)
        if not isinstance(result, Tensor) or result.numel() != 1:
            shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"the metric returned {shape}; it must return one number, a tensor: sum it"
            )
        gradients = torch.autograd.grad(result, list(zeros.values()), allow_unused=True)
    return {
        site: torch.zeros_like(zero) if gradient is None else gradient
        for (site, zero), gradient in zip(zeros.items(), gradients, strict=True)
    }
