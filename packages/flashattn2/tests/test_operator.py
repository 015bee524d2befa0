"""The operators under opcheck, torch.compile, torch.export, autocast and fake tensors."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from flashattn2 import (
    attention_reference,
    autograd_functions,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
    sdpa,
)
from flashattn2.attention import specify_call
from flashattn2.operators import backward_op, forward_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.runtime import interpreter as triton_interpreter

pytestmark = pytest.mark.filterwarnings(
    # opcheck reads the gradients of copies that it makes.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
BACKENDS = ("torch", "aten", "triton")
CU = torch.tensor([0, 3, 9], dtype=torch.int32)
SCALARS = (0.25, -1, 0, 0.0)


def draw_tensors(layout="heads first", requires_grad=False):
    if layout == "heads first":
        shapes = ((2, 2, 9, 16), (2, 1, 9, 16), (2, 1, 9, 16))
        return [torch.randn(s, requires_grad=requires_grad) for s in shapes]
    shapes = ((2, 9, 2, 16), (2, 9, 1, 16), (2, 9, 1, 16))
    return [torch.randn(s).transpose(1, 2).requires_grad_(requires_grad) for s in shapes]


# Other tests compare the strides of the tiled backend's fake results, and compile it.
CHECKED_BACKENDS = [pytest.param("torch", marks=pytest.mark.exhaustive), "aten", "triton"]


@pytest.mark.parametrize("backend", CHECKED_BACKENDS)
@pytest.mark.parametrize(
    "layout", ["heads first", pytest.param("sequence first", marks=pytest.mark.exhaustive)]
)
def test_opcheck_of_dense_attention(interpreter, backend, layout):
    q, k, v = (x[:1].detach().requires_grad_() for x in draw_tensors(layout))
    method = (backend, "ieee", True)
    torch.library.opcheck(forward_op, (q, k, v, None, None, *SCALARS, *method))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = forward_op(q, k, v, None, None, *SCALARS, *method)
    # With a gradient of the log-sum-exp, the aten backend is the tiled backend.
    grad_lse = None if backend == "aten" else torch.randn_like(lse)
    arguments = (q, k, v, out, lse, torch.randn_like(out), grad_lse, None, None)
    torch.library.opcheck(backward_op, (*arguments, *SCALARS, *method))


LAYOUTS = {
    "heads first": lambda x: x,
    "sequence first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch inside": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "columns first": lambda x: x.mT.contiguous().mT,
    "gaps": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
    "one head for all": lambda x: x[:, :1].expand(x.shape),
}


#: Batch size, heads of queries and keys, and head dim of values.
SIZES = ((1, (4, 1), 24), (2, (2, 2), 16), (2, (4, 1), 24))


def list_backends_and_layouts():
    """Return the cases of fake results; the tiled backend's results are contiguous."""
    cases = []
    for backend, layout in itertools.product(BACKENDS, LAYOUTS):
        is_usual = backend != "torch" or layout in ("heads first", "gaps")
        cases.append(
            pytest.param(backend, layout, marks=[] if is_usual else [pytest.mark.exhaustive])
        )
    return cases


@pytest.mark.parametrize(("backend", "layout"), list_backends_and_layouts())
def test_fake_results_have_the_strides_of_real_results(interpreter, monkeypatch, backend, layout):
    """Inductor compiles later operators for the strides of the fake results."""
    # The strides do not depend on the values, which the interpreter computes slowly.
    monkeypatch.setattr(triton_interpreter.GridExecutor, "__call__", lambda *_, **__: None)
    method = (backend, "ieee", True)

    def layouts(run, *arguments):
        """Return the shapes, dtypes and strides; a dimension of one row may have any stride."""
        return [
            (x.shape, x.dtype, [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1])
            for x in run(*arguments, *SCALARS, *method)
        ]

    def assert_equal_layouts(run, *arguments):
        with FakeTensorMode() as mode:
            fakes = [x if x is None else mode.from_tensor(x) for x in arguments]
            fake = layouts(run, *fakes)
        assert fake == layouts(run, *arguments)

    cases = [(*sizes, torch.float32, 1.0) for sizes in SIZES]
    if backend == "aten":
        # This backend has other paths for float16 and for infinite scores.
        cases += [(*SIZES[2], torch.float16, 1.0), (*SIZES[1], torch.float32, torch.inf)]
    for batch, heads, v_dim, dtype, number in cases:
        q, k, v = (
            torch.randn(batch, n, 9, d).to(dtype)
            for n, d in zip((heads[0], heads[1], heads[1]), (16, 16, v_dim), strict=True)
        )
        q[0, 0, 0, 0] = number
        q, k, v = (LAYOUTS[layout](x) for x in (q, k, v))
        # Packed sequences have the batch size 1, for which dense attention has no other strides.
        cu = CU if batch == 1 else None
        assert_equal_layouts(forward_op, q, k, v, cu, cu)
        out, lse = forward_op(q, k, v, cu, cu, *SCALARS, *method)
        for grad_lse in (None, torch.randn_like(lse)):
            grad_out = LAYOUTS[layout](torch.randn_like(out))
            assert_equal_layouts(backward_op, q, k, v, out, lse, grad_out, grad_lse, cu, cu)


