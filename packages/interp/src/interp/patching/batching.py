"""Patches of one run as one batch that grows from block to block.

See "Batching" and "Causality" in the docstring of `interp.patching`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from interp.patching.restart import Restart
from interp.prompts import Metrics, measure
from interp.tap import installed_hooks

# A patch at one of these sites changes later positions in the same block, through attention.
_BEFORE_ATTENTION = re.compile(r":input|\.norm1(:input)?|\.attention(:input|\.[kv])")
# A patch at one of these sites changes its own position only, until the next block.
_AFTER_ATTENTION = re.compile(r"\.(?!norm1|attention[.:]).*|\.attention(\.q|\.o|\.o:input)?")

Actions = Mapping[str, Callable[[Tensor], Tensor]]


@dataclass(frozen=True, eq=False)
class Patches:
    """Head activations to replace; patch i replaces head[i] at position[i] of layer[i]."""

    #: (patches,), in ascending order.
    layer: Tensor
    #: (patches,).
    head: Tensor
    #: (patches, positions per patch).
    position: Tensor

    def split(self, size: int) -> list[Patches]:
        """Return the patches in batches of at most `size`."""
        return [
            Patches(layer, head, position)
            for layer, head, position in zip(
                self.layer.split(size),
                self.head.split(size),
                self.position.split(size),
                strict=True,
            )
        ]


class PatchBatch:
    """A batch of patched runs, one row per patch, at the input of the next block."""

    def __init__(self, run: Restart) -> None:
        self.run = run
        #: Residual streams, (rows, seq, d_model).
        self.streams = run.block_inputs[0][:0]

    def add_rows(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Add one row per patch of this layer.

        `positions` is (patches, positions per patch). Return the rows and columns of the patched
        positions in the activations of this block; both broadcast to that shape.
        """
        old, new = len(self.streams), len(positions)
        inputs = self.run.block_inputs[layer].expand(new, -1, -1)
        self.streams = torch.cat([self.streams, inputs])
        return torch.arange(old, old + new, device=positions.device)[:, None], positions

    def run_block(self, layer: int, actions: Actions) -> None:
        """Run one block for all rows, while `actions` replace activations at their sites."""
        with installed_hooks(self.run.model, actions):
            self.streams = self.run.replay(layer, self.streams)

    def final_streams(self) -> Tensor:
        """Return the final streams (rows, seq, d_model)."""
        return self.streams


class CausalPatchBatch(PatchBatch):
    """A `PatchBatch` of a `Decoder` that computes the affected positions only.

    `streams` is (1, m, d_model): the m affected positions of all rows, concatenated.
    """

    def __init__(self, run: Restart, *, is_before_attention: bool) -> None:
        super().__init__(run)
        self.is_before_attention = is_before_attention
        self.streams = run.block_inputs[0][:, :0]
        length = run.block_inputs[0].shape[1]
        #: True at the affected positions, (rows, seq).
        self.affected = torch.zeros(0, length, dtype=torch.bool, device=self.streams.device)

    def add_rows(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Add the affected positions of one row per patch of this layer."""
        self._extend_to_later_positions(layer)
        affected = self.affected.new_zeros(len(positions), self.affected.shape[1])
        affected = affected.scatter(1, positions, True)
        if self.is_before_attention:
            affected = affected.cumsum(1) > 0
        # The column in `streams` of each affected position of the new rows.
        columns = self.streams.shape[1] + affected.flatten().cumsum(0).view_as(affected) - 1
        inputs = self.run.block_inputs[layer].expand(len(affected), -1, -1)[affected]
        self.streams = torch.cat([self.streams, inputs[None]], 1)
        self.affected = torch.cat([self.affected, affected])
        return torch.zeros_like(positions), columns.gather(1, positions)

    def _extend_to_later_positions(self, layer: int) -> None:
        """Mark all positions after an affected one, which the next block's attention affects."""
        if self.is_before_attention:
            return
        streams = self._fill_rows(self.run.block_inputs[layer], self.streams)
        self.affected = self.affected.cumsum(1) > 0
        self.streams = streams[self.affected][None]

    def run_block(self, layer: int, actions: Actions) -> None:
        """Run one block for all rows.

        Attention receives whole rows of queries, keys and values; all other modules receive the
        affected positions.
        """
        if not actions:
            self._extend_to_later_positions(layer)
        name = self.run.block_names[layer]
        _, padding, position, position_ids, _ = self.run.replay.arguments[layer][0]
        if position is not None:  # (seq, d_model), or (1, seq, d_model) with position ids
            position = position.flatten(0, -2)[self.affected.nonzero()[:, 1]]
        projections = [f"{name}.attention.{part}" for part in "qkv"]
        with (
            installed_hooks(self.run.model, {f"{name}.attention.o:input": self._select_affected}),
            installed_hooks(self.run.model, actions),
            installed_hooks(
                self.run.model,
                {site: partial(self._fill_projections, site) for site in projections},
            ),
        ):
            block = self.run.model.get_submodule(name)
            self.streams = block(self.streams, padding, position, position_ids)

    def final_streams(self) -> Tensor:
        """Return the final streams (rows, seq, d_model); unaffected positions are as recorded."""
        return self._fill_rows(self.run.final_stream, self.streams)

    def _fill_projections(self, site: str, x: Tensor) -> Tensor:
        return self._fill_rows(self.run.projections[site], x)

    def _select_affected(self, x: Tensor) -> Tensor:
        return x[self.affected][None]

    def _fill_rows(self, recorded: Tensor, x: Tensor) -> Tensor:
        """Return rows (rows, seq, ...) of the recorded run with `x` at the affected positions."""
        filled = recorded.repeat(len(self.affected), 1, 1)
        filled[self.affected] = x[0]
        return filled


def run_patches(
    run: Restart,
    sites: Sequence[str],
    sources: Sequence[Tensor],
    patches: Patches,
    metric: Metrics,
) -> Tensor:
    """Return the metric (patches,) of each patched run.

    `sites` and `sources` contain one site and its new values (seq, heads, d_head) per layer.
    """
    part = sites[0].removeprefix(run.block_names[0])
    is_before_attention = bool(_BEFORE_ATTENTION.fullmatch(part))
    is_known_site = is_before_attention or bool(_AFTER_ATTENTION.fullmatch(part))
    results = []
    for chunk in patches.split(run.batch):
        batch = PatchBatch(run)
        if run.projections and is_known_site:
            batch = CausalPatchBatch(run, is_before_attention=is_before_attention)
        for layer in range(int(chunk.layer[0]), run.layers):
            starts = chunk.layer == layer
            actions: Actions = {}
            if bool(starts.any()):
                heads, positions = chunk.head[starts][:, None], chunk.position[starts]
                rows, columns = batch.add_rows(layer, positions)
                source = sources[layer]
                new = source[positions, heads]
                replace = partial(replace_heads, (rows, columns, heads), new, source.shape[1])
                actions = {sites[layer]: replace}
            batch.run_block(layer, actions)
        results.append(measure(metric, batch.final_streams()))
    return torch.cat(results)


def replace_heads(
    index: tuple[Tensor | slice | int, ...], new: Tensor, heads: int, old: Tensor
) -> Tensor:
    """Return `old` (n, seq, heads * d_head) with `new` at `index` (row, position, head)."""
    changed = old.unflatten(-1, (heads, -1)).clone()
    changed[index] = new.to(changed)
    joined: Tensor = changed.flatten(-2)
    return joined
