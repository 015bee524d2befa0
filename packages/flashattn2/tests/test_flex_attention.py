"""An independent reference: torch's FlexAttention, in the cases of its test suite.

FlexAttention has no backward pass on a CPU, so outputs and log-sum-exps are compared.  Its masks
are written as functions of two positions, without code of flashattn2.
"""

import pytest
import torch
from flashattn2 import flash_attention, flash_attention_varlen, flash_attention_with_kvcache
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    flex_attention,
)

pytestmark = [
    pytest.mark.exhaustive,
    # It says that it is slow unless it is compiled.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def band(left, right, shift):
    def seen(b, h, i, j):
        position = i + shift
        return (j >= position - left) & (j <= position + right)

    return seen


def judged(q, k, v, *, softcap=None, mask=None, **options):
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


def same(ours, theirs):
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
        mask = band(10**6, 0, shift)
    elif window:
        mask = band(*window, shift)
    ours = flash_attention(
        q, k, v, is_causal=causal, window=window, return_lse=True, backend=backend, **options
    )
    same(ours, judged(q, k, v, mask=mask, **options))


def test_packed_sequences_equal_flex_attention_documents():
    lengths = torch.tensor([17, 1, 64, 46])
    document = torch.repeat_interleave(torch.arange(4), lengths)
    q, k, v = (torch.randn(1, 4, 128, 32) for _ in "qkv")

    def together(b, h, i, j):
        return document[i] == document[j]

    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    for causal in (False, True):
        ours, lse = flash_attention_varlen(
            *(x[0].transpose(0, 1) for x in (q, k, v)), cu, cu, is_causal=causal, return_lse=True
        )
        mask = and_masks(together, band(10**6, 0, 0)) if causal else together
        same((ours.transpose(0, 1)[None], lse[None]), judged(q, k, v, mask=mask))


def test_rows_that_see_no_key_have_zero_output_and_gradient():
    q = torch.randn(1, 2, 40, 16)
    k, v = torch.randn(2, 1, 2, 25, 16)
    ours = flash_attention(q, k, v, is_causal=True, return_lse=True)
    same(ours, judged(q, k, v, mask=band(10**6, 0, -15)))


def test_paged_cache_equals_flex_attention():
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    lengths, page = [70, 33, 128], 16
    pages = sum(-(-n // page) for n in lengths)
    q = torch.randn(3, 4, 1, 16)
    k, v = torch.randn(3, 2, 128, 16), torch.randn(3, 2, 128, 16)
    cache = PagedAttention(pages + 4, page, 3, device="cpu")
    for b, n in enumerate(lengths):
        cache.reserve(torch.tensor(b), torch.tensor(n))
    flat_k, flat_v = (torch.zeros(1, 2, (pages + 4) * page, 16) for _ in "kv")
    for b, n in enumerate(lengths):
        cache.assign(
            torch.tensor([b]),
            torch.arange(n)[None],
            k[b : b + 1, :, :n],
            v[b : b + 1, :, :n],
            flat_k,
            flat_v,
        )
    # Theirs is one row of pages, ours a tensor of them.
    ours_k, ours_v = (
        x[0].unflatten(1, (pages + 4, page)).transpose(0, 1) for x in (flat_k, flat_v)
    )
    table = cache.page_table[:, : 128 // page].int()
    out = flash_attention_with_kvcache(
        q, ours_k, ours_v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), block_table=table
    )
    counts = torch.tensor(lengths)

    def filled(b, h, i, j):
        return j < counts[b]

    block_mask = create_block_mask(filled, 3, None, 1, 128, device="cpu", BLOCK_SIZE=page)
    moved = cache.convert_logical_block_mask(block_mask)
    theirs = flex_attention(q, flat_k, flat_v, block_mask=moved, enable_gqa=True)
    torch.testing.assert_close(out, theirs, atol=2e-5, rtol=2e-5)
