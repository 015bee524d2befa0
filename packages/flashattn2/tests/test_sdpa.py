"""`sdpa` equals torch's function in output and gradients."""

import functools
import inspect
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flashattn2 import attention_reference, sdpa
from flashattn2.backends import aten
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

lengths = st.integers(1, 12)


def assert_same(q, k, v, **options):
    results = []
    for function in (sdpa, F.scaled_dot_product_attention):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves, **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)


@given(
    seq=st.tuples(lengths, lengths),
    dims=st.sampled_from(((8, 8), (8, 5), (3, 7))),
    group=st.sampled_from((1, 3)),
    is_causal=st.booleans(),
    scale=st.sampled_from((None, 0.7)),
)
@settings(max_examples=40, deadline=None)
def test_sdpa_equals_torch_aligned_at_the_top_left(seq, dims, group, is_causal, scale):
    q = torch.randn(2, 2 * group, seq[0], dims[0], dtype=torch.float64)
    k, v = (torch.randn(2, 2, seq[1], d, dtype=torch.float64) for d in dims)
    assert_same(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=group > 1)


@pytest.mark.parametrize(
    ("q", "k"),
    [((3, 5, 8), (3, 6, 8)), ((2, 3, 4, 5, 8), (2, 3, 4, 6, 8)), ((2, 4, 5, 8), (1, 4, 6, 8)),
     ((1, 1, 5, 8), (2, 4, 6, 8))],
)  # fmt: skip
@pytest.mark.parametrize("is_causal", [False, True])
def test_leading_dimensions_broadcast(q, k, is_causal):
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in (q, k, k))
    assert_same(q, k, v, is_causal=is_causal)


def test_sdpa_has_the_signature_of_torch():
    ours = inspect.signature(sdpa).parameters
    assert list(ours) == [
        "query",
        "key",
        "value",
        "attn_mask",
        "dropout_p",
        "is_causal",
        "scale",
        "enable_gqa",
    ]
    q = torch.randn(1, 2, 5, 8)
    assert sdpa(q, q, q, None, 0.0, True).shape == q.shape
    for function in (sdpa, F.scaled_dot_product_attention):
        with pytest.raises(TypeError, match="from 3 to 6 positional arguments but 7 were given"):
            function(q, q, q, None, 0.0, True, 0.5)


@pytest.mark.parametrize(
    "arguments",
    [{"enable_gqa": 1}, {"enable_gqa": None}, {"is_causal": 1}, {"dropout_p": None}],
    ids=str,
)
def test_arguments_of_other_types_are_refused_as_by_torch(arguments):
    q = torch.randn(1, 2, 5, 8)
    for function in (sdpa, F.scaled_dot_product_attention):
        with pytest.raises(TypeError, match=r"must be (bool|float), not (int|NoneType)"):
            function(q, q, q, **arguments)


MASKS = {
    "boolean": {"attn_mask": torch.rand(5, 6) > 0.4},
    "additive": {"attn_mask": torch.randn(2, 4, 5, 6)},
    "broadcast": {"attn_mask": torch.randn(1, 6), "scale": 0.3},
    "dropout": {"dropout_p": 0.5},
    "infinite scale": {"scale": math.inf},
    "undefined scale": {"scale": math.nan},
    "scale of another type": {"scale": True},
    "scale below float32": {"scale": 1e-40},
    "negative NumPy scale": {"scale": np.float32(-0.3)},
    "zero scale": {"scale": 0.0},
    "scale in a tensor": {"scale": torch.tensor(0.3)},
}


