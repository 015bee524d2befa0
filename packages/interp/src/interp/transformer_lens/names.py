"""Short names of TransformerLens's hooks."""

from __future__ import annotations

import re

#: Other names of activations.
_ALIASES = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "key": "k",
    "query": "q",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_mid": "mid",
    "mlp_post": "post",
}
_LAYER_TYPES = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
#: The submodule of a block that contains the hook.
_SUBMODULES = dict.fromkeys(
    ("q", "k", "v", "z", "rot_q", "rot_k", "result", "pattern", "attn_scores"), "attn"
) | dict.fromkeys(("pre", "post", "mid", "pre_linear"), "mlp")


def get_act_name(name: str, layer: int | str | None = None, layer_type: str | None = None) -> str:
    """Return the full name of a hook, such as "blocks.5.attn.hook_pattern" for ("pattern", 5).

    A layer may be a part of the name: "k6" is ("k", 6), and "scale4ln1" is ("scale", 4, "ln1").
    "scale" and "normalized" without a layer belong to the final norm. Full names do not change.
    """
    if ("." in name or name.startswith("hook_")) and layer is None and layer_type is None:
        return name
    if match := re.match(r"([a-z]+)(\d+)([a-z]?.*)", name):
        name, layer, layer_type = match.groups()
    name = _ALIASES.get(name, name)
    submodule = _SUBMODULES.get(name, _LAYER_TYPES.get(layer_type or "", layer_type))
    parts = [] if layer is None else [f"blocks.{layer}"]
    if layer is None and name in ("scale", "normalized"):
        parts.append("ln_final")
    return ".".join([*parts, *([submodule] if submodule else []), f"hook_{name}"])
