"""Small models of twenty-one families of transformers with random weights."""

import torch

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
#: The sizes of each family that differ from SIZES, or have other names.
FAMILIES = {
    "gpt2": {"n_inner": 24},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 8, "n_inner": 24},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "bloom": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 1},
    "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 2},
    "llama": {"num_key_value_heads": 1},
    "mistral": {"num_key_value_heads": 1},
    "mixtral": {"num_key_value_heads": 1, "num_local_experts": 3},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 8},
    "gemma": {"num_key_value_heads": 1, "head_dim": 8},
    "gemma2": {"num_key_value_heads": 1, "head_dim": 8},
    "phi": {},
    "starcoder2": {"num_key_value_heads": 1},
    "stablelm": {"num_key_value_heads": 1},
    "bert": {"is_decoder": True},
    "mamba": {"state_size": 4},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "decoder_start_token_id": 0},
    "vit": {"image_size": 8, "patch_size": 4},
}


def build(name, dtype=torch.float64):
    """Return a model of a family in evaluation mode, because dropout would draw other numbers."""
    import transformers as tf

    tf.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = tf.AutoConfig.for_model(name, **{**SIZES, **FAMILIES[name]})
    maker = {"t5": tf.AutoModelForSeq2SeqLM, "vit": tf.AutoModelForImageClassification}
    cls = maker.get(name, tf.AutoModelForCausalLM)
    model = cls.from_config(config, attn_implementation="eager")
    if name == "mixtral":
        # The default implementation does not support float64, the eager one the meta device.
        model.set_experts_implementation("batched_mm")
    return model.to(dtype).eval()


def build_masks(name, tokens):
    """Return masks with which transformers reads no values, which the meta device does not have."""
    if name == "mamba":
        return {}
    if name != "t5":
        return {"attention_mask": torch.ones_like(tokens)}
    # T5 also reads the values of masks of two dimensions.
    batch, length = tokens.shape
    seen = torch.zeros(batch, 1, length, length)
    later = torch.full((length, length), torch.finfo(seen.dtype).min).triu(1)
    return {"attention_mask": seen, "decoder_attention_mask": seen + later}


def build_loss(name):
    """Return the loss of a family's model on random inputs, which become tokens or pixels."""

    def loss(model, inputs):
        if name == "vit":
            pixels = inputs.new_zeros(2, 3, 8, 8) + inputs.mean()
            return model(pixel_values=pixels).logits.square().mean()
        tokens = (inputs * 100).long().abs() % 40
        return model(input_ids=tokens, labels=tokens, **build_masks(name, tokens)).loss

    return loss
