"""The reference equals torch's attention in float64."""

import torch
import torch.nn.functional as F
from flashattn2 import attention_reference
from hypothesis import given, settings
from hypothesis import strategies as st


@given(
    seq_q=st.integers(1, 12),
    seq_k=st.integers(1, 12),
    group=st.sampled_from((1, 3)),
    is_causal=st.booleans(),
    left=st.none() | st.integers(0, 6),
    right=st.none() | st.integers(0, 6),
)
@settings(max_examples=30, deadline=None)
def test_reference_equals_sdpa_with_the_band_as_mask(seq_q, seq_k, group, is_causal, left, right):
    q = torch.randn(2, 2 * group, seq_q, 5, dtype=torch.float64)
    k, v = (torch.randn(2, 2, seq_k, 5, dtype=torch.float64) for _ in "kv")
    distance = torch.arange(seq_k) - torch.arange(seq_q)[:, None] - (seq_k - seq_q)
    seen = torch.ones(seq_q, seq_k, dtype=torch.bool)
    if is_causal:
        seen &= distance <= 0
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    out, lse = attention_reference(
        q, k, v, is_causal=is_causal, window=(left, right), scale=0.3, return_lse=True
    )
    expected = F.scaled_dot_product_attention(q, k, v, seen, scale=0.3, enable_gqa=True)
    sees_some = seen.any(-1)
    torch.testing.assert_close(out[:, :, sees_some], expected[:, :, sees_some])
    assert (out[:, :, ~sees_some] == 0).all()
    assert (lse[:, :, ~sees_some] == -torch.inf).all()
    assert lse[:, :, sees_some].isfinite().all()


def test_softcap_bounds_the_scores():
    q, k, v = (torch.randn(1, 6, 8, dtype=torch.float64) for _ in "qkv")
    scores = 1.5 * torch.tanh((q @ k.mT) * 0.9 / 1.5)
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(attention_reference(q, k, v, scale=0.9, softcap=1.5), expected)
