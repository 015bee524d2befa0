"""The minimal implementation is attention, and the other implementations agree with it."""

import pytest
import torch
from flashattn2 import flash_attention, plain

LENGTHS = [(1, 1), (64, 64), (130, 130), (70, 200), (200, 70)]


def draw(seq_q, seq_k, dim=16, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seq_q)
    shapes = (2, seq_q, dim), (2, seq_k, dim), (2, seq_k, dim)
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def run_with_gradients(function, inputs, **options):
    out = function(*inputs, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad(out, inputs, weights)


def run_plain_attention(q, k, v, is_causal):
    return plain.PlainAttention.apply(q, k, v, is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_plain_tiles_compute_attention_by_its_definition(lengths, is_causal):
    if is_causal and len({*lengths}) > 1:
        lengths = (lengths[0], lengths[0])
    inputs = draw(*lengths)
    ours = run_with_gradients(run_plain_attention, inputs, is_causal=is_causal)
    expected = run_with_gradients(plain.attention, inputs, is_causal=is_causal)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_package_computes_what_plain_computes(backend, is_causal):
    inputs = draw(300, 300)
    ours = run_with_gradients(flash_attention, inputs, is_causal=is_causal, backend=backend)
    expected = run_with_gradients(run_plain_attention, inputs, is_causal=is_causal)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_plain_saves_one_number_per_row():
    inputs = draw(130, 130)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        plain.PlainAttention.apply(*inputs, True)
    assert sorted(tuple(x.shape) for x in saved) == [(2, 130)] + [(2, 130, 16)] * 4
