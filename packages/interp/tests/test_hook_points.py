"""TransformerLens's hook names, and direct logit attribution by neuron."""

from functools import partial

import pytest
import torch
from interp import Decoder, attribution, patch, record
from interp.bench import build_random_decoder
from interp.decoder.fold import fold_decoder
from interp.decoder.modules.settings import Settings
from interp.decoder.neurons import neuron_attribution
from interp.decoder.rotary import Rotary
from interp.hook_points import HookPoint, Scale
from torch import Tensor, nn

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 37


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    return build_random_decoder("llama", vocabulary=37, d_model=24, layers=2, heads=6)


@torch.no_grad()
def test_hooks_of_transformer_lens_are_split_into_heads(decoder: Decoder) -> None:
    sites = {
        "blocks.1.hook_resid_pre": "blocks.1:input",
        "blocks.1.hook_resid_mid": "blocks.1.mid",
        "blocks.1.hook_resid_post": "blocks.1",
        "blocks.0.attn.hook_q": "blocks.0.attention.q",
        "blocks.0.attn.hook_k": "blocks.0.attention.k",
        "blocks.0.attn.hook_z": "blocks.0.attention.o:input",
        "blocks.0.attn.hook_pattern": "blocks.0.attention.pattern",
        "blocks.0.hook_attn_out": "blocks.0.attention_out",
        "blocks.0.mlp.hook_pre": "blocks.0.mlp.gate",
        "blocks.0.mlp.hook_post": "blocks.0.mlp.down:input",
        "blocks.0.hook_mlp_out": "blocks.0.mlp_out",
    }
    with record(decoder, *sites.values()) as ours:
        expected = decoder(TOKENS)
    with record(decoder, *sites, names="transformer_lens") as theirs:
        decoder(TOKENS)
    assert set(theirs) == set(sites)
    assert theirs["blocks.0.attn.hook_q"].shape == (2, 12, 6, 4)
    assert theirs["blocks.0.attn.hook_k"].shape == (2, 12, 2, 4)
    for name, site in sites.items():
        is_split = name.endswith(("_q", "_k", "_z"))
        assert torch.equal(theirs[name].flatten(-2) if is_split else theirs[name], ours[site])
    with record(decoder, "blocks.*.attn.hook_z", names="transformer_lens") as seen:
        decoder(TOKENS)
    assert list(seen) == ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"]

    # A patch changes the stream that is added to the MLP's output, not the MLP's input alone.
    with (
        patch(decoder, {"blocks.0.hook_resid_mid": torch.zeros_like}, names="transformer_lens"),
        record(decoder, "blocks.0", "blocks.0.mlp_out") as patched,
    ):
        decoder(TOKENS)
    assert torch.equal(patched["blocks.0"], patched["blocks.0.mlp_out"])

    def without_head_3(z: Tensor) -> Tensor:
        z = z.clone()
        z[:, :, 3] = 0
        return z

    with patch(decoder, {"blocks.0.attn.hook_z": without_head_3}, names="transformer_lens"):
        ablated = decoder(TOKENS)
    weight = decoder.layers[0].attention.o.weight
    weight[:, 12:16] = 0  # the columns that read head 3
    torch.testing.assert_close(decoder(TOKENS), ablated)
    assert not torch.allclose(ablated, expected)
    deep = build_random_decoder("llama", vocabulary=37, d_model=24, layers=12, heads=6)
    kinds = r"has hook_embed(, blocks\.\*\.[a-z0-9._]+){14}, ln_final.hook_scale$"
    for model, hook, message in (
        (deep, "hook", kinds),
        (decoder, "blocks.0.attn.hook_rot_q", r"no hook is named 'blocks\.0.*; .*hook_z"),
        (nn.Linear(2, 2), "hook_embed", r"of a Linear are unknown; .* as from describe\(\)"),
    ):
        with (
            pytest.raises(ValueError, match=message),
            record(model, hook, names="transformer_lens"),
        ):
            pass


