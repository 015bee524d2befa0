"""The weights that a checkpoint must have, although a decoder without them would run too.

`Decoder` raises ValueError if a projection has no matrix. Without its norms, biases, gates, sinks
or shared experts, a decoder would run, but its logits would be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from interp.decoder.families import FAMILIES
from interp.decoder.modules.settings import Settings

_ATTENTION = ("attention.q", "attention.k", "attention.v", "attention.o")
_MLP = ("mlp.up", "mlp.down")
_LATENT = ("attention.kv_down", "attention.k_rotary", "attention.o")
_EXPERTS = ("mlp.experts.0.gate", "mlp.experts.0.up", "mlp.experts.0.down", "mlp.router")
_QK_NORMS = ("attention.q_norm", "attention.k_norm")
_NORMS_OF_OUTPUTS = ("attention_out", "mlp_out")

#: For each family, the parts of a block with biases, by the option that adds these biases and its
#: default. "" means that the family always has the biases.
_BIASES: Mapping[str, Mapping[tuple[str, bool], tuple[str, ...]]] = {
    "gpt2": {("", True): _ATTENTION + _MLP},
    "llama": {("attention_bias", False): _ATTENTION, ("mlp_bias", False): (*_MLP, "mlp.gate")},
    "qwen2": {("", True): _ATTENTION[:3]},
    "phi": {("", True): _ATTENTION + _MLP},
    "gpt_neox": {("attention_bias", True): _ATTENTION, ("", True): _MLP},
    "gptj": {("", True): _MLP},
    "stablelm": {("use_qkv_bias", False): _ATTENTION[:3]},
    "starcoder2": {("use_bias", True): _ATTENTION + _MLP},
    "granite": {("attention_bias", False): _ATTENTION, ("mlp_bias", False): (*_MLP, "mlp.gate")},
    "opt": {("enable_bias", True): _ATTENTION + _MLP},
    "bloom": {("", True): _ATTENTION + _MLP},
    "falcon": {("bias", False): _ATTENTION + _MLP},
    "gpt_oss": {("attention_bias", True): _ATTENTION, ("", True): _EXPERTS},
    "deepseek_v2": {("attention_bias", False): _LATENT},
    "deepseek_v3": {("attention_bias", False): _LATENT},
}
_USUAL_BIASES = {("attention_bias", False): _ATTENTION}
_UNGATED = ("gpt2", "phi", "gpt_neox", "gptj", "starcoder2", "opt", "bloom", "falcon")
#: Families whose layer norms have no biases.
_WITHOUT_NORM_BIASES = ("cohere", "cohere2")
#: Families whose parallel blocks have one norm.
_ONE_NORM_IF_PARALLEL = ("phi", "gptj", "stablelm", "cohere", "cohere2", "falcon")
_NORMS: Mapping[str, tuple[str, ...]] = {
    "qwen3": ("norm1", "norm2", *_QK_NORMS),
    "qwen3_moe": ("norm1", "norm2", *_QK_NORMS),
    "gemma2": ("norm1", "norm2", *_NORMS_OF_OUTPUTS),
    "gemma3_text": ("norm1", "norm2", *_NORMS_OF_OUTPUTS, *_QK_NORMS),
    "olmo2": (*_NORMS_OF_OUTPUTS, *_QK_NORMS),
    "olmo3": (*_NORMS_OF_OUTPUTS, *_QK_NORMS),
}
#: Further parameters of a family. Names of parameters in blocks start with "blocks.*.".
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "phi": ("unembed.bias",),
    "gptj": ("unembed.bias",),
    "bloom": ("embed_norm.weight", "embed_norm.bias"),
    "gpt_oss": ("blocks.*.attention.sinks.weight",),
    "deepseek_v2": ("blocks.*.mlp.shared.up.weight",),
    "deepseek_v3": ("blocks.*.mlp.shared.up.weight", "blocks.*.mlp.correction.bias"),
}


def list_missing_weights(
    names: Iterable[str], config: Mapping[str, Any], settings: Settings
) -> list[str]:
    """Return the expected kinds of weights that no layer has, sorted.

    `names` are canonical names. A kind is a canonical name with `*` in place of the layer. `config`
    is the configuration of a supported family.
    """
    kinds = {re.sub(r"^blocks\.\d+\.", "blocks.*.", name) for name in names}
    family = str(config["model_type"])
    expected = set(_OTHERS.get(family, ()))
    if not FAMILIES[family].rotary and not FAMILIES[family].alibi:
        expected.add("position.weight")
    if not FAMILIES[family].bare_norms:
        has_biases = FAMILIES[family].centered and family not in _WITHOUT_NORM_BIASES
        for norm in ("norm", *(f"blocks.*.{norm}" for norm in _list_norms(config, settings))):
            expected |= {f"{norm}.weight", f"{norm}.bias"} if has_biases else {f"{norm}.weight"}
    for (option, default), parts in _BIASES.get(family, _USUAL_BIASES).items():
        if config.get(option, default):
            expected |= {f"blocks.*.{part}.bias" for part in parts}
    if not any(".mlp." in kind for kind in kinds):
        expected.add("blocks.*.mlp.up.weight")
    if family not in _UNGATED:
        up = [kind for kind in kinds if ".mlp." in kind and kind.endswith(".up.weight")]
        expected |= {kind.replace(".up.", ".gate.") for kind in up}
    return sorted(expected - kinds)


def _list_norms(config: Mapping[str, Any], settings: Settings) -> tuple[str, ...]:
    """Return the names of the norms in each block."""
    family = config["model_type"]
    num_norms = config.get("num_ln_in_parallel_attn")  # An option of Falcon.
    has_two = num_norms == 2 or (num_norms is None and config.get("new_decoder_architecture"))
    if settings.parallel and family in _ONE_NORM_IF_PARALLEL and not has_two:
        return ("norm1",)
    return _NORMS.get(family, ("norm1", "norm2"))
