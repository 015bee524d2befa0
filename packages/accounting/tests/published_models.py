"""Sizes of published models, as their config.json files give them, and what the models hold.

Each total is what the module holds that transformers builds from these sizes on the meta device.
"""

from typing import Any, NamedTuple


class Published(NamedTuple):
    config: dict[str, Any]
    total: int
    kv_bytes: int
    """Bytes a token in bf16, before any window saturates."""
    active: int = 0


def make_gpt2(width: int, layers: int, heads: int, positions: int = 1024) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": 50257,
    }


def make_llama(
    width: int,
    hidden: int,
    layers: int,
    heads: int,
    kv: int,
    vocab: int,
    family: str = "llama",
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    } | more


def make_experts(count: int, chosen: int, **more: Any) -> dict[str, Any]:
    return {"num_local_experts": count, "num_experts_per_tok": chosen} | more


DEEPSEEK_V3 = make_llama(7168, 18432, 61, 128, 128, 129280, "deepseek_v3") | {
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
}
QWEN3_MOE = make_llama(2048, 6144, 48, 32, 4, 151936, "qwen3_moe") | {
    "moe_intermediate_size": 768,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
}


def make_gpt_oss(layers: int, count: int) -> dict[str, Any]:
    sizes = make_llama(2880, 2880, layers, 64, 8, 201088, "gpt_oss")
    return sizes | make_experts(count, 4, head_dim=64, sliding_window=128)


def make_gemma2(
    width: int, hidden: int, layers: int, heads: int, kv: int, dim: int
) -> dict[str, Any]:
    return make_llama(
        width,
        hidden,
        layers,
        heads,
        kv,
        256000,
        "gemma2",
        head_dim=dim,
        sliding_window=4096,
        tie_word_embeddings=True,
    )


def tie_embeddings(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"tie_word_embeddings": True}


_MIXTRAL_8X7B = make_llama(4096, 14336, 32, 32, 8, 32000, "mixtral") | make_experts(8, 2)
_MIXTRAL_8X22B = make_llama(6144, 16384, 56, 48, 8, 32768, "mixtral") | make_experts(8, 2)
_QWEN3_8B = make_llama(4096, 12288, 36, 32, 8, 151936, "qwen3", head_dim=128)
_LLAMA_32_1B = tie_embeddings(make_llama(2048, 8192, 16, 32, 8, 128256, head_dim=64))
_NEOX_20B = make_llama(6144, 24576, 44, 64, 64, 50432, "gpt_neox")
_PYTHIA = make_llama(4096, 16384, 32, 32, 32, 50432, "gpt_neox")
_PHI_2 = make_llama(2560, 10240, 32, 32, 32, 51200, "phi")

PUBLISHED = {
    "gpt2": Published(make_gpt2(768, 12, 12), 124_439_808, 36_864),
    "gpt2-medium": Published(make_gpt2(1024, 24, 16), 354_823_168, 98_304),
    "gpt2-large": Published(make_gpt2(1280, 36, 20), 774_030_080, 184_320),
    "gpt2-xl": Published(make_gpt2(1600, 48, 25), 1_557_611_200, 307_200),
    "gpt3-175b": Published(make_gpt2(12288, 96, 96, 2048), 174_604_259_328, 4_718_592),
    "llama2-7b": Published(make_llama(4096, 11008, 32, 32, 32, 32000), 6_738_415_616, 524_288),
    "llama2-13b": Published(make_llama(5120, 13824, 40, 40, 40, 32000), 13_015_864_320, 819_200),
    "llama2-70b": Published(make_llama(8192, 28672, 80, 64, 8, 32000), 68_976_648_192, 327_680),
    "llama3-8b": Published(make_llama(4096, 14336, 32, 32, 8, 128256), 8_030_261_248, 131_072),
    "llama3-70b": Published(make_llama(8192, 28672, 80, 64, 8, 128256), 70_553_706_496, 327_680),
    "llama3.1-405b": Published(
        make_llama(16384, 53248, 126, 128, 8, 128256), 405_853_388_800, 516_096
    ),
    "llama3.2-1b": Published(_LLAMA_32_1B, 1_235_814_400, 32_768),
    "mistral-7b-v0.1": Published(
        make_llama(4096, 14336, 32, 32, 8, 32000, "mistral"), 7_241_732_096, 131_072
    ),
    "mixtral-8x7b": Published(_MIXTRAL_8X7B, 46_702_792_704, 131_072, 12_879_925_248),
    "mixtral-8x22b": Published(_MIXTRAL_8X22B, 140_630_071_296, 229_376, 39_161_468_928),
    "deepseek-v3": Published(DEEPSEEK_V3, 671_026_404_352, 70_272, 37_552_282_624),
    "qwen2.5-0.5b": Published(
        tie_embeddings(make_llama(896, 4864, 24, 14, 2, 151936, "qwen2")), 494_032_768, 12_288
    ),
    "qwen2.5-7b": Published(
        make_llama(3584, 18944, 28, 28, 4, 152064, "qwen2"), 7_615_616_512, 57_344
    ),
    "qwen2.5-72b": Published(
        make_llama(8192, 29568, 80, 64, 8, 152064, "qwen2"), 72_706_203_648, 327_680
    ),
    "qwen3-8b": Published(_QWEN3_8B, 8_190_735_360, 147_456),
    "qwen3-30b-a3b": Published(QWEN3_MOE, 30_532_122_624, 98_304, 3_353_032_704),
    "gemma2-2b": Published(make_gemma2(2304, 9216, 26, 8, 4, 256), 2_614_341_888, 106_496),
    "gemma2-9b": Published(make_gemma2(3584, 14336, 42, 16, 8, 256), 9_241_705_984, 344_064),
    "gemma2-27b": Published(make_gemma2(4608, 36864, 46, 32, 16, 128), 27_227_128_320, 376_832),
    "gpt-neox-20b": Published(_NEOX_20B, 20_554_567_680, 1_081_344),
    "pythia-6.9b": Published(_PYTHIA, 6_857_302_016, 524_288),
    "phi-2": Published(_PHI_2, 2_779_683_840, 327_680),
    "gpt-oss-20b": Published(make_gpt_oss(24, 32), 20_914_757_184, 49_152, 4_187_440_704),
    "gpt-oss-120b": Published(make_gpt_oss(36, 128), 116_829_156_672, 73_728, 5_711_982_912),
}
