"""Export and import of models as Hugging Face folders: config.json and model.safetensors.

The decoder of this package is the Llama architecture with one key-value head per query head, so
that `transformers.AutoModelForCausalLM.from_pretrained` loads an exported model. Export and import
work without the package transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from llmsys_suite.config import UsageError
from llmsys_suite.folder import create_folder
from llmsys_suite.model import NORM_EPSILON, ROPE_BASE, Decoder, ModelConfig

#: Names of modules in this package and in transformers. Modules of a block also have the prefix
#: `blocks.N` in this package and `model.layers.N` in transformers.
NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
#: Fields of config.json that do not change the logits of a model.
WITHOUT_EFFECT = ("architectures", "bos_token_id", "eos_token_id", "dtype")
#: Defaults in transformers of the fields of config.json whose values differ in this package.
TRANSFORMERS_DEFAULTS = {"rms_norm_eps": 1e-6}


def export_model(model: Decoder, folder: Path, tokenizer: Path | None = None) -> None:
    """Write a model to a new or empty folder that `AutoModelForCausalLM.from_pretrained` loads.

    `tokenizer` is a file of the package tokenizers. It is copied into the folder, where
    `AutoTokenizer.from_pretrained` loads it.

    Raises:
        UsageError: the folder is not empty or cannot be written.
    """
    from safetensors.torch import save_file

    create_folder(folder, "config.json", json.dumps(_build_config(model.config), indent=1) + "\n")
    tensors = {get_transformers_name(name): p.detach() for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        shutil.copy(tokenizer, folder / "tokenizer.json")
        kind = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
        (folder / "tokenizer_config.json").write_text(kind + "\n", encoding="utf-8")


def import_model(folder: Path) -> Decoder:
    """Return the model in a Hugging Face folder, with weights converted to float32.

    Raises:
        UsageError: a file is missing or damaged, or the model has another architecture.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = load_file(folder / "model.safetensors")
        shape = ModelConfig(
            d_model=config["hidden_size"],
            d_ff=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            vocabulary=config["vocab_size"],
            context=config["max_position_embeddings"],
        )
        model = Decoder(shape)
        # The names of the parameters of RoPE depend on the version of transformers.
        rope = {"rope_type": "default", "rope_theta": ROPE_BASE}
        rope |= {
            name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config
        }
        rope |= (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UsageError(f"{folder} cannot be read as a Llama model: {error}") from None
    received = {name: value for name, value in config.items() if value is not None}
    received |= {"rope_theta": ROPE_BASE, "rope_parameters": rope}
    for name, value in _build_config(shape).items():
        actual = received.get(name, TRANSFORMERS_DEFAULTS.get(name, value))
        if name not in WITHOUT_EFFECT and actual != value:
            raise UsageError(f"{folder}/config.json: expected {name} {value!r}, got {actual!r}")
    try:
        model.load_state_dict(
            {name: stored.pop(get_transformers_name(name)) for name in model.state_dict()}
        )
    except (KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise UsageError(f"{folder}: expected the tensors of its config.json: {reason}") from None
    if stored:
        raise UsageError(f"{folder}: expected the tensors of a Llama model, got {min(stored)!r}")
    return model


def _build_config(shape: ModelConfig) -> dict[str, Any]:
    """Return the content of config.json for a shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPSILON,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_ff,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.d_model // shape.num_heads,
        "max_position_embeddings": shape.context,
        "rope_theta": ROPE_BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        # Without these fields, transformers would end a text at token 2.
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def get_transformers_name(name: str) -> str:
    """Return the name in transformers of a parameter of this package."""
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", name)
    if block:
        return f"model.layers.{block[1]}.{NAMES[block[2]]}.weight"
    return f"{NAMES[name.removesuffix('.weight')]}.weight"