@pytest.mark.parametrize("backend", CHECKED_BACKENDS)
def test_opcheck_of_packed_sequences(interpreter, backend):
    q, k, v = (x[:1, :1].detach().requires_grad_() for x in draw_tensors())
    arguments = (q, k, v, CU, CU, *SCALARS, backend, "ieee", True)
    torch.library.opcheck(forward_op, arguments)


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_compile_makes_one_graph_of_forward_and_backward(interpreter, backend):
    def loss(q, k, v):
        out, lse = flash_attention(q, k, v, is_causal=True, return_lse=True, backend=backend)
        return (out * out).sum() + lse.sin().sum()

    q, k, v = draw_tensors(requires_grad=True)
    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(
        torch.autograd.grad(compiled(q, k, v), (q, k, v)), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_compile_takes_packed_sequences_and_lengths_it_has_not_seen():
    def run(q, k, cu_q, cu_k):
        return flash_attention_varlen(q, k, k, cu_q, cu_k, is_causal=True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths_q, lengths_k in (((4, 5), (6, 2)), ((7, 1), (3, 9)), ((2, 9), (5, 4))):
        boundaries = [torch.tensor((0, *n)).cumsum(0).int() for n in (lengths_q, lengths_k)]
        q = torch.randn(sum(lengths_q), 2, 16, requires_grad=True)
        k = torch.randn(sum(lengths_k), 2, 16, requires_grad=True)
        results = []
        for function in (compiled, run):
            out = function(q, k, *boundaries)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k))))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_malformed_boundaries_are_an_error_in_compiled_graphs(interpreter, backend):
    """Boundaries that are too short would leave rows of the result unwritten."""

    def run(q, cu_q, cu_k):
        return flash_attention_varlen(q, q, q, cu_q, cu_k, backend=backend)

    q = torch.randn(9, 2, 16)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for boundaries in ((0, 3, 6), (0, 3, 12), (1, 3, 9), (0, 10, 9), (0, -1, 9)):
        wrong = torch.tensor(boundaries, dtype=torch.int32)
        for function in (run, compiled):
            with pytest.raises(ValueError, match="cu_seqlens_q must start at 0, never decrease"):
                function(q, wrong, CU)
            with pytest.raises(ValueError, match="cu_seqlens_k must start at 0, never decrease"):
                function(q, CU, wrong)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("function", [flash_attention, sdpa])
def test_graphs_of_make_fx_are_right_for_other_lengths(function, mode):
    """The flag that makes torch's CPU kernel causal is right for equal lengths only."""
    reference = (
        attention_reference if function is flash_attention else F.scaled_dot_product_attention
    )

    def differentiate(attend, q, k):
        leaves = q.detach().requires_grad_(), k.detach().requires_grad_()
        with torch.enable_grad():
            out = attend(*leaves, k, is_causal=True)
            return out.detach(), *torch.autograd.grad(out, leaves, out.detach())

    q, k = torch.randn(2, 1, 2, 20, 8)
    differentiate(function, q, k)  # store a plan, with which a call skips the dispatch
    graph = make_fx(lambda q, k: differentiate(function, q, k), tracing_mode=mode)(q, k)
    for seq_q, seq_k in ((20, 30), (30, 20)):
        q, k = torch.randn(1, 2, seq_q, 8), torch.randn(1, 2, seq_k, 8)
        for ours, right in zip(graph(q, k), differentiate(reference, q, k), strict=True):
            torch.testing.assert_close(ours, right)


