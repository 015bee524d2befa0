"""Rotary positions from a Hugging Face configuration.

Newer configurations have `rope_parameters`, possibly one set per kind of layer. Older ones have
`rope_theta` and `rope_scaling`, and families differ in the names and defaults of the base, of the
fraction of rotated dimensions, and of the original length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interp.decoder.families import FAMILIES, Family
from interp.decoder.rotary import Rotary, scaled_rotary


def rotary_of(config: Mapping[str, Any], family: Family, d_head: int, kind: str) -> Rotary:
    """Return the rotary positions of a kind of layer."""
    if not family.rotary or (config["model_type"] == "cohere2" and kind == "full_attention"):
        return Rotary()
    rope = rope_parameters(config, family, kind)
    dims = _rotated_dims(config, family, d_head, rope)
    max_length = config.get("max_position_embeddings", 0)
    return scaled_rotary(rope, dims, _original_length(config, rope), max_length)


def _rotated_dims(
    config: Mapping[str, Any], family: Family, d_head: int, rope: Mapping[str, Any]
) -> int:
    """Return the number of dimensions per head that are rotated."""
    if family.rotary_fraction is not None:
        fraction = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
        fraction = fraction or config.get("rotary_pct") or family.rotary_fraction
        return int(d_head * fraction)
    fraction = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if family.latent and fraction not in (None, 1):
        raise ValueError(
            f"partial_rotary_factor = {fraction!r} is not supported with latent attention, whose "
            "rotated dimensions are qk_rope_head_dim"
        )
    name = "qk_rope_head_dim" if family.latent else "rotary_dim"
    is_named = family.latent or config["model_type"] == "gptj"
    return (config.get(name) if is_named else None) or d_head


def length_limit(config: Mapping[str, Any]) -> int | None:
    """Return the length beyond which rotary angles depend on earlier calls, or None.

    The "dynamic" method of transformers keeps the angles of the longest text until a short one.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not family.rotary:
        return None
    rope = rope_parameters(config, family, "full_attention")
    is_dynamic = "dynamic" in (rope.get("rope_type"), rope.get("type"))
    return int(config["max_position_embeddings"]) if is_dynamic else None


def _original_length(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """Return the length of the pretraining; that outside of the rotary options has priority."""
    name = "original_max_position_embeddings"
    length: int = config.get(name) or rope.get(name) or config.get("max_position_embeddings", 0)
    return length


def rope_parameters(config: Mapping[str, Any], family: Family, kind: str) -> dict[str, Any]:
    """Return the rotary parameters of a kind of layer, from newer or older configurations."""
    rope = dict(config.get("rope_parameters") or {})
    rope = dict(rope.get(kind, rope))
    theta = config.get("rope_theta") or config.get("rotary_emb_base") or family.default_theta
    is_local = kind == "sliding_attention" and family.local_theta is not None
    if is_local:
        theta = config.get("rope_local_base_freq") or family.local_theta
    # Layers with a window are not scaled in families that have a separate base, and in OLMo 3.
    is_unscaled = is_local or (config["model_type"], kind) == ("olmo3", "sliding_attention")
    if not rope and not is_unscaled:
        rope = dict(config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", theta)
    return rope
