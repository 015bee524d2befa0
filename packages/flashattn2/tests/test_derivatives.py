"""Forward mode and the double backward of the tiled version, against finite differences."""

import functools

import pytest
import torch
from flashattn2 import attention_reference, flash_attention, sdpa
from flashattn2.backends import tiled
from torch.autograd import forward_ad, gradcheck, gradgradcheck

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


# The fast mode compares random projections of the Jacobian, the other mode every element.
FAST_MODES = [True, pytest.param(False, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("fast_mode", FAST_MODES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck_in_both_modes(options, fast_mode):
    run = attention(options)
    assert gradcheck(run, inputs(), check_forward_ad=True, fast_mode=fast_mode)


@pytest.mark.parametrize("fast_mode", FAST_MODES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradgradcheck(options, fast_mode):
    assert gradgradcheck(attention(options), inputs(), fast_mode=fast_mode)


def test_aten_backend_has_the_same_derivatives():
    run = attention({"is_causal": True}, "aten")
    assert gradcheck(run, inputs(6, 6), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(run, inputs(6, 6), fast_mode=True)


@pytest.mark.parametrize("backend", ["torch", "aten"])
def test_torch_func_differentiates_in_reverse_mode(backend):
    q, k, v = inputs(6, 6)

    def loss(attend):
        return lambda q, k, v: attend(q, k, v, is_causal=True).square().sum()

    ours = loss(lambda *a, **o: flash_attention(*a, **o, backend=backend))
    got = torch.func.grad(ours, argnums=(0, 1, 2))(q, k, v)
    expected = torch.func.grad(loss(attention_reference), argnums=(0, 1, 2))(q, k, v)
    torch.testing.assert_close(got, expected)


def test_torch_func_differentiates_in_forward_mode():
    q, k, v = inputs()
    tangents = tuple(torch.randn_like(x) for x in (q, k, v))

    def reference(q, k, v):
        return attention_reference(q, k, v, is_causal=True)

    def ours(q, k, v):
        return flash_attention(q, k, v, is_causal=True, backend="torch")

    _, expected = torch.func.jvp(reference, (q, k, v), tangents)
    _, got = torch.func.jvp(ours, (q, k, v), tangents)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", ["torch", "aten"])
@pytest.mark.parametrize("method", ["grad", "backward"])
def test_third_derivative_is_an_error(backend, method):
    """With `once_differentiable`, `torch.autograd.grad` would find no path to the inputs."""
    q = torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    out = flash_attention(q, q, q, backend=backend)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(
        NotImplementedError, match="third derivatives are not supported; use attention_reference"
    ):
        torch.autograd.grad(second.sum(), q) if method == "grad" else second.sum().backward()


@pytest.mark.parametrize("backend", ["torch", "aten"])
@pytest.mark.parametrize("layout", ["heads first", "sequence first"])
def test_forward_mode_takes_any_layout_and_values_of_another_head_dim(backend, layout):
    for v_dim in (3, 2):
        q, k, v = (torch.randn(2, 5, 2, dim, dtype=torch.float64) for dim in (3, 3, v_dim))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if layout == "heads first":
            q, k, v = (x.contiguous() for x in (q, k, v))
        moved = torch.randn_like(q)
        results = []
        for function in (
            lambda *x: flash_attention(*x, is_causal=True, backend=backend, return_lse=True),
            lambda *x: attention_reference(*x, is_causal=True, return_lse=True),
        ):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(q, moved)
                results.append([forward_ad.unpack_dual(x).tangent for x in function(dual, k, v)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_forward_within_backward_is_right_and_backward_within_forward_refused():
    q = torch.randn(1, 2, 5, 3, dtype=torch.float64)
    moved = torch.randn_like(q)

    def loss(function):
        return lambda q: function(q, q, q, is_causal=True).square().sum()

    def moving(f):
        return torch.func.grad(lambda q: torch.func.jvp(f, (q,), (moved,))[1])(q)

    torch.testing.assert_close(moving(loss(flash_attention)), moving(loss(attention_reference)))
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(torch.func.grad(loss(flash_attention)), (q,), (moved,))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 3}], ids=str)
def test_gradients_of_dual_numbers_are_refused(options, create_graph):
    """The operators would drop the tangents of a backward pass without an error."""
    for seq in (5, 20, 20):  # the second call of 20 keys takes the fast path
        leaf = torch.randn(1, 2, seq, 3, requires_grad=True)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(leaf, torch.ones_like(leaf))
            out = flash_attention(dual, dual, dual, **options)
            with pytest.raises(NotImplementedError, match="cannot differentiate a backward pass"):
                torch.autograd.grad(out.sum(), dual, create_graph=create_graph)


@pytest.mark.parametrize("options", [{}, {"window": 3}], ids=str)
def test_compiled_forward_mode_is_right_or_refused(options):
    """An operator in a compiled graph would drop the tangents without an error."""
    q, moved = torch.randn(2, 1, 2, 20, 3)

    def tangent(q, moved):
        return torch.func.jvp(lambda q: flash_attention(q, q, q, **options), (q,), (moved,))[1]

    expected = tangent(q, moved)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(tangent, backend="aot_eager")(q, moved), expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="forward-mode derivatives are not"):
        torch.compile(tangent, fullgraph=True, backend="aot_eager")(q, moved)


@pytest.mark.parametrize("backend", ["torch", "aten"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_jacobians_of_forward_mode_equal_the_reference(backend, is_causal):
    q, k, v = (x.detach() for x in inputs(6, 6))

    def jacobians(function, **options):
        run = functools.partial(function, is_causal=is_causal, **options)
        return torch.func.jacfwd(run, argnums=(0, 1, 2))(q, k, v)

    ours, expected = jacobians(flash_attention, backend=backend), jacobians(attention_reference)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (torch.vmap, "the mapped dimension part of the batch"),
        (lambda f: torch.func.jacrev(torch.func.jacrev(f)), "second derivatives by jacrev"),
        (torch.func.hessian, "forward mode cannot differentiate"),
    ],
    ids=["vmap", "jacrev of jacrev", "hessian"],
)
def test_vmap_is_refused(transform, message):
    q = torch.randn(2, 2, 2, 5, 3)
    if transform is not torch.vmap:
        q = q[0]
    with pytest.raises(NotImplementedError, match=message):
        transform(lambda x: flash_attention(x, x, x))(q)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_jacobians_of_reverse_mode_equal_the_reference(backend):
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 4, 4)

    def run(q, k):
        return flash_attention(q, k, k, window=(1, 0), return_lse=True, backend=backend)

    def expected(q, k):
        return attention_reference(q, k, k, window=(1, 0), return_lse=True)

    for results in zip(*(torch.func.jacrev(f, (0, 1))(q, k) for f in (run, expected)), strict=True):
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    jacobians = [
        torch.func.jacrev(f)(q)
        for f in (lambda x: sdpa(x, x, x), lambda x: attention_reference(x, x, x))
    ]
    torch.testing.assert_close(*jacobians, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_batched_gradients_are_refused(interpreter, backend):
    """The kernels cannot read the memory of a batch of cotangents or tangents."""
    q = torch.randn(1, 2, 5, 16, requires_grad=True)

    def run(q):
        return flash_attention(q, q, q, backend=backend)

    out = run(q)
    cotangents = torch.randn(3, *out.shape)
    message = "and with it batched gradients"
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.grad(out, q, cotangents, is_grads_batched=True)
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.functional.jacobian(run, q, vectorize=True, strategy="forward-mode")


def test_batched_gradients_of_the_cpu_kernel_equal_separate_gradients():
    q = torch.randn(1, 2, 20, 16, requires_grad=True)
    out = flash_attention(q, q, q, is_causal=True)
    cotangents = torch.randn(3, *out.shape)
    (batched,) = torch.autograd.grad(out, q, cotangents, is_grads_batched=True, retain_graph=True)
    for cotangent, ours in zip(cotangents, batched, strict=True):
        (expected,) = torch.autograd.grad(out, q, cotangent, retain_graph=True)
        torch.testing.assert_close(ours, expected)