def test_graphs_of_make_fx_with_new_keys_are_refused():
    """The graph would contain the number of new keys; without new keys, it is right."""
    lengths = torch.tensor([20, 3], dtype=torch.int32)

    def run(q, cache, *new):
        return flash_attention_with_kvcache(q, cache, cache.clone(), *new, cache_seqlens=lengths)

    q, new = torch.randn(2, 2, 2, 1, 8)
    cache = torch.randn(2, 2, 40, 8)
    with pytest.raises(NotImplementedError, match=r"number in the example; use torch\.export"):
        make_fx(run)(q, cache, new, new)
    graph = make_fx(run)(q, cache)
    q, cache = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 50, 8)
    torch.testing.assert_close(graph(q, cache), run(q, cache))


@pytest.mark.parametrize("most", [None, 100])
def test_exported_program_accepts_every_length(most):
    """The path for fewer keys than a vector register holds must not fix the range of lengths."""

    class Attention(torch.nn.Module):
        def forward(self, q):
            return flash_attention(q, q, q, is_causal=True)

    lengths = torch.export.Dim("seq", min=2, max=most)
    program = torch.export.export(
        Attention(), (torch.randn(1, 2, 20, 16),), dynamic_shapes={"q": {2: lengths}}
    )
    assert "flashattn2.forward" in str(program.graph)
    for seq in (3, 40):
        q = torch.randn(1, 2, seq, 16)
        torch.testing.assert_close(program.module()(q), Attention()(q))


def test_sizes_beyond_the_range_of_the_kernels_are_refused(interpreter):
    q = torch.zeros(1).expand(1, 2, 2**30, 16)
    with pytest.raises(ValueError, match="every dimension of q to be at most 1073741823"):
        flash_attention(q, q, q, backend="triton")


@pytest.mark.parametrize(
    ("packed", "backend"),
    [
        (False, "torch"),
        (False, "aten"),
        (False, "triton"),
        (True, "aten"),
        pytest.param(True, "torch", marks=pytest.mark.exhaustive),
        (True, "triton"),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)], ids=str
)
def test_autocast_casts_the_inputs_and_nothing_inside(interpreter, backend, dtype, packed):
    """Sums and scores remain in float32: results have the bits of inputs cast beforehand."""

    def derivatives(q, k, v):
        inputs = (x[0].transpose(0, 1) for x in (q, k, v)) if packed else (q, k, v)
        run = flash_attention_varlen if packed else flash_attention
        boundaries = (CU, CU) if packed else ()
        out, lse = run(*inputs, *boundaries, is_causal=True, return_lse=True, backend=backend)
        loss = (out.float() ** 2).sum() + lse.sin().sum()
        first = torch.autograd.grad(loss, (q, k, v), create_graph=True)
        second = torch.autograd.grad(sum((g.float() ** 2).sum() for g in first), (q, k, v))
        return (out, lse, *first, *second)

    q, k, v = (x[:1].detach() for x in draw_tensors())
    by_hand = derivatives(*(x.to(dtype).requires_grad_() for x in (q, k, v)))
    # Values that the lower precision holds exactly, and no sum of a gradient over casts.
    saved = [x.to(dtype).float().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", dtype):
        under_autocast = derivatives(*saved)
    for ours, expected in zip(under_autocast, by_hand, strict=True):
        assert torch.equal(ours.to(expected.dtype), expected)


def test_shapes_come_without_data():
    with FakeTensorMode():
        q = torch.empty(1, 2, 65536, 64, dtype=torch.bfloat16)
        out, lse = flash_attention(q, q, q, is_causal=True, return_lse=True)
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)


