"""Path patching: the effect of one component on the metric through each receiver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder
from interp.decoder.modules.attention import DecoderAttention
from interp.patching.batching import replace_heads
from interp.patching.restart import Restart
from interp.prompts import (
    MeanOverPairs,
    Metric,
    Metrics,
    Prompt,
    average_over_pairs,
    forward,
    measure,
    split_pairs,
)
from interp.tap import patch, record
from interp.text import Texts, Tokenizer


@dataclass(frozen=True)
class Node:
    """A sender ("embed", "head", "mlp") or a receiver ("q", "k", "v", "mlp", "final")."""

    kind: Literal["embed", "head", "q", "k", "v", "mlp", "final"]
    #: The index of the layer; 0 for "embed" and "final".
    layer: int = 0
    #: The index of the head; for "k" and "v", the index of the key-value head.
    head: int = 0

    def __str__(self) -> str:
        if self.kind in ("embed", "final"):
            return self.kind
        return f"{self.kind} {self.layer}" + (f".{self.head}" if self.kind != "mlp" else "")


@dataclass(frozen=True, eq=False)
class EdgeEffects(MeanOverPairs):
    """The effect of each edge from a sender to a receiver. Tensors are (senders, receivers)."""

    senders: tuple[Node, ...]
    receivers: tuple[Node, ...]
    #: True if the receiver's input is computed after the sender's output.
    exists: Tensor
    #: The effects, which are 0 where `exists` is False.
    values: Tensor
    #: The measured effects if `values` are estimates, otherwise None. Edges that were not measured
    #: are nan, and edges that do not exist are 0.
    exact: Tensor | None = None

    @property
    def error(self) -> Tensor:
        """The estimate minus the exact effect of each edge; nan for edges that were not measured.

        Raises ValueError if `values` are exact.
        """
        if self.exact is None:
            raise ValueError(
                "expected estimates, got exact effects of patch_edges; call edge_attribution"
            )
        return self.values - self.exact

    def top(self, count: int) -> list[tuple[Node, Node, float]]:
        """Return `count` edges, or all if there are fewer, as (sender, receiver, value).

        The edges are those with the largest absolute values, in descending order.
        """
        num_edges = min(count, int(self.exists.sum()))
        sizes = torch.where(self.exists, self.values.abs(), -1.0)
        edges = []
        for index in sizes.flatten().topk(num_edges).indices.tolist():
            row, column = divmod(index, len(self.receivers))
            value = float(self.values[row, column])
            edges.append((self.senders[row], self.receivers[column], value))
        return edges


@torch.no_grad()
def patch_edges(
    model: Decoder,
    clean: Prompt | Texts,
    corrupted: Prompt | Texts,
    metric: Metrics,
    *,
    senders: Sequence[Node] | None = None,
    receivers: Sequence[Node] | None = None,
    tokenizer: Tokenizer | None = None,
    batch: int = 64,
) -> EdgeEffects:
    """Return the exact effect of each edge from `senders` to `receivers`, by default of all edges.

    The prompts, `metric`, `tokenizer` and `batch` are the same as in `patch_streams`. An edge is
    patched at all positions at once. Raises ValueError for unknown nodes, for models that add
    learned positions to queries and keys only, and for prompts, metrics and models with hooks as in
    `patch_streams`.
    """
    results = []
    pairs = split_pairs(model, clean, corrupted, metric, tokenizer)
    for clean_prompt, corrupted_prompt, pair_metric in pairs:
        run = Restart(model, corrupted_prompt, batch=batch)
        edges, changes = compute_sender_changes(
            model, clean_prompt, corrupted_prompt, senders, receivers
        )
        values = measure_edges(run, pair_metric, edges, edges.exists, changes)
        results.append(replace(edges, values=values))
    return average_over_pairs(results)


@torch.no_grad()
def measure_edges(
    run: Restart, metric: Metric, edges: EdgeEffects, selected: Tensor, changes: Tensor
) -> Tensor:
    """Return the exact effects of the edges in the mask `selected`, and 0 for other edges."""
    model = run.model
    baseline = measure(metric, run.final_stream)
    values = baseline.new_zeros(selected.shape)  # the metric may have another type than the model
    for column, receiver in enumerate(edges.receivers):
        rows = selected[:, column].nonzero()[:, 0]
        for chosen in torch.split(rows, run.batch):
            if receiver.kind == "final":
                after = measure(metric, run.final_stream + changes[chosen])
            else:
                site, replacement = _build_receiver_patch(run, receiver, changes[chosen])
                with patch(model, {site: replacement}):
                    after = measure(metric, run(receiver.layer, len(chosen)))
            values[chosen, column] = after - baseline
    return values


def _build_receiver_patch(
    run: Restart, receiver: Node, changes: Tensor
) -> tuple[str, partial[Tensor]]:
    """Return the site of a receiver, and a replacement that adds `changes` to the receiver's input.

    `changes` are (n, seq, d_model). For queries, keys and values, only one head is replaced.
    """
    name = f"blocks.{receiver.layer}"
    if receiver.kind == "mlp":
        return f"{name}.norm2:input", partial(torch.add, changes)
    block = run.model.layers[receiver.layer]
    normed = block.norm1(run.block_inputs[receiver.layer] + changes)
    linear, heads = get_projection(block.attention, receiver.kind)
    new = linear(normed).unflatten(-1, (heads, -1))[:, :, receiver.head]
    index = (slice(None), slice(None), torch.tensor(receiver.head, device=new.device))
    return f"{name}.attention.{receiver.kind}", partial(replace_heads, index, new, heads)


def get_projection(attention: DecoderAttention, kind: str) -> tuple[nn.Module, int]:
    """Return the module that computes "q", "k" or "v", and the number of its heads."""
    linear = cast(nn.Module, getattr(attention, kind))
    return linear, attention.heads if kind == "q" else attention.kv_heads


def compute_sender_changes(
    model: Decoder,
    clean: Prompt,
    corrupted: Prompt,
    senders: Sequence[Node] | None,
    receivers: Sequence[Node] | None,
) -> tuple[EdgeEffects, Tensor]:
    """Return edges with values of 0, and each sender's clean output minus its corrupted output.

    The differences are (senders, seq, d_model). Errors are those of `patch_edges`.
    """
    if model.settings.positions_in_attention:
        raise ValueError(
            "edges need learned positions in the stream, got positions in queries and keys only; "
            "call patch_parts"
        )
    sites = [f"blocks.{i}.attention.o:input" for i in range(len(model.layers))]
    with record(model, *sites, "blocks.0:input", "blocks.*.mlp_out") as recorded:
        forward(model, clean)
        clean_run = dict(recorded)
        forward(model, corrupted)
    changes = [clean_run["blocks.0:input"] - recorded["blocks.0:input"]]
    for i, (block, site) in enumerate(zip(model.layers, sites, strict=True)):
        attention = block.attention
        # A norm after the attention reads all heads together, so each head is changed separately
        # while the other heads keep their corrupted outputs.
        corrupted_heads = recorded[site].expand(attention.heads, -1, -1)
        head = torch.arange(attention.heads, device=corrupted_heads.device)
        clean_heads = clean_run[site].unflatten(-1, (attention.heads, -1))[0].transpose(0, 1)
        index = (head, slice(None), head)
        changed = replace_heads(index, clean_heads, attention.heads, corrupted_heads)
        new_output = block.attention_out(attention.o(changed))
        old_output = block.attention_out(attention.o(recorded[site]))
        changes.append(new_output - old_output)
        changes.append(clean_run[f"blocks.{i}.mlp_out"] - recorded[f"blocks.{i}.mlp_out"])
    all_senders, all_receivers = _list_nodes(model)
    chosen_senders = _select_nodes(senders, all_senders, "senders")
    chosen_receivers = _select_nodes(receivers, all_receivers, "receivers")
    rows = [all_senders.index(node) for node in chosen_senders]
    layers, parallel = len(model.layers), model.settings.parallel
    outputs = torch.tensor([_get_output_order(node) for node in chosen_senders])
    inputs = torch.tensor([_get_input_order(node, layers, parallel) for node in chosen_receivers])
    exists = (outputs[:, None] < inputs).to(changes[0].device)
    values = torch.zeros_like(exists, dtype=torch.promote_types(changes[0].dtype, torch.float32))
    edges = EdgeEffects(tuple(chosen_senders), tuple(chosen_receivers), exists, values)
    return edges, torch.cat(changes)[rows]


def _list_nodes(model: Decoder) -> tuple[list[Node], list[Node]]:
    """Return all senders, in the order of their outputs, and all receivers."""
    senders = [Node("embed")]
    receivers: list[Node] = []
    for layer, block in enumerate(model.layers):
        heads, kv_heads = block.attention.heads, block.attention.kv_heads
        senders += [Node("head", layer, head) for head in range(heads)]
        senders.append(Node("mlp", layer))
        receivers += [Node("q", layer, head) for head in range(heads)]
        receivers += [Node("k", layer, head) for head in range(kv_heads)]
        receivers += [Node("v", layer, head) for head in range(kv_heads)]
        receivers.append(Node("mlp", layer))
    receivers.append(Node("final"))
    return senders, receivers


def _select_nodes(nodes: Sequence[Node] | None, known: list[Node], role: str) -> list[Node]:
    if nodes is None:
        return known
    for node in nodes:
        if node not in known:
            raise ValueError(f"{node!r} is not among the {role}: {', '.join(map(str, known))}")
    return list(nodes)


def _get_output_order(node: Node) -> int:
    """Return the index of the attention or MLP that computes a sender's output; -1 for "embed"."""
    if node.kind == "embed":
        return -1
    return 2 * node.layer + (1 if node.kind == "mlp" else 0)


def _get_input_order(node: Node, layers: int, parallel: bool) -> int:
    """Return the index of the attention or MLP whose input `node` reads, in order of computation.

    In `parallel` blocks, the MLP reads the same input as the attention.
    """
    if node.kind == "final":
        return 2 * layers
    return 2 * node.layer + (1 if node.kind == "mlp" and not parallel else 0)
