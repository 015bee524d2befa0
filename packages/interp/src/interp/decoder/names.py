"""The roles of a decoder's weights, determined from their names and shapes.

    model.layers.3.self_attn.q_proj.weight  ->  blocks.3.attention.q.weight
    transformer.h.3.attn.c_attn.weight      ->  blocks.3.attention.{q, k, v}.weight, transposed

Only the last parts of a name matter (q_proj, gate, ln_1), so custom models are described too. Fused
weights are split as [q | k | v], or by group of heads if they are named query_key_value.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

#: Parameters whose names do not end in ".weight" or ".bias" (stacked experts, sinks, corrections),
#: and their replacements, which do.
_UNNAMED = (
    (re.compile(r"(experts\.(?:gate_up|down)_proj)$"), r"\1.weight"),
    (re.compile(r"(experts\.(?:gate_up|down)_proj)_bias$"), r"\1.bias"),
    (re.compile(r"(\.sinks)$"), r"\1.weight"),
    (re.compile(r"(e_score_correction)_bias$"), r"\1.bias"),
)
#: Buffers of old checkpoints: causal masks and rotary tables.
_BUFFER = re.compile(r"(^|\.)(inv_freq|masked_bias|attn\.bias|attention\.bias)$")
_LAYER = re.compile(r"(?:^|.*?\.)(\d+)\.(.+)\.(weight|bias)$")
_ATTENTION = r"(?:.*att.*\.)"
#: Regular expressions of the last part of a module's name outside of blocks, by role.
_OUTSIDE = {
    "embed": r"embed_tokens|wte|embed_in|embed|embedding|embeddings|tok_embeddings"
    r"|token_embedding|word_embeddings",
    "embed_norm": r"word_embeddings_layernorm|embed_norm",
    "position": r"wpe|position|positions|position_embedding|pos_embed|embed_positions",
    "norm": r"norm|ln_f|final_layer_norm|final_layernorm|final_norm|ln_final",
    "unembed": r"lm_head|embed_out|head|unembed|output",
}
#: Regular expressions of a module's name inside a block, by role.
_INSIDE = {
    "attention.q": r"(?:.*\.)?(?:q_proj|wq|query|q)",
    "attention.k": r"(?:.*\.)?(?:k_proj|wk|key|k)",
    "attention.v": r"(?:.*\.)?(?:v_proj|wv|value|v)",
    "attention.qkv": r"(?:.*\.)?(?:c_attn|qkv_proj|qkv|in_proj)",
    "attention.qkv_by_group": r"(?:.*\.)?query_key_value",
    "attention.o": rf"{_ATTENTION}(?:c_proj|dense|out|o|proj)|(?:.*\.)?(?:o_proj|out_proj|wo)"
    r"|out|o",
    "attention.q_norm": r"(?:.*\.)?(?:q_norm|q_layernorm)",
    "attention.k_norm": r"(?:.*\.)?(?:k_norm|k_layernorm)",
    "attention.q_down": r"(?:.*\.)?q_a_proj",
    "attention.q_latent_norm": r"(?:.*\.)?q_a_layernorm",
    "attention.q_up": r"(?:.*\.)?q_b_proj",
    "attention.kv_down": r"(?:.*\.)?kv_a_proj_with_mqa",
    "attention.kv_latent_norm": r"(?:.*\.)?kv_a_layernorm",
    "attention.kv_up": r"(?:.*\.)?kv_b_proj",
    "attention.sinks": r"(?:.*\.)?sinks",
    "mlp.correction": r"(?:.*\.)?e_score_correction",
    "mlp.gate_up": r"(?:.*\.)?gate_up_proj",
    "mlp.gate": r"(?:.*\.)?(?:gate_proj|w1|gate)",
    "mlp.up": r"(?:.*\.)?(?:up_proj|w3|up|c_fc|dense_h_to_4h|fc1|fc_in)",
    "mlp.down": r"(?:.*\.)?(?:down_proj|w2|down|dense_4h_to_h|fc2|fc_out)|mlp\.c_proj",
    "norm1": r"input_layernorm|ln_1|ln1|norm1|attention_norm|attn_norm|self_attn_layer_norm"
    r"|ln_attn",
    "norm2": r"post_attention_layernorm|pre_feedforward_layernorm|ln_2|ln2|norm2|ffn_norm|mlp_norm"
    r"|final_layer_norm|ln_mlp",
    "mlp_out": r"post_feedforward_layernorm",
}


def canonicalize_weights(
    tensors: Mapping[str, Tensor], *, d_head: int, heads: int
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint or a module under the names of `Decoder`.

    Fused weights are split; the parts are views if strides allow it. An unembedding that is the
    same tensor as the embedding is left out. Raises ValueError for a name without a role, for two
    different tensors with the same role, and for fused weights that are not whole heads.
    """
    weights: dict[str, Tensor] = {}
    for name, part, value in iter_canonical_parts(tensors, d_head=d_head, heads=heads):
        if part in weights and weights[part] is not value and not torch.equal(weights[part], value):
            raise ValueError(f"two different tensors are {part}, one is {name}; leave one out")
        weights[part] = value
    if "unembed.weight" in weights and weights["unembed.weight"] is weights.get("embed.weight"):
        del weights["unembed.weight"]
    return weights


