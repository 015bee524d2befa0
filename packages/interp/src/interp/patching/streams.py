"""Which activation carries the answer: put one run's into another and see what comes back.

- `patch_streams`: every (layer, position) of the residual stream, exactly. A patch entering block l
  changes nothing before it, so each layer restarts from the recorded stream with all positions as
  one batch, and the metric sees the final stream alone, not a whole vocabulary of logits.
- `patch_parts`: the same for every head's queries, keys, values or result at every position.
- `attribution_patching`: all sites at once, to first order, from one backward pass.
- `path_patching`: the effect of one component through chosen readers alone.

Nanda 2023, "Attribution Patching"; Goldowsky-Dill et al. 2023, "Path Patching".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from interp.patching.restart import Metric, Restart, forward
from interp.tap import Replacement, patch, record


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
        return (self.values - self.corrupted) / (self.clean - self.corrupted)


@torch.no_grad()
def patch_streams(
    model: nn.Module,
    blocks: str,
    clean: Tensor,
    corrupted: Tensor,
    metric: Metric,
    *,
    batch: int = 64,
) -> StreamScan:
    """Put the clean stream into the corrupted run, at each block's input and position in turn.

    `blocks` names the blocks in order ("blocks.*"): modules that take the stream first and give
    it back, each the next one's input. `clean` and `corrupted` are (1, seq); `metric` maps final
    streams (n, seq, d_model), as they leave the last block, to (n,), see `logit_difference`.
    `batch` positions run together.

    Raises ValueError if a block does not feed the next one, or gives something else when called
    again.
    """
    run = Restart(model, blocks, clean, corrupted, batch=batch)
    positions = torch.arange(clean.shape[1], device=clean.device)
    values = []
    for layer in range(len(run.names)):
        results = []
        for chosen in torch.split(positions, batch):
            patched = run.corrupted[layer].repeat(len(chosen), 1, 1)
            rows = torch.arange(len(chosen), device=chosen.device)
            patched[rows, chosen] = run.clean[layer][0, chosen]
            results.append(run.measured(metric, layer, patched))
        values.append(torch.cat(results))
    ends = run.ends(metric)
    return StreamScan(run.names, torch.stack(values), *ends)


@torch.no_grad()
def patch_parts(
    model: nn.Module,
    blocks: str,
    part: str,
    clean: Tensor,
    corrupted: Tensor,
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
    if heads < 1:
        raise ValueError(f"heads {heads} is less than 1")
    run = Restart(model, blocks, clean, corrupted, batch=batch)
    sites = [f"{name}.{part}" for name in run.names]
    with record(model, *sites, clone=True) as seen:
        forward(model, clean)
    length = clean.shape[1]
    values = []
    for layer, site in enumerate(sites):
        value = seen[site]
        if value.ndim != 3 or value.shape[1] != length or value.shape[2] % heads:
            raise ValueError(
                f"{site!r} is {tuple(value.shape)}; for {heads} heads and {length} tokens it must "
                f"be (1, {length}, heads * d_head)"
            )
        by_head = value.unflatten(-1, (heads, -1))
        places = torch.arange(heads * length, device=value.device)
        results = []
        for chosen in torch.split(places, batch):
            head, position = chosen // length, chosen % length
            rows = torch.arange(len(chosen), device=chosen.device)

            def put(
                old: Tensor,
                rows: Tensor = rows,
                head: Tensor = head,
                position: Tensor = position,
                by_head: Tensor = by_head,
            ) -> Tensor:
                new = old.unflatten(-1, (heads, -1)).clone()
                new[rows, position, head] = by_head[0, position, head]
                joined: Tensor = new.flatten(-2)
                return joined

            streams = run.corrupted[layer].repeat(len(chosen), 1, 1)
            with patch(model, {site: put}):
                results.append(run.measured(metric, layer, streams))
        values.append(torch.cat(results).view(heads, length))
    return StreamScan(run.names, torch.stack(values), *run.ends(metric))


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


def attribution_patching(
    model: nn.Module,
    sites: Sequence[str],
    clean: Tensor,
    corrupted: Tensor,
    metric: Metric,
) -> dict[str, Tensor]:
    """The effect of each activation to first order: (clean - corrupted) * d metric / d activation.

    Summed over the last dimension, so (batch, seq) for streams. `metric` maps the model's output
    to one number. The error against real patches is of second order in clean - corrupted.
    """
    with torch.no_grad(), record(model, *sites, clone=True) as seen:
        forward(model, clean)
        before = dict(seen)
        forward(model, corrupted)
    _require_equal_shapes(before, seen)
    # An added zero is a place to differentiate at, also where no parameter asks for gradients.
    zeros = {site: torch.zeros_like(x, requires_grad=True) for site, x in seen.items()}
    added: dict[str, Replacement] = {site: partial(torch.add, zero) for site, zero in zeros.items()}
    with torch.enable_grad(), patch(model, added), record(model, *sites, clone=True) as again:
        result = metric(forward(model, corrupted))
        _require_repeatable(seen, again)
        _require_one_number(result)
        gradients = torch.autograd.grad(result, list(zeros.values()))
    return {
        site: ((before[site] - seen[site]) * gradient).sum(-1)
        for (site, gradient) in zip(zeros, gradients, strict=True)
    }


@torch.no_grad()
def path_patching(
    model: nn.Module, sender: str, receivers: Sequence[str], clean: Tensor, corrupted: Tensor
) -> Tensor:
    """The corrupted run's output, had `receivers` read `sender` as it is in the clean run.

    `sender` is a module whose output is added to the stream, `receivers` are inputs that read the
    stream before any norm ("blocks.3.norm1:input"). The stream is a sum, so the direct path is
    the difference of the sender's output, added at the receivers alone; everything between still
    sees the corrupted run.
    """
    with record(model, sender, clone=True) as seen:
        forward(model, clean)
        before = seen[sender]
        forward(model, corrupted)
    _require_equal_shapes({sender: before}, seen)
    change = before - seen[sender]
    with (
        patch(model, {site: partial(torch.add, change) for site in receivers}),
        record(model, sender, clone=True) as again,
    ):
        out: Tensor = forward(model, corrupted)
    _require_repeatable(seen, again)
    return out


def drop_heads(*dropped: int, heads: int) -> Callable[[Tensor], Tensor]:
    """A patch for the input of an output projection: some of its `heads` heads give 0."""
    if not all(0 <= head < heads for head in dropped):
        raise ValueError(f"heads {dropped} are not all within 0 and {heads - 1}")

    def drop(mixed: Tensor) -> Tensor:
        parts = mixed.chunk(heads, -1)
        return torch.cat([p * (i not in dropped) for i, p in enumerate(parts)], -1)

    return drop


def _require_equal_shapes(clean: Mapping[str, Tensor], corrupted: Mapping[str, Tensor]) -> None:
    for site, x in clean.items():
        if x.shape != corrupted[site].shape:
            raise ValueError(
                f"at {site!r} the runs are {tuple(x.shape)} and {tuple(corrupted[site].shape)}; "
                "give prompts of the same number and length"
            )


def _require_repeatable(seen: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    """The same tokens must give the same activations: not so with a cache or dropout."""
    for site, x in again.items():
        old = seen[site]
        if x.shape != old.shape or not torch.allclose(
            x, old, rtol=1e-3, atol=1e-4 * float(old.abs().max())
        ):
            raise ValueError(
                f"{site!r} differs when the corrupted run is repeated: either the model keeps a "
                "state (a cache, dropout): use eval() and turn caches off, or a receiver comes "
                "before its sender"
            )


def _require_one_number(result: object) -> None:
    if not isinstance(result, Tensor) or result.numel() != 1:
        given = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"the metric gave {given}; it must give one number, a tensor: sum it")
