"""Activation patching of every layer, head and position of a `Decoder`, and ablation of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder
from interp.lens import require_whole_heads
from interp.patching.batching import run_patches
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
from interp.tap import record
from interp.text import Texts, Tokenizer

#: Metrics that differ by at most this many rounding units (machine epsilon times the larger metric)
#: count as equal. Metrics of equal prompts in batches of different sizes differ by up to two units.
MAX_ROUNDING_UNITS = 64


@dataclass(frozen=True, eq=False)
class PatchingResult(MeanOverPairs):
    """The metric after each patch, and in the clean and the corrupted run."""

    #: The metric after each patch, (layers, positions); (layers, heads, positions) from
    #: `patch_parts`.
    values: Tensor
    #: The metric of the clean run.
    clean: float
    #: The metric of the corrupted run.
    corrupted: float

    @property
    def recovered(self) -> Tensor:
        """The fraction of the gap that each patch closes, with the shape of `values`.

        The gap is the clean metric minus the corrupted metric: a fraction of 0 is the corrupted
        metric, and 1 is the clean metric. Raises ValueError if the metrics of the two runs differ
        by rounding errors only.
        """
        gap = self.clean - self.corrupted
        rounding = torch.finfo(self.values.dtype).eps * max(abs(self.clean), abs(self.corrupted))
        if abs(gap) <= MAX_ROUNDING_UNITS * rounding:
            raise ValueError(
                f"the metric is {self.clean:.6g} in both runs: there is no gap to recover; pass "
                "prompts whose metrics differ"
            )
        return (self.values - self.corrupted) / gap


@torch.no_grad()
def patch_streams(
    model: Decoder,
    clean: Prompt | Texts,
    corrupted: Prompt | Texts,
    metric: Metrics,
    *,
    tokenizer: Tokenizer | None = None,
    batch: int = 64,
) -> PatchingResult:
    """Patch the clean residual stream before each block into the corrupted run, per position.

    The `values` of the result are the metrics after each patch, (layers, positions), means over the
    pairs. Raises TypeError if `model` is not a `Decoder`, and for texts without a tokenizer. Raises
    ValueError for prompts and metrics that do not correspond, and for a model with hooks, as inside
    `patch`.

    Args:
        model: A decoder, as from `describe`.
        clean: Token ids (1, seq), or the decoder's keyword arguments, such as `input_ids` with an
            `attention_mask`. Several prompts are (pairs, seq). With `tokenizer`, also a text or a
            list of texts.
        corrupted: A prompt of the same shape and with the same padding.
        metric: A function from final streams (n, seq, d_model), the outputs of the last block, to
            one number per stream, (n,), as from `logit_difference`; or one function per pair. It
            must not read padding.
        tokenizer: A function from a text to token ids, or a tokenizer of transformers. Texts of
            different lengths are padded on the left.
        batch: The number of patches that run together.
    """
    pairs = split_pairs(model, clean, corrupted, metric, tokenizer)
    results = [_patch_pair(model, ":input", *pair, batch) for pair in pairs]
    return average_over_pairs([replace(result, values=result.values[:, 0]) for result in results])


@torch.no_grad()
def patch_parts(
    model: Decoder,
    part: str,
    clean: Prompt | Texts,
    corrupted: Prompt | Texts,
    metric: Metrics,
    *,
    tokenizer: Tokenizer | None = None,
    batch: int = 64,
) -> PatchingResult:
    """Patch the clean activation into the corrupted run, per layer, head and position.

    `part` is the site "attention.q", "attention.k", "attention.v", "attention.o:input" (z),
    "attention_out" or "mlp_out" of each block. For keys and values, heads are key-value heads;
    "attention_out" and "mlp_out" count as one head. The other arguments and errors are those of
    `patch_streams`. The `values` of the result are (layers, heads, positions). Raises ValueError
    for an unknown part.
    """
    pairs = split_pairs(model, clean, corrupted, metric, tokenizer)
    return average_over_pairs([_patch_pair(model, part, *pair, batch) for pair in pairs])


def _patch_pair(
    model: Decoder, part: str, clean: Prompt, corrupted: Prompt, metric: Metric, batch: int
) -> PatchingResult:
    run = Restart(model, corrupted, batch=batch)
    sites, heads = find_sites_and_heads(model, part)
    last_block = f"blocks.{len(sites) - 1}"
    with record(model, *sites, last_block) as recorded:
        forward(model, clean)
    sources = [recorded[site][0].unflatten(-1, (heads, -1)) for site in sites]
    length = run.final_stream.shape[1]
    patches = torch.ones(len(sites), heads, length, device=run.final_stream.device).nonzero()
    values = run_patches(run, sites, sources, patches, metric)
    final_streams = torch.cat([recorded[last_block], run.final_stream])
    clean_value, corrupted_value = measure(metric, final_streams).tolist()
    return PatchingResult(values.view(len(sites), heads, length), clean_value, corrupted_value)


def find_sites_and_heads(model: Decoder, part: str) -> tuple[list[str], int]:
    """Return the site of a part in each block, and its number of heads.

    Raises ValueError for an unknown part.
    """
    attention = model.layers[0].attention
    heads_of = {
        ":input": 1,
        "attention.q": attention.heads,
        "attention.k": attention.kv_heads,
        "attention.v": attention.kv_heads,
        "attention.o:input": attention.heads,
        "attention_out": 1,
        "mlp_out": 1,
    }
    if part not in heads_of:
        raise ValueError(f"expected part {', '.join(heads_of)}, got {part!r}")
    separator = "" if part.startswith(":") else "."
    sites = [f"blocks.{i}{separator}{part}" for i in range(len(model.layers))]
    return sites, heads_of[part]


def logit_difference(
    norm: Callable[[Tensor], Tensor] | None,
    unembed: nn.Linear | Tensor,
    right: int,
    wrong: int,
    *,
    position: int = -1,
) -> Callable[[Tensor], Tensor]:
    """Return the metric logit(right) - logit(wrong) at one position, from two unembedding rows.

    The metric maps final streams (n, seq, d_model) to (n,). `norm` is the model's final norm, or
    None; `right` and `wrong` are token ids. A cap on logits (Gemma 2) is not applied.

    Raises ValueError for a token id outside the vocabulary.
    """
    weight = unembed if isinstance(unembed, Tensor) else unembed.weight
    for name, token in (("right", right), ("wrong", wrong)):
        if not 0 <= token < len(weight):
            raise ValueError(
                f"expected a token id from 0 to {len(weight) - 1} as {name}, got {token}"
            )
    bias = None if isinstance(unembed, Tensor) else unembed.bias
    direction = weight[right] - weight[wrong]
    constant = 0.0 if bias is None else bias[right] - bias[wrong]

    def metric(stream: Tensor) -> Tensor:
        x = stream[:, position]
        return (x if norm is None else norm(x)) @ direction + constant

    return metric


def drop_heads(*dropped: int, heads: int, to: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return a replacement for the site `attention.o:input` that ablates the heads `dropped`.

    `heads` is the number of heads of the layer. Ablated heads are set to 0, or to their values in
    `to`. This tensor must broadcast to the activation (batch, seq, heads * d_head); it may be a
    mean or the activation of another prompt. Raises ValueError for heads that do not exist.
    """
    if not all(0 <= head < heads for head in dropped):
        raise ValueError(f"expected heads from 0 to {heads - 1}, got {dropped}")

    def drop(mixed: Tensor) -> Tensor:
        require_whole_heads(mixed, heads)
        replacement = torch.zeros_like(mixed) if to is None else to.to(mixed).expand_as(mixed)
        parts = list(mixed.chunk(heads, -1))
        for head in dropped:
            parts[head] = replacement.chunk(heads, -1)[head]
        return torch.cat(parts, -1)

    return drop