@pytest.mark.parametrize("arguments", MASKS.values(), ids=MASKS)
def test_unsupported_arguments_run_torchs_function(arguments):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 8)
    results = []
    for function in (sdpa, F.scaled_dot_product_attention):
        torch.manual_seed(0)
        results.append(function(q, k, k, **arguments))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def test_sdpa_may_replace_the_attribute_of_torch(monkeypatch):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 8)
    expected = F.scaled_dot_product_attention(q, k, k, **MASKS["additive"])
    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    replaced = F.scaled_dot_product_attention(q, k, k, **MASKS["additive"])
    torch.testing.assert_close(replaced, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_run_torchs_function():
    parts = [torch.randn(n, 4, 8) for n in (3, 5)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    expected = F.scaled_dot_product_attention(q, q, q)
    for ours, right in zip(sdpa(q, q, q).unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(ours, right)


class Wrapper(torch.Tensor):
    """A wrapper of a tensor that, as `DTensor`, has no rule for operators of other libraries."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace != "aten":
            raise NotImplementedError(f"{func} has no rule")
        unwrap = functools.partial(torch.utils._pytree.tree_map_only, Wrapper, lambda x: x.inner)
        out = func(*unwrap(args), **unwrap(kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, Wrapper, out)


@pytest.mark.parametrize("is_causal", [False, True])
def test_wrapper_subclasses_run_torchs_function(monkeypatch, is_causal):
    """On devices without the aten backend, `flash_attention` calls its own operators."""
    monkeypatch.setattr(aten, "find_obstacle", lambda *_: "it is not on a CPU")
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 3, 8)
    out = sdpa(*map(Wrapper, (q, k, k)), is_causal=is_causal)
    expected = F.scaled_dot_product_attention(q, k, k, is_causal=is_causal)
    torch.testing.assert_close(out.inner, expected)


@pytest.mark.parametrize(
    "dtypes", list(itertools.product((torch.float32, torch.bfloat16), repeat=3))
)
def test_mixed_dtypes_under_autocast_are_cast_as_torch_casts(dtypes):
    q, k, v = (torch.randn(1, 2, 5, 16).to(dtype) for dtype in dtypes)
    with torch.autocast("cpu", torch.bfloat16):
        ours, expected = sdpa(q, k, v), F.scaled_dot_product_attention(q, k, v)
    assert ours.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected)


def test_arguments_that_torch_refuses_are_refused():
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match=r"size of tensor|broadcast"):
        sdpa(q, k, k)
    both = {"attn_mask": torch.zeros(5, 5), "is_causal": True}
    try:
        expected = F.scaled_dot_product_attention(q, q, q, **both)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="attn_mask"):
            sdpa(q, q, q, **both)
    else:  # torch 2.11 accepts both on CPUs
        torch.testing.assert_close(sdpa(q, q, q, **both), expected)
    for number in (0, 1, 1.0, None):
        with pytest.raises(TypeError, match=r"'is_causal'.* must be bool"):
            sdpa(q, q, q, is_causal=number)


@pytest.mark.parametrize("options", [{}, {"attn_mask": torch.ones(5, 6) > 0}, {"dropout_p": 0.5}])
def test_values_of_another_length_than_keys_are_refused(options):
    """Torch's CPU kernel reads beyond the shorter tensor."""
    q = torch.randn(1, 4, 5, 8)
    k = torch.randn(1, 4, 6, 8)
    v = torch.randn(1, 4, 4, 8)
    with pytest.raises(ValueError, match="expected as many values as keys, got 6 keys"):
        sdpa(q, k, v, **options)


def get_outcome(function, tensors, options):
    """Return the output of a call, or None if it raises an error."""
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=options.pop("autocast", False)):
            return function(*tensors, **options)
    except (IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


SHAPES = {
    "values broadcast": [(2, 3, 5, 8), (2, 3, 6, 8), (1, 1, 6, 8)],
    "value heads differ": [(2, 4, 5, 8), (2, 2, 6, 8), (2, 4, 6, 8)],
    "no queries": [(2, 3, 0, 8), (2, 3, 6, 8), (2, 3, 6, 8)],
    "no keys": [(2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)],
    "no batch, other head dims": [(0, 3, 5, 8), (0, 3, 6, 9), (0, 3, 6, 8)],
    "no queries, odd groups": [(2, 3, 0, 8), (2, 2, 6, 8), (2, 2, 6, 8)],
    "two dimensions": [(5, 8), (6, 8), (6, 8)],
    "vector": [(8,), (6, 8), (6, 8)],
    "head dim 0": [(2, 4, 5, 0), (2, 4, 6, 0), (2, 4, 6, 0)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
@pytest.mark.parametrize("options", [{}, {"enable_gqa": True}, {"is_causal": True, "scale": 0.3}])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("autocast", [False, True])
def test_sdpa_accepts_and_refuses_what_torch_does(shapes, options, dtype, autocast):
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    options = {**options, "autocast": autocast}
    expected = get_outcome(F.scaled_dot_product_attention, tensors, dict(options))
    ours = get_outcome(sdpa, tensors, dict(options))
    if expected is None:
        assert ours is None
    else:
        # One rounding of bfloat16; the two functions may round in another order.
        atol = 0.02 if expected.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(ours, expected, atol=atol, rtol=atol, equal_nan=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_sdpa_under_vmap_runs_torchs_function():
    q = torch.randn(3, 1, 2, 5, 8)
    expected = F.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(torch.func.vmap(sdpa)(q, q, q), expected)


def test_functionalized_sdpa_runs_torchs_function():
    """The window of `attention_reference` has no in-place operators, which would fail here."""
    q = torch.randn(1, 2, 5, 8)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    for function in (sdpa, attention_reference):

        def run(q, function=function):
            return function(q, q, q, is_causal=True)

        torch.testing.assert_close(torch.func.functionalize(run)(q), expected)
    gradient = torch.func.functionalize(torch.func.grad(lambda q: sdpa(q, q, q).sin().sum()))(q)
    torch.testing.assert_close(gradient, torch.func.grad(lambda q: sdpa(q, q, q).sin().sum())(q))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_sdpa_has_the_hessian_of_torchs_function():
    # With equal head dims, torch's function raises an error.
    q = torch.randn(1, 1, 3, 4)
    k = torch.randn(1, 1, 5, 4)
    v = torch.randn(1, 1, 5, 3)
    ours, expected = (
        torch.func.hessian(lambda q: run(q, k, v).square().sum())(q)  # noqa: B023
        for run in (sdpa, F.scaled_dot_product_attention)
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_sdpa_runs_torchs_function_for_any_lengths():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    traced = torch.jit.trace(lambda q, k: sdpa(q, k, k, is_causal=True), (q, q), check_trace=False)
    expected = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    torch.testing.assert_close(traced(q, k), expected)


def test_compiled_transforms_of_sdpa_run_torchs_function():
    q, k = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 5, 8)

    def differentiate(function):
        return torch.func.grad(lambda q: function(q, k, k, is_causal=True).sin().sum())

    compiled = torch.compile(differentiate(sdpa), fullgraph=True, backend="aot_eager")
    expected = differentiate(F.scaled_dot_product_attention)(q)
    torch.testing.assert_close(compiled(q), expected)


def test_sdpa_compiles_in_one_graph():
    q, k = torch.randn(1, 4, 7, 8), torch.randn(1, 4, 5, 8)
    compiled = torch.compile(sdpa, fullgraph=True, backend="aot_eager")
    for keys in (q, k):
        expected = F.scaled_dot_product_attention(q, keys, keys, is_causal=True)
        torch.testing.assert_close(compiled(q, keys, keys, is_causal=True), expected)


@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_changing_scales_and_lengths_compile_without_graph_breaks(is_causal):
    torch._dynamo.reset()

    def run(q, k, scale):
        return sdpa(q, k, k, is_causal=is_causal, scale=scale)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    cases = [(0.3, 7, 9), (0.4, 9, 7), (0.5, 8, 8)]
    for scale, seq_q, seq_k in cases:
        q, k = torch.randn(1, 2, seq_q, 8), torch.randn(1, 2, seq_k, 8)
        expected = F.scaled_dot_product_attention(q, k, k, is_causal=is_causal, scale=scale)
        torch.testing.assert_close(compiled(q, k, scale), expected)


def test_a_mask_compiles_in_one_graph():
    q, mask = torch.randn(1, 2, 7, 8), torch.rand(7, 7) > 0.4
    compiled = torch.compile(sdpa, fullgraph=True, backend="aot_eager")
    expected = F.scaled_dot_product_attention(q, q, q, mask)
    torch.testing.assert_close(compiled(q, q, q, mask), expected)


@pytest.mark.parametrize("replaced", [F.scaled_dot_product_attention, sdpa])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(7, 7) > 0}])
def test_sdpa_calls_the_function_of_context_parallel(options, replaced, monkeypatch):
    def of_all_ranks(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **others):
        # These tensors stand for the DTensors that torch's function passes on.
        wrapped = [TwoTensor(x, x) for x in (query, key, value)]
        return replaced(*wrapped, attn_mask, dropout_p, is_causal, **others).a + 1

    of_all_ranks.__module__ = "torch.distributed.tensor.experimental._context_parallel._attention"
    q = torch.randn(1, 2, 7, 8)
    expected = F.scaled_dot_product_attention(q, q, q, **options) + 1
    monkeypatch.setattr(F, "scaled_dot_product_attention", of_all_ranks)
    torch.testing.assert_close(sdpa(q, q, q, **options), expected)


def test_sdpa_does_not_call_a_wrapper_around_itself(monkeypatch):
    q = torch.randn(1, 2, 7, 8)
    expected = F.scaled_dot_product_attention(q, q, q, torch.ones(7, 7) > 0)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: sdpa(*a, **k))
    actual = F.scaled_dot_product_attention(q, q, q, torch.ones(7, 7) > 0)
    torch.testing.assert_close(actual, expected)
