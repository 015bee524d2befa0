"""Patches of one run in a batch that grows from block to block.

"How it works" in the README of the package explains the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from interp.patching.restart import Restart
from interp.prompts import Metric, measure
from interp.tap import install_hooks

Actions = Mapping[str, Callable[[Tensor], Tensor]]


class PatchBatch:
    """A batch of patched runs, one row per patch, at the input of the next block.

    Only the affected positions are computed: the patched position of a row and later positions.
    `streams` is (1, m, d_model): the m affected positions of all rows, concatenated.
    """

    def __init__(self, run: Restart) -> None:
        self.run = run
        self.streams = run.final_stream[:, :0]
        #: True at the affected positions, (rows, seq).
        self.affected = run.final_stream.new_zeros(0, run.final_stream.shape[1], dtype=torch.bool)

    def add_rows(self, layer: int, positions: Tensor) -> Tensor:
        """Add one row per patch of this layer, with the recorded input of its block.

        `positions` are the patched positions, (patches,). The result contains their indices in
        dimension 1 of `streams`, (patches,).
        """
        every_position = torch.arange(self.affected.shape[1], device=positions.device)
        affected = every_position >= positions[:, None]
        # The patched position of a row is the first of its affected positions.
        indices = self.streams.shape[1] + affected.sum(1).cumsum(0) - affected.sum(1)
        inputs = self.run.block_inputs[layer].expand(len(affected), -1, -1)[affected]
        self.streams = torch.cat([self.streams, inputs[None]], 1)
        self.affected = torch.cat([self.affected, affected])
        return indices

    def run_block(self, layer: int, actions: Actions) -> None:
        """Run one block for all rows, while `actions` replace activations at their sites.

        All modules receive the affected positions only. The attention between its projections is
        an exception: positions interact, so it receives queries, keys and values of whole rows.
        """
        padding, embeddings, position_ids = self.run.block_arguments
        if embeddings is not None:  # (1, seq, d_model)
            embeddings = embeddings.flatten(0, -2)[self.affected.nonzero()[:, 1]]
        name = f"blocks.{layer}.attention"
        fill = {
            f"{name}.{part}": partial(self.fill_rows, self.run.projections[f"{name}.{part}"])
            for part in "qkv"
        }
        # Hooks run in the order of installation, and actions must receive the affected positions
        # only. At o:input, these are therefore selected before the actions run. At q, k and v, the
        # unaffected positions are added after the actions.
        with (
            install_hooks(self.run.model, {f"{name}.o:input": lambda x: x[self.affected][None]}),
            install_hooks(self.run.model, actions),
            install_hooks(self.run.model, fill),
        ):
            block = self.run.model.layers[layer]
            self.streams = block(self.streams, padding, embeddings, position_ids)

    def fill_rows(self, recorded: Tensor, x: Tensor) -> Tensor:
        """Return rows (rows, seq, ...) of the recorded run with `x` at the affected positions."""
        filled = recorded.repeat(len(self.affected), 1, 1)
        filled[self.affected] = x[0]
        return filled


def run_patches(
    run: Restart, sites: Sequence[str], sources: Sequence[Tensor], patches: Tensor, metric: Metric
) -> Tensor:
    """Return the metric (patches,) of each patched run.

    `sites` has one site per layer, and `sources` has the new values (seq, heads, d_head) of each
    site. The rows of `patches` are (layer, head, position), in ascending order of layers.
    """
    results = []
    for chunk in patches.split(run.batch):
        batch = PatchBatch(run)
        for layer in range(int(chunk[0, 0]), len(sites)):
            heads, positions = chunk[chunk[:, 0] == layer, 1:].mT
            actions: Actions = {}
            if len(heads):
                indices = batch.add_rows(layer, positions)
                source = sources[layer]
                index = (torch.zeros_like(indices), indices, heads)
                new = source[positions, heads]
                actions = {sites[layer]: partial(replace_heads, index, new, source.shape[1])}
            batch.run_block(layer, actions)
        results.append(measure(metric, batch.fill_rows(run.final_stream, batch.streams)))
    return torch.cat(results)


def replace_heads(
    index: tuple[Tensor | slice | int, ...], new: Tensor, heads: int, old: Tensor
) -> Tensor:
    """Return `old` (n, seq, heads * d_head) with `new` at `index` (row, position, head)."""
    changed = old.unflatten(-1, (heads, -1)).clone()
    changed[index] = new.to(changed)
    joined: Tensor = changed.flatten(-2)
    return joined
