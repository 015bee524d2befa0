import torch
from accounting import Experts, Transformer, parameters
from hypothesis import given, settings
from random_shapes import draw_shapes
from torch import nn


def test_attention_and_mlp_equal_torch_layers() -> None:
    block = nn.TransformerEncoderLayer(24, 4, 56, device="meta")
    ours = Transformer(
        layers=1,
        d_model=24,
        heads=4,
        d_ff=56,
        vocab_size=0,
        gated_mlp=False,
        norm="layernorm",
        final_norm=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )
    assert parameters(ours).total == sum(p.numel() for p in block.parameters())


@settings(deadline=None, max_examples=30)
@given(draw_shapes())
def test_every_line_is_the_sum_or_the_product_that_it_prints(shape: Transformer) -> None:
    for active in (False, True):
        counted = parameters(shape, active=active)
        assert counted.total == sum(leaf.total for leaf in counted.leaves())
        assert counted.to_dict()["value"] == counted.total
        for _, _, value, why in counted.lines():
            if "×" in why:
                factors = [int(f.split()[0].replace(",", "")) for f in why.split(" × ")]
                assert value == torch.tensor(factors).prod()


@settings(deadline=None, max_examples=30)
@given(draw_shapes())
def test_active_is_all_without_the_experts_not_chosen(shape: Transformer) -> None:
    everything, active = parameters(shape).total, parameters(shape, active=True).total
    if shape.experts is None:
        assert everything == active
        return
    idle = (shape.experts.count - shape.experts.per_token) * len(shape.expert_layers)
    width = shape.experts.width
    bias = (shape.mlp_matrices - 1) * width + shape.d_model if shape.mlp_bias else 0
    assert everything - active == idle * (shape.mlp_matrices * shape.d_model * width + bias)


def test_path_names_one_part_and_is_tested_like_it_is_read() -> None:
    experts = Experts(count=4, per_token=2, shared=64, shared_gate=True)
    model = Transformer(layers=2, d_model=64, heads=4, vocab_size=100, experts=experts)
    counted = parameters(model)
    assert "attention/query" in counted
    assert "attention/gate" not in counted
    assert "query" not in counted
    assert "attention/query/x" not in counted
    names = [part.name for part in counted["experts"]]
    assert len(set(names)) == len(names)
