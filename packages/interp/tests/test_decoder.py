"""Descriptions of every family, compared with transformers' models with random weights."""

import copy
import functools
import itertools
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interp import Decoder, attribution, composition_scores, logit_lens, patch, record
from interp.bench import build_random_decoder
from interp.decoder import families
from interp.decoder.checkpoint import load_decoder
from interp.decoder.config_settings import build_settings
from interp.decoder.describe import describe
from interp.decoder.fold import fold_decoder
from interp.decoder.source import collect_weights
from interp.patching import (
    EdgeEffects,
    Node,
    PatchingResult,
    edge_attribution,
    logit_difference,
    patch_edges,
    patch_parts,
    patch_streams,
)
from interp.patching.batching import replace_heads
from interp.patterns import record_patterns
from safetensors.torch import load_file, save_file
from small_models import FAMILIES, LLAMA3, TOKENS
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")

#: Families that differ in structure: learned positions, rotary, parallel blocks, ALiBi, experts.
REPRESENTATIVES = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",
    "GPTNeoXForCausalLM",
    "MixtralForCausalLM",
    "BloomForCausalLM",
    "OPTForCausalLM",
    "CohereForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
)


#: Representatives with parallel blocks, ALiBi, attention sinks and latent attention.
STRUCTURES = (
    "GPTNeoXForCausalLM",
    "BloomForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
)


#: Representatives with biases and learned positions, gates, more norms, experts, latent attention.
CHECKPOINTS = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",
    "MixtralForCausalLM",
    "DeepseekV3ForCausalLM",
)


def make_case(*values: object, usual: bool) -> Any:
    """Return the values of a test, which is part of the exhaustive run only unless `usual`."""
    return pytest.param(*values, marks=[] if usual else pytest.mark.exhaustive)


#: The representatives are tested in every run, the other families in the exhaustive one.
SAMPLED = [make_case(name, usual=name in REPRESENTATIVES) for name in FAMILIES]
#: A name with a second word has other options of its family. It is tested in the exhaustive run.
EACH_FAMILY = [make_case(name, usual=" " not in name) for name in FAMILIES]


def build_peer(name: str, attention: str = "eager") -> torch.nn.Module:
    """Return a random float64 model in which every parameter affects the logits."""
    model_class = getattr(transformers, name.split()[0])
    config = model_class.config_class(**FAMILIES[name])
    config._attn_implementation, config._experts_implementation = attention, "eager"
    torch.manual_seed(0)
    model = model_class(config).double().eval()
    with torch.no_grad():
        for name_of_tensor, tensor in collect_weights(model).items():
            if "q_a_proj" in name_of_tensor or "kv_a_proj" in name_of_tensor:
                tensor.zero_()  # A small latent reaches the epsilon of its norm.
                tensor.add_(torch.randn_like(tensor) * 2e-3)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model


@functools.cache
def get_shared_peer(name: str) -> torch.nn.Module:
    """Return a `peer` that several tests read and none changes."""
    return build_peer(name)


@functools.cache
def get_description(name: str) -> Decoder:
    """Return a description that several tests read and none changes."""
    return describe(get_shared_peer(name))


