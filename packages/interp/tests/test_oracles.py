"""Comparisons with other libraries, each in a separate environment because of conflicting pins.

uv venv lens && uv pip install --python lens/bin/python transformer-lens pytest safetensors
PYTHONPATH=src lens/bin/python -m pytest -m exhaustive --noconftest tests/test_oracles.py
"""

import itertools
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from figures import assert_at_least
from interp import (
    AttentionOnly,
    Decoder,
    LowRank,
    attribution,
    composition_scores,
    describe,
    detect_heads,
    logit_lens,
    patch,
    record,
)
from interp.bench import compare_with_transformer_lens
from interp.decoder.fold import fold_decoder
from interp.hook_points import find_hook_points
from interp.patching import attribution_patching, logit_difference, patch_parts, patch_streams
from torch import Tensor, nn

pytestmark = pytest.mark.exhaustive


def build_small_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="models of each family")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def build_small_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="models of each family")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31,
        n_embd=24,
        n_layer=2,
        n_head=3,
        n_positions=16,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


CLEAN = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
CORRUPTED = torch.tensor([[2, 7, 1, 8, 2, 8, 1]])


def compute_difference(logits: Tensor) -> Tensor:
    return logits[0, -1, 5] - logits[0, -1, 7]


@torch.no_grad()
def test_hooks_and_patches_equal_transformer_lens() -> None:
    """Each hook name has the activation that TransformerLens caches under it."""
    pytest.importorskip("transformer_lens", reason="tried with transformer-lens 4.3.0")
    from transformer_lens import patching
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    model = build_small_gpt2()
    bridge = build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config)
    bridge.enable_compatibility_mode(no_processing=True)
    decoder = describe(build_small_gpt2())
    logits, cache = bridge.run_with_cache(CLEAN)
    torch.testing.assert_close(decoder(CLEAN), logits)
    names = find_hook_points(decoder, ["**"], "transformer_lens")
    with record(decoder, *names, names="transformer_lens") as seen:
        decoder(CLEAN)
    assert len(seen) == len(names) == 31
    for name in names:
        torch.testing.assert_close(seen[name], cache[name], msg=lambda m, n=name: f"{n}: {m}")
    metric = logit_difference(decoder.norm, decoder.unembed, 5, 7)
    streams = patch_streams(decoder, CLEAN, CORRUPTED, metric)
    theirs = patching.get_act_patch_resid_pre(bridge, CORRUPTED, cache, compute_difference)
    torch.testing.assert_close(streams.values, theirs, rtol=1e-4, atol=1e-4)
    heads = patch_parts(decoder, "attention.o:input", CLEAN, CORRUPTED, metric)
    theirs = patching.get_act_patch_attn_head_out_by_pos(
        bridge, CORRUPTED, cache, compute_difference
    )
    torch.testing.assert_close(heads.values.mT, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_hook_functions_of_transformer_lens_have_the_same_effect() -> None:
    """The same functions run with `run_with_hooks` and with `patch`."""
    pytest.importorskip("transformer_lens", reason="tried with transformer-lens 4.3.0")
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
    from transformer_lens.utilities import get_act_name

    model = build_small_gpt2()
    bridge = build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config)
    bridge.enable_compatibility_mode(no_processing=True)
    decoder = describe(build_small_gpt2())
    clean = bridge.run_with_cache(CLEAN)[1]
    seen: list[tuple[str, int]] = []

    def ablate_head(value: Tensor, hook: Any) -> Tensor:
        value[:, :, 1] = 0.0
        return value

    def ablate_head_in_place(value: Tensor, hook: Any) -> None:
        value[:, :, 1] = 0.0

    def restore(stream: Tensor, hook: Any, position: int) -> Tensor:
        stream[:, position] = clean[hook.name][:, position]
        return stream

    def note_name(pattern: Tensor, hook: Any) -> None:
        seen.append((hook.name, hook.layer()))

    for name, function in (
        (get_act_name("v", 1), ablate_head),
        (get_act_name("z", 0), ablate_head_in_place),
        (get_act_name("resid_pre", 1), partial(restore, position=3)),
        (get_act_name("pattern", 1), note_name),
    ):
        expected = bridge.run_with_hooks(CORRUPTED, fwd_hooks=[(name, function)])
        with patch(decoder, {name: function}, names="transformer_lens"):
            torch.testing.assert_close(decoder(CORRUPTED), expected)
    assert seen == [("blocks.1.attn.hook_pattern", 1)] * 2


