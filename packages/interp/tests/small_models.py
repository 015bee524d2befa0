"""Options of small models of every family, by the class of transformers."""

import torch

COMMON = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT = COMMON | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
WINDOW = {"head_dim": 8, "sliding_window": 5}
FALCON = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "GPT2LMHeadModel": {
        "vocab_size": 37, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "bos_token_id": None, "eos_token_id": None,
    },
    "LlamaForCausalLM": COMMON,
    "LlamaForCausalLM llama3": COMMON | {"rope_parameters": LLAMA3, "attention_bias": True},
    "LlamaForCausalLM linear": COMMON
    | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    # Llama ignores `partial_rotary_factor`.
    "LlamaForCausalLM whole": COMMON
    | {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        }
    },
    "LlamaForCausalLM tied": COMMON | {"tie_word_embeddings": True, "mlp_bias": True},
    "MistralForCausalLM": COMMON | {"sliding_window": 5},
    "Qwen2ForCausalLM": COMMON,
    "Qwen3ForCausalLM": COMMON | {"head_dim": 8},
    "GemmaForCausalLM": COMMON | {"head_dim": 8},
    "Gemma2ForCausalLM": COMMON | WINDOW,
    "Gemma3ForCausalLM": COMMON
    | WINDOW
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "Gemma3ForCausalLM local": COMMON
    | WINDOW
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "Phi3ForCausalLM": COMMON,
    "GPTNeoXForCausalLM": {k: v for k, v in COMMON.items() if k != "num_key_value_heads"},
    "GPTNeoXForCausalLM sequential": {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}
    | {"use_parallel_residual": False},
    "Olmo2ForCausalLM": COMMON,
    "MixtralForCausalLM": COMMON | {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": COMMON
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8},
    "LlamaForCausalLM yarn": COMMON | {"rope_parameters": YARN},
    "PhiForCausalLM": COMMON | {"hidden_size": 32},
    "PhiForCausalLM tied": COMMON | {"hidden_size": 32, "tie_word_embeddings": True},
    "OlmoForCausalLM": COMMON,
    "Olmo3ForCausalLM": COMMON | WINDOW,
    "StableLmForCausalLM": COMMON | {"hidden_size": 32},
    "StableLmForCausalLM parallel": COMMON
    | {"hidden_size": 32, "use_parallel_residual": True, "use_qkv_bias": True},
    "Starcoder2ForCausalLM": COMMON | {"sliding_window": 5},
    "CohereForCausalLM": COMMON,
    "Cohere2ForCausalLM": COMMON
    | WINDOW
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "GraniteForCausalLM": COMMON
    | {
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "GPTJForCausalLM": {
        "vocab_size": 37, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "rotary_dim": 4, "bos_token_id": None, "eos_token_id": None,
    },
    "OPTForCausalLM": {
        "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 20, "max_position_embeddings": 64, "word_embed_proj_dim": 24,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    },
    "BloomForCausalLM": {
        "vocab_size": 37, "hidden_size": 24, "n_layer": 2, "n_head": 6,
        "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 64,
    },
    "FalconForCausalLM": FALCON,
    "FalconForCausalLM sequential": FALCON | {"parallel_attn": False, "multi_query": False},
    "FalconForCausalLM grouped": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "GptOssForCausalLM": COMMON | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    # Norms inside latent attention have a fixed epsilon, unlike the other norms.
    "DeepseekV3ForCausalLM": LATENT
    | {"q_lora_rank": 14, "n_group": 3, "topk_group": 2, "rms_norm_eps": 1e-2},
    "DeepseekV3ForCausalLM yarn": LATENT
    | {
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    },
    "DeepseekV2ForCausalLM": LATENT
    | {
        "q_lora_rank": 14, "n_group": 3, "topk_group": 1, "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 3.0, "rope_parameters": YARN | {"mscale_all_dim": 0.8},
    },
    "DeepseekV2ForCausalLM lite": LATENT | {"q_lora_rank": None, "attention_bias": True},
    "Phi3ForCausalLM longrope": COMMON
    | {
        "hidden_size": 32,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 9.0],
        },
        "original_max_position_embeddings": 32,
    },
    "LlamaForCausalLM dynamic": COMMON
    | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "OlmoForCausalLM clipped": COMMON | {"clip_qkv": 0.3},
}  # fmt: skip

TOKENS = torch.arange(26).reshape(2, 13) * 7 % 37