@torch.no_grad()
@pytest.mark.parametrize("name", EACH_FAMILY)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = get_shared_peer(name)
    expected = model(TOKENS).logits
    # Transformers computes rotary angles and routing weights in float32.
    close = {"rtol": 1e-5, "atol": 1e-5 * float(expected.abs().max())}
    decoder = get_description(name)
    torch.testing.assert_close(decoder(TOKENS), expected, **close)
    lengths = {comparison.length for comparison in decoder.comparisons}
    assert {1, decoder.settings.context} <= lengths
    assert all(comparison.error <= comparison.tolerance for comparison in decoder.comparisons)
    model.save_pretrained(tmp_path)
    loaded = load_decoder(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(loaded(TOKENS), expected, **close)


def test_every_supported_family_and_rotary_method_is_compared() -> None:
    """Pythia is GPT-NeoX, Phi 1 is phi, Phi 4 is phi3, Command R is cohere, YaRN is a method."""
    configs = [
        getattr(transformers, name.split()[0]).config_class(**options)
        for name, options in FAMILIES.items()
    ]
    assert {config.model_type for config in configs} == set(families.FAMILIES)
    rotary = [getattr(config, "rope_parameters", None) or {} for config in configs]
    methods = {parameters.get("rope_type", "default") for parameters in rotary}
    assert methods == {"default", "linear", "dynamic", "llama3", "yarn", "longrope"}


OLDER = {  # options of configurations before transformers 5
    "GemmaForCausalLM": {"hidden_act": "gelu", "rope_theta": 100.0},
    "GPTNeoXForCausalLM": {"rotary_emb_base": 100, "rotary_pct": 0.5},
    "GPTNeoXForCausalLM sequential": {"rotary_emb_base": 100},
    "Gemma2ForCausalLM": {"rope_theta": 100.0},
    "Gemma3ForCausalLM": {
        "rope_theta": 100.0, "rope_local_base_freq": 10.0, "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "Phi3ForCausalLM": {"rope_theta": 100.0, "partial_rotary_factor": 0.75, "sliding_window": 3},
    "LlamaForCausalLM llama3": {
        "rope_theta": 100.0,
        "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
    },
    "Qwen2ForCausalLM": {
        "rope_theta": 100.0, "use_sliding_window": True, "sliding_window": 3,
        "max_window_layers": 1,
    },
    # Both families of Qwen have another rule for the layers with a window.
    "Qwen3MoeForCausalLM": {
        "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1,
    },
    "MistralForCausalLM": {},
    "MixtralForCausalLM": {},
    "CohereForCausalLM": {},
    "Olmo3ForCausalLM": {},
    "Gemma3ForCausalLM local": {"sliding_window_pattern": 2},
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", OLDER)
def test_older_configurations_are_read_as_transformers_reads_them(
    name: str, tmp_path: Path
) -> None:
    model = build_peer(name).float()
    model.save_pretrained(tmp_path)
    config_json = json.loads((tmp_path / "config.json").read_text())
    for newer in ("rope_parameters", "layer_types", "transformers_version"):
        config_json.pop(newer, None)
    (tmp_path / "config.json").write_text(json.dumps(config_json | OLDER[name]))
    theirs = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected = theirs(TOKENS).logits
    # These configurations have the same meaning without the removed keys; the other
    # configurations change it.
    same = OLDER[name] == {} or name in ("GPTNeoXForCausalLM sequential", "Gemma3ForCausalLM local")
    close = {"rtol": 1e-5, "atol": 1e-5 * float(expected.abs().max())}
    assert torch.allclose(expected, model(TOKENS).logits, **close) == same
    torch.testing.assert_close(load_decoder(tmp_path)(TOKENS), expected, **close)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        "Qwen3MoeForCausalLM",
        *(make_case(name, usual=False) for name in ("MixtralForCausalLM", "Olmo2ForCausalLM")),
    ],
)
def test_models_in_half_precision_are_described(name: str) -> None:
    model = build_peer(name).bfloat16()
    decoder = describe(model)
    assert decoder(TOKENS).dtype == torch.bfloat16
    metric = logit_difference(decoder.norm, decoder.unembed, 5, 8)
    scan = patch_streams(decoder, TOKENS[:1], TOKENS[1:], metric)
    whole = get_description(name)
    exact = patch_streams(
        whole, TOKENS[:1], TOKENS[1:], logit_difference(whole.norm, whole.unembed, 5, 8)
    )
    # Rounding occasionally sends a token to another expert, so the median is compared.
    assert (scan.values - exact.values).abs().median() < 0.05 * exact.values.abs().max()


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *(make_case(name, "eager", usual=name in REPRESENTATIVES) for name in FAMILIES),
        *(
            make_case(name, "sdpa", usual=name in ("LlamaForCausalLM", "GPT2LMHeadModel"))
            for name in FAMILIES
            # SDPA leaves out Gemma 2's caps, and transformers has none for the rest.
            if not name.startswith(("Gemma2", "GPTJ", "Bloom", "GptOss"))
        ),
    ],
)
def test_patterns_equal_output_attentions_and_outputs_are_unchanged(
    name: str, attention: str
) -> None:
    model = build_peer(name, attention)
    expected = model(TOKENS).logits
    with record_patterns(model) as patterns:
        assert torch.equal(model(TOKENS).logits, expected)
    theirs = get_shared_peer(name)(TOKENS, output_attentions=True).attentions
    assert len(patterns) == len(theirs) == 2
    for ours, pattern in zip(patterns.values(), theirs, strict=True):
        columns = ours[..., : pattern.shape[-1]]  # without the sink of gpt-oss
        torch.testing.assert_close(columns.to(pattern), pattern, rtol=1e-5, atol=1e-6)
    # The description has the same patterns.
    decoder = get_description(name)
    with record(decoder, "blocks.*.attention.pattern") as seen:
        decoder(TOKENS)
    for ours, pattern in zip(seen.values(), theirs, strict=True):
        torch.testing.assert_close(ours, pattern.to(ours), rtol=1e-4, atol=1e-6)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("name", SAMPLED)
