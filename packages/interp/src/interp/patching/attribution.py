"""First-order estimates of patching: (clean - corrupted) * d metric / d activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from interp.decoder.decoder import Decoder
from interp.patching.paths import (
    EdgeEffects,
    Node,
    compute_sender_changes,
    get_projection,
    measure_edges,
)
from interp.patching.restart import Restart
from interp.prompts import (
    Metric,
    Metrics,
    Prompt,
    average_over_pairs,
    encode_pairs,
    forward,
    get_mask,
    measure,
    measure_tokens,
    split_pairs,
)
from interp.tap import Replacement, patch, record
from interp.text import Texts, Tokenizer


def attribution_patching(
    model: Decoder,
    sites: Sequence[str],
    clean: Prompt | Texts,
    corrupted: Prompt | Texts,
    metric: Callable[[Tensor], Tensor],
    *,
    tokenizer: Tokenizer | None = None,
) -> dict[str, Tensor]:
    """Estimate the effect of patching each activation, from one backward pass.

    The result is a dictionary from sites to effects. Effects are summed over the last dimension of
    the activation: for streams, they are (batch, seq). The error is of second order in
    clean - corrupted. `metric` is a function from the logits (batch, seq, vocabulary) to one
    number, a tensor. The prompts and `tokenizer` are the same as in `patch_streams`. Raises
    ValueError if the two prompts differ in shape or in padding, or if the metric reads padding.
    """
    clean, corrupted = encode_pairs(model, clean, corrupted, tokenizer)
    with torch.no_grad(), record(model, *sites) as recorded:
        forward(model, clean)
        clean_run = dict(recorded)
        forward(model, corrupted)
    mask = get_mask(corrupted)
    gradients = _compute_gradients(
        model, corrupted, lambda logits, _: measure_tokens(metric, mask, logits), recorded
    )
    return {
        site: ((clean_run[site] - recorded[site]) * gradients[site]).sum(-1) for site in recorded
    }


def edge_attribution(
    model: Decoder,
    clean: Prompt | Texts,
    corrupted: Prompt | Texts,
    metric: Metrics,
    *,
    senders: Sequence[Node] | None = None,
    receivers: Sequence[Node] | None = None,
    tokenizer: Tokenizer | None = None,
    exact: int | None = 8,
    batch: int = 64,
) -> EdgeEffects:
    """Estimate the effects that `patch_edges` measures, from one backward pass.

    For queries and keys, the norm, projection and softmax are computed, and later operations are
    linearized. For values, the operations after the projection are linearized, and for MLPs the
    operations after the input of the norm. Effects on the final stream are exact.

    The `exact` edges with the largest absolute estimates are also measured (all edges if `exact` is
    None). The property `error` of the result is the estimate minus the measurement. Raises
    ValueError if `exact` is negative, and as `patch_edges` does.
    """
    if exact is not None and exact < 0:
        raise ValueError(f"expected exact >= 0, got {exact}")
    pairs = split_pairs(model, clean, corrupted, metric, tokenizer)
    runs = [Restart(model, prompt, batch=batch) for _, prompt, _ in pairs]
    results = []
    changes = []
    for run, pair in zip(runs, pairs, strict=True):
        result, change = _estimate_edges(run, *pair, senders, receivers)
        results.append(result)
        changes.append(change)
    edges = average_over_pairs(results)
    selected = _select_largest(edges, exact)
    measured_results = []
    for run, pair, result, change in zip(runs, pairs, results, changes, strict=True):
        values = measure_edges(run, pair[2], edges, selected, change)
        exact_values = torch.where(selected | ~edges.exists, values, float("nan"))
        measured_results.append(replace(result, exact=exact_values))
    return average_over_pairs(measured_results)


def _select_largest(edges: EdgeEffects, count: int | None) -> Tensor:
    """Return a mask of the `count` edges with the largest absolute values; None selects all."""
    if count is None or count >= int(edges.exists.sum()):
        return edges.exists
    sizes = torch.where(edges.exists, edges.values.abs(), -1.0).flatten()
    selected = torch.zeros_like(sizes, dtype=torch.bool)
    selected[sizes.topk(count).indices] = True
    return selected.view_as(edges.exists)


def _estimate_edges(
    run: Restart,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metric,
    senders: Sequence[Node] | None,
    receivers: Sequence[Node] | None,
) -> tuple[EdgeEffects, Tensor]:
    """Return the estimates for one pair of prompts, and the changes of the senders' outputs."""
    model = run.model
    with torch.no_grad():
        edges, changes = compute_sender_changes(model, clean, corrupted, senders, receivers)
    inner = ("attention.q", "attention.k", "attention.v", "attention.pattern", "norm2:input")
    final = f"blocks.{len(model.layers) - 1}"
    sites = [final, *(f"blocks.*.{site}" for site in inner)]
    with torch.no_grad(), record(model, *sites) as recorded:
        forward(model, corrupted)
    gradients = _compute_gradients(
        model, corrupted, lambda logits, final_stream: measure(metric, final_stream), recorded
    )
    # Effects (senders, heads) of each kind of receiver and layer.
    effects: dict[tuple[str, int], Tensor] = {}
    for column, receiver in enumerate(edges.receivers):
        rows = edges.exists[:, column].nonzero()[:, 0]
        key = receiver.kind, receiver.layer
        if key not in effects:
            site = f"blocks.{receiver.layer}.attention"
            if receiver.kind == "final":
                site = final
            elif receiver.kind == "mlp":
                site = f"blocks.{receiver.layer}.norm2:input"
            chunks = [
                _estimate_receiver_effects(
                    run, receiver, site, changes[chosen], recorded, gradients, metric
                )
                for chosen in torch.split(rows, run.batch)
            ]
            effects[key] = torch.cat(chunks)
        edges.values[rows, column] = effects[key][:, receiver.head].to(edges.values)
    return edges, changes


