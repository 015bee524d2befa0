"""Many changed copies of one run, each from the block on in which it is changed, as one batch.

    block 0   row row                       patched in block 0
    block 1   row row row                   joined by those of block 1
    block 2   row row row row row           ...: each block is called once for all of them

In a `Decoder`, attention is causal, so that a patch changes its own position and later ones alone:
`CausalWave` computes those, and takes the queries, keys and values of earlier ones from the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from interp.patching.restart import Metrics, Restart, measure
from interp.tap import tapped

# Sites where a position of the stream stands for itself: those from which attention carries what is
# changed on to later positions of the same block, and the others.
_SPREADS = re.compile(r":input|\.norm1(:input)?|\.attention(:input|\.[kv])")
_STAYS = re.compile(r"\.(?!norm1|attention[.:]).*|\.attention(\.q|\.o|\.o:input)?")

Actions = Mapping[str, Callable[[Tensor], Tensor]]


class Wave:
    """Rows (n, seq, d_model) as they enter the next block."""

    def __init__(self, run: Restart) -> None:
        self.run, self.x = run, run.streams[0][:0]

    def join(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows that are changed in this block, at `positions` (new, any); where, for a site."""
        old, new = len(self.x), len(positions)
        self.x = torch.cat([self.x, self.run.streams[layer].expand(new, -1, -1)])
        return torch.arange(old, old + new, device=positions.device)[:, None], positions

    def step(self, layer: int, actions: Actions) -> None:
        """Through one block."""
        with tapped(self.run.model, actions):
            self.x = self.run.calls.again(layer, self.x)

    def end(self) -> Tensor:
        """The final streams (n, seq, d_model)."""
        return self.x


class CausalWave(Wave):
    """The same of a `Decoder`, position by position: those that can differ, in one row (1, m)."""

    def __init__(self, run: Restart, *, spreads: bool) -> None:
        super().__init__(run)
        self.spreads, self.x = spreads, run.streams[0][:, :0]
        length = run.streams[0].shape[1]
        self.reached = torch.zeros(0, length, dtype=torch.bool, device=self.x.device)

    def join(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Add what stands at `positions`, and after them where the change spreads in this block."""
        self._widen(layer)
        new = self.reached.new_zeros(len(positions), self.reached.shape[1])
        new = new.scatter(1, positions, True)
        new = new.cumsum(1) > 0 if self.spreads else new
        # Where each position of the new rows went.
        index = self.x.shape[1] + new.flatten().cumsum(0).view_as(new) - 1
        stream = self.run.streams[layer].expand(len(new), -1, -1)[new]
        self.x = torch.cat([self.x, stream[None]], 1)
        self.reached = torch.cat([self.reached, new])
        return torch.zeros_like(positions), index.gather(1, positions)

    def _widen(self, layer: int) -> None:
        # From the next block on, what was changed at a position reaches all later ones.
        if self.spreads:
            return
        streams = self._filled(self.run.streams[layer], self.x)
        self.reached = self.reached.cumsum(1) > 0
        self.x = streams[self.reached][None]

    def step(self, layer: int, actions: Actions) -> None:
        """Attention sees whole rows, the rest of the block what can differ."""
        if not actions:
            self._widen(layer)
        name = self.run.names[layer]
        _, padding, position, place = self.run.calls.arguments[layer][0]
        if position is not None:  # (seq, d_model), or (1, seq, d_model) of position ids
            position = position.flatten(0, -2)[self.reached.nonzero()[:, 1]]
        sites = [f"{name}.attention.{part}" for part in "qkv"]
        with (
            tapped(self.run.model, {f"{name}.attention.o:input": self._reached}),
            tapped(self.run.model, actions),
            tapped(self.run.model, {site: partial(self._whole, site) for site in sites}),
        ):
            self.x = self.run.model.get_submodule(name)(self.x, padding, position, place)

    def end(self) -> Tensor:
        """What was not reached is as in the run itself."""
        return self._filled(self.run.end, self.x)

    def _whole(self, site: str, x: Tensor) -> Tensor:
        return self._filled(self.run.held[site], x)

    def _reached(self, x: Tensor) -> Tensor:
        return x[self.reached][None]

    def _filled(self, run: Tensor, x: Tensor) -> Tensor:
        filled = run.repeat(len(self.reached), 1, 1)
        filled[self.reached] = x[0]
        return filled


def scan(
    run: Restart,
    sites: Sequence[str],
    sources: Sequence[Tensor],
    layer: Tensor,
    head: Tensor,
    position: Tensor,
    metric: Metrics,
) -> Tensor:
    """The metric (n,) with a layer's source (seq, heads, d_head) put at n places, in their order.

    Place i is head[i] at position[i], one or several, in layer[i], which never falls.
    """
    part = sites[0].removeprefix(run.names[0])
    spreads = bool(_SPREADS.fullmatch(part))
    causal = run.held and (spreads or _STAYS.fullmatch(part))
    results = []
    for i in range(0, len(layer), run.batch):
        layers, heads, positions = (x[i : i + run.batch] for x in (layer, head, position))
        wave = CausalWave(run, spreads=spreads) if causal else Wave(run)
        for index in range(int(layers[0]), run.layers):
            here, actions = layers == index, {}
            if bool(here.any()):
                one, at = heads[here][:, None], positions[here]
                places = (*wave.join(index, at), one)
                source = sources[index]
                put = partial(put_heads, places, source[at, one], source.shape[1])
                actions = {sites[index]: put}
            wave.step(index, actions)
        results.append(measure(metric, wave.end()))
    return torch.cat(results)


def put_heads(
    places: tuple[Tensor | slice | int, ...], new: Tensor, heads: int, old: Tensor
) -> Tensor:
    """`old` (n, seq, heads * d_head) with `new` at places (row, position, head)."""
    changed = old.unflatten(-1, (heads, -1)).clone()
    changed[places] = new.to(changed)
    joined: Tensor = changed.flatten(-2)
    return joined