def iter_canonical_parts(
    tensors: Mapping[str, Tensor], *, d_head: int, heads: int
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (tensor name, canonical name, part of the tensor) for each part of each tensor."""
    is_conv1d = _is_input_first(tensors)
    # The experts of gpt-oss have biases, weights (in, out) and interleaved gate and up projections.
    is_gpt_oss = any(name.endswith("experts.gate_up_proj_bias") for name in tensors)
    roles = assign_roles(tensors)
    rotated = _count_latent_rotary_dims(tensors, roles)
    for name, role in roles.items():
        tensor = tensors[name]
        if is_conv1d and re.search(r"\.c_(attn|proj|fc)\.weight$", name):
            tensor = tensor.T
        if is_gpt_oss and ".experts.all." in role:
            tensor = tensor.mT if role.endswith("weight") else tensor
            role = role.replace(".gate_up.", ".gate_up_alternating.")
        if rotated and ".attention." in role:
            parts = _split_latent(role, tensor, heads, d_head, rotated)
        else:
            parts = _split_fused(role, tensor, heads, d_head)
        for part, value in parts:
            yield name, part, value


def assign_roles(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a dictionary from tensor names to roles, such as `blocks.3.attention.qkv.weight`.

    Buffers of old checkpoints are left out. Raises ValueError for a name without a role.
    """
    has_experts = any(".experts." in name for name in tensors)
    # With norms of outputs, post_attention_layernorm is the norm after the attention. In other
    # models, it is the norm before the MLP.
    has_output_norms = any("post_feedforward_layernorm" in name for name in tensors)
    roles = {}
    for name, tensor in tensors.items():
        if _BUFFER.search(name):
            continue
        full_name = name
        for regex, replacement in _UNNAMED:
            full_name = regex.sub(replacement, full_name)
        role = _find_role(full_name, has_experts=has_experts, has_output_norms=has_output_norms)
        if role is None:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} has no known role in a decoder; rename the module, "
                "or pass the tensors and `Settings` to `Decoder` directly"
            )
        roles[name] = role
    if not any(".mlp.up." in role or ".mlp.gate_up." in role for role in roles.values()):
        # w1 is the gate if the MLP has a w3 (the up projection), otherwise the up projection.
        for name, role in roles.items():
            if name.rpartition(".")[0].endswith(".w1"):
                roles[name] = role.replace(".mlp.gate.", ".mlp.up.")
    return roles


def is_norm_role(role: str) -> bool:
    """Return True if a role is the weight or bias of a norm."""
    part = role.split(".")[-2]
    return part.endswith("norm") or part in ("norm1", "norm2", "attention_out", "mlp_out")


def count_layers(tensors: Mapping[str, Tensor]) -> int:
    """Return the largest block number plus 1; raise ValueError if no tensor is in a block."""
    matches = [_LAYER.match(name) for name in tensors]
    numbers = [int(match[1]) for match in matches if match]
    if not numbers:
        raise ValueError(
            "expected tensors of numbered blocks (`layers.0. ...`), got none; the model must be a "
            "stack of blocks"
        )
    return max(numbers) + 1


def count_head_features(tensors: Mapping[str, Tensor]) -> int:
    """Return heads * d_head, the width of the input of the output projection."""
    for name, tensor in tensors.items():
        role = _find_role(name, has_experts=False, has_output_norms=False) or ""
        if role.endswith(".attention.o.weight"):
            return tensor.shape[0 if _is_input_first(tensors) else 1]
    raise ValueError("no attention was found: expected the weight of an output projection (o_proj)")


def _is_input_first(tensors: Mapping[str, Tensor]) -> bool:
    """Return True if weights are (in, out), as in GPT-2: c_attn has more columns than rows."""
    fused = [x for name, x in tensors.items() if name.endswith("c_attn.weight")]
    return any(x.shape[1] > x.shape[0] for x in fused)