@torch.no_grad()
def _estimate_receiver_effects(
    run: Restart,
    receiver: Node,
    site: str,
    change: Tensor,
    recorded: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    metric: Metric,
) -> Tensor:
    """Return the effect of a changed input on each receiver of one kind and layer, (n, heads).

    `change` (n, seq, d_model) is added to the input. An effect is a change of the metric.
    """
    if receiver.kind == "final":
        stream = recorded[site]
        return (measure(metric, stream + change) - measure(metric, stream))[:, None]
    if receiver.kind == "mlp":
        return torch.einsum("nsd,xsd->n", change, gradients[site])[:, None]
    block = run.model.layers[receiver.layer]
    linear, heads = get_projection(block.attention, receiver.kind)
    stream = run.block_inputs[receiver.layer]
    new_projection = linear(block.norm1(stream + change))  # [n, seq, heads * d_head]
    if receiver.kind == "v":
        value_effects = (new_projection - recorded[f"{site}.v"]) * gradients[f"{site}.v"]
        return value_effects.unflatten(-1, (heads, -1)).sum((1, 3))
    return _estimate_pattern_effects(
        run, receiver, site, new_projection, heads, recorded, gradients[f"{site}.pattern"]
    )


def _estimate_pattern_effects(
    run: Restart,
    receiver: Node,
    site: str,
    new_keys_or_queries: Tensor,
    heads: int,
    recorded: Mapping[str, Tensor],
    gradient: Tensor,
) -> Tensor:
    """Return the effects of new queries or keys (n, seq, heads * d_head) of each head, (n, heads).

    `gradient` is the metric's gradient with respect to the pattern. The softmax is recomputed, and
    all operations after it are linearized.
    """
    attention = run.model.layers[receiver.layer].attention
    norm = attention.q_norm if receiver.kind == "q" else attention.k_norm
    is_joint = len(getattr(norm, "weight", ())) > attention.d_head
    if is_joint:
        # With a norm over all heads (OLMo 2), a change of one head would change the other heads
        # too. Each row therefore changes a single head and uses the recorded run's other heads.
        is_single_head = torch.eye(heads, dtype=torch.bool, device=gradient.device)
        old_heads = recorded[f"{site}.{receiver.kind}"].unflatten(-1, (heads, -1))
        new_heads = new_keys_or_queries.unflatten(-1, (heads, -1))
        mixed = torch.where(is_single_head[:, None, None, :, None], new_heads, old_heads)
        new_keys_or_queries = mixed.flatten(-2).flatten(0, 1)  # [heads * n, seq, heads * d_head]
    rows = len(new_keys_or_queries)
    inputs = {part: recorded[f"{site}.{part}"].expand(rows, -1, -1) for part in "qk"}
    inputs[receiver.kind] = new_keys_or_queries
    padding, _, position_ids = run.block_arguments
    old_pattern = recorded[f"{site}.pattern"]  # [1, query heads, seq, seq], without the sink
    scores = attention.compute_scores(inputs["q"], inputs["k"], padding, position_ids)
    pattern = scores.softmax(-1)[..., : old_pattern.shape[-1]]  # [rows, query heads, seq, seq]
    effects = ((pattern - old_pattern) * gradient).sum((2, 3))  # [rows, query heads]
    if is_joint:
        return effects.sum(1).unflatten(0, (heads, -1)).T
    # A key head changes the patterns of all query heads that share it.
    return effects.unflatten(-1, (heads, -1)).sum(-1)


def _compute_gradients(
    model: Decoder,
    prompt: Prompt,
    metric: Callable[[Tensor, Tensor], Tensor],
    recorded: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the gradient of metric(logits, final stream) for each activation in `recorded`.

    The model runs on `prompt`. Raises ValueError if the metric does not return one number.
    """
    # Zeros are added to the activations, so that there is a graph even if no parameter is trained.
    with torch.inference_mode(False):
        zeros = {site: torch.zeros_like(x, requires_grad=True) for site, x in recorded.items()}
    added: dict[str, Replacement] = {site: partial(torch.add, zero) for site, zero in zeros.items()}
    # The output of the last block is recorded, not the norm's input: a metric may call the norm.
    last_block = f"blocks.{len(model.layers) - 1}"
    with torch.inference_mode(False), torch.enable_grad():
        with patch(model, added), record(model, last_block, detach=False) as last:
            logits = forward(model, prompt)
        result = metric(logits, last[last_block])
        if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
            shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"the metric returned {shape}; it must return one number with a gradient"
            )
        gradients = torch.autograd.grad(result, list(zeros.values()), allow_unused=True)
    return {
        site: torch.zeros_like(zero) if gradient is None else gradient
        for (site, zero), gradient in zip(zeros.items(), gradients, strict=True)
    }
