"""Every family of causal language models in transformers, tiny, under eager attention and ours."""

import dataclasses
import functools
import inspect

import torch
import transformers
from transformers.models.auto import modeling_auto

FAMILIES = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LARGEST = 20_000_000
# The sizes of a tiny model, by the names that configurations have for them.
SIZES = {
    64: "hidden_size d_model n_embd dim emb_dim embed_dim word_embed_proj_dim embedding_size "
        "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length lru_width "
        "mamba_hidden_size input_embedding_size",
    96: "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size intermediate_size_mlp "
        "encoder_ffn_dim decoder_ffn_dim shared_expert_intermediate_size",
    32: "moe_intermediate_size expert_ffn_hidden_size moe_ffn_hidden_size index_head_dim "
        "shared_intermediate_size mlp_hidden_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
       "num_key_value_heads num_kv_heads n_head_kv num_experts_per_tok moe_topk moe_k top_k "
       "eos_token_id num_decoder_layers num_encoder_layers multi_query_group_num",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads num_experts "
       "decoder_attention_heads num_local_experts n_routed_experts moe_num_experts "
       "num_attn_heads index_n_heads",
    16: "head_dim kv_lora_rank q_lora_rank qk_nope_head_dim v_head_dim kv_channels "
        "attention_head_size global_head_dim index_topk",
    8: "qk_rope_head_dim rotary_dim mamba_d_state ssm_state_size state_size",
    97: "vocab_size vocab_size_per_layer_input",
    5: "sliding_window attention_window local_attention window_size attention_window_size",
    1: "bos_token_id n_group topk_group n_shared_experts first_k_dense_replace num_groups",
    0: "pad_token_id num_nextn_predict_layers",
}  # fmt: skip
DROPOUTS = (
    "attention_dropout attn_pdrop resid_pdrop embd_pdrop dropout hidden_dropout activation_dropout "
    "attention_probs_dropout_prob hidden_dropout_prob residual_dropout"
)
# Options that some families need in addition to these sizes.
DECODERS = (
    "bert roberta electra ernie megatron-bert roformer camembert xlm-roberta xlm-roberta-xl xmod "
    "data2vec-text rembert big_bird roberta-prelayernorm bert-generation reformer roc_bert"
)
HYBRIDS = (
    "bailing_hybrid bamba granitemoehybrid jamba qwen3_5_text qwen3_5_moe_text qwen3_next "
    "recurrent_gemma lfm3"
)
CHANGES: dict[str, dict[str, object]] = {
    **{family: {"is_decoder": True} for family in DECODERS.split()},
    # Some of their layers are attention.
    **{family: {"num_hidden_layers": 8} for family in HYBRIDS.split()},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 8},
}


class CannotBuildError(Exception):
    """Raised if a family cannot be built with these sizes, or if its eager model fails."""


def make_tiny_config(family):
    """Return the configuration of a family with tiny sizes."""
    kind = transformers.CONFIG_MAPPING[family]
    known = set(inspect.signature(kind.__init__).parameters)
    if dataclasses.is_dataclass(kind):
        known |= {field.name for field in dataclasses.fields(kind)}
    sizes = {name: size for size, names in SIZES.items() for name in names.split()}
    sizes |= dict.fromkeys(DROPOUTS.split(), 0.0)
    sizes = {name: size for name, size in sizes.items() if name in known}
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = 4
    return kind(**sizes | CHANGES.get(family, {}))


def build(family, implementation):
    """Return a model of the family with random weights; matrices are scaled by three."""
    torch.manual_seed(0)
    config = make_tiny_config(family)
    with torch.device("meta"):
        probe = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    size = sum(p.numel() for p in probe.parameters())
    if size > LARGEST:
        raise CannotBuildError(f"{size} parameters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        make_tiny_config(family), attn_implementation=implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3)
    return model.eval()


def make_tokens(side="none"):
    """Return token ids with padding on one side or none, and a mask of the tokens."""
    ids = torch.randint(3, 90, (3, 23), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :9] = mask[1, :3] = 0
    if side == "right":
        mask[0, -9:] = mask[1, -3:] = 0
    return ids * mask, mask


def compute_logits(model, side="none"):
    """Return the logits of the tokens."""
    ids, mask = make_tokens(side)
    with torch.no_grad():
        if side == "none":
            return model(input_ids=ids).logits
        return model(input_ids=ids, attention_mask=mask).logits[mask.bool()]


def compute_packed_logits(model):
    """Return the logits of two documents in each row, recognized by their positions."""
    ids, _ = make_tokens()
    positions = torch.cat((torch.arange(9), torch.arange(14)))[None].expand(3, -1)
    with torch.no_grad():
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits


def generate(model, **options):
    """Return the tokens that the model generates after left padding."""
    ids, mask = make_tokens("left")
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True, **options}
    return model.generate(ids, attention_mask=mask, eos_token_id=None, **options)


