"""TransformerLens's functions for activation patching, with one forward pass per patch.

    get_act_patch_resid_pre(model, corrupted_tokens, clean_cache, metric)       # (layers, pos)

All functions have these arguments. Each function patches one activation at a time from the clean
cache into the corrupted run, for all indices of the dimensions in its name. It returns the metric
of the logits after each patch. `interp.patching` computes many patches in one batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from interp.hook_points import HookPoint
from interp.transformer_lens.activation_cache import ActivationCache
from interp.transformer_lens.hooked_decoder import HookedDecoder
from interp.transformer_lens.names import get_act_name

#: A function from logits (batch, pos, d_vocab) to one number.
LogitMetric = Callable[[Tensor], Tensor]

#: The dimensions of a pattern after the batch.
_PATTERN = ("head", "dest_pos", "src_pos")


def _patch_each(
    model: HookedDecoder,
    corrupted_tokens: Tensor,
    clean_cache: ActivationCache,
    patching_metric: LogitMetric,
    *,
    name: str,
    axes: tuple[str, ...],
) -> Tensor:
    """Return the metric of each patch of the activation `name`, (layers, *axes).

    Dimensions of the activation that are not among `axes` are patched at all indices together.
    Raises ValueError for a clean cache of another shape.
    """
    heads = model.cfg.n_key_value_heads if name in ("k", "v") else model.cfg.n_heads
    positions = corrupted_tokens.shape[-1]
    sizes = {"head": heads, "pos": positions, "dest_pos": positions, "src_pos": positions}
    dimensions = _PATTERN if name == "pattern" else ("pos", "head")
    shape = [model.cfg.n_layers, *(sizes[axis] for axis in axes)]
    dtype = torch.promote_types(model.cfg.dtype, torch.float32)
    metrics = torch.zeros(shape, dtype=dtype, device=model.cfg.device)
    for layer, *indices in itertools.product(*map(range, shape)):
        chosen = dict(zip(axes, indices, strict=True))
        index = (slice(None), *(chosen.get(dimension, slice(None)) for dimension in dimensions))

        def restore(value: Tensor, hook: HookPoint, index: tuple[int | slice, ...]) -> Tensor:
            clean = clean_cache[hook.name]
            if clean.shape[1:] != value.shape[1:]:
                raise ValueError(
                    f"{hook.name} is {tuple(clean.shape)} in the clean cache, expected "
                    f"{tuple(value.shape)}; pass prompts of equal lengths, with a batch dimension"
                )
            value[index] = clean[index]
            return value

        hook = get_act_name(name, layer), partial(restore, index=index)
        logits = model.run_with_hooks(corrupted_tokens, fwd_hooks=[hook])
        metrics[(layer, *indices)] = float(patching_metric(logits))
    return metrics


get_act_patch_resid_pre = partial(_patch_each, name="resid_pre", axes=("pos",))
get_act_patch_resid_mid = partial(_patch_each, name="resid_mid", axes=("pos",))
get_act_patch_attn_out = partial(_patch_each, name="attn_out", axes=("pos",))
get_act_patch_mlp_out = partial(_patch_each, name="mlp_out", axes=("pos",))
get_act_patch_attn_head_out_by_pos = partial(_patch_each, name="z", axes=("pos", "head"))
get_act_patch_attn_head_q_by_pos = partial(_patch_each, name="q", axes=("pos", "head"))
get_act_patch_attn_head_k_by_pos = partial(_patch_each, name="k", axes=("pos", "head"))
get_act_patch_attn_head_v_by_pos = partial(_patch_each, name="v", axes=("pos", "head"))
get_act_patch_attn_head_pattern_by_pos = partial(_patch_each, name="pattern", axes=_PATTERN[:2])
get_act_patch_attn_head_pattern_dest_src_pos = partial(_patch_each, name="pattern", axes=_PATTERN)
get_act_patch_attn_head_out_all_pos = partial(_patch_each, name="z", axes=("head",))
get_act_patch_attn_head_q_all_pos = partial(_patch_each, name="q", axes=("head",))
get_act_patch_attn_head_k_all_pos = partial(_patch_each, name="k", axes=("head",))
get_act_patch_attn_head_v_all_pos = partial(_patch_each, name="v", axes=("head",))
get_act_patch_attn_head_pattern_all_pos = partial(_patch_each, name="pattern", axes=("head",))


def get_act_patch_block_every(
    model: HookedDecoder,
    corrupted_tokens: Tensor,
    clean_cache: ActivationCache,
    metric: LogitMetric,
) -> Tensor:
    """Return the metric of patches of block inputs, attentions and MLPs, (3, layers, pos)."""
    run = partial(_patch_each, model, corrupted_tokens, clean_cache, metric, axes=("pos",))
    return torch.stack([run(name=name) for name in ("resid_pre", "attn_out", "mlp_out")])


def _patch_heads(
    model: HookedDecoder,
    corrupted_tokens: Tensor,
    clean_cache: ActivationCache,
    metric: LogitMetric,
    *,
    axes: tuple[str, ...],
) -> Tensor:
    """Return the metric of patches of z, q, k, v and patterns, (5, layers, *axes, heads).

    `axes` is () or ("pos",). The position of a pattern is the position of the query. Keys and
    values with fewer heads are padded with zeros.
    """
    run = partial(_patch_each, model, corrupted_tokens, clean_cache, metric)
    results = [run(name=name, axes=(*axes, "head")) for name in ("z", "q", "k", "v")]
    pattern = run(name="pattern", axes=_PATTERN[: 1 + len(axes)])
    results.append(pattern.mT if axes else pattern)
    heads = model.cfg.n_heads
    return torch.stack([F.pad(result, (0, heads - result.shape[-1])) for result in results])


get_act_patch_attn_head_all_pos_every = partial(_patch_heads, axes=())
get_act_patch_attn_head_by_pos_every = partial(_patch_heads, axes=("pos",))