CLOSE = {"rtol": 1e-3, "atol": 1e-3}


def build_folded_pair() -> tuple[Any, Decoder]:
    """Return TransformerLens's model with folded and centered weights, and the same `Decoder`."""
    pytest.importorskip("transformer_lens", reason="tried with transformer-lens 4.3.0")
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    model = build_small_gpt2()
    bridge = build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config)
    bridge.enable_compatibility_mode()
    return bridge, fold_decoder(describe(build_small_gpt2()))


@torch.no_grad()
def test_direct_logit_attribution_of_transformer_lens_has_the_same_numbers() -> None:
    """The exploratory analysis demo: the accumulated stream, layers and heads."""
    bridge, decoder = build_folded_pair()
    cache = bridge.run_with_cache(CLEAN)[1]
    direction = bridge.W_U[:, 5] - bridge.W_U[:, 7]
    right, wrong = torch.full_like(CLEAN, 5), torch.full_like(CLEAN, 7)
    parts = decoder.components(CLEAN)
    terms = attribution(parts, decoder.norm, decoder.unembed, right, against=wrong).named()
    ours = {name: float(term.expand(CLEAN.shape)[0, -1]) for name, term in terms.items()}

    def project(stack: Tensor) -> list[float]:
        normed = cache.apply_ln_to_stack(stack, layer=-1, pos_slice=-1)
        values: list[float] = (normed @ direction)[:, 0].tolist()
        return values

    heads, names = cache.stack_head_results(layer=-1, pos_slice=-1, return_labels=True)
    for name, value in zip(names, project(heads), strict=True):
        layer, head = name[1:].split("H")
        assert ours[f"head {layer}.{head}"] == pytest.approx(value, abs=1e-3)
    layers, names = cache.decompose_resid(layer=-1, pos_slice=-1, return_labels=True)
    theirs = dict(zip(names, project(layers), strict=True))
    for i in range(2):
        attention = sum(ours[f"head {i}.{head}"] for head in range(3)) + ours[f"attention bias {i}"]
        assert theirs[f"{i}_attn_out"] == pytest.approx(attention, abs=1e-3)
        assert theirs[f"{i}_mlp_out"] == pytest.approx(ours[f"mlp {i}"], abs=1e-3)
    accumulated = project(cache.accumulated_resid(layer=-1, pos_slice=-1))
    assert accumulated[0] == pytest.approx(ours["embed"] + ours["position"], abs=1e-3)
    streams = [name for name in ours if not name.startswith(("norm", "unembed"))]
    assert accumulated[-1] == pytest.approx(sum(ours[name] for name in streams), abs=1e-3)


