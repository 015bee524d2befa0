"""`describe` reproduces every property of a model, or refuses the model."""

import copy
import dataclasses
import functools
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interp import Decoder, describe, patch, record
from interp.decoder.fold import fold_decoder
from interp.decoder.names import assign_roles
from interp.decoder.source import collect_weights
from interp.decoder.verify import matching
from interp.decoder.verify.random_weights import RandomWeights, Scale
from interp.patching import attribution_patching
from torch import Tensor, nn

D_MODEL = 32
HEADS = 4
D_HEAD = 8
CONTEXT = 96


@dataclass(frozen=True)
class Options:
    """The properties of the model that a mutation can change."""

    kv_heads: int = 4
    window: int | None = None
    window_of_last: int | None = None
    rotary: bool = True
    theta: float = 1e4
    rotated: int = D_HEAD
    interleaved: bool = False
    scale: float = D_HEAD**-0.5
    scale_by_length: bool = False
    scale_by_layer: bool = False
    score_cap: float | None = None
    logit_cap: float | None = None
    clip: float | None = None
    slope: float = 0.0
    sink: bool = False
    eps: float = 1e-5
    eps_of_last: float | None = None
    centered: bool = False
    bias: bool = False
    activation: Callable[[Tensor], Tensor] = F.silu
    parallel: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    norms_again: bool = False
    causal: bool = True
    swaps_heads: bool = False
    hidden_token: int | None = None
    reverses_layers: bool = False
    position_offset: int = 0
    stretches_after: int | None = None
    masked_score: float = float("-inf")
    stream_limit: float = float("inf")


