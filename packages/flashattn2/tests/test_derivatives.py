"""The first and second derivatives, compared with finite differences and with the reference."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from flashattn2 import attention_reference, flash_attention, sdpa
from flashattn2.backends import tiled
from torch.autograd import forward_ad, gradcheck, gradgradcheck

OPTIONS = [
    {},
    {"is_causal": True, "softcap": 1.5},
    {"window": (2, 1), "scale": 0.8},
    {"is_causal": True, "window": (4, None), "softcap": 0.9},
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "TILE", 4)


def draw_inputs(seq_q=7, seq_k=6):
    shapes = ((1, 2, seq_q, 3), (1, 1, seq_k, 3), (1, 1, seq_k, 3))
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def build_attention(options, backend="torch"):
    def run(q, k, v):
        out, lse = flash_attention(q, k, v, return_lse=True, backend=backend, **options)
        # A row that sees no key has a log-sum-exp of -inf, of which no difference can be taken.
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return run


# The fast mode compares random projections of the Jacobian, the other mode every element.
FAST_MODES = [True, pytest.param(False, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("fast_mode", FAST_MODES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(options, fast_mode):
    assert gradcheck(build_attention(options), draw_inputs(), fast_mode=fast_mode)


@pytest.mark.parametrize("fast_mode", FAST_MODES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradgradcheck(options, fast_mode):
    assert gradgradcheck(build_attention(options), draw_inputs(), fast_mode=fast_mode)


def test_aten_backend_has_the_same_derivatives():
    run = build_attention({"is_causal": True}, "aten")
    assert gradcheck(run, draw_inputs(6, 6), fast_mode=True)
    assert gradgradcheck(run, draw_inputs(6, 6), fast_mode=True)


@pytest.mark.parametrize("backend", ["torch", "aten"])
def test_torch_func_differentiates_in_reverse_mode(backend):
    q, k, v = draw_inputs(6, 6)

    def loss(attend):
        return lambda q, k, v: attend(q, k, v, is_causal=True).square().sum()

    ours = loss(lambda *a, **o: flash_attention(*a, **o, backend=backend))
    got = torch.func.grad(ours, argnums=(0, 1, 2))(q, k, v)
    expected = torch.func.grad(loss(attention_reference), argnums=(0, 1, 2))(q, k, v)
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


def test_double_backward_inside_saved_tensors_hooks_is_an_error():
    q = torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True)

    def compute_second(context):
        with context:
            (first,) = torch.autograd.grad(
                flash_attention(q, q, q).square().sum(), q, create_graph=True
            )
            return torch.autograd.grad(first.square().sum(), q)

    with pytest.raises(RuntimeError, match="leave the context before the double backward pass"):
        compute_second(torch.autograd.graph.save_on_cpu())
    compute_second(contextlib.nullcontext())  # The error leaves torch's state unchanged.
    with torch.autograd.graph.save_on_cpu():
        flash_attention(q, q, q).sum().backward()


# torch's own forward mode still scripts a few of its rules.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.parametrize("options", [{}, {"window": 3}], ids=str)
def test_forward_mode_is_refused(options):
    """The operators would drop the tangents without an error."""
    for seq in (5, 20, 20):  # the second call of 20 keys takes the fast path
        q, tangent = torch.randn(2, 1, 2, seq, 3)
        with pytest.raises(NotImplementedError, match="forward-mode derivatives, as torch"):
            torch.func.jvp(lambda q: flash_attention(q, q, q, **options), (q,), (tangent,))
        leaf = q.clone().requires_grad_()
        out = flash_attention(leaf, leaf, leaf, **options)
        with forward_ad.dual_level():
            # Inputs without a tangent are allowed inside of a level.
            torch.testing.assert_close(flash_attention(q, q, q, **options), out.detach())
            with pytest.raises(NotImplementedError, match="forward-mode derivatives, as torch"):
                flash_attention(forward_ad.make_dual(q, tangent), q, q, **options)
            cotangent = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
            with pytest.raises(NotImplementedError, match="forward-mode derivatives, as torch"):
                torch.autograd.grad(out, leaf, cotangent)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"window": 3}, marks=pytest.mark.exhaustive)], ids=str
)
def test_compiled_forward_mode_is_refused(options):
    q, tangent = torch.randn(2, 1, 2, 20, 3)

    @torch.compile(backend="aot_eager")
    def run(q, tangent):
        return torch.func.jvp(lambda q: flash_attention(q, q, q, **options), (q,), (tangent,))

    with pytest.raises(NotImplementedError, match="forward-mode derivatives, as torch"):
        run(q, tangent)
    # Dynamo would skip the functions that raised this error in later tests.
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (torch.vmap, "the mapped dimension part of the batch"),
        (torch.func.jacrev, "batched gradients and Jacobians"),
        (torch.func.hessian, "forward-mode derivatives, as torch.func.jvp and torch.func.hess"),
    ],
    ids=["vmap", "jacrev", "hessian"],
)
def test_vmap_is_refused(transform, message):
    q = torch.randn(2, 2, 2, 5, 3)
    if transform is not torch.vmap:
        q = q[0]
    with pytest.raises(NotImplementedError, match=message):
        transform(lambda x: flash_attention(x, x, x))(q)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_jacobian_of_sdpa_is_that_of_torchs_function():
    q = torch.randn(1, 2, 3, 4)
    ours, expected = (
        torch.func.jacrev(lambda x: f(x, x, x))(q)  # noqa: B023
        for f in (sdpa, F.scaled_dot_product_attention)
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_batched_gradients_are_refused(interpreter, backend):
    """The kernels cannot read the memory of a batch of cotangents."""
    q = torch.randn(1, 2, 5, 16, requires_grad=True)

    def run(q):
        return flash_attention(q, q, q, backend=backend)

    out = run(q)
    cotangents = torch.randn(3, *out.shape)
    with pytest.raises(NotImplementedError, match="and with it batched gradients"):
        torch.autograd.grad(out, q, cotangents, is_grads_batched=True)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("dim_v", [8, 16, 24])
def test_batched_gradients_of_the_cpu_kernel_equal_separate_gradients(heads, dim_v):
    q = torch.randn(1, heads, 20, 16, requires_grad=True)
    out = flash_attention(q, q[:, :2], torch.randn(1, 2, 20, dim_v), is_causal=True)
    cotangents = torch.randn(3, *out.shape)
    (batched,) = torch.autograd.grad(out, q, cotangents, is_grads_batched=True, retain_graph=True)
    for cotangent, ours in zip(cotangents, batched, strict=True):
        (expected,) = torch.autograd.grad(out, q, cotangent, retain_graph=True)
        torch.testing.assert_close(ours, expected)