@torch.no_grad()
def test_patching_demos_of_transformer_lens_have_the_same_numbers() -> None:
    """The activation patching demo: parts by position, and heads at all positions."""
    bridge, decoder = build_folded_pair()
    from transformer_lens import patching

    cache = bridge.run_with_cache(CLEAN)[1]
    metric = logit_difference(decoder.norm, decoder.unembed, 5, 7)
    scans = {
        "attention_out": patching.get_act_patch_attn_out,
        "mlp_out": patching.get_act_patch_mlp_out,
        "attention.q": patching.get_act_patch_attn_head_q_by_pos,
        "attention.k": patching.get_act_patch_attn_head_k_by_pos,
        "attention.v": patching.get_act_patch_attn_head_v_by_pos,
    }
    for part, scan in scans.items():
        values = patch_parts(decoder, part, CLEAN, CORRUPTED, metric).values
        theirs = scan(bridge, CORRUPTED, cache, compute_difference)
        by_position = values.mT if part.startswith("attention.") else values[:, 0]
        torch.testing.assert_close(by_position, theirs, **CLOSE)
    at_all_positions = {
        "hook_z": patching.get_act_patch_attn_head_out_all_pos,
        "hook_pattern": patching.get_act_patch_attn_head_pattern_all_pos,
    }
    for hook, scan in at_all_positions.items():
        theirs = scan(bridge, CORRUPTED, cache, compute_difference)
        for layer, head in itertools.product(range(2), range(3)):
            name = f"blocks.{layer}.attn.{hook}"
            with record(decoder, name, names="transformer_lens") as seen:
                decoder(CLEAN)
            chosen = (slice(None), slice(None), head) if hook == "hook_z" else (slice(None), head)
            new = partial(replaced, chosen, seen[name][chosen])
            with patch(decoder, {name: new}, names="transformer_lens"):
                value = compute_difference(decoder(CORRUPTED))
            torch.testing.assert_close(value, theirs[layer, head], **CLOSE)


def replaced(index: tuple[slice | int, ...], new: Tensor, value: Tensor) -> Tensor:
    value[index] = new
    return value


def test_main_demo_of_transformer_lens_has_the_same_numbers() -> None:
    """Induction scores and the loss without a head; attribution patching with backward hooks."""
    bridge, decoder = build_folded_pair()
    once = torch.randperm(31)[:7]
    tokens = torch.cat([once, once])[None]
    name = "blocks.0.attn.hook_v"

    def ablate(value: Tensor, hook: Any) -> Tensor:
        value[:, :, 1] = 0.0
        return value

    with torch.no_grad():
        cache = bridge.run_with_cache(CLEAN)[1]
        repeated = bridge.run_with_cache(tokens)[1]
        patterns = [repeated["pattern", i] for i in range(2)]
        scores = detect_heads(patterns, tokens, queries=slice(7, None)).scores["induction"]
        for i, pattern in enumerate(patterns):
            # Their mean includes the last token of the first copy, which has no earlier occurrence.
            diagonal = pattern.diagonal(dim1=-2, dim2=-1, offset=1 - 7)[0, :, 1:]
            torch.testing.assert_close(scores[i], diagonal.mean(-1), **CLOSE)
        loss = bridge.run_with_hooks(tokens, return_type="loss", fwd_hooks=[(name, ablate)])
        with patch(decoder, {name: ablate}, names="transformer_lens"):
            logits = decoder(tokens)[0, :-1]
        torch.testing.assert_close(nn.functional.cross_entropy(logits, tokens[0, 1:]), loss)
    corrupted: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    streams = [f"blocks.{i}.hook_resid_pre" for i in range(2)]

    def store(into: dict[str, Tensor], stream: str, value: Tensor, hook: Any) -> None:
        into[stream] = value.detach().clone()

    with bridge.hooks(
        fwd_hooks=[(stream, partial(store, corrupted, stream)) for stream in streams],
        bwd_hooks=[(stream, partial(store, gradients, stream)) for stream in streams],
    ):
        compute_difference(bridge(CORRUPTED)).backward()
    sites = ["blocks.0:input", "blocks.1:input"]
    estimates = attribution_patching(decoder, sites, CLEAN, CORRUPTED, compute_difference)
    for site, stream in zip(sites, streams, strict=True):
        theirs = ((cache[stream] - corrupted[stream]) * gradients[stream]).sum(-1)
        torch.testing.assert_close(estimates[site], theirs, **CLOSE)


