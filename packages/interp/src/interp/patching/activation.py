"""Activation patching and ablation of every layer, head and position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder
from interp.lens import require_whole_heads
from interp.patching.batching import Patches, run_patches
from interp.patching.restart import Restart
from interp.prompts import (
    MeanOverPairs,
    Metrics,
    Prompt,
    forward,
    mask_of,
    mean_over_pairs,
    measure,
    split_pairs,
)
from interp.tap import record

Replacement = Literal["zero", "mean", "resample"]


@dataclass(frozen=True, eq=False)
class PatchingResult(MeanOverPairs):
    """The metric after each patch, and in the clean and the corrupted run."""

    #: Names of the blocks.
    names: tuple[str, ...]
    #: (layers, positions), or (layers, heads, positions) from `patch_parts`.
    values: Tensor
    clean: float
    corrupted: float

    @property
    def recovered(self) -> Tensor:
        """The fraction of the gap that each patch closes: 0 if corrupted, 1 if clean."""
        if self.clean == self.corrupted:
            raise ValueError(
                f"the metric is {self.clean:.6g} in both runs: there is no gap to recover; pass "
                "prompts whose metrics differ"
            )
        return (self.values - self.corrupted) / (self.clean - self.corrupted)


@dataclass(frozen=True, eq=False)
class AblationResult(MeanOverPairs):
    """The metric of the run without each head or MLP."""

    #: Names of the blocks.
    names: tuple[str, ...]
    #: (layers, heads).
    values: Tensor
    #: The metric of the unchanged run.
    baseline: float

    @property
    def effect(self) -> Tensor:
        """The contribution of each part: the metric with it minus the metric without it."""
        return self.baseline - self.values


@torch.no_grad()
def patch_streams(
    model: nn.Module,
    blocks: str,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metrics,
    *,
    batch: int = 64,
) -> PatchingResult:
    """Patch the clean residual stream into the corrupted run, per layer and position.

    Args:
        model: Any model with a sequence of blocks.
        blocks: The pattern that names the blocks in order ("blocks.*"). Each takes the residual
            stream first and returns the next block's input.
        clean: Token ids (1, seq), or the model's keyword arguments, such as `input_ids` with an
            `attention_mask`. Several prompts are (pairs, seq).
        corrupted: A prompt of the same shape.
        metric: A function from final streams (n, seq, d_model), the outputs of the last block, to
            (n,), such as `logit_difference`; or one function per pair.
        batch: The number of patches that run together.

    Raises ValueError if a block's output is not the next block's input, or if a second call of a
    block returns another result.
    """
    result = patch_parts(model, blocks, ":input", clean, corrupted, metric, batch=batch)
    pairs = tuple(replace(pair, values=pair.values[:, 0]) for pair in result.pairs)
    return replace(result, values=result.values[:, 0], pairs=pairs)


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
) -> PatchingResult:
    """Patch the clean activation into the corrupted run, per layer, head and position.

    `part` is a site inside each block whose last dimension is a concatenation of `heads` heads. In
    a `Decoder` these are "attention.o:input" for z, "attention.q", "attention.k" and "attention.v"
    (with the number of key-value heads), and "mlp_out" with one head. All other arguments are those
    of `patch_streams`. `values` are (layers, heads, positions).

    Raises ValueError as `patch_streams` does, and if the site does not have `heads` heads.
    """
    if pairs := split_pairs(clean, corrupted, metric):
        patch_pair = partial(patch_parts, model, blocks, part, heads=heads, batch=batch)
        return mean_over_pairs([patch_pair(*pair) for pair in pairs])
    run = Restart(model, blocks, corrupted, batch=batch)
    sites = _part_sites(run, part, heads)
    with record(model, *sites, run.block_names[-1], clone=True) as seen:
        forward(model, clean)
    length, device = run.final_stream.shape[1], run.final_stream.device
    sources = [_split_heads(site, seen[site], heads, length)[0] for site in sites]
    index = torch.ones(len(sites), heads, length, device=device).nonzero()
    patches = Patches(index[:, 0], index[:, 1], index[:, 2:])
    values = run_patches(run, sites, sources, patches, metric)
    final_streams = torch.cat([seen[run.block_names[-1]], run.final_stream])
    clean_value, corrupted_value = measure(metric, final_streams).tolist()
    shaped = values.view(len(sites), heads, length)
    return PatchingResult(run.block_names, shaped, clean_value, corrupted_value)


@torch.no_grad()
def ablate_parts(
    model: nn.Module,
    blocks: str,
    part: str,
    prompt: Prompt,
    metric: Metrics,
    *,
    how: Replacement = "zero",
    reference: Prompt | None = None,
    heads: int = 1,
    batch: int = 64,
) -> AblationResult:
    """Ablate each head or MLP at all positions and measure the run without it.

    `part` and `metric` are those of `patch_parts`. `how` chooses the replacement:

    - "zero": zeros.
    - "mean": the mean over all prompts and positions of `reference`, (n, seq) token ids or keyword
      arguments of the model, without the positions that its `attention_mask` hides.
    - "resample": the activation at the same position of each prompt of `reference`. The metric is
      the mean over these prompts.
    """
    if how not in ("zero", "mean", "resample"):
        raise ValueError(f"how {how!r} is not one of 'zero', 'mean', 'resample'")
    if (how == "zero") != (reference is None):
        raise ValueError(f"how={how!r} {'takes no' if how == 'zero' else 'needs a'} reference=")
    if prompts := split_pairs(prompt, prompt, metric):
        ablate = partial(ablate_parts, model, blocks, part, how=how, reference=reference)
        results = [ablate(row, m, heads=heads, batch=batch) for row, _, m in prompts]
        return mean_over_pairs(results)
    run = Restart(model, blocks, prompt, batch=batch)
    length, device = run.final_stream.shape[1], run.final_stream.device
    mask = None if reference is None else mask_of(reference)
    if how == "resample" and mask is not None:
        _require_whole_prompts(mask, length)
    sites = _part_sites(run, part, heads)
    with record(model, *sites, clone=True) as seen:
        forward(model, prompt if reference is None else reference)
    sources = [_split_heads(site, seen[site], heads, None) for site in sites]
    if how == "zero":
        sources = [torch.zeros_like(source[:1]) for source in sources]
    elif how == "mean" and mask is not None:
        sources = [source[mask].mean(0).expand(1, length, -1, -1) for source in sources]
    layer, head = torch.ones(len(sites), heads, device=device).nonzero().mT
    all_positions = torch.arange(length, device=device).expand(len(head), -1)
    patches = Patches(layer, head, all_positions)
    per_source = [
        run_patches(run, sites, by_layer, patches, metric)
        for by_layer in zip(*sources, strict=True)
    ]
    values = torch.stack(per_source).mean(0).view(len(sites), heads)
    return AblationResult(run.block_names, values, float(measure(metric, run.final_stream)))


def _require_whole_prompts(mask: Tensor, length: int) -> None:
    if mask.shape[1] != length or not bool(mask.all()):
        raise ValueError(
            f"reference is {tuple(mask.shape)} with {int((~mask).sum())} positions of padding; "
            f"to resample from it pass (n, {length}) tokens without padding"
        )


def _part_sites(run: Restart, part: str, heads: int) -> list[str]:
    if isinstance(run.model, Decoder):
        _require_heads_of_decoder(run.model, part, heads)
    separator = "" if part.startswith(":") else "."
    return [f"{name}{separator}{part}" for name in run.block_names]


def _require_heads_of_decoder(model: Decoder, part: str, heads: int) -> None:
    """Raise ValueError unless a part has `heads` heads; 1 patches all heads together."""
    attention = model.layers[0].attention
    known = {
        "attention.q": attention.heads,
        "attention.k": attention.kv_heads,
        "attention.v": attention.kv_heads,
        "attention.o:input": attention.heads,
    }
    if part in known and heads not in (1, known[part]):
        raise ValueError(
            f"{part!r} of this decoder has {known[part]} heads, got heads={heads}; pass "
            f"heads={known[part]}, or 1 to patch all heads together"
        )


def _split_heads(site: str, value: Tensor, heads: int, length: int | None) -> Tensor:
    """Return an activation as (..., seq, heads, d_head)."""
    if length is None and value.ndim == 3:
        length = value.shape[1]
    if heads < 1:
        raise ValueError(f"expected heads >= 1, got {heads}")
    if value.ndim != 3 or value.shape[1] != length or value.shape[2] % heads:
        raise ValueError(
            f"{site!r} is {tuple(value.shape)}; for {heads} heads and {length} tokens it must "
            f"be (1, {length}, heads * d_head)"
        )
    split: Tensor = value.unflatten(-1, (heads, -1))
    return split


def logit_difference(
    norm: Callable[[Tensor], Tensor] | None,
    unembed: nn.Linear | Tensor,
    right: int,
    wrong: int,
    *,
    position: int = -1,
) -> Callable[[Tensor], Tensor]:
    """Return the metric logit(right) - logit(wrong), from two rows of the unembedding.

    The logits are those before a cap (Gemma 2).
    """
    weight = unembed if isinstance(unembed, Tensor) else unembed.weight
    for name, token in (("right", right), ("wrong", wrong)):
        if not 0 <= token < len(weight):
            raise ValueError(
                f"expected a token id within 0 and {len(weight) - 1} as {name}, got {token}"
            )
    bias = None if isinstance(unembed, Tensor) else unembed.bias
    direction = weight[right] - weight[wrong]
    constant = 0.0 if bias is None else bias[right] - bias[wrong]

    def metric(stream: Tensor) -> Tensor:
        x = stream[:, position]
        return (x if norm is None else norm(x)) @ direction + constant

    return metric


def drop_heads(*dropped: int, heads: int, to: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return a patch for the input of an output projection that ablates some of its heads.

    The ablated heads are 0, or their values in `to`, which broadcasts to the input and may contain
    a mean or the activations of another prompt.
    """
    if not all(0 <= head < heads for head in dropped):
        raise ValueError(f"heads {dropped} are not all within 0 and {heads - 1}")

    def drop(mixed: Tensor) -> Tensor:
        require_whole_heads(mixed, heads)
        replacement = torch.zeros_like(mixed) if to is None else to.to(mixed).expand_as(mixed)
        parts = list(mixed.chunk(heads, -1))
        for head in dropped:
            parts[head] = replacement.chunk(heads, -1)[head]
        return torch.cat(parts, -1)

    return drop