def compute_gradients(model, **checkpointing):
    """Return the gradients of the parameters; only our model runs in checkpoints."""
    ids, mask = make_tokens("right")
    model.train()
    # Some routers draw random numbers in training.
    torch.manual_seed(0)
    is_ours = model.config._attn_implementation != "eager"
    if is_ours and checkpointing:
        model.gradient_checkpointing_enable(checkpointing)
        model.enable_input_require_grads()
    try:
        out = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        model.zero_grad()
        out[mask.bool()].float().square().mean().backward()
        # An expert without tokens has no gradient, or one of zeros.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        return torch.cat([grad.flatten() for grad in grads])
    finally:
        model.eval()
        if is_ours and checkpointing:
            model.gradient_checkpointing_disable()


def compute_autocast_logits(model):
    """Return the logits under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return compute_logits(model, "left").float()


def compute_compiled_logits(model):
    """Return the logits of our model compiled, with graph breaks at attention."""
    if model.config._attn_implementation == "eager":
        return compute_logits(model, "left")
    torch._dynamo.reset()
    return compute_logits(torch.compile(model, backend="eager"), "left")


SCENARIOS = {
    "no padding": compute_logits,
    "left padding": functools.partial(compute_logits, side="left"),
    "right padding": functools.partial(compute_logits, side="right"),
    "packed": compute_packed_logits,
    "generation": generate,
    "static cache": functools.partial(generate, cache_implementation="static"),
    "beam search": functools.partial(generate, num_beams=2),
    "gradients": compute_gradients,
    "checkpoints": functools.partial(compute_gradients, use_reentrant=False),
    "reentrant checkpoints": functools.partial(compute_gradients, use_reentrant=True),
    "autocast": compute_autocast_logits,
    "compiled": compute_compiled_logits,
}
PADDING = ("no padding", "left padding", "right padding")


def run_scenarios(family, scenarios):
    """Return for each scenario "equal", or the messages of the refusal and of eager failures."""
    try:
        eager = build(family, "eager")
    except Exception as error:
        raise CannotBuildError(f"{type(error).__name__}: {error}") from error
    results = {}
    model = None
    for name in scenarios:
        try:
            expected = SCENARIOS[name](eager)
        except Exception as error:
            if name == "no padding":
                raise CannotBuildError(f"{type(error).__name__}: {error}") from error
            results[name] = f"eager fails: {type(error).__name__}: {error}"
            continue
        try:
            if model is None:
                model = build(family, "linear_memory")
                model.load_state_dict(eager.state_dict())
            computed = SCENARIOS[name](model)
        except Exception as error:
            # The compiler raises another error, which quotes ours.
            if not isinstance(error, ValueError) and name != "compiled":
                raise
            results[name] = f"refused: {error}"
            continue
        compare(family, name, computed, expected)
        results[name] = "equal"
    return results


def compare(family, name, computed, expected):
    """Assert that the results of a scenario are equal up to rounding."""
    message = f"{family}, {name}"
    if name == "autocast":
        # A router may send a few tokens to another expert, so most tokens are compared.
        difference = (computed - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert difference.median() <= 0.05, f"{message}: {difference.median()}"
    elif expected.is_floating_point():
        scale = max(1.0, expected.abs().max().item()) if "logits" not in name else 1.0
        torch.testing.assert_close(
            computed, expected, atol=1e-4 * scale, rtol=1e-3, msg=lambda m: f"{message}: {m}"
        )
    else:
        assert torch.equal(computed, expected), message