@torch.no_grad()
def test_patches_equal_pyvene() -> None:
    pyvene = pytest.importorskip("pyvene", reason="tried with pyvene 0.1.8")
    decoder = describe(build_small_gpt2())
    metric = logit_difference(decoder.norm, decoder.unembed, 5, 7)
    ours = {
        "block_input": patch_streams(decoder, CLEAN, CORRUPTED, metric).values,
        "attention_output": patch_parts(decoder, "attention_out", CLEAN, CORRUPTED, metric).values,
        "mlp_output": patch_parts(decoder, "mlp_out", CLEAN, CORRUPTED, metric).values,
    }
    for component, values in ours.items():
        for layer, row in enumerate(values.flatten(1)):
            change = {"layer": layer, "component": component}
            change["intervention_type"] = pyvene.VanillaIntervention
            theirs = pyvene.IntervenableModel(change, model=build_small_gpt2())
            for position, value in enumerate(row):
                locations = {"sources->base": position}
                prompts = {"input_ids": CORRUPTED}, [{"input_ids": CLEAN}]
                out = theirs(*prompts, unit_locations=locations)[1]
                torch.testing.assert_close(
                    value, compute_difference(out.logits), rtol=1e-4, atol=1e-4
                )


@torch.no_grad()
def test_causal_tracing_of_pyvene_has_the_same_numbers() -> None:
    """Its demo of Meng et al. 2022 adds noise to the first tokens and restores one activation."""
    pyvene = pytest.importorskip("pyvene", reason="tried with pyvene 0.1.8")
    subject = [0, 1, 2]
    noise = 3 * torch.randn(1, 3, 24, generator=torch.Generator().manual_seed(0))

    class NoiseIntervention(
        pyvene.ConstantSourceIntervention, pyvene.LocalistRepresentationIntervention
    ):
        def __init__(self, embed_dim: int, **options: Any) -> None:
            super().__init__()
            self.interchange_dim = embed_dim

        def forward(self, base: Tensor, source: Any = None, subspaces: Any = None) -> Tensor:
            return base + noise

    def add_noise(stream: Tensor) -> Tensor:
        stream[:, subject] += noise
        return stream

    decoder = describe(build_small_gpt2())
    sites = {"block_output": "blocks.*", "mlp_output": "blocks.*.mlp_out"}
    sites["attention_output"] = "blocks.*.attention_out"
    for component, pattern in sites.items():
        with record(decoder, pattern) as clean:
            decoder(CLEAN)
        for layer in range(2):
            model = pyvene.IntervenableModel(
                pyvene.IntervenableConfig(
                    representations=[
                        pyvene.RepresentationConfig(0, "block_input"),
                        pyvene.RepresentationConfig(layer, component),
                    ],
                    intervention_types=[NoiseIntervention, pyvene.VanillaIntervention],
                ),
                build_small_gpt2(),
            )
            site = pattern.replace("*", str(layer))
            for position in range(7):
                at = [[[position]]]
                prompt = {"input_ids": CLEAN}
                locations = {"sources->base": ([None, *at], [[subject], *at])}
                theirs = model(prompt, [None, prompt], locations)[1].logits

                def restore(value: Tensor, site: str = site, position: int = position) -> Tensor:
                    value[:, position] = clean[site][:, position]
                    return value

                with patch(decoder, {"blocks.0:input": add_noise, site: restore}):
                    torch.testing.assert_close(decoder(CLEAN), theirs, rtol=1e-4, atol=1e-4)


def test_factored_matrices_and_composition_equal_transformer_lens() -> None:
    pytest.importorskip("transformer_lens", reason="tried with transformer-lens 4.3.0")
    from transformer_lens.FactoredMatrix import FactoredMatrix
    from transformer_lens.utilities.matrix import composition_scores as theirs

    torch.manual_seed(0)
    ov, qk = (LowRank(torch.randn(3, 4, 10, 3), torch.randn(3, 4, 3, 10)) for _ in range(2))
    # TransformerLens multiplies row vectors.
    their_ov, their_qk = FactoredMatrix(ov.b.mT, ov.a.mT), FactoredMatrix(qk.a, qk.b)
    torch.testing.assert_close(their_ov.norm(), ov.norm())
    torch.testing.assert_close(their_ov.svd()[1], ov.svd()[1])
    ours, other = ov.eigenvalues(), their_ov.eigenvalues
    torch.testing.assert_close(ours.abs().sort(-1)[0], other.abs().sort(-1)[0])
    later = torch.ones(3, 3).triu(1)[:, None, :, None]
    for kind, reader in (("q", their_qk), ("k", their_qk.T), ("v", their_ov)):
        expected = theirs(their_ov, reader) * later
        torch.testing.assert_close(composition_scores(ov, qk, kind=kind), expected)