def rotate(x: Tensor, options: Options) -> Tensor:
    n = options.rotated
    frequencies = options.theta ** (-torch.arange(0, n, 2).float() / n)
    position = torch.arange(x.shape[-2]) + options.position_offset
    if options.stretches_after is not None and x.shape[-2] > options.stretches_after:
        frequencies = frequencies / 2
    angle = position[:, None] * frequencies
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    turned, rest = x[..., :n], x[..., n:]
    if options.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        return torch.cat(
            [torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], -1
        )
    a, b = turned.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def split_heads(x: Tensor) -> Tensor:
    """Return features (batch, seq, heads * D_HEAD) as (batch, heads, seq, D_HEAD)."""
    return x.unflatten(-1, (-1, D_HEAD)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, options: Options, layer: int) -> None:
        super().__init__()
        self.options = options
        self.layer = layer
        self.num_heads = HEADS
        wide, narrow = HEADS * D_HEAD, options.kv_heads * D_HEAD
        self.q_proj = nn.Linear(D_MODEL, wide, bias=options.bias)
        self.k_proj = nn.Linear(D_MODEL, narrow, bias=options.bias)
        self.v_proj = nn.Linear(D_MODEL, narrow, bias=options.bias)
        self.o_proj = nn.Linear(wide, D_MODEL, bias=options.bias)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        o, n = self.options, x.shape[1]
        q, k, v = (split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if o.clip is not None:
            q, k, v = (y.clamp(-o.clip, o.clip) for y in (q, k, v))
        if o.rotary:
            q, k = rotate(q, o), rotate(k, o)
        k, v = (y.repeat_interleave(HEADS // o.kv_heads, 1) for y in (k, v))
        scores = q @ k.mT * o.scale
        if o.scale_by_length:
            scores = scores * torch.arange(1, n + 1).to(x).log().clamp(min=1)[:, None]
        if o.scale_by_layer:
            scores = scores / (self.layer + 1)
        if o.score_cap is not None:
            scores = o.score_cap * (scores / o.score_cap).tanh()
        ago = torch.arange(n)[:, None] - torch.arange(n)
        scores = scores - (o.slope * ago).to(scores)
        window = o.window_of_last if self.layer == 1 and o.window_of_last else o.window
        hidden = ago < 0 if o.causal else torch.zeros_like(ago, dtype=torch.bool)
        if window is not None:
            hidden = hidden | (ago >= window)
        if o.hidden_token is not None:
            hidden = hidden | ((tokens == o.hidden_token)[:, None, None, :] & (ago != 0))
        scores = scores.masked_fill(hidden, o.masked_score)
        if o.sink:
            scores = F.pad(scores, (0, 1))
        pattern = scores.softmax(-1)[..., :n]
        mixed = (pattern @ v).transpose(1, 2)
        if o.swaps_heads:
            mixed = mixed.flip(2)
        return self.o_proj(mixed.flatten(2))


class Block(nn.Module):
    def __init__(self, options: Options, layer: int) -> None:
        super().__init__()
        self.options = options
        last = layer == 1 and options.eps_of_last is not None
        eps = options.eps_of_last if last else options.eps
        norm = nn.LayerNorm if options.centered else nn.RMSNorm
        self.norm1, self.norm2 = norm(D_MODEL, eps=options.eps), norm(D_MODEL, eps=eps)
        self.attn = Attention(options, layer)
        self.mlp = nn.ModuleDict(
            {
                name: nn.Linear(*sizes, bias=options.bias)
                for name, sizes in {
                    "gate": (D_MODEL, 64),
                    "up": (D_MODEL, 64),
                    "down": (64, D_MODEL),
                }.items()
            }
        )

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        o = self.options
        attended = x + o.residual_scale * self.attn(self.norm1(x), tokens)
        y = self.norm2(x if o.parallel else attended)
        inner = o.activation(self.mlp["gate"](y)) * self.mlp["up"](y)
        return attended + o.residual_scale * self.mlp["down"](inner)


class Model(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.embed = nn.Embedding(50, D_MODEL)
        if not options.rotary:
            self.position = nn.Embedding(CONTEXT, D_MODEL)
        self.blocks = nn.ModuleList(Block(options, i) for i in range(2))
        norm = nn.LayerNorm if options.centered else nn.RMSNorm
        self.norm = norm(D_MODEL, eps=options.eps)
        self.head = nn.Linear(D_MODEL, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        o = self.options
        x = self.embed(tokens) * o.embed_scale
        if not o.rotary:
            x = x + self.position(torch.arange(tokens.shape[1]) + o.position_offset)
        for block in list(self.blocks)[:: -1 if o.reverses_layers else 1]:
            x = block(x, tokens).clamp(-o.stream_limit, o.stream_limit)
        x = self.norm(x)
        logits = self.head(self.norm(x) if o.norms_again else x) * o.logit_scale
        return logits if o.logit_cap is None else o.logit_cap * (logits / o.logit_cap).tanh()


def build_model(**changes: Any) -> Model:
    """Return a model with weights at the usual small initialization."""
    torch.manual_seed(0)
    model = Model(dataclasses.replace(Options(), **changes)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


# Each entry changes one property. `describe` must reproduce detected and passed properties.
CARRIED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as usual": ({}, {}),
    "grouped queries": ({"kv_heads": 2}, {}),
    "theta that is tried": ({"theta": 5e5}, {}),
    "theta": ({"theta": 777.0}, {"rope_theta": 777.0}),
    "learned positions": ({"rotary": False}, {}),
    "layer norm": ({"centered": True}, {}),
    "biases": ({"bias": True}, {}),
    "gelu": ({"activation": F.gelu}, {}),
    "relu": ({"activation": F.relu}, {}),
    "epsilon": ({"eps": 1e-3}, {}),
    "window": ({"window": 16}, {"windows": (16, 16)}),
    "window of one layer": ({"window_of_last": 90}, {"windows": (None, 90)}),
    "scale": ({"scale": 0.1}, {"scale": 0.1}),
    "score cap": ({"score_cap": 50.0}, {"score_cap": 50.0}),
    "logit cap": ({"logit_cap": 30.0}, {"logit_cap": 30.0}),
    "parallel": ({"parallel": True}, {"parallel": True}),
}  # fmt: skip

REFUSED: dict[str, dict[str, Any]] = {
    "window of 16": {"window": 16},
    "window of 80": {"window": 80},
    "window one shorter than the context": {"window": CONTEXT - 1, "rotary": False},
    "window of the last layer": {"window_of_last": 40},
    "interleaved rotary pairs": {"interleaved": True},
    "other theta": {"theta": 9e3},
    "half of each head rotated": {"rotated": D_HEAD // 2},
    "rotary angles that stretch": {"stretches_after": 64},
    "positions from 1": {"rotary": False, "position_offset": 1},
    "scale": {"scale": 0.3},
    "scale by length": {"scale_by_length": True},
    "scale by layer": {"scale_by_layer": True},
    "score cap of 50": {"score_cap": 50.0},
    "score cap of 500": {"score_cap": 500.0},
    "logit cap of 30": {"logit_cap": 30.0},
    "clipped queries": {"clip": 6.0},
    "queries clipped at 50": {"clip": 50.0},
    "linear biases": {"slope": 0.01},
    "attention sink": {"sink": True},
    "epsilon of one norm": {"eps_of_last": 1e-6},
    "quick gelu": {"activation": lambda x: x * (1.702 * x).sigmoid()},
    "clamped activation": {"activation": lambda x: F.silu(x).clamp(max=7)},
    "activation clamped at 20": {"activation": lambda x: F.silu(x).clamp(max=20)},
    "activation clamped at 50": {"activation": lambda x: F.silu(x).clamp(max=50)},
    "stream clamped at 100": {"stream_limit": 100.0},
    "stream clamped at 1000": {"stream_limit": 1000.0},
    "hidden scores of -100": {"masked_score": -100.0},
    "hidden scores of -1000": {"masked_score": -1000.0},
    "activation clamped at 1000": {"activation": lambda x: F.silu(x).clamp(max=1000)},
    "hidden scores of -10000": {"masked_score": -10000.0},
    "score cap of 1000": {"score_cap": 1000.0},
    "parallel residual": {"parallel": True},
    "embedding scale": {"embed_scale": 1.1},
    "residual scale": {"residual_scale": 0.9},
    "logit scale": {"logit_scale": 1.01},
    "a second norm": {"norms_again": True},
    "sight of later tokens": {"causal": False},
    "heads in another order": {"swaps_heads": True},
    "layers in another order": {"reverses_layers": True},
    "a token that is hidden": {"hidden_token": 0},
}


#: The properties that candidates vary. The others are refused with the other settings passed.
TRIED = (
    "other theta",
    "quick gelu",
    "clamped activation",
    "activation clamped at 20",
    "activation clamped at 50",
    "activation clamped at 1000",
)


#: Properties that no comparison reaches, so that the README warns of them.
NOT_DETECTED: dict[str, dict[str, Any]] = {
    "activation clamped at 100000": {"activation": lambda x: F.silu(x).clamp(max=1e5)},
    "hidden scores of -1000000": {"masked_score": -1e6},
    "score cap of 1000000": {"score_cap": 1e6},
}


#: The properties that change a model of random weights by less than bfloat16 rounds.
SUBTLE = (
    "window of 16",
    "interleaved rotary pairs",
    "other theta",
    "logit scale",
    "logit cap of 30",
)


def list_in_both_dtypes(names: Iterable[str], *sampled: str) -> list[Any]:
    """Return each name with both dtypes; bfloat16 of names not in `sampled` is exhaustive.

    Both dtypes are described alike, because the verification uses a float32 copy.
    """
    return [
        pytest.param(
            name,
            dtype,
            id=f"{name}-{str(dtype).removeprefix('torch.')}",
            marks=[pytest.mark.exhaustive] * (dtype == torch.bfloat16 and name not in sampled),
        )
        for name in names
        for dtype in (torch.float32, torch.bfloat16)
    ]


def assert_equal_with_sharp_weights(decoder: Decoder, model: nn.Module) -> None:
    """Compare logits after scaling the shared weights, so that attention is far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.4)
        length = min(decoder.settings.context or CONTEXT, CONTEXT)
        tokens = torch.randint(50, (2, length), generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(decoder(tokens), model(tokens), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "dtype"), list_in_both_dtypes(CARRIED, "as usual", "window"))
def test_detected_or_passed_properties_are_described(name: str, dtype: torch.dtype) -> None:
    changes, settings = CARRIED[name]
    if settings:  # fewer candidates; the other models show that the activation is detected
        settings = {"activation": "silu"} | settings
    model = build_model(**changes).to(dtype)
    decoder = describe(model, context=CONTEXT, **settings)
    if dtype == torch.float32:
        assert_equal_with_sharp_weights(decoder, model)


@pytest.mark.parametrize(("name", "dtype"), list_in_both_dtypes(REFUSED, *SUBTLE))
def test_unsupported_properties_are_refused(name: str, dtype: torch.dtype) -> None:
    changes = REFUSED[name]
    known: dict[str, Any] = {"context": CONTEXT}
    if name not in TRIED:
        known |= {"activation": "silu"} | (
            {"rope_theta": 1e4} if changes.get("rotary", True) else {}
        )
    with pytest.raises(ValueError, match="no description of this Model reproduces its logits"):
        describe(build_model(**changes).to(dtype), **known)


@pytest.mark.parametrize("name", NOT_DETECTED)
def test_bounds_that_no_comparison_reaches_are_not_detected(name: str) -> None:
    """The limits in the README name these bounds, and must change if `describe` detects them."""
    assert (
        describe(build_model(**NOT_DETECTED[name]), context=CONTEXT).settings.activation == "silu"
    )


def test_the_default_context_is_1024_tokens_and_shorter_for_large_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model()
    known = {"activation": "silu", "rope_theta": 1e4}
    decoder = describe(model, **known)
    assert decoder.settings.context == 1024
    with pytest.raises(ValueError, match=r"up to 1024 tokens, got 1025; .*context=1025"):
        decoder(torch.zeros(1, 1025, dtype=torch.long))
    # A forward pass of a token costs two FLOPs per parameter.
    flops = 2 * sum(parameter.numel() for parameter in model.parameters())
    for affordable, context in ((200, 200), (12, 128)):
        monkeypatch.setattr(matching, "_FORWARD_FLOPS", affordable * flops)
        assert describe(model, **known).settings.context == context
    # A tied weight counts once.
    model.head.weight = model.embed.weight
    flops -= 2 * model.embed.weight.numel()
    monkeypatch.setattr(matching, "_FORWARD_FLOPS", 200 * flops)
    assert describe(model, **known).settings.context == 200


def test_texts_longer_than_the_verified_length_are_refused() -> None:
    model = build_model(window=60)
    decoder = describe(model, context=60)
    assert_equal_with_sharp_weights_up_to(decoder, model, 60)
    with pytest.raises(ValueError, match=r"up to 60 tokens, got 61; describe\(model, context=61\)"):
        decoder(torch.zeros(1, 61, dtype=torch.long))
    with pytest.raises(ValueError, match="no description of this Model"):
        describe(model, context=61)


def assert_equal_with_sharp_weights_up_to(decoder: Decoder, model: nn.Module, length: int) -> None:
    assert decoder.settings.context == length
    assert_equal_with_sharp_weights(decoder, model)


@pytest.mark.parametrize("context", [0, -3, CONTEXT + 1])
def test_context_beyond_the_positions_is_refused(context: int) -> None:
    message = rf"at least 1 and at most {CONTEXT} \(learned positions\), got {context}"
    with pytest.raises(ValueError, match=message):
        describe(build_model(rotary=False), context=context)


class ShortModel(Model):
    """A model that cannot be called with more than 70 tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > 70:
            raise IndexError("the cache of angles ends here")
        return super().forward(tokens)


def test_longest_accepted_power_of_two_is_verified() -> None:
    torch.manual_seed(0)
    model = ShortModel(Options()).eval()
    assert describe(model).settings.context == 64
    assert describe(model, context=70).settings.context == 70
    assert describe(build_model(rotary=False)).settings.context == CONTEXT


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "mode",
    [
        partial(default_dtype, torch.bfloat16),
        partial(torch.device, "meta"),
        partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        torch.inference_mode,
    ],
    ids=["default dtype", "default device", "autocast", "inference"],
)
def test_descriptions_do_not_depend_on_modes_of_torch(
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    model = build_family("GemmaForCausalLM", num_hidden_layers=1)
    pair = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 4, 3]])
    with mode():
        decoder = describe(model)
        with torch.autocast("cpu", enabled=False):
            inside = attribution_patching(decoder, ["blocks.0:input"], *pair, sum_last_logits)
    expected = describe(model)
    assert torch.equal(decoder(pair[0]), expected(pair[0]))
    outside = attribution_patching(decoder, ["blocks.0:input"], *pair, sum_last_logits)
    assert torch.equal(inside["blocks.0:input"], outside["blocks.0:input"])


def sum_last_logits(logits: Tensor) -> Tensor:
    return logits[:, -1].sum()


def test_describe_keeps_modes_and_weights() -> None:
    model = build_model()
    model.train()
    model.blocks[0].eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    describe(model, context=CONTEXT)
    assert model.training
    assert model.blocks[1].training
    assert not model.blocks[0].training
    assert not model.blocks[0].attn.training
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_warnings_of_the_model_reach_the_caller() -> None:
    model = build_model()
    model.register_forward_pre_hook(lambda *_: warnings.warn("an old option", stacklevel=1))
    with pytest.warns(UserWarning, match="an old option"):
        describe(model, context=CONTEXT)


def test_hooks_that_change_the_logits_are_named() -> None:
    model = build_model()
    model.blocks[1].mlp["up"].register_forward_hook(lambda _module, _args, output: 1.1 * output)
    with pytest.raises(ValueError, match=r"most 5e-05; remove the hooks of blocks\.1\.mlp\.up; if"):
        describe(model, context=CONTEXT)


def test_the_number_of_heads_may_be_passed() -> None:
    model = build_model()
    for block in model.blocks:
        del block.attn.num_heads
    assert_equal_with_sharp_weights(describe(model, context=CONTEXT, heads=HEADS), model)


@pytest.mark.parametrize("shared", ["layer", "mlp", "weight"])
def test_layers_that_share_modules_or_weights_are_described_and_kept(shared: str) -> None:
    model = build_family("LlamaForCausalLM", num_hidden_layers=4)
    first, last = model.model.layers[0], model.model.layers[3]
    if shared == "layer":
        model.model.layers[3] = first
    elif shared == "mlp":
        last.mlp = first.mlp
    else:
        last.mlp.up_proj.weight = first.mlp.up_proj.weight
    tokens = torch.arange(26).reshape(2, 13) * 7 % 37
    with torch.no_grad():
        # The cache of transformers has one entry per layer index, which the layers share.
        before = model(tokens, use_cache=False).logits
        decoder = describe(model)
        assert torch.equal(model(tokens, use_cache=False).logits, before)
        torch.testing.assert_close(decoder(tokens), before)


SMALL = {
    "vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip
FAMILIES = {
    "GPT2LMHeadModel": {
        "vocab_size": 37, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "bos_token_id": None, "eos_token_id": None,
    },
    "LlamaForCausalLM": SMALL,
    "Phi3ForCausalLM": SMALL | {"pad_token_id": None},
    "GPTNeoXForCausalLM": SMALL | {"bos_token_id": None, "eos_token_id": None},
    "GemmaForCausalLM": SMALL | {"head_dim": 8, "num_key_value_heads": 2},
    "Gemma3ForCausalLM": SMALL
    | {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 9, "pad_token_id": None},
    "Qwen3MoeForCausalLM": SMALL
    | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
       "num_key_value_heads": 2},
    "GraniteForCausalLM": SMALL
    | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
       "pad_token_id": None},
    "FalconForCausalLM": {
        "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "new_decoder_architecture": True, "num_kv_heads": 2, "max_position_embeddings": 32,
        "bos_token_id": None, "eos_token_id": None,
    },
    "OPTForCausalLM": {
        "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 20, "max_position_embeddings": 32, "word_embed_proj_dim": 24,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    },
    "CohereForCausalLM": SMALL
    | {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
       "pad_token_id": None},
    "PhiForCausalLM": SMALL | {"hidden_size": 32},
    "GPTJForCausalLM": {
        "vocab_size": 37, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "rotary_dim": 4, "bos_token_id": None, "eos_token_id": None,
    },
    "StableLmForCausalLM": SMALL
    | {"hidden_size": 32, "num_key_value_heads": 2},
    "GptOssForCausalLM": SMALL
    | {"head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
       "pad_token_id": None},
    "DeepseekV3ForCausalLM": SMALL
    | {"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 14, "qk_rope_head_dim": 4,
       "qk_nope_head_dim": 6, "v_head_dim": 10, "n_routed_experts": 6, "num_experts_per_tok": 2,
       "moe_intermediate_size": 12, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 0},
}  # fmt: skip


def build_family(name: str, **options: object) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")
    model_class = getattr(transformers, name)
    config = model_class.config_class(**(FAMILIES[name] | options))
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return model_class(config).eval()


def change_in_place(parameter: Tensor, how: str) -> None:
    if how == "optimizer":
        parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD([parameter], lr=0.5).step()
    elif how == "data":
        parameter.data += 0.5 * torch.rand_like(parameter)
    else:
        with torch.no_grad():
            parameter.mul_(1.5).add_(0.1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before = False"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 12}, "word_embed_proj_dim = 12"),
        ("FalconForCausalLM", {"alibi": True}, "alibi = True is not supported"),
        ("CohereForCausalLM", {"use_qk_norm": True}, "use_qk_norm = True is not supported"),
        ("StableLmForCausalLM", {"qk_layernorm": True}, "qk_layernorm = True is not supported"),
    ],
)
def test_unsupported_options_of_families_are_refused(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        describe(build_family(name, **options))


def test_other_families_are_recorded_and_refused_with_the_unknown_property() -> None:
    model = build_model()
    model.config = SimpleNamespace(model_type="mpt", to_dict=lambda: {"model_type": "mpt"})
    tokens = torch.tensor([[1, 2, 3]])
    with patch(model, {"blocks.0": torch.zeros_like}), record(model, "blocks.*") as seen:
        model(tokens)
    assert not seen["blocks.0"].any()
    unknown = "model_type 'mpt' is not one of gpt2, .*: its norms, positions and activation are"
    with pytest.raises(ValueError, match=unknown):
        describe(model)
    model.blocks[0].gamma = nn.Linear(2, 3)
    with pytest.raises(
        ValueError, match=r"'mpt' .*: blocks\.0\.gamma\.weight \(3, 2\) has no known"
    ):
        describe(model)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got str; load the model"):
        describe("gpt2")


Arguments = dict[str, Tensor]

#: Incorrect uses of the attention mask and the position ids, as changes of the arguments.
MISUSED: dict[str, Callable[[Arguments], Arguments]] = {
    "the mask is ignored": lambda x: {k: v for k, v in x.items() if k != "attention_mask"},
    "padding between tokens is visible": lambda x: (
        x | {"attention_mask": x["attention_mask"].cumsum(-1).clamp(max=1)}
    ),
    "the mask of the first row is used": lambda x: (
        x | {"attention_mask": x["attention_mask"][:1].expand_as(x["attention_mask"])}
    ),
    "position ids are ignored": lambda x: {k: v for k, v in x.items() if k != "position_ids"},
    "default positions skip padding": lambda x: (
        {"position_ids": (x["attention_mask"].cumsum(-1) - 1).clamp(min=0)} | x
    ),
}


@pytest.mark.parametrize(
    "name",
    ["LlamaForCausalLM", pytest.param("GPT2LMHeadModel", marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("misuse", MISUSED)
def test_models_that_misuse_masks_or_position_ids_are_refused(name: str, misuse: str) -> None:
    model = build_family(name)
    original = model.forward

    def forward(
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> Any:
        passed = {"attention_mask": attention_mask, "position_ids": position_ids}
        arguments = {key: value for key, value in passed.items() if value is not None}
        if attention_mask is not None:
            arguments = MISUSED[misuse](arguments)
        return original(input_ids, **arguments, **options)

    model.forward = forward
    message = (
        f"no description of this {name} reproduces its logits: in the (padded|positions) comparison"
    )
    with pytest.raises(ValueError, match=message):
        describe(model)


class PlainBlock(Block):
    """A block whose MLP has no gate and the projections w1 and w2."""

    def __init__(self, options: Options, layer: int) -> None:
        super().__init__(options, layer)
        self.mlp = nn.ModuleDict({"w1": self.mlp["up"], "w2": self.mlp["down"]})

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), tokens)
        return x + self.mlp["w2"](F.gelu(self.mlp["w1"](self.norm2(x))))


def test_w1_without_w3_is_the_first_projection() -> None:
    model = build_model()
    model.blocks = nn.ModuleList(PlainBlock(model.options, i) for i in range(2))
    assert_equal_with_sharp_weights(describe(model, context=CONTEXT), model)


def test_weights_outside_of_memory_are_refused() -> None:
    model = build_family("GPT2LMHeadModel").to("meta")
    message = r"transformer\.wte\.weight is a Parameter on meta; load or dequantize it"
    with pytest.raises(ValueError, match=message):
        describe(model)


def test_rope_theta_is_refused_for_models_with_a_configuration() -> None:
    transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")
    sizes = {"vocab_size": 37, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=1, **sizes)
    with pytest.raises(ValueError, match=r"rope_theta = 5\.0 was passed, but the configuration"):
        describe(transformers.LlamaForCausalLM(config), rope_theta=5.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_rounding_errors_of_deep_models_stay_below_the_tolerances(name: str) -> None:
    """Sharp attention and routing amplify rounding errors in each layer."""
    decoder = describe(build_family(name, num_hidden_layers=48))
    assert all(c.error < 0.5 * c.tolerance for c in decoder.comparisons)


# For each constant: the family, the class of the modules that have it, and another value.
CONSTANTS: dict[str, tuple[str, str, float]] = {
    "limit": ("GptOssForCausalLM", "GptOssExperts", 6.0),
    "alpha": ("GptOssForCausalLM", "GptOssExperts", 1.6),
    "top_k": ("GptOssForCausalLM", "GptOssTopKRouter", 1),
    "routed_scaling_factor": ("DeepseekV3ForCausalLM", "DeepseekV3TopkRouter", 1.0),
    "topk_group": ("DeepseekV3ForCausalLM", "DeepseekV3TopkRouter", 3),
    "norm_topk_prob": ("DeepseekV3ForCausalLM", "DeepseekV3TopkRouter", False),
    "variance_epsilon": ("DeepseekV3ForCausalLM", "DeepseekV3RMSNorm", 1e-5),
    "scaling": ("DeepseekV3ForCausalLM", "DeepseekV3Attention", 0.33),
}


@pytest.mark.parametrize(
    "constant",
    [
        name
        if name in ("limit", "topk_group")
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in CONSTANTS
    ],
)
def test_other_constants_than_those_of_the_configuration_are_refused(constant: str) -> None:
    name, module_type, value = CONSTANTS[constant]
    model = build_family(name)
    changed = [m for m in model.modules() if type(m).__name__ == module_type]
    if constant == "variance_epsilon":  # Norms inside latent attention have no option.
        changed = [norm for norm in changed if len(norm.weight) != 24]
    for module in changed:
        assert getattr(module, constant) != value
        setattr(module, constant, value)
    with pytest.raises(ValueError, match=f"no description of this {name} reproduces its logits"):
        describe(model)


#: Separate, fused and interleaved projections of queries, keys and values.
PROJECTIONS = ("LlamaForCausalLM", "Phi3ForCausalLM", "FalconForCausalLM")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=[] if is_usual else pytest.mark.exhaustive)
        for name in FAMILIES
        for how in ("optimizer", "data", "no_grad")
        for is_usual in [name == PROJECTIONS[0] or (name in PROJECTIONS and how == "data")]
    ],
)
def test_weights_changed_in_place_are_followed_or_refused(name: str, how: str) -> None:
    """Each parameter of one layer and outside of layers is changed separately."""
    tokens = torch.arange(26).reshape(2, 13) * 7 % 37
    model = build_family(name)
    decoder = describe(model)
    folded = fold_decoder(decoder)
    weights = {key: x for key, x in collect_weights(model).items() if ".1." not in key}
    for weight in list(weights.values()) if how == "data" else list(weights.values())[:2]:
        before = weight.detach().clone()
        change_in_place(weight, how)
        refusal = ""
        with torch.no_grad():
            try:
                logits = decoder(tokens)
            except RuntimeError as error:
                refusal = str(error)
            if refusal:
                names = [name for name, tensor in weights.items() if tensor is weight]  # tied
                assert any(f"{name} was changed in place" in refusal for name in names)
                for read in (decoder.ov, decoder.qk):
                    with pytest.raises(RuntimeError, match="the model again"):
                        read()
            else:
                torch.testing.assert_close(logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
            with pytest.raises(RuntimeError, match="changed in place"):
                folded(tokens)
            weight.copy_(before)


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "LlamaForCausalLM", "Phi3ForCausalLM", "OPTForCausalLM"]
)
def test_families_without_folded_or_interleaved_weights_share_all_weights(name: str) -> None:
    model = build_family(name)
    decoder = describe(model)
    shared = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for parameter in decoder.parameters():
        assert parameter.untyped_storage().data_ptr() in shared


@functools.cache
def get_described_gpt2() -> Decoder:
    """Return a description that several tests read and none changes."""
    return describe(build_family("GPT2LMHeadModel"))


def test_exchanged_entries_of_a_copied_vector_are_refused() -> None:
    model = build_family("GemmaForCausalLM")
    gain = model.model.norm.weight
    with torch.no_grad():
        gain[0] = 0.5
        decoder = describe(model)
        gain[:2] = gain[:2].flip(0)
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight was changed in place"):
        decoder(torch.zeros(1, 5, dtype=torch.long))


def test_changes_of_copies_in_a_shared_storage_are_refused_after_cpu() -> None:
    model = build_family("GemmaForCausalLM")
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    offset = 0
    for parameter in model.parameters():
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    decoder = describe(model).cpu()
    change_in_place(model.model.norm.weight, "no_grad")
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight was changed in place"):
        decoder(torch.zeros(1, 5, dtype=torch.long))


def test_threads_that_describe_one_model_keep_its_weights() -> None:
    tokens = torch.arange(26).reshape(2, 13) * 7 % 37
    model = build_family("LlamaForCausalLM")
    with torch.no_grad():
        before = model(tokens).logits
        with ThreadPoolExecutor(2) as pool:
            descriptions = list(pool.map(describe, [model, model]))
        assert torch.equal(model(tokens).logits, before)
        for decoder in descriptions:
            torch.testing.assert_close(decoder(tokens), before)


@pytest.mark.parametrize("name", ["PhiForCausalLM", "GPTJForCausalLM"])
def test_tied_unembeddings_keep_their_bias(name: str) -> None:
    tokens = torch.arange(26).reshape(2, 13) * 7 % 37
    model = build_family(name, tie_word_embeddings=True)
    with torch.no_grad():
        model.lm_head.bias.normal_()
        torch.testing.assert_close(describe(model)(tokens), model(tokens).logits)


def test_moved_or_converted_weights_are_refused() -> None:
    tokens = torch.zeros(1, 5, dtype=torch.long)
    model = build_family("LlamaForCausalLM")
    decoder = describe(model)
    model.double()
    with pytest.raises(RuntimeError, match=r"moved or converted .*describe\(\) the model again"):
        decoder(tokens)
    model = build_family("LlamaForCausalLM")
    decoder = describe(model)
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    with pytest.raises(RuntimeError, match=r"lm_head\.weight was replaced"):
        decoder(tokens)
    model = build_family("LlamaForCausalLM")
    converted = describe(model).double()  # a copy of the weights
    assert converted(tokens).dtype == torch.float64
    same = describe(model).cpu().float()  # no copy of the weights
    change_in_place(model.lm_head.weight, "no_grad")
    with pytest.raises(RuntimeError, match=r"lm_head\.weight was changed in place"):
        converted(tokens)
    torch.testing.assert_close(same(tokens), model(tokens).logits)


def change_epsilon(model: nn.Module) -> None:
    model.model.norm.variance_epsilon = 0.1


def change_frequencies(model: nn.Module) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


def change_config(model: nn.Module) -> None:
    model.config.logits_scaling = 3.0


def replace_forward(model: nn.Module) -> None:
    model.model.layers[0].mlp.forward = torch.zeros_like


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (change_epsilon, "model.norm.variance_epsilon"),
        (change_frequencies, "model.rotary_emb.inv_freq"),
        (change_config, "config.logits_scaling"),
        (replace_forward, "model.layers.0.mlp.forward"),
    ],
)
def test_constants_changed_after_the_description_are_refused(
    change: Callable[[nn.Module], None], name: str
) -> None:
    # Granite's forward method reads the configuration.
    model = build_family("GraniteForCausalLM" if change is change_config else "LlamaForCausalLM")
    decoder = describe(model)
    folded = fold_decoder(decoder)
    change(model)
    for description in (decoder, folded):
        with pytest.raises(RuntimeError, match=rf"{name} was changed after .*describe\(\) the mod"):
            description(torch.zeros(1, 5, dtype=torch.long))