def test_folding_keeps_log_probabilities_and_leaves_the_original_alone(name: str) -> None:
    decoder = get_description(name)
    before = {k: v.clone() for k, v in decoder.state_dict().items()}
    expected = decoder(TOKENS)
    folded = fold_decoder(decoder)
    # DeepSeek's routing weights are computed in float32.
    close = {"rtol": 1e-6, "atol": 1e-6} if decoder.settings.router_in_float32 else {}
    torch.testing.assert_close(folded(TOKENS).log_softmax(-1), expected.log_softmax(-1), **close)
    for block in folded.layers:
        for norm in (block.norm1, block.norm2, folded.norm):
            if getattr(norm, "weight", None) is not None:
                assert torch.equal(norm.weight, torch.ones_like(norm.weight))
        # With a sink, the rows of a pattern do not sum to 1, and the bias of values stays.
        has_sink = block.attention.sinks is not None
        assert has_sink or block.attention.v.bias is None or not block.attention.v.bias.any()
    assert torch.equal(decoder(TOKENS), expected)
    assert all(torch.equal(v, before[k]) for k, v in decoder.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("name", SAMPLED)
def test_lens_and_attribution_support_every_family(name: str) -> None:
    decoder = get_description(name)
    with record(decoder, "blocks.*", "norm:input") as seen:
        logits = decoder(TOKENS)
    lens = logit_lens([seen[f"blocks.{i}"] for i in range(2)], None, decoder.decode)
    assert torch.equal(lens.top_probabilities[-1], logits.log_softmax(-1).topk(5).values.exp())
    parts = decoder.components(TOKENS)
    shares = attribution(parts, decoder.norm, decoder.unembed, TOKENS)
    size = shares.terms.abs().sum(0).max()
    assert (shares.terms.sum(0) - shares.logits).abs().max() <= 1e-9 * size
    assert len(parts) >= 1 + 2 * 2


@torch.no_grad()
@pytest.mark.parametrize("name", [make_case("GPT2LMHeadModel", usual=False), "LlamaForCausalLM"])
@pytest.mark.parametrize(
    "part",
    ["attention.o:input", make_case("attention.q", usual=False), "attention.k", "mlp_out"],
)
def test_patch_parts_equals_one_forward_pass_per_patch(name: str, part: str) -> None:
    decoder = get_description(name)
    clean, corrupted = TOKENS[:1], TOKENS[:1].clone()
    corrupted[0, [3, 7]] = torch.tensor([1, 2])
    attention = decoder.layers[0].attention
    heads = {"attention.k": attention.kv_heads, "mlp_out": 1}.get(part, attention.heads)
    metric = logit_difference(decoder.norm, decoder.unembed, 5, 8)
    scan = patch_parts(decoder, part, clean, corrupted, metric, batch=9)
    assert scan.values.shape == (2, heads, 13)
    with record(decoder, f"blocks.*.{part}") as seen:
        decoder(clean)
    for layer, head, position in itertools.product(range(2), {0, heads - 1}, (0, 3, 12)):
        site = f"blocks.{layer}.{part}"

        def put(x: Tensor, site: str = site, head: int = head, at: int = position) -> Tensor:
            x = x.clone()
            width = x.shape[-1] // heads
            chosen = slice(head * width, (head + 1) * width)
            x[:, at, chosen] = seen[site][:, at, chosen]
            return x

        with patch(decoder, {site: put}), record(decoder, "norm:input") as last:
            decoder(corrupted)
        expected = metric(last["norm:input"]).item()
        assert scan.values[layer, head, position].item() == pytest.approx(expected, rel=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", [make_case(name, usual=name in STRUCTURES) for name in FAMILIES])
def test_patches_of_padded_prompts_equal_one_forward_pass_per_patch(name: str) -> None:
    decoder = get_description(name)
    corrupted = TOKENS[:1].clone()
    corrupted[0, [3, 7]] = torch.tensor([1, 2])
    mask = torch.ones(1, 13, dtype=torch.long)
    mask[0, 11:] = 0
    clean = {"input_ids": TOKENS[:1], "attention_mask": mask}
    other = {**clean, "input_ids": corrupted}
    metric = logit_difference(decoder.norm, decoder.unembed, 5, 8, position=10)
    # DeepSeek's routing weights are rounded to float32 in each layer.
    exact = 1e-6 if decoder.settings.router_in_float32 else 1e-9
    for part in (":input", "attention.k", "attention_out"):
        scan = patch_parts(decoder, part, clean, other, [metric], batch=17)
        heads = scan.values.shape[1]
        separator = "" if part == ":input" else "."
        with record(decoder, f"blocks.*{separator}{part}") as seen:
            decoder(**clean)
        for layer, head, position in itertools.product(range(2), {0, heads - 1}, (3, 8)):
            site = f"blocks.{layer}{separator}{part}"
            new = seen[site].unflatten(-1, (heads, -1))[0, position, head]
            put = partial(replace_heads, (slice(None), position, head), new, heads)
            with patch(decoder, {site: put}), record(decoder, "norm:input") as last:
                decoder(**other)
            expected = metric(last["norm:input"]).item()
            assert scan.values[layer, head, position].item() == pytest.approx(expected, rel=exact)


@torch.no_grad()
def test_unaffected_positions_are_not_recomputed() -> None:
    reference = build_random_decoder(
        "gpt2", vocabulary=37, context=20, d_model=24, layers=4, heads=3
    )
    metric = logit_difference(reference.norm, reference.unembed, 5, 8)
    with FlopCounterMode(display=False) as forward:
        reference(TOKENS[:1])
    with FlopCounterMode(display=False) as counter:
        scan = patch_parts(reference, "attention.o:input", TOKENS[:1], TOKENS[1:], metric)
    # Half of the blocks and half of the positions are left out, and the unembedding.
    assert counter.get_total_flops() < 0.4 * scan.values.numel() * forward.get_total_flops()


@torch.no_grad()
@pytest.mark.parametrize("name", ["LlamaForCausalLM", make_case("GPT2LMHeadModel", usual=False)])
def test_several_pairs_return_their_mean(name: str) -> None:
    decoder = get_description(name)
    clean, corrupted = TOKENS, TOKENS.roll(3, 1)
    metrics = [logit_difference(decoder.norm, decoder.unembed, i, 8) for i in (5, 6)]
    pairs = [(clean[[i]], corrupted[[i]], metrics[i]) for i in range(2)]
    scans = {
        "parts": partial(patch_parts, decoder, "attention.q"),
        "streams": partial(patch_streams, decoder),
        "edges": partial(patch_edges, decoder, receivers=[Node("final"), Node("k", 1, 1)]),
        "estimates": partial(
            edge_attribution, decoder, receivers=[Node("final"), Node("k", 1, 1)], exact=None
        ),
    }
    for run in scans.values():
        per_pair, both = [run(*pair) for pair in pairs], run(clean, corrupted, metrics)
        torch.testing.assert_close(both.values, (per_pair[0].values + per_pair[1].values) / 2)
        for single, pair in zip(per_pair, both.pairs, strict=True):
            torch.testing.assert_close(pair.values, single.values)
        difference = (per_pair[0].values - per_pair[1].values).abs()
        torch.testing.assert_close(both.standard_error, difference / 2)
        with pytest.raises(ValueError, match="at least 2 pairs of prompts"):
            per_pair[0].standard_error  # noqa: B018
        if isinstance(both, EdgeEffects) and both.exact is not None:
            exact = torch.stack([single.exact for single in per_pair]).mean(0)
            torch.testing.assert_close(both.exact, exact, equal_nan=True)
            assert both.standard_error_of(lambda mean: mean.error).shape == both.values.shape
        if isinstance(both, PatchingResult):
            assert both.clean == pytest.approx((per_pair[0].clean + per_pair[1].clean) / 2)
            assert both.recovered.shape == both.values.shape
    # Each prompt keeps its padding.
    mask = torch.ones_like(clean)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = {"input_ids": clean, "attention_mask": mask, "position_ids": positions}
    of_padded = patch_streams(decoder, padded, padded | {"input_ids": corrupted}, metrics)
    alone = [{k: v[1:] for k, v in x.items()} for x in (padded, padded | {"input_ids": corrupted})]
    expected = patch_streams(decoder, *alone, metrics[1]).values
    torch.testing.assert_close(of_padded.pairs[1].values, expected)
    with pytest.raises(ValueError, match="1 metrics for 2 pairs; pass one, or one per pair"):
        patch_streams(decoder, clean, corrupted, metrics[:1])


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        "LlamaForCausalLM yarn",
        "Phi3ForCausalLM",
        "GPTNeoXForCausalLM",
        "CohereForCausalLM",
    ],
)
def test_circuits_under_rotary_positions_give_the_scores_at_every_distance(name: str) -> None:
    decoder = copy.deepcopy(get_description(name))
    block = decoder.layers[1]
    attention = block.attention
    for linear in (attention.q, attention.k):  # circuits leave biases out
        linear.bias = None
    with record(decoder, "blocks.1.norm1", "blocks.1.attention.pattern") as seen:
        decoder(TOKENS)
    x, pattern = seen["blocks.1.norm1"], seen["blocks.1.attention.pattern"]
    for distance in (0, 1, 5):
        # log-softmax is the score up to a constant per query, so differences are compared.
        query, key = x[:, distance:], x[:, : x.shape[1] - distance]
        scores = [
            torch.einsum("bqm,hmr,hrn,bqn->bhq", query, c.a, c.b, other) * attention.settings.scale
            for c, other in ((decoder.qk(distance)[1], key), (decoder.qk()[1], query))
        ]
        position_ids_ = torch.arange(distance, x.shape[1])
        logs = (
            pattern[:, :, position_ids_, position_ids_ - distance].log()
            - pattern[:, :, position_ids_, position_ids_].log()
        )
        torch.testing.assert_close(scores[0] - scores[1], logs, rtol=1e-5, atol=1e-5)
    ov = decoder.ov()[1]
    v = (x @ attention.v.weight.T).unflatten(-1, (attention.kv_heads, -1)).transpose(1, 2)
    v = v.repeat_interleave(attention.heads // attention.kv_heads, 1)
    heads = attention.o.weight.unflatten(1, (attention.heads, -1)).transpose(0, 1)
    expected = torch.einsum("bhsd,hmd->bhsm", v, heads)
    torch.testing.assert_close(ov.apply(x[:, None]), expected)
    assert composition_scores(decoder.ov(), decoder.qk(1), kind="k").shape == (2, 4, 2, 4)


@torch.no_grad()
def test_circuits_of_latent_attention_leave_out_the_scale_of_the_norm() -> None:
    attention = get_description("DeepseekV3ForCausalLM").layers[1].attention
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    for part in (attention.q, attention.k, attention.v):
        scale = (part.down(x).square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ours = (x @ part.weight.T).unflatten(-1, (4, -1))
        expected = part(x).unflatten(-1, (4, -1))
        # The first dimensions of keys are rotated, and are not normed.
        rotated = 4 if part is attention.k else 0
        torch.testing.assert_close(ours[..., :rotated], expected[..., :rotated])
        normed = ours[..., rotated:] * scale[..., None]
        torch.testing.assert_close(normed, expected[..., rotated:])
    assert attention.qk().dense().shape == attention.ov().dense().shape == (4, 24, 24)


def test_custom_decoders_are_described_by_structure(decoder: nn.Module) -> None:
    tokens = TOKENS % 17
    described = describe(decoder, rope_theta=100.0, context=16)
    torch.testing.assert_close(described(tokens), decoder(tokens), rtol=1e-5, atol=1e-5)
    assert (
        described.layers[0].attention.q.weight.data_ptr() == decoder.layers[0].q.weight.data_ptr()
    )
    with pytest.raises(ValueError, match=r"no description of this Decoder .* rope_theta="):
        describe(decoder, context=16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'theta'"):
        describe(decoder, theta=100.0)
    reference = build_random_decoder(
        "gpt2", vocabulary=37, context=20, d_model=24, layers=2, heads=3
    )
    torch.testing.assert_close(describe(reference)(TOKENS), reference(TOKENS), rtol=1e-5, atol=1e-5)


class FusedBlock(nn.Module):
    """GPT-2's block with `nn.Linear`, whose weights are (out, in)."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(d, 3 * d), "c_proj": nn.Linear(d, d)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(d, 4 * d), "c_proj": nn.Linear(4 * d, d)})

    def forward(self, x: Tensor) -> Tensor:
        fused = self.attn["c_attn"](self.ln_1(x)).unflatten(-1, (3, self.n_head, -1))
        q, k, v = fused.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).flatten(2))
        inner = nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x)))
        return x + self.mlp["c_proj"](inner)


class Fused(nn.Module):
    def __init__(self, d: int = 24) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(37, d), nn.Embedding(20, d)
        self.h = nn.ModuleList(FusedBlock(d, 3) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, 37, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)), None


def test_fused_weights_of_both_orientations_and_tied_heads_are_described() -> None:
    torch.manual_seed(0)
    model = Fused()
    described = describe(model)
    torch.testing.assert_close(described(TOKENS), model(TOKENS)[0], rtol=1e-5, atol=1e-5)
    assert described.unembed.weight is described.embed.weight
    with (
        record_patterns(model) as patterns,
        record(described, "blocks.*.attention.pattern") as seen,
    ):
        model(TOKENS)
        described(TOKENS)
    for ours, pattern in zip(seen.values(), patterns.values(), strict=True):
        torch.testing.assert_close(ours, pattern)


def test_decoder_of_the_suite_is_described() -> None:
    suite = pytest.importorskip("llmsys_suite.model", reason="the suite, which uses this package")
    torch.manual_seed(0)
    config = suite.ModelConfig(d_model=24, d_ff=40, num_layers=2, num_heads=3, vocabulary=37)
    model = suite.Decoder(config)
    decoder = describe(model, context=16)
    torch.testing.assert_close(decoder(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)
    with record_patterns(model) as patterns:
        model(TOKENS)
    assert list(patterns) == ["blocks.0.attention", "blocks.1.attention"]


@pytest.mark.parametrize("name", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_fractions_of_rotated_dimensions_are_refused_in_latent_attention(name: str) -> None:
    config = getattr(transformers, name).config_class(**FAMILIES[name]).to_dict()
    build_settings(config)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    for change in ({"rope_parameters": rope}, {"partial_rotary_factor": 0.5}):
        with pytest.raises(ValueError, match=r"partial_rotary_factor = 0\.5 is not supported"):
            build_settings(config | change)


def test_loaded_gpt2_is_tied_and_limited_to_its_positions(tmp_path: Path) -> None:
    build_peer("GPT2LMHeadModel").save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    assert decoder.unembed.weight is decoder.embed.weight
    assert all(p.is_contiguous() and not p.requires_grad for p in decoder.parameters())
    assert load_decoder(tmp_path, dtype=torch.bfloat16)(TOKENS).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="at most 32 tokens, the number of learned positions, got"):
        decoder(torch.zeros(1, 33, dtype=torch.long))
    config_json = json.loads((tmp_path / "config.json").read_text())
    del config_json["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    assert load_decoder(tmp_path).unembed.weight.shape == (37, 24)
    state = load_file(tmp_path / "model.safetensors")
    head = {"lm_head.weight": state["transformer.wte.weight"] + 1}
    save_file(state | head, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight that differs from .* or omits it"):
        load_decoder(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    config_json |= {"model_type": "llama", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    with pytest.raises(ValueError, match=r"no tensor for blocks\.\*\.mlp\.gate\.weight"):
        load_decoder(tmp_path)


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_decoder(tmp_path)
    build_peer("LlamaForCausalLM").save_pretrained(tmp_path)
    config_json = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"model_type": "bert"}, "model_type 'bert' is not one of gpt2, llama"),
        ({"num_hidden_layers": 4}, "expected 4 layers in .*, got 2"),
        ({"num_attention_heads": 5}, "for 5 heads of"),
        ({"hidden_act": "mish"}, "activation 'mish' is not one of silu"),
        (
            {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}},
            "rope_type 'ntk' is not one of",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config_json | change))
        with pytest.raises(ValueError, match=message):
            load_decoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    state = load_file(tmp_path / "model.safetensors")
    single = state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected mlp\.up\.weight in layer 1"):
        load_decoder(tmp_path)
    state["model.layers.1.mlp.up_proj.weight"] = single
    head = state.pop("lm_head.weight")
    save_file(state, tmp_path / "model.safetensors")
    omitted = {key: value for key, value in config_json.items() if key != "tie_word_embeddings"}
    for config in (config_json, omitted):  # The default of this family is false.
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"no unembedding .* tie_word_embeddings = false"):
            load_decoder(tmp_path)
    save_file(state | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_json | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"lm_head\.weight that differs from model\.embed_tokens"):
        load_decoder(tmp_path)
    embed = state["model.embed_tokens.weight"]
    save_file(state | {"lm_head.weight": embed.clone()}, tmp_path / "model.safetensors")
    tied = load_decoder(tmp_path)
    assert tied.unembed.weight is tied.embed.weight
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    state |= {"lm_head.weight": head, "model.extra": single.clone()}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.extra .* has no known role"):
        load_decoder(tmp_path)
    del state["model.extra"]
    save_file(state | {"model.norm.bias": single[0].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"with a role in this decoder, got norm\.bias"):
        load_decoder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_decoder(tmp_path)


def test_wrong_tokens_and_models_are_refused() -> None:
    decoder = get_description("LlamaForCausalLM")
    with pytest.raises(ValueError, match="reach from 0 to 40; this vocabulary has 37"):
        decoder(torch.tensor([[0, 40]]))
    with pytest.raises(ValueError, match=r"integers \(batch, seq\)"):
        decoder(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="at least one id"):
        decoder(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="describe the model that has the unembedding"):
        describe(build_peer("LlamaForCausalLM").model)
    with pytest.raises(ValueError, match=r"got none; set model\.num_heads"):
        describe(nn.Sequential(nn.Linear(3, 3)))


@pytest.mark.parametrize("name", [make_case(name, usual=name in CHECKPOINTS) for name in FAMILIES])
def test_checkpoints_without_a_kind_of_tensor_are_refused(name: str, tmp_path: Path) -> None:
    """Without norms, biases or gates in all layers, a decoder would run and have other logits."""
    build_peer(name).float().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    kinds: dict[str, list[str]] = {}
    for tensor in state:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", tensor), []).append(tensor)
    assert len(kinds) >= 7
    load_decoder(tmp_path)
    for tensors in kinds.values():
        partial = {key: value for key, value in state.items() if key not in tensors}
        save_file(partial, tmp_path / "model.safetensors")
        with pytest.raises(
            ValueError, match=r"has no|missing\?|no attention|two different|expected a tensor"
        ):
            load_decoder(tmp_path)


def test_patterns_of_torch_attention_and_generation_are_recorded() -> None:
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 5, 8)
    with record_patterns(attention) as patterns:
        attention(x, x, x, need_weights=False)
    expected = attention(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(patterns[""], expected)
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with record_patterns(layer) as patterns:
        layer(x)
    assert patterns["self_attn"].shape == (1, 2, 5, 5)
    model = build_peer("LlamaForCausalLM", "sdpa")
    with record_patterns(model) as patterns:
        model.generate(TOKENS[:, :5], max_new_tokens=4, do_sample=False)
    # The last generated token attends to itself and to the 7 tokens before it, in the cache.
    assert {p.shape for p in patterns.values()} == {(2, 4, 1, 8)}


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        *("LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM"),
        make_case("MistralForCausalLM", usual=False),  # windows and padding: test_prompts
    ],
)
def test_padded_prompts_have_the_same_logits_and_patches_as_unpadded_ones(name: str) -> None:
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    model = build_peer(name, "sdpa")
    decoder = get_description(name)
    seen, positions = mask.bool(), (mask.cumsum(-1) - 1).clamp(min=0)
    columns = torch.arange(13).expand(2, -1)
    for position_ids_ in (positions, columns):
        theirs, ours = (
            m(TOKENS, attention_mask=mask, position_ids=position_ids_) for m in (model, decoder)
        )
        torch.testing.assert_close(ours[seen], theirs.logits[seen], rtol=1e-5, atol=1e-5)
        assert ours.isfinite().all()
    bare = decoder(TOKENS[:1, 4:])
    padded = decoder(TOKENS, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(padded[:1, 4:], bare, rtol=1e-5, atol=1e-5)
    by_default = partial(decoder, TOKENS, attention_mask=mask)
    if name == "GPT2LMHeadModel":
        with pytest.warns(UserWarning, match="learned positions count padding too"):
            assert torch.equal(by_default(), ours)
    elif name == "OPTForCausalLM":
        assert torch.equal(by_default(), padded)
    else:
        assert torch.equal(by_default(), ours)
    clean, corrupted = TOKENS[:1], TOKENS[:1].clone()
    corrupted[0, [5, 7]] = torch.tensor([1, 2])
    padded = [
        {"input_ids": x, "attention_mask": mask[:1], "position_ids": positions[:1]}
        for x in (clean, corrupted)
    ]
    metric = logit_difference(decoder.norm, decoder.unembed, 5, 8)
    bare = patch_streams(decoder, clean[:, 4:], corrupted[:, 4:], metric)
    scan = patch_streams(decoder, *padded, metric)
    torch.testing.assert_close(scan.values[:, 4:], bare.values, rtol=1e-5, atol=1e-5)
    assert scan.clean == pytest.approx(bare.clean, rel=1e-5)
    with pytest.raises(ValueError, match=r"attention_mask is \(2, 3\); pass \(2, 13\)"):
        decoder(TOKENS, attention_mask=mask[:, :3])
    if name != "LlamaForCausalLM":  # Rotary positions are used again in the scans that follow.
        return
    parts = [
        patch_parts(decoder, "attention.k", *pair, metric).values
        for pair in (padded, (clean[:, 4:], corrupted[:, 4:]))
    ]
    torch.testing.assert_close(parts[0][..., 4:], parts[1], rtol=1e-5, atol=1e-5)
    edges = [
        edge_attribution(decoder, *pair, metric, exact=None)
        for pair in (padded, (clean[:, 4:], corrupted[:, 4:]))
    ]
    torch.testing.assert_close(edges[0].exact, edges[1].exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(edges[0].values, edges[1].values, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_patterns_of_padded_prompts_equal_output_attentions() -> None:
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    # In float64, transformers' eager attention of a padded prompt is nan.
    model = build_peer("LlamaForCausalLM", "sdpa").float()
    expected = model(TOKENS, attention_mask=mask).logits
    with record_patterns(model) as patterns:
        assert torch.equal(model(TOKENS, attention_mask=mask).logits, expected)
    theirs = build_peer("LlamaForCausalLM").float()(
        TOKENS, attention_mask=mask, output_attentions=True
    )
    for ours, pattern in zip(patterns.values(), theirs.attentions, strict=True):
        torch.testing.assert_close(ours[:, :, 4:], pattern[:, :, 4:], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_patterns_of_one_query_with_a_mask_have_all_heads() -> None:
    """Transformers passes the query heads that share a key head to SDPA as queries of one head."""
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    recorded = []
    for attention in ("eager", "sdpa"):
        model = build_peer("LlamaForCausalLM", attention).float()
        with record_patterns(model) as patterns:
            past = model(TOKENS[:, :8], attention_mask=mask[:, :8]).past_key_values
            model(TOKENS[:, 8:9], attention_mask=mask[:, :9], past_key_values=past)
        recorded.append(list(patterns.values()))
    for theirs, ours in zip(*recorded, strict=True):
        assert ours.shape == (2, 4, 1, 9)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_record_patterns_removes_hooks_after_an_exception() -> None:
    model = build_peer("LlamaForCausalLM")
    with pytest.raises(ZeroDivisionError), record_patterns(model):
        raise ZeroDivisionError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(RuntimeError, match="no attention was recorded"), record_patterns(nn.ReLU()):
        pass
    with record_patterns(model) as outer, record_patterns(model) as inner:
        model(TOKENS)
    assert all(torch.equal(outer[name], inner[name]) for name in outer)
