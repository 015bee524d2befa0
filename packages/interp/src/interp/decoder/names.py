"""Which tensor is which: the roles of a decoder's weights, found from their names and shapes.

    model.layers.3.self_attn.q_proj.weight  ->  blocks.3.attention.q.weight
    transformer.h.3.attn.c_attn.weight      ->  blocks.3.attention.{q, k, v}.weight, transposed

A name is read by what it says (q_proj, gate, ln_1), so that models of one's own are found too.
Fused weights are split: [q | k | v], or by head where they are called query_key_value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

# Buffers that old checkpoints carry: causal masks and rotary tables.
_NO_WEIGHT = re.compile(r"(^|\.)(inv_freq|masked_bias|attn\.bias|attention\.bias)$")
_LAYER = re.compile(r"(?:^|.*?\.)(\d+)\.(.+)\.(weight|bias)$")
_ATTENTION = r"(?:.*att.*\.)"
_OUTSIDE = {
    "embed": r"embed_tokens|wte|embed_in|embed|embedding|embeddings|tok_embeddings|token_embedding",
    "position": r"wpe|position|positions|position_embedding|pos_embed",
    "norm": r"norm|ln_f|final_layer_norm|final_norm|ln_final",
    "unembed": r"lm_head|embed_out|head|unembed|output",
}
_INSIDE = {
    "attention.q": r"(?:.*\.)?(?:q_proj|wq|query|q)",
    "attention.k": r"(?:.*\.)?(?:k_proj|wk|key|k)",
    "attention.v": r"(?:.*\.)?(?:v_proj|wv|value|v)",
    "attention.qkv": r"(?:.*\.)?(?:c_attn|qkv_proj|qkv|in_proj)",
    "attention.qkv_by_head": r"(?:.*\.)?query_key_value",
    "attention.o": rf"{_ATTENTION}(?:c_proj|dense|out|o|proj)|(?:.*\.)?(?:o_proj|out_proj|wo)"
    r"|out|o",
    "attention.q_norm": r"(?:.*\.)?(?:q_norm|q_layernorm)",
    "attention.k_norm": r"(?:.*\.)?(?:k_norm|k_layernorm)",
    "mlp.gate_up": r"(?:.*\.)?gate_up_proj",
    "mlp.gate": r"(?:.*\.)?(?:gate_proj|w1|gate)",
    "mlp.up": r"(?:.*\.)?(?:up_proj|w3|up|c_fc|dense_h_to_4h|fc1|fc_in)",
    "mlp.down": r"(?:.*\.)?(?:down_proj|w2|down|dense_4h_to_h|fc2|fc_out)|mlp\.c_proj",
    "norm1": r"input_layernorm|ln_1|ln1|norm1|attention_norm|attn_norm",
    "norm2": r"post_attention_layernorm|pre_feedforward_layernorm|ln_2|ln2|norm2|ffn_norm|mlp_norm",
    "mlp_out": r"post_feedforward_layernorm",
}


def canonical_weights(
    tensors: Mapping[str, Tensor], *, d_head: int, heads: int
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint or a module under the names of `Decoder`.

    Parts of fused weights are views where strides allow it. Raises ValueError for a name that has
    no role, and for two tensors of one role.
    """
    found: dict[str, Tensor] = {}
    for name, part, value in canonical_parts(tensors, d_head=d_head, heads=heads):
        if part in found and found[part] is not value and not torch.equal(found[part], value):
            raise ValueError(f"two different tensors are {part}; the second is {name}")
        found[part] = value
    if "unembed.weight" in found and found["unembed.weight"] is found.get("embed.weight"):
        del found["unembed.weight"]
    return found


