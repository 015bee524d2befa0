"""Random models for tests."""

from dataclasses import replace

from accounting import Transformer
from accounting.model.records import Experts, Window
from hypothesis import strategies as st


def draw_shapes() -> st.SearchStrategy[Transformer]:
    """Return random models with optional grouped queries, experts, windows, biases and ties."""

    @st.composite
    def build(draw: st.DrawFn) -> Transformer:
        layers = draw(st.integers(1, 5))
        group = draw(st.integers(1, 3))
        kv = draw(st.integers(1, 3))
        experts = draw(st.booleans())
        return Transformer(
            layers=layers,
            d_model=draw(st.integers(1, 40)),
            heads=group * kv,
            kv_heads=kv,
            head_dim=draw(st.integers(1, 16)),
            d_ff=draw(st.integers(1, 64)),
            vocab_size=draw(st.integers(0, 99)),
            gated_mlp=draw(st.booleans()),
            norm=draw(st.sampled_from(["rmsnorm", "layernorm", "none"])),
            tied=draw(st.booleans()),
            qkv_bias=draw(st.booleans()),
            mlp_bias=draw(st.booleans()),
            experts=Experts(count=4, per_token=2, layers=tuple(range(1, layers)) or None)
            if experts
            else None,
            window=draw(st.sampled_from([None, Window(size=5)])),
        )

    return build()


def make_divisible(shape: Transformer) -> Transformer:
    """Return the shape with sizes that four devices can split."""
    return replace(
        shape,
        layers=4,
        heads=shape.heads * 4,
        kv_heads=shape.kv_heads * 4,
        d_ff=shape.d_ff * 4,
        experts=Experts(count=4, per_token=2, width=shape.d_ff * 4, layers=(1, 2))
        if shape.experts
        else None,
        attention_layers=None,
        mlp_layers=None,
        vocab_size=shape.vocab_size * 4,
        window=None,
    )
