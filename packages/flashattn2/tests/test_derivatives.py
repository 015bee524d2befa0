"""First derivatives in reverse mode are right; all other derivatives are refused."""

import pytest
import torch
from flashattn2 import FlashAttentionTorch, attention_reference, flash_attention
from flashattn2.backends import tiled
from torch.autograd import forward_ad, gradcheck

# torch's own forward mode still scripts a few of its rules.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

OPTIONS = [
    {},
    {"is_causal": True, "softcap": 1.5},
    {"window": (2, 1), "scale": 0.8},
    {"is_causal": True, "window": (4, None), "softcap": 0.9},
]
SECOND = "second derivatives are not supported; use attention_reference"
FORWARD = "forward-mode derivatives are not supported; use attention_reference"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "TILE", 4)


def inputs(seq_q=7, seq_k=6):
    shapes = ((1, 2, seq_q, 3), (1, 1, seq_k, 3), (1, 1, seq_k, 3))
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(options):
    def run(q, k, v):
        out, lse = flash_attention(q, k, v, return_lse=True, backend="torch", **options)
        # A row that sees no key has a log-sum-exp of -inf, of which no difference can be taken.
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert gradcheck(run, inputs(), fast_mode=True)


@pytest.mark.parametrize("backend", ["torch", "aten"])
def test_torch_func_differentiates_in_reverse_mode(backend):
    q, k, v = inputs(6, 6)

    def loss(attend):
        return lambda q, k, v: attend(q, k, v, is_causal=True).square().sum()

    ours = loss(lambda *a, **o: flash_attention(*a, **o, backend=backend))
    got = torch.func.grad(ours, argnums=(0, 1, 2))(q, k, v)
    expected = torch.func.grad(loss(attention_reference), argnums=(0, 1, 2))(q, k, v)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", ["torch", "aten", "paper"])
@pytest.mark.parametrize("method", ["grad", "backward"])
def test_second_derivative_is_an_error(backend, method):
    """With `once_differentiable`, `torch.autograd.grad` would find no path to the inputs."""
    for seq in (5, 5, 20):  # the second call takes the fast path
        q = torch.randn(1, 2, seq, 3, dtype=torch.float64, requires_grad=True)
        if backend == "paper":
            out = FlashAttentionTorch.apply(q[0], q[0], q[0])
        else:
            out = flash_attention(q, q, q, backend=backend)
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match=SECOND):
            torch.autograd.grad(first.sum(), q) if method == "grad" else first.sum().backward()


def moved(function, q):
    return torch.func.jvp(function, (q,), (torch.ones_like(q),))[1]


def moved_dual(function, q):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(q, torch.ones_like(q)))


FORWARD_MODES = {
    "dual": moved_dual,
    "jvp": moved,
    "jacfwd": lambda function, q: torch.func.jacfwd(function)(q),
    "grad of jvp": lambda function, q: torch.func.grad(lambda x: moved(function, x))(q),
    "jvp of grad": lambda function, q: moved(torch.func.grad(function), q),
}


@pytest.mark.parametrize("transform", FORWARD_MODES.values(), ids=FORWARD_MODES)
@pytest.mark.parametrize("options", [{}, {"window": 3}], ids=str)
def test_forward_mode_is_refused(options, transform):
    def loss(q):
        return flash_attention(q, q, q, **options).square().sum()

    for seq in (5, 20, 20):  # the second call of 20 keys takes the fast path
        with pytest.raises(NotImplementedError, match=FORWARD):
            transform(loss, torch.randn(1, 2, seq, 3))


@pytest.mark.parametrize("seq", [5, 20])
def test_cotangents_with_tangents_are_refused(seq):
    """The kernels would drop the tangents of a backward pass without an error."""
    q = torch.randn(1, 2, seq, 3, requires_grad=True)
    with forward_ad.dual_level():
        out = flash_attention(q, q, q)
        dual = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match=FORWARD):
            torch.autograd.grad(out, q, dual)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_forward_mode_is_refused(fullgraph):
    """An operator in a compiled graph would drop the tangents without an error."""
    q, moved = torch.randn(2, 1, 2, 20, 3)

    def tangent(q, moved):
        return torch.func.jvp(lambda q: flash_attention(q, q, q), (q,), (moved,))[1]

    torch._dynamo.reset()
    with pytest.raises(Exception, match="forward-mode derivatives are not supported"):
        torch.compile(tangent, fullgraph=fullgraph, backend="aot_eager")(q, moved)


@pytest.mark.parametrize(
    "transform", [torch.func.jacrev, torch.func.hessian, torch.vmap], ids=lambda f: f.__name__
)
def test_vmap_is_refused(transform):
    q = torch.randn(3, 2, 2, 5, 3)
    if transform is not torch.vmap:
        q = q[0]
    with pytest.raises(NotImplementedError, match="not supported"):
        transform(lambda x: flash_attention(x, x, x))(q)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_batched_gradients_are_refused(interpreter, backend):
    """The kernels cannot read the memory of a batch of cotangents."""
    q = torch.randn(1, 2, 5, 16, requires_grad=True)
    out = flash_attention(q, q, q, backend=backend)
    with pytest.raises(NotImplementedError, match="batched gradients, is not supported"):
        torch.autograd.grad(out, q, torch.randn(3, *out.shape), is_grads_batched=True)


def test_batched_gradients_of_the_cpu_kernel_equal_separate_gradients():
    q = torch.randn(1, 2, 20, 16, requires_grad=True)
    out = flash_attention(q, q, q, is_causal=True)
    cotangents = torch.randn(3, *out.shape)
    (batched,) = torch.autograd.grad(out, q, cotangents, is_grads_batched=True, retain_graph=True)
    for cotangent, ours in zip(cotangents, batched, strict=True):
        (expected,) = torch.autograd.grad(out, q, cotangent, retain_graph=True)
        torch.testing.assert_close(ours, expected)
