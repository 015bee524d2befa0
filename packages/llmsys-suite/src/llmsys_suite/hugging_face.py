"""Export and import of models as Hugging Face folders: config.json and model.safetensors.

The decoder of this package is the Llama architecture with one key-value head per query head, so
that `transformers.AutoModelForCausalLM.from_pretrained` loads an exported model. Neither direction
needs transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from llmsys_suite.config import UsageError
from llmsys_suite.model import NORM_EPSILON, ROPE_BASE, Decoder, ModelConfig

#: Names of modules in this package and in transformers. Modules of a block have the prefix
#: `blocks.N` here and `model.layers.N` in transformers.
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
#: Values that config.json must have so that this package can represent the model.
REQUIRED: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": NORM_EPSILON,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
#: Defaults of transformers that differ from REQUIRED. They apply if config.json omits a field.
LEFT_OUT = {"rms_norm_eps": 1e-6}


def export_model(model: Decoder, folder: Path, tokenizer: Path | None = None) -> None:
    """Write a model to an empty or new folder that `AutoModelForCausalLM.from_pretrained` loads.

    `tokenizer` is a file of the package tokenizers. It is copied into the folder, where
    `AutoTokenizer.from_pretrained` loads it.

    Raises:
        UsageError: the folder is not empty or cannot be written.
    """
    from safetensors.torch import save_file

    shape = model.config
    config = REQUIRED | {
        "architectures": ["LlamaForCausalLM"],
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
        # Without these, the defaults of transformers would end a text at token 2.
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; name another folder")
        tensors = {their_name(name): p.detach() for name, p in model.named_parameters()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        if tokenizer is not None:
            shutil.copy(tokenizer, folder / "tokenizer.json")
            kind = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
            (folder / "tokenizer_config.json").write_text(kind + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from None


def import_model(folder: Path) -> Decoder:
    """Return the model in a Hugging Face folder, with weights converted to float32.

    Raises:
        UsageError: a file is missing, or the model is not of this package's architecture.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"{folder} cannot be read: {error}") from None
    try:
        model = Decoder(_shape(config, folder))
    except KeyError as missing:
        raise UsageError(f"{folder / 'config.json'} has no {missing}") from None
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{folder / 'config.json'}: {error}") from None
    expected = {their_name(name) for name, _ in model.named_parameters()}
    if different := expected ^ stored.keys():
        raise UsageError(f"{folder}: expected the tensors of a Llama model, got {min(different)!r}")
    for name, parameter in model.named_parameters():
        theirs = stored[their_name(name)]
        if theirs.shape != parameter.shape:
            raise UsageError(
                f"{folder}: expected {their_name(name)} of shape {tuple(parameter.shape)}, as in "
                f"config.json, got {tuple(theirs.shape)}"
            )
    model.load_state_dict(
        {name: stored[their_name(name)].float() for name, _ in model.named_parameters()}
    )
    return model


def their_name(name: str) -> str:
    """Return the transformers name of a parameter of this package."""
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", name)
    if block:
        return f"model.layers.{block[1]}.{NAMES[block[2]]}.weight"
    return f"{NAMES[name.removesuffix('.weight')]}.weight"


def _shape(config: dict[str, Any], folder: Path) -> ModelConfig:
    """Return the shape that a config.json describes.

    Raises UsageError for another architecture, and KeyError for a missing field.
    """
    heads = config["num_attention_heads"]
    shape = ModelConfig(
        d_model=config["hidden_size"],
        d_ff=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
    )
    rope = config.get("rope_parameters") or {}
    if config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise UsageError(f"{folder}: expected rotary positions without scaling")
    required = REQUIRED | {
        "num_key_value_heads": heads,
        "head_dim": shape.d_model // heads,
        "rope_theta": ROPE_BASE,
        "partial_rotary_factor": 1.0,
    }
    stated = {name: value for name, value in (config | rope).items() if value is not None}
    for name, value in required.items():
        received = stated.get(name, LEFT_OUT.get(name, value))
        if received != value:
            raise UsageError(f"{folder}: expected {name} {value!r}, got {received!r}")
    return shape
