"""A second call of a signature skips validation and has the results of the first call."""

import pytest
import torch
from flashattn2 import flash_attention, flash_attention_with_kvcache, sdpa
from flashattn2.plan_cache import PLANS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_cases import lay_out

LAYOUTS = ("heads first", "sequence first", "gaps", "reversed")
lengths = st.sampled_from((1, 5, 9, 16, 19, 23))
#: Arguments of both tests with which the second call calls torch's CPU kernel directly, which few
#: of the drawn arguments do.
DIRECT = {"dtype": torch.float32, "layouts": 3 * (LAYOUTS[0],)}
#: The number of drawn calls.
EXAMPLES = [25, pytest.param(500, marks=pytest.mark.exhaustive)]


def assert_second_run_is_cached(run):
    """Assert that two runs return the same numbers, and that the second run adds no plan."""
    PLANS.clear()
    first_results = run()
    plans = dict(PLANS)
    assert plans
    for first, second in zip(first_results, run(), strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=0, equal_nan=True)
    assert plans == PLANS


@pytest.mark.parametrize("examples", EXAMPLES)
def test_second_call_of_a_signature_equals_the_first(examples):
    @given(
        seq=st.tuples(lengths, lengths),
        dims=st.sampled_from(((8, 8), (8, 8), (8, 5))),
        heads=st.sampled_from(((2, 2), (4, 2))),
        dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.float16)),
        layouts=st.tuples(*3 * [st.sampled_from(LAYOUTS)]),
        needs=st.tuples(*3 * [st.booleans()]),
        is_causal=st.booleans(),
        as_torch_s=st.booleans(),
        options=st.sampled_from(
            ({}, {}, {"return_lse": True}, {"scale": 0.3}, {"window": 2}, {"softcap": 2.0},
             {"sinks": torch.zeros(1)})
        ),
    )  # fmt: skip
    @example(
        **DIRECT, seq=(19, 19), dims=(8, 8), heads=(4, 2), needs=3 * (False,), is_causal=True,
        as_torch_s=False, options={},
    )  # fmt: skip
    @example(
        **DIRECT, seq=(19, 16), dims=(8, 8), heads=(4, 2), needs=3 * (True,), is_causal=True,
        as_torch_s=True, options={},
    )  # fmt: skip
    @settings(max_examples=examples, deadline=None)
    def check(seq, dims, heads, dtype, layouts, needs, is_causal, as_torch_s, options):
        shapes = [(2, heads[i > 0], seq[i > 0], dims[i > 1]) for i in range(3)]
        qkv = [
            lay_out(torch.randn(shape).to(dtype), layout).requires_grad_(needed)
            for shape, layout, needed in zip(shapes, layouts, needs, strict=True)
        ]
        if "sinks" in options:
            options = {"sinks": torch.zeros(heads[0])}

        def run():
            if as_torch_s:
                out = sdpa(*qkv, is_causal=is_causal, scale=options.get("scale"), enable_gqa=True)
                outs = (out,)
            else:
                outs = flash_attention(*qkv, is_causal=is_causal, **options)
                outs = outs if isinstance(outs, tuple) else (outs,)
            if not any(needs):
                return outs
            inputs = [x for x in qkv if x.requires_grad]
            grads = torch.autograd.grad(outs[0].square().sum(), inputs, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
            return *(x.detach() for x in (*outs, *grads)), *second

        assert_second_run_is_cached(run)

    check()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_second_call_over_a_cache_equals_the_first(examples):
    @given(
        shape=st.tuples(st.integers(1, 3), st.sampled_from(((2, 2), (4, 2))), st.integers(1, 2)),
        count=st.sampled_from((0, 3, 6, 14, 16, 19)),
        new=st.integers(0, 2),
        v_dim=st.sampled_from((8, 8, 5)),
        layouts=st.tuples(*3 * [st.sampled_from(LAYOUTS)]),
        dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
        options=st.sampled_from(
            ({}, {"return_lse": True}, {"window": (17, 0)}, {"window": 0}, {"is_causal": True},
             {"scale": 0.3, "return_lse": True}, {"softcap": 2.0})
        ),
    )  # fmt: skip
    @example(**DIRECT, shape=(2, (4, 2), 1), count=19, new=1, v_dim=8, options={"window": (17, 0)})
    @example(**DIRECT, shape=(2, (4, 2), 1), count=16, new=0, v_dim=8, options={"return_lse": True})
    @settings(max_examples=examples, deadline=None)
    def check(shape, count, new, v_dim, layouts, dtype, options):
        batch, (heads, kv_heads), seq_q = shape
        q = lay_out(torch.randn(batch, heads, seq_q, 8).to(dtype), layouts[0])
        caches = [torch.randn(batch, kv_heads, 21, d).to(dtype) for d in (8, v_dim)]
        rows = [torch.randn(batch, kv_heads, new, d).to(dtype) for d in (8, v_dim)] if new else ()

        def run():
            k, v = (lay_out(x.clone(), y) for x, y in zip(caches, layouts[1:], strict=True))
            out = flash_attention_with_kvcache(q, k, v, *rows, cache_seqlens=count, **options)
            return *(out if isinstance(out, tuple) else (out,)), k, v

        assert_second_run_is_cached(run)

    check()


def test_similar_arguments_of_other_types_are_checked():
    q = torch.randn(2, 2, 17, 8)
    flash_attention(q, q, q)
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo"):
        flash_attention(q.to_sparse(), q, q)
    for other in (q.to_sparse(), q.to("meta"), q.bool(), q.numpy()):
        for index in range(3):
            arguments = [q, q, q]
            arguments[index] = other
            with pytest.raises((ValueError, TypeError)):
                flash_attention(*arguments)
    cache, new = torch.randn(2, 2, 20, 8), torch.randn(2, 2, 1, 8)
    token = q[:, :, :1]
    flash_attention_with_kvcache(token, cache, cache, new, new, cache_seqlens=17)
    flash_attention_with_kvcache(token, cache, cache, cache_seqlens=17)
    for wrong in (
        {"cache_seqlens": 20},
        {"cache_seqlens": -1},
        {"cache_seqlens": True},
        {"k": None},
        {"v": None},
        {"k": new.to("meta")},
        {"k": new[:, :1]},
        {"v": new.double()},
        {"v": new.numpy()},
        {"v": new.to_sparse()},
        {"k_cache": cache.to("meta")},
        {"q": token.numpy()},
    ):
        arguments = {"q": token, "k_cache": cache, "v_cache": cache, "k": new, "v": new}
        with pytest.raises((ValueError, TypeError)):
            flash_attention_with_kvcache(**{**arguments, "cache_seqlens": 17, **wrong})


@torch.no_grad()
def test_cached_plan_does_not_skip_the_validation_of_cu_seqlens_q():
    q, cache = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 32, 8)
    flash_attention_with_kvcache(q, cache, cache, cache_seqlens=20)
    with pytest.raises(TypeError, match=r"cu_seqlens_q to be a torch\.Tensor, got list"):
        flash_attention_with_kvcache(q, cache, cache, cache_seqlens=20, cu_seqlens_q=[0, 1])