def test_head_scores_equal_transformer_lens() -> None:
    pytest.importorskip("transformer_lens", reason="tried with transformer-lens 4.3.0")
    from transformer_lens import head_detector as theirs

    torch.manual_seed(0)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 3, 1, 4]])
    future = torch.ones(8, 8).triu(1).bool()
    pattern = torch.randn(1, 5, 8, 8).masked_fill(future, float("-inf")).softmax(-1)
    expected_kinds = detect_heads([pattern], tokens)
    masks = {
        "previous": theirs.get_previous_token_head_detection_pattern(tokens),
        "duplicate": theirs.get_duplicate_token_head_detection_pattern(tokens),
        "induction": theirs.get_induction_head_detection_pattern(tokens),
    }
    for kind, mask in masks.items():
        # TransformerLens divides by all attention, this package by the queries with a target key.
        queries = mask.bool().any(-1).sum()
        for head in range(5):
            fraction = theirs.compute_head_attention_similarity_score(
                pattern[0, head],
                mask,
                exclude_bos=False,
                exclude_current_token=False,
                error_measure="mul",
            )
            expected = fraction * 8 / queries
            assert expected_kinds.scores[kind][0, head].item() == pytest.approx(
                float(expected), rel=1e-4
            )


def test_records_and_patches_equal_nnsight() -> None:
    nnsight = pytest.importorskip("nnsight", reason="tried with nnsight 0.8.1")
    model = build_small_llama()
    traced = nnsight.NNsight(model)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with traced.trace(tokens):
        theirs = traced.model.layers[0].self_attn.output[0].save()
    with torch.no_grad(), record(model, "model.layers.0.self_attn") as seen:
        model(tokens)
    torch.testing.assert_close(seen["model.layers.0.self_attn"], theirs.detach())
    with traced.trace(tokens):
        traced.model.layers[0].mlp.output[:] = 0
        logits = traced.lm_head.output.save()
    with torch.no_grad(), patch(model, {"model.layers.0.mlp": torch.zeros_like}):
        ours = model(tokens).logits
    torch.testing.assert_close(ours, logits.detach())


