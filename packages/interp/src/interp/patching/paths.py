"""Which path carries the answer: what one part says, heard by chosen readers alone.

The stream is a sum, so a path is the difference of what its sender adds in the two runs, added to
what its receiver reads. What lies between sees the corrupted run; what follows, the answer.
`path_patching` does it for any model, `patch_edges` for all edges of a `Decoder`, in batches that
restart at the receiver. Goldowsky-Dill et al. 2023, "Path Patching".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder, DecoderAttention
from interp.patching.restart import (
    Metrics,
    Prompt,
    Restart,
    alike,
    forward,
    mean_of,
    measure,
    several,
)
from interp.patching.waves import put_heads
from interp.tap import patch, record


@dataclass(frozen=True)
class Node:
    """A sender ("embed", "head", "mlp") or a receiver ("q", "k", "v", "mlp", "final")."""

    kind: Literal["embed", "head", "q", "k", "v", "mlp", "final"]
    layer: int = 0
    head: int = 0  # of "k" and "v", the head that query heads share

    def __str__(self) -> str:
        if self.kind in ("embed", "final"):
            return self.kind
        return f"{self.kind} {self.layer}" + (f".{self.head}" if self.kind != "mlp" else "")


@dataclass(frozen=True, eq=False)
class Edges:
    """What the metric gains when a receiver reads a sender as it is in the clean run.

    `values` (senders, receivers); 0 where `exists` is False, as a receiver comes before its
    sender. `exact` stands beside estimates where it was asked for.
    """

    senders: tuple[Node, ...]
    receivers: tuple[Node, ...]
    exists: Tensor
    values: Tensor
    exact: Tensor | None = None
    each: Tensor | None = None  # of several pairs: (pairs, senders, receivers)

    @property
    def error(self) -> Tensor:
        """The estimate less the exact effect, edge by edge."""
        if self.exact is None:
            raise ValueError("the exact effects were not computed; ask for them with exact=True")
        return self.values - self.exact

    def top(self, count: int) -> list[tuple[Node, Node, float]]:
        """The `count` edges of the largest effect, (sender, receiver, value)."""
        count = min(count, int(self.exists.sum()))
        sizes = torch.where(self.exists, self.values.abs(), -1.0)
        columns = len(self.receivers)
        return [
            (
                self.senders[i // columns],
                self.receivers[i % columns],
                float(self.values.flatten()[i]),
            )
            for i in sizes.flatten().topk(count).indices.tolist()
        ]


@torch.no_grad()
def path_patching(
    model: nn.Module, sender: str, receivers: Sequence[str], clean: Prompt, corrupted: Prompt
) -> Tensor:
    """The corrupted run's output, had `receivers` read `sender` as it is in the clean run.

    `sender` is a module whose output is added to the stream, `receivers` are inputs that read the
    stream before any norm ("blocks.3.norm1:input").
    """
    with record(model, sender, clone=True) as seen:
        forward(model, clean)
        before = seen[sender]
        forward(model, corrupted)
    require_equal_shapes({sender: before}, seen)
    change = before - seen[sender]
    with (
        patch(model, {site: partial(torch.add, change) for site in receivers}),
        record(model, sender, clone=True) as again,
    ):
        out: Tensor = forward(model, corrupted)
    require_repeatable(seen, again)
    return out


@torch.no_grad()
def patch_edges(
    model: Decoder,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metrics,
    *,
    senders: Sequence[Node] | None = None,
    receivers: Sequence[Node] | None = None,
    batch: int = 64,
) -> Edges:
    """The exact effect of each edge between `senders` and `receivers`, all there are by default.

    `metric` maps final streams (n, seq, d_model) to (n,), as in `patch_streams`; changes are
    patched at all positions at once.
    """
    if pairs := several(clean, corrupted, metric):
        patched = partial(patch_edges, model, senders=senders, receivers=receivers, batch=batch)
        return mean_of([patched(*pair) for pair in pairs])
    edges, changes = sent(model, clean, corrupted, senders, receivers)
    run = Restart(model, "blocks.*", corrupted, batch=batch)
    base = measure(metric, run.end)
    for column, receiver in enumerate(edges.receivers):
        rows = edges.exists[:, column].nonzero()[:, 0]
        for chosen in torch.split(rows, batch):
            if receiver.kind == "final":
                after = measure(metric, run.end + changes[chosen])
            else:
                site, put = _heard(model, run, receiver, changes[chosen])
                with patch(model, {site: put}):
                    streams = run.streams[receiver.layer].repeat(len(chosen), 1, 1)
                    after = measure(metric, run(streams, receiver.layer))
            edges.values[chosen, column] = after - base
    return edges


def _heard(
    model: Decoder, run: Restart, receiver: Node, changes: Tensor
) -> tuple[str, partial[Tensor]]:
    """Where a receiver's reading goes, and what it is for each of the changes (n, seq, d_model)."""
    name = f"blocks.{receiver.layer}"
    if receiver.kind == "mlp":
        return f"{name}.norm2:input", partial(torch.add, changes)
    block = model.layers[receiver.layer]
    read = block.norm1(run.streams[receiver.layer] + changes)
    linear, heads = projection(block.attention, receiver.kind)
    new = linear(read).unflatten(-1, (heads, -1))[:, :, receiver.head]
    places = (slice(None), slice(None), torch.tensor(receiver.head, device=new.device))
    return f"{name}.attention.{receiver.kind}", partial(put_heads, places, new, heads)


