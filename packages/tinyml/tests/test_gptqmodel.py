"""GPTQ beside GPTQModel's own code: the perplexity of a small trained Llama."""

import copy
import sysconfig
from pathlib import Path

import pytest
import torch
from tinyml import gptq, quantize
from torch import nn

pytestmark = pytest.mark.exhaustive
LENGTH = 64
#: Layers that receive the same inputs, in the order in which a block runs them.
STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


@pytest.fixture(scope="module")
def trained():
    """Return a Llama trained on Python source, calibration batches and held-out text, as bytes."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    text = b"".join(path.read_bytes() for path in files)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    train, held_out = data.split([len(data) * 9 // 10, len(data) - len(data) * 9 // 10])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(120):
        starts = torch.randint(len(train) - LENGTH, (8,)).tolist()
        tokens = torch.stack([train[start : start + LENGTH] for start in starts])
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    batches = train[: 128 * LENGTH].view(8, 16, LENGTH)
    return model.eval(), list(batches), held_out[: 256 * LENGTH].view(-1, LENGTH)


@torch.no_grad()
def compute_perplexity(model, tokens):
    return float(model(tokens, labels=tokens).loss.exp())


@torch.no_grad()
def round_by_gptqmodel(model, batches, bits, activation_order):
    pytest.importorskip("gptqmodel", reason="needs GPTQModel")
    from gptqmodel import quantization
    from gptqmodel.quantization.gptq import GPTQ

    config = quantization.QuantizeConfig(
        bits=bits,
        group_size=32,
        sym=True,
        damp_percent=0.01,
        desc_act=activation_order,
        act_group_aware=False,
    )
    model = copy.deepcopy(model)
    for block in model.model.layers:
        for names in STAGES:
            solvers = {}
            handles = []
            for name in names:
                layer = block.get_submodule(name)
                solver = solvers[layer] = GPTQ(layer, copy.deepcopy(config))
                solver.quantizer.configure(perchannel=True)
                handles.append(
                    layer.register_forward_hook(
                        lambda _, inputs, outputs, solver=solver: solver.add_batch(
                            inputs[0], outputs
                        )
                    )
                )
            for batch in batches:
                model(batch)
            for handle in handles:
                handle.remove()
            for layer, solver in solvers.items():
                layer.weight.data = solver.quantize()[0].to(layer.weight)
    return model


@pytest.mark.filterwarnings("ignore")  # GPTQModel and its dependencies warn of options
@pytest.mark.parametrize("activation_order", [False, True])
@pytest.mark.parametrize("bits", [2, 3])
def test_the_perplexity_is_that_of_gptqmodel(trained, bits, activation_order):
    model, batches, held_out = trained
    options = {"group_size": 32, "protect": ["lm_head"]}
    ours = compute_perplexity(
        gptq(model, batches, bits, activation_order=activation_order, **options), held_out
    )
    theirs = compute_perplexity(
        round_by_gptqmodel(model, batches, bits, activation_order), held_out
    )
    nearest = compute_perplexity(quantize(model, bits, layers=[nn.Linear], **options), held_out)
    exact = compute_perplexity(model, held_out)
    print(f"{exact:.3f} float, {nearest:.3f} nearest, {theirs:.3f} GPTQModel, {ours:.3f} ours")
    assert ours - exact < 0.8 * (nearest - exact)
    assert ours < 1.02 * theirs