def _find_role(name: str, *, has_experts: bool, has_output_norms: bool) -> str | None:
    match = _LAYER.match(name)
    if match is None:
        path, _, kind = name.rpartition(".")
        last = path.rpartition(".")[2]
        for role, regex in _OUTSIDE.items():
            if re.fullmatch(regex, last):
                return f"{role}.{kind}"
        return None
    layer, inner, kind = match.groups()
    inner_role = _find_inner_role(inner, has_experts=has_experts, has_output_norms=has_output_norms)
    return None if inner_role is None else f"blocks.{layer}.{inner_role}.{kind}"


@functools.cache
def _find_inner_role(inner: str, *, has_experts: bool, has_output_norms: bool) -> str | None:
    """Return the role, such as `attention.q`, of the module with the name `inner` in a block."""
    if has_output_norms and inner == "post_attention_layernorm":
        return "attention_out"
    number = re.search(r"\.experts\.(\d+)\.", inner)
    if has_experts and number is None and re.fullmatch(r"(?:.*\.)?(?:gate|router)", inner):
        return "mlp.router"
    for role, regex in _INSIDE.items():
        if re.fullmatch(regex, inner):
            if re.search(r"shared_experts?\.", inner):
                return role.replace("mlp.", "mlp.shared.")
            if number:
                return role.replace("mlp.", f"mlp.experts.{number[1]}.")
            if ".experts." in inner:
                return role.replace("mlp.", "mlp.experts.all.")
            return role
    return None


def _split_fused(
    role: str, tensor: Tensor, heads: int, d_head: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (role, part) for each part of a tensor: experts, q, k and v, or gate and up."""
    if ".experts.all." in role:
        for i, expert in enumerate(tensor):
            yield from _split_fused(role.replace(".all.", f".{i}."), expert, heads, d_head)
    elif ".qkv_by_group." in role:
        yield from _split_groups(role, tensor, heads, d_head)
    elif ".qkv." in role:
        kv_features = (len(tensor) - heads * d_head) // 2
        sizes = [heads * d_head, kv_features, kv_features]
        for part, value in zip("qkv", tensor.split(sizes), strict=True):
            yield role.replace("qkv", part), value
    elif ".gate_up" in role:
        is_alternating = ".gate_up_alternating." in role
        fused = "gate_up_alternating" if is_alternating else "gate_up"
        values = (tensor[::2], tensor[1::2]) if is_alternating else tensor.chunk(2)
        for part, value in zip(("gate", "up"), values, strict=True):
            yield role.replace(fused, part), value
    else:
        yield role, tensor


def _count_latent_rotary_dims(tensors: Mapping[str, Tensor], roles: Mapping[str, str]) -> int:
    """Return the number of rotated dimensions per head in latent attention, or 0."""
    tensor_of = {role.split(".", 2)[-1]: tensors[name] for name, role in roles.items()}
    down = tensor_of.get("attention.kv_down.weight")
    norm = tensor_of.get("attention.kv_latent_norm.weight")
    return 0 if down is None or norm is None else len(down) - len(norm)


def _split_latent(
    role: str, tensor: Tensor, heads: int, d_head: int, rotated: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (role, part) for parts of latent attention; rotated query dimensions become first."""
    path, _, kind = role.rpartition(".")
    block, _, part = path.rpartition(".")
    if part in ("q", "q_up"):
        by_head = tensor.unflatten(0, (heads, d_head))
        yield role, by_head.roll(rotated, 1).flatten(0, 1)
    elif part == "kv_down":
        yield role, tensor[:-rotated]
        yield f"{block}.k_rotary.{kind}", tensor[-rotated:]
    elif part == "kv_up":
        by_head = tensor.unflatten(0, (heads, -1))
        yield f"{block}.k_up.{kind}", by_head[:, : d_head - rotated].flatten(0, 1)
        yield f"{block}.v_up.{kind}", by_head[:, d_head - rotated :].flatten(0, 1)
    else:
        yield role, tensor


def _split_groups(
    role: str, tensor: Tensor, heads: int, d_head: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (role, part) for q, k and v of a tensor that stores them by group of heads."""
    kv_heads = (len(tensor) // d_head - heads) // 2
    if kv_heads < 1 or len(tensor) != (heads + 2 * kv_heads) * d_head or heads % kv_heads:
        raise ValueError(
            f"{role} has {len(tensor)} rows, which are not {heads} query heads of {d_head} and "
            "key and value heads that they share evenly; check the number of heads"
        )
    # Each group contains the query heads that share a key head, this key head and its value head.
    groups = tensor.unflatten(0, (kv_heads, heads // kv_heads + 2, d_head))
    yield role.replace("qkv_by_group", "q"), groups[:, :-2].flatten(0, 2)
    yield role.replace("qkv_by_group", "k"), groups[:, -2].flatten(0, 1)
    yield role.replace("qkv_by_group", "v"), groups[:, -1].flatten(0, 1)