def projection(attention: DecoderAttention, kind: str) -> tuple[nn.Linear, int]:
    """The projection to queries, keys or values, and how many heads it has."""
    linear = cast(nn.Linear, getattr(attention, kind))
    return linear, attention.heads if kind == "q" else attention.kv_heads


def sent(
    model: Decoder,
    clean: Prompt,
    corrupted: Prompt,
    senders: Sequence[Node] | None,
    receivers: Sequence[Node] | None,
) -> tuple[Edges, Tensor]:
    """The edges, all 0, and what each sender would add to the stream less what it adds."""
    if not isinstance(model, Decoder):
        raise TypeError(
            f"edges are those of a Decoder, not of a {type(model).__name__}: describe() it"
        )
    if model.settings.positions_in_attention:
        raise ValueError("edges need positions in the stream; these go into queries and keys alone")
    sites = ("blocks.0:input", "blocks.*.attention.o:input", "blocks.*.mlp_out")
    with record(model, *sites, clone=True) as seen:
        forward(model, clean)
        before = dict(seen)
        forward(model, corrupted)
    every = {"embed": Node("embed")}
    changes = [before["blocks.0:input"] - seen["blocks.0:input"]]
    hears: list[Node] = []
    for i, block in enumerate(model.layers):
        attention, site = block.attention, f"blocks.{i}.attention.o:input"
        # A norm after the attention takes all heads together: each is changed with others held.
        old = seen[site].expand(attention.heads, -1, -1)
        head = torch.arange(attention.heads, device=old.device)
        new = before[site].unflatten(-1, (attention.heads, -1))[0].transpose(0, 1)
        alone = put_heads((head, slice(None), head), new, attention.heads, old)
        added = [block.attention_out(attention.o(x)) for x in (alone, seen[site])]
        changes += [
            added[0] - added[1],
            before[f"blocks.{i}.mlp_out"] - seen[f"blocks.{i}.mlp_out"],
        ]
        nodes = [*(Node("head", i, h) for h in range(attention.heads)), Node("mlp", i)]
        every |= {str(node): node for node in nodes}
        hears += [
            Node(k, i, h) for k in ("q", "k", "v") for h in range(projection(attention, k)[1])
        ]
        hears.append(Node("mlp", i))
    hears.append(Node("final"))
    chosen = _chosen(senders, list(every.values()), "senders")
    heard = _chosen(receivers, hears, "receivers")
    rows = [list(every.values()).index(node) for node in chosen]
    layers, parallel = len(model.layers), model.settings.parallel
    exists = torch.tensor(
        [[_sends(a) < _hears(b, layers, parallel) for b in heard] for a in chosen],
        device=changes[0].device,
    )
    values = torch.zeros(exists.shape, dtype=changes[0].dtype, device=exists.device)
    return Edges(tuple(chosen), tuple(heard), exists, values), torch.cat(changes)[rows]


def _chosen(given: Sequence[Node] | None, every: list[Node], what: str) -> list[Node]:
    if given is None:
        return every
    for node in given:
        if node not in every:
            raise ValueError(f"{node!r} is not among the {what}: {', '.join(map(str, every))}")
    return list(given)


def _sends(node: Node) -> int:
    """When a sender has spoken: attention and MLP of each layer take turns."""
    return -1 if node.kind == "embed" else 2 * node.layer + (node.kind == "mlp")


def _hears(node: Node, layers: int, parallel: bool) -> int:
    if node.kind == "final":
        return 2 * layers
    return 2 * node.layer + (node.kind == "mlp" and not parallel)


def require_equal_shapes(clean: Mapping[str, Tensor], corrupted: Mapping[str, Tensor]) -> None:
    """The two runs must agree in number and length."""
    for site, x in clean.items():
        if x.shape != corrupted[site].shape:
            raise ValueError(
                f"at {site!r} the runs are {tuple(x.shape)} and {tuple(corrupted[site].shape)}; "
                "give prompts of the same number and length"
            )


def require_repeatable(seen: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    """The same tokens must give the same activations: not so with a cache or dropout."""
    for site, x in again.items():
        if not alike(x, seen[site]):
            raise ValueError(
                f"{site!r} differs when the corrupted run is repeated: either the model keeps a "
                "state (a cache, dropout): use eval() and turn caches off, or a receiver comes "
                "before its sender"
            )