def test_replaced_modules_are_refused() -> None:
    tokens = torch.zeros(1, 5, dtype=torch.long)
    model = build_family("LlamaForCausalLM")
    decoder = describe(model)
    expected = decoder(tokens)
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    with pytest.raises(RuntimeError, match=r"module model\.layers\.0\.mlp\.act_fn was added, repl"):
        decoder(tokens)
    model = build_family("LlamaForCausalLM")
    decoder = describe(model)
    projection = model.model.layers[1].self_attn.v_proj
    wrapper = nn.Linear(1, 1, bias=False)
    wrapper.weight = projection.weight
    model.model.layers[1].self_attn.v_proj = wrapper
    with pytest.raises(RuntimeError, match=r"v_proj was added, replaced or removed"):
        decoder(tokens)
    model.model.layers[1].self_attn.v_proj = projection
    torch.testing.assert_close(decoder(tokens), expected)


def test_copied_decoders_do_not_notice_changes_of_a_model() -> None:
    tokens = torch.tensor([[1, 2, 3]])
    described = build_family("GemmaForCausalLM")
    decoder = describe(described)
    expected = decoder(tokens)
    model, decoder = copy.deepcopy((described, decoder))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)
    torch.testing.assert_close(decoder(tokens), expected, rtol=0, atol=0)


