"""Tests that compare the package with plain.py."""

from pathlib import Path

from accounting import Plan, Transformer, communication, flops, kv_cache, parameters, plain
from accounting.memory.activations import count_activation_bytes
from accounting.memory.states import count_state_bytes
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 9), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4),
    st.integers(1, 99), st.integers(1, 99), st.integers(1, 5), st.integers(1, 40),
)  # fmt: skip
def test_package_equals_minimal_implementation(
    layers: int, width: int, group: int, kv: int, d_ff: int, vocab: int, batch: int, seq: int
) -> None:
    heads = group * kv
    d = heads * width
    sizes = (layers, d, heads, kv, d_ff, vocab)
    model = Transformer(
        layers=layers, d_model=d, heads=heads, kv_heads=kv, d_ff=d_ff, vocab_size=vocab
    )
    count = plain.parameters(*sizes)
    assert parameters(model).total == count
    assert flops(model, batch=batch, seq=seq).total == plain.flops(*sizes, batch, seq)
    saved = count_activation_bytes(model, batch=batch, seq=seq, precision="bf16")
    assert saved.total == plain.count_activation_bytes(*sizes[:5], batch * seq)
    cached = kv_cache(model, seq=seq, batch=batch)
    assert cached.total == plain.count_kv_cache_bytes(*sizes[:4], batch * seq)
    for zero in range(4):
        assert count_state_bytes(count, data=7, zero=zero).total == plain.count_state_bytes(
            count, 7, zero
        )
        wire = communication(model, Plan(data=4, zero=zero)).wire.total
        assert wire == plain.count_data_parallel_bytes(count, 4, zero, ends=(2 * vocab + 1) * d)


def test_the_plain_file_is_short_and_needs_nothing() -> None:
    text = Path(plain.__file__).read_text()
    assert len(text.splitlines()) <= 120
    imports = [line for line in text.splitlines() if line.startswith(("import", "from"))]
    assert imports == ["from math import ceil"]