@torch.no_grad()
def test_hook_functions_of_transformer_lens_receive_the_hook(decoder: Decoder) -> None:
    """The functions have the forms of TransformerLens's main demo."""
    corrupted = TOKENS.flip(0)
    with record(decoder, "**", names="transformer_lens") as clean:
        expected = decoder(TOKENS)

    def ablate_head(value: Tensor, hook: HookPoint) -> Tensor:
        value[:, :, 1] = 0.0
        return value

    def restore(stream: Tensor, hook: HookPoint, position: int) -> Tensor:
        stream[:, position] = clean[hook.name][:, position]
        return stream

    def ablate_in_place(value: Tensor, *, hook: HookPoint) -> None:
        value[:, :, 1] = 0.0

    def without_hook(value: Tensor) -> Tensor:
        value[:, :, 1] = 0.0
        return value

    names = "transformer_lens"
    logits = []
    for function in (ablate_head, ablate_in_place, without_hook):
        with patch(decoder, {"blocks.0.attn.hook_v": function}, names=names):
            logits.append(decoder(TOKENS))
    assert not torch.equal(logits[0], expected)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])

    def restore_position_3(stream: Tensor) -> Tensor:
        stream[:, 3] = clean["blocks.1.hook_resid_pre"][:, 3]
        return stream

    at_3 = partial(restore, position=3)
    with patch(decoder, {"blocks.1.hook_resid_pre": at_3}, names=names):
        patched = decoder(corrupted)
    with patch(decoder, {"blocks.1:input": restore_position_3}):
        assert torch.equal(decoder(corrupted), patched)

    totals = torch.zeros(2, 6)

    def store_total(pattern: Tensor, hook: HookPoint) -> None:
        totals[hook.layer()] = pattern.sum((0, 2, 3))

    with patch(decoder, {"blocks.*.attn.hook_pattern": store_total}, names=names):
        assert torch.equal(decoder(TOKENS), expected)
    torch.testing.assert_close(totals, torch.full((2, 6), 24.0))  # a sum of 1 for each query

    # A function without `hook` must return a tensor, as without names.
    with (
        pytest.raises(TypeError, match="'embed_norm' returned a NoneType; return a tensor"),
        patch(decoder, {"hook_embed": lambda value: None}, names=names),
    ):
        decoder(TOKENS)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_terms_of_neurons_sum_to_the_term_of_the_mlp(family: str) -> None:
    torch.manual_seed(0)
    model = build_random_decoder(family, vocabulary=37, d_model=24, layers=2, heads=6).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    against = TOKENS.flip(1)
    with record(model, "norm:input") as seen:
        model(TOKENS)
    parts = model.components(TOKENS)
    terms = attribution(parts, model.norm, model.unembed, TOKENS, against=against).named()
    neurons = neuron_attribution(model, {"input_ids": TOKENS}, TOKENS, against=against)
    for i, block in enumerate(model.layers):
        assert neurons[i].shape == (2, 12, block.mlp.down.in_features)
        bias = block.mlp.down.bias
        rest: Tensor | float = 0.0
        if bias is not None:
            direction = model.unembed.weight[TOKENS] - model.unembed.weight[against]
            stream = seen["norm:input"]
            scale = (stream.var(-1, unbiased=False, keepdim=True) + model.norm.eps).rsqrt()
            read = model.norm.weight * direction
            rest = ((bias - bias.mean()) * scale * read).sum(-1)
        torch.testing.assert_close(neurons[i].sum(-1) + rest, terms[f"mlp {i}"])


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_folding_keeps_the_terms_of_heads_and_neurons(family: str) -> None:
    torch.manual_seed(0)
    model = build_random_decoder(family, vocabulary=37, d_model=24, layers=2, heads=6).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.normal_()
    against = TOKENS.flip(1)
    results = []
    for decoder in (model, fold_decoder(model)):
        parts = decoder.components(TOKENS)
        terms = attribution(parts, decoder.norm, decoder.unembed, TOKENS, against=against).named()
        neurons = neuron_attribution(decoder, TOKENS, TOKENS, against=against)
        results.append((terms, torch.stack(neurons)))
    (terms, neurons), (folded_terms, folded_neurons) = results
    torch.testing.assert_close(folded_neurons, neurons)
    if family == "gpt2":
        # Folding moves the bias of the values into the bias of the attention output, and that of
        # the final norm into the bias of the unembedding.
        for values in (terms, folded_terms):
            values["biases"] = values.pop("norm bias", 0) + values.pop("unembed bias", 0)
            for layer in range(2):
                heads = [values.pop(f"head {layer}.{head}") for head in range(6)]
                values[f"attention {layer}"] = sum(heads, values.pop(f"attention bias {layer}"))
    assert folded_terms.keys() == terms.keys()
    for name, term in terms.items():
        torch.testing.assert_close(folded_terms[name], term, msg=lambda m, n=name: f"{n}: {m}")


def test_scales_of_streams_whose_squares_overflow_in_half_precision_are_finite() -> None:
    scale = Scale("norm:input", nn.RMSNorm(24, eps=1e-5).half())
    stream = 600 * torch.randn(2, 3, 24).half()
    expected = scale.read(stream.double())
    torch.testing.assert_close(scale.read(stream).double(), expected, rtol=1e-3, atol=0)


def test_neurons_of_models_without_an_mlp_are_refused() -> None:
    shapes = {"embed": (9, 4), "unembed": (9, 4)}
    shapes |= {f"blocks.0.attention.{part}": (4, 4) for part in "qkvo"}
    settings = Settings(heads=2, d_head=2, scale=1.0, rotary=(Rotary(),), windows=(None,))
    model = Decoder({f"{k}.weight": torch.ones(shape) for k, shape in shapes.items()}, settings)
    with pytest.raises(ValueError, match="layer 0 is not a sum over neurons"):
        neuron_attribution(model, TOKENS % 9, TOKENS % 9)