@pytest.mark.parametrize("cls", ["LlamaForCausalLM", "GptOssForCausalLM"])
def test_descriptions_are_pickled(cls: str) -> None:
    tokens = torch.tensor([[1, 2, 3]])
    decoder = describe(build_family(cls))
    torch.testing.assert_close(pickle.loads(pickle.dumps(decoder))(tokens), decoder(tokens))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[0, 1, 2, 0, 1]], "packed texts are not supported"),
        ([[0, 1, 3, 4, 5]], "must increase by 1"),
        ([[-1, 0, 1, 2, 3]], "reach from -1 to 3"),
        (
            [[28, 29, 30, 31, 32]],
            "from 28 to 32; expected positions of at least 0 and at most 31",
        ),
        ([[0, 1, 2]], r"position_ids are torch.int64 \(1, 3\); pass integers \(1, 5\)"),
        ([[0.0, 1, 2, 3, 4]], "pass integers"),
    ],
)
def test_position_ids_of_packed_texts_are_refused(
    positions: list[list[float]], message: str
) -> None:
    decoder = get_described_gpt2()
    with pytest.raises(ValueError, match=message):
        decoder(torch.ones(1, 5, dtype=torch.long), position_ids=torch.tensor(positions))


def test_verification_calls_the_model_once_per_property() -> None:
    """Forward passes are the cost of describing a large model."""
    model = build_model()
    shapes = []
    with model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape))):
        describe(model, context=CONTEXT)
    # Small, large and huge weights, one token, the whole context, and the model's own weights.
    assert shapes == [(1, 16), (1, 16), (2, 4), (2, 1), (1, CONTEXT), (1, 12)]


def test_comparisons_of_one_scale_share_random_weights() -> None:
    tensors = collect_weights(build_model())
    roles = assign_roles(tensors)
    settings = describe(build_model(), context=CONTEXT).settings
    random_weights = RandomWeights(tensors, roles, settings, gain_offset=0.0)
    scales = Scale(), Scale(score_std=20.0)
    first, large = random_weights.draw(scales[0], 0), random_weights.draw(scales[1], 0)
    redrawn = random_weights.draw(scales[0], 0)
    other_seed = random_weights.draw(scales[0], 1)
    for name, weight in first.items():
        assert torch.equal(redrawn[name], weight)
        assert not torch.equal(other_seed[name], weight)
    query = "blocks.0.attn.q_proj.weight"
    torch.testing.assert_close(large[query], first[query] * 8**0.5)