@pytest.mark.parametrize("backend", ["torch", "auto", "triton"])
def test_any_strides_give_the_same_result(interpreter, backend):
    packed = torch.randn(1, 9, 3, 2, 16)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    gaps = torch.randn(1, 2, 9, 32)[..., ::2]
    upright = torch.randn(1, 2, 16, 9).mT
    spread = torch.randn(1, 2, 1, 16).expand(-1, -1, 9, -1)
    for tensors in (
        (q, k, v),
        (gaps, gaps.flip(2), gaps),
        (upright, upright, upright),
        (q, spread, spread),
        (spread, k, v),
    ):
        results = []
        for x in (tensors, [t.contiguous() for t in tensors]):
            leaves = [t.detach().requires_grad_() for t in x]
            out = flash_attention(*leaves, is_causal=True, backend=backend)
            # The gradient of a sum arrives with strides of zero.
            results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_negated_views_keep_their_sign(interpreter):
    """The imaginary part of a conjugate is a view with the opposite sign of its memory."""
    negated = [torch.complex(*torch.randn(2, 2, 2, 3, 16)).conj().imag for _ in range(3)]
    assert all(x.is_neg() for x in negated)
    plain = [x.resolve_neg() for x in negated]
    gradients, caches = [], []
    for q, k, v in (negated, plain):
        leaves = [x.clone().requires_grad_() for x in plain]
        out = flash_attention(*leaves, backend="triton")
        # As `v`, the gradient has gaps between its elements; as this view, it has none.
        grad = torch._neg_view(v.resolve_neg()) if v.is_neg() else -v
        gradients += [torch.autograd.grad(out, leaves, grad)]
        cache = torch.zeros(2, 2, 2, 8, 16)
        flash_attention_with_kvcache(q, *cache, k, v, cache_seqlens=4, backend="triton")
        caches.append(cache)
    torch.testing.assert_close(*gradients)
    assert torch.equal(*caches)


@pytest.mark.parametrize(
    ("backend", "dtype", "options", "v_dim"),
    [
        *itertools.product(
            ("torch", "auto"),
            (torch.float32, torch.bfloat16),
            ({}, {"window": 3}, {"return_lse": True}),
            (24, 16),
        ),
        ("triton", torch.float32, {}, 24),
        ("triton", torch.float32, {"return_lse": True}, 16),
    ],
    ids=str,
)
def test_result_may_be_changed_in_place_and_its_gradient_is_then_refused(
    interpreter, backend, dtype, options, v_dim
):
    """Models often add a residual in place.  The backward pass reads the unchanged output."""
    tensors = [torch.randn(1, 2, 20, dim, dtype=dtype) for dim in (24, 24, v_dim)]

    def run(*qkv):
        result = flash_attention(*qkv, backend=backend, **options)
        return result[0] if options.get("return_lse") else result

    torch.testing.assert_close(run(*tensors).add_(1), run(*tensors) + 1, rtol=0, atol=0)
    leaves = [x.requires_grad_() for x in tensors]
    out = run(*leaves).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), leaves)


@pytest.mark.parametrize("packed", [False, True])
def test_mixed_dtypes_under_autocast_are_cast(packed):
    """Rotary embeddings in float32 leave the values in bfloat16."""
    q, v = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16).bfloat16()
    expected = flash_attention(q.bfloat16(), q.bfloat16(), v)
    with torch.autocast("cpu", torch.bfloat16):
        if packed:
            rows, values = q[0].transpose(0, 1), v[0].transpose(0, 1)
            cu = torch.tensor([0, 40], dtype=torch.int32)
            out = flash_attention_varlen(rows, rows, values, cu, cu).transpose(0, 1)[None]
        else:
            out = flash_attention(q, q, v)
    torch.testing.assert_close(out, expected)


def test_a_compiled_forward_accepts_a_bound_that_became_symbolic():
    """After calls with two bounds, a graph of the inner function contains a symbolic bound."""
    torch._dynamo.reset()
    compiled = torch.compile(autograd_functions._run, backend="aot_eager", fullgraph=True)
    q = torch.randn(1, 2, 20, 16)
    for is_causal in (True, False, True):
        scores = is_causal, None, None, None
        *tensors, spec, method, _ = specify_call(q, q, q, None, None, scores, True, "auto")
        call = *tensors, None, None, spec, method
        torch.testing.assert_close(compiled(*call), autograd_functions._run(*call))