def test_demos_of_nnsight_have_the_same_numbers() -> None:
    """The computations of its logit lens, activation patching and attribution patching demos."""
    nnsight = pytest.importorskip("nnsight", reason="tried with nnsight 0.8.1")
    model = build_small_llama()
    traced = nnsight.NNsight(model)
    decoder = describe(build_small_llama())
    layers = range(2)
    with torch.no_grad():
        # The probabilities of each layer's stream.
        lens_of = []
        with traced.trace(CLEAN):
            for i in layers:
                stream = traced.model.layers[i].output
                lens_of.append(traced.lm_head(traced.model.norm(stream)).softmax(-1).save())
        with record(decoder, "blocks.*") as seen:
            decoder(CLEAN)
        lens = logit_lens(seen, decoder.norm, decoder.unembed, top=31)
        for ours, theirs in zip(lens.top_probabilities, lens_of, strict=True):
            torch.testing.assert_close(ours, theirs.sort(-1, descending=True)[0])
        # The logit difference after each patch of the stream.
        clean = []
        with traced.trace(CLEAN):
            for i in layers:
                clean.append(traced.model.layers[i].input.save())
        metric = logit_difference(decoder.norm, decoder.unembed, 5, 7)
        values = patch_streams(decoder, CLEAN, CORRUPTED, metric).values
        for i in layers:
            for position in range(7):
                with traced.trace(CORRUPTED):
                    traced.model.layers[i].input[:, position] = clean[i][:, position]
                    logits = traced.lm_head.output.save()
                torch.testing.assert_close(values[i, position], compute_difference(logits))
    # The gradient of the logit difference for the output of each attention.
    before: list[Any] = []
    corrupted: list[Any] = []
    gradients: list[Any] = []
    with traced.trace(CLEAN):
        for i in layers:
            before.append(traced.model.layers[i].self_attn.o_proj.output.save())
    with traced.trace(CORRUPTED):
        for i in layers:
            corrupted.append(traced.model.layers[i].self_attn.o_proj.output.save())
        loss = compute_difference(traced.lm_head.output)
        with loss.backward():
            for i in reversed(layers):
                gradients.insert(0, corrupted[i].grad.save())
    estimates = attribution_patching(
        decoder, ["blocks.*.attention_out"], CLEAN, CORRUPTED, compute_difference
    )
    for i, ours in enumerate(estimates.values()):
        theirs = ((before[i] - corrupted[i]) * gradients[i]).sum(-1)
        torch.testing.assert_close(ours, theirs.detach())


def test_attribution_patching_equals_captum() -> None:
    captum = pytest.importorskip("captum.attr", reason="tried with captum 0.9.0")
    torch.manual_seed(0)
    model = AttentionOnly(vocabulary=9, context=4, d_model=6, layers=2, heads=2).double()
    clean, corrupted = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 5, 3, 4]])
    for layer in range(2):
        site = f"blocks.{layer}"
        theirs = captum.LayerGradientXActivation(
            lambda tokens: model(tokens)[:, -1, 0], model.blocks[layer]
        ).attribute(corrupted)
        with record(model, site) as seen:
            model(clean)
            before = seen[site]
            model(corrupted)
        expected = (theirs / seen[site] * (before - seen[site])).sum(-1)
        ours = attribution_patching(
            model, [site], clean, corrupted, lambda out: out[:, -1, 0].sum()
        )
        torch.testing.assert_close(ours[site], expected)


def test_integrated_gradients_through_patches_equal_captum() -> None:
    captum = pytest.importorskip("captum.attr", reason="tried with captum 0.9.0")
    torch.manual_seed(0)
    model = AttentionOnly(vocabulary=9, context=4, d_model=6, layers=2, heads=2).double()
    clean, corrupted = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 5, 3, 4]])
    integrated = captum.LayerIntegratedGradients(
        lambda tokens: model(tokens)[:, -1, 0], model.blocks[0]
    )
    theirs = integrated.attribute(clean, baselines=corrupted, n_steps=5, method="gausslegendre")
    with record(model, "blocks.0") as seen:
        model(clean)
        end = seen["blocks.0"]
        model(corrupted)
    step = end - seen["blocks.0"]
    ours = torch.zeros_like(step)
    for node, weight in zip(*numpy.polynomial.legendre.leggauss(5), strict=True):
        point = (seen["blocks.0"] + (node + 1) / 2 * step).requires_grad_()
        with patch(model, {"blocks.0": point}):
            (gradient,) = torch.autograd.grad(model(corrupted)[0, -1, 0], point)
        ours += weight / 2 * gradient * step
    torch.testing.assert_close(ours, theirs)


@pytest.mark.timing
def test_composition_is_faster_with_a_hundredth_of_the_memory() -> None:
    pytest.importorskip("transformer_lens", reason="tried with transformer-lens 4.3.0")
    row = compare_with_transformer_lens()
    assert row["error"] < 1e-4
    # Every processor must reach 15.
    assert_at_least("interp: TransformerLens over composition", 15, row["ratio_p50"], margin=0)
    memory = row["peer_mib"] / row["ours_mib"]
    assert_at_least("interp: memory of TransformerLens over composition", 100, memory)
