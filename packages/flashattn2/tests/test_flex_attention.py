"""An independent reference: torch's FlexAttention, in the cases of its test suite.

FlexAttention has no backward pass on a CPU, so outputs and log-sum-exps are compared.  Its masks
are written as functions of two positions, without code of flashattn2.
"""

import pytest
import torch
from flashattn2 import flash_attention
from torch.nn.attention.flex_attention import (
    AuxRequest,
    create_block_mask,
    flex_attention,
)

pytestmark = [
    pytest.mark.exhaustive,
    # It says that it is slow unless it is compiled.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def build_band(left, right, shift):
    def seen(b, h, i, j):
        position = i + shift
        return (j >= position - left) & (j <= position + right)

    return seen


def compute_flex_attention(q, k, v, *, softcap=None, mask=None, **options):
    """Return the output and log-sum-exp of FlexAttention."""
    block_mask = None
    if mask is not None:
        block_mask = create_block_mask(
            mask, None, None, q.shape[2], k.shape[2], device="cpu", BLOCK_SIZE=32
        )

    def cap(spec, b, h, i, j):
        return softcap * torch.tanh(spec / softcap)

    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=cap if softcap else None,
        block_mask=block_mask,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
        **options,
    )
    return out, aux.lse


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("heads", "seq", "dims", "strided"),
    [((4, 4), (128, 128), (64, 64), False), ((4, 2), (100, 100), (16, 32), True),
     ((4, 1), (64, 200), (64, 64), True), ((4, 2), (31, 277), (16, 32), False),
     ((4, 4), (1, 130), (64, 64), False)],
)  # fmt: skip
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (20, 0)}, {"window": (13, 40)}, {"softcap": 3.0},
     {"causal": True, "softcap": 3.0, "scale": 0.3}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_attention_equals_flex_attention(heads, seq, dims, strided, options, backend):
    q_shape, k_shape = (2, heads[0], seq[0], dims[0]), (2, heads[1], seq[1], dims[0])
    shapes = q_shape, k_shape, (*k_shape[:3], dims[1])
    if strided:
        q, k, v = (torch.randn(b, s, h, d).transpose(1, 2) for b, h, s, d in shapes)
    else:
        q, k, v = (torch.randn(shape) for shape in shapes)
    shift = seq[1] - seq[0]
    options = dict(options)
    causal, window = options.pop("causal", False), options.pop("window", None)
    mask = None
    if causal:
        mask = build_band(10**6, 0, shift)
    elif window:
        mask = build_band(*window, shift)
    ours = flash_attention(
        q, k, v, is_causal=causal, window=window, return_lse=True, backend=backend, **options
    )
    assert_same(ours, compute_flex_attention(q, k, v, mask=mask, **options))