def canonical_parts(
    tensors: Mapping[str, Tensor], *, d_head: int, heads: int
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the name of each tensor, and the canonical name and value of each part of it."""
    is_conv1d = _input_first(tensors)
    for name, role in roles_of(tensors).items():
        tensor = tensors[name]
        if is_conv1d and re.search(r"\.c_(attn|proj|fc)\.weight$", name):
            tensor = tensor.T
        for part, value in _unfused(role, tensor, heads, d_head):
            yield name, part, value


def roles_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the role of each tensor that is a weight: `blocks.3.attention.qkv.weight`.

    Raises ValueError for a name that has no role.
    """
    experts = any(".experts." in name for name in tensors)
    # A norm after the attention is called what others call the norm before the MLP.
    sandwiched = any("post_feedforward_layernorm" in name for name in tensors)
    roles = {}
    for name, tensor in tensors.items():
        if _NO_WEIGHT.search(name):
            continue
        stacked = re.sub(r"(experts\.(?:gate_up|down)_proj)$", r"\1.weight", name)
        role = _role(stacked, experts=experts, sandwiched=sandwiched)
        if role is None:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} plays no part in a decoder that is known here; "
                "rename the module, or give the tensors and `Settings` to `Decoder` yourself"
            )
        roles[name] = role
    return roles


def layer_of(name: str) -> int:
    """Return the number of the block that a tensor belongs to, or -1."""
    stacked = re.sub(r"(experts\.(?:gate_up|down)_proj)$", r"\1.weight", name)
    match = _LAYER.match(stacked)
    return int(match[1]) if match else -1


def layers_of(tensors: Mapping[str, Tensor]) -> int:
    """How many blocks the tensors belong to."""
    numbers = [int(match[1]) for name in tensors if (match := _LAYER.match(name))]
    if not numbers:
        raise ValueError("no numbered blocks among the tensors: this is no stack of blocks")
    return max(numbers) + 1


def features_of_heads(tensors: Mapping[str, Tensor]) -> int:
    """How many features all heads have together: what enters the output projection."""
    for name, tensor in tensors.items():
        role = _role(name, experts=False, sandwiched=False) or ""
        if role.endswith(".attention.o.weight"):
            return tensor.shape[0 if _input_first(tensors) else 1]
    raise ValueError("no attention was found among the tensors: none is an output projection")


def _input_first(tensors: Mapping[str, Tensor]) -> bool:
    """Whether weights are input x output, as in GPT-2's checkpoints: c_attn is then wide."""
    fused = (x for name, x in tensors.items() if name.endswith("c_attn.weight"))
    return any(x.shape[1] > x.shape[0] for x in fused)


def _role(name: str, *, experts: bool, sandwiched: bool) -> str | None:
    match = _LAYER.match(name)
    if match is None:
        path, _, kind = name.rpartition(".")
        last = path.rpartition(".")[2]
        for role, regex in _OUTSIDE.items():
            if re.fullmatch(regex, last):
                return f"{role}.{kind}"
        return None
    layer, rest, kind = match.groups()
    prefix = f"blocks.{layer}."
    if sandwiched and rest == "post_attention_layernorm":
        return f"{prefix}attention_out.{kind}"
    if rest.endswith("shared_expert_gate"):
        return f"{prefix}mlp.shared_gate.{kind}"
    number = re.search(r"\.experts\.(\d+)\.", rest)
    if experts and number is None and re.fullmatch(r"(?:.*\.)?(?:gate|router)", rest):
        return f"{prefix}mlp.router.{kind}"
    for role, regex in _INSIDE.items():
        if re.fullmatch(regex, rest):
            if "shared_expert." in rest:
                role = role.replace("mlp.", "mlp.shared.")
            elif number:
                role = role.replace("mlp.", f"mlp.experts.{number[1]}.")
            elif ".experts." in rest:
                role = role.replace("mlp.", "mlp.experts.all.")
            return f"{prefix}{role}.{kind}"
    return None


def _unfused(role: str, tensor: Tensor, heads: int, d_head: int) -> Iterator[tuple[str, Tensor]]:
    """The parts of a tensor that holds several: of all experts, of q, k and v, of gate and up."""
    if ".experts.all." in role:
        for i, one in enumerate(tensor):
            yield from _unfused(role.replace(".all.", f".{i}."), one, heads, d_head)
    elif ".qkv_by_head." in role:
        by_head = tensor.unflatten(0, (heads, 3, d_head))
        for i, part in enumerate("qkv"):
            yield role.replace("qkv_by_head", part), by_head[:, i].flatten(0, 1)
    elif ".qkv." in role:
        rest = (len(tensor) - heads * d_head) // 2
        for part, value in zip("qkv", tensor.split([heads * d_head, rest, rest]), strict=True):
            yield role.replace("qkv", part), value
    elif ".gate_up." in role:
        for part, value in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield role.replace("gate_up", part), value
    else:
        yield role, tensor
