"""Forward mode and the double backward of the tiled version, against finite differences."""

import pytest
import torch
from flashattn2 import attention_reference, flash_attention, tiled
from torch.autograd import gradcheck, gradgradcheck

# torch's own forward mode still scripts a few of its rules.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

OPTIONS = [
    {},
    {"is_causal": True, "softcap": 1.5},
    {"window": (2, 1), "scale": 0.8},
    {"is_causal": True, "window": (4, None), "softcap": 0.9},
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "TILE", 4)


def inputs(seq_q=7, seq_k=6):
    shapes = ((1, 2, seq_q, 3), (1, 1, seq_k, 3), (1, 1, seq_k, 3))
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def attention(options, backend="torch"):
    def run(q, k, v):
        out, lse = flash_attention(q, k, v, return_lse=True, backend=backend, **options)
        # A row that sees no key has a log-sum-exp of -inf, of which no difference can be taken.
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return run


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck_in_both_modes(options):
    assert gradcheck(attention(options), inputs(), check_forward_ad=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradgradcheck(options):
    assert gradgradcheck(attention(options), inputs())


def test_torch_s_cpu_kernel_gets_the_same_derivatives():
    run = attention({"is_causal": True}, "aten")
    assert gradcheck(run, inputs(6, 6), check_forward_ad=True)
    assert gradgradcheck(run, inputs(6, 6))


@pytest.mark.parametrize("backend", ["torch", "aten"])
def test_torch_func_differentiates_it_backward(backend):
    q, k, v = inputs(6, 6)

    def loss(attend):
        return lambda q, k, v: attend(q, k, v, is_causal=True).square().sum()

    ours = loss(lambda *a, **o: flash_attention(*a, **o, backend=backend))
    got = torch.func.grad(ours, argnums=(0, 1, 2))(q, k, v)
    expected = torch.func.grad(loss(attention_reference), argnums=(0, 1, 2))(q, k, v)
    torch.testing.assert_close(got, expected)


def test_torch_func_differentiates_it_forward():
    q, k, v = inputs()
    tangents = tuple(torch.randn_like(x) for x in (q, k, v))

    def reference(q, k, v):
        return attention_reference(q, k, v, is_causal=True)

    def ours(q, k, v):
        return flash_attention(q, k, v, is_causal=True, backend="torch")

    _, expected = torch.func.jvp(reference, (q, k, v), tangents)
    _, got = torch.func.jvp(ours, (q, k, v), tangents)
    torch.testing.assert_close(got, expected)
