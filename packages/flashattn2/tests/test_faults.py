"""Invalid input raises an error that names the argument, the value and the remedy."""

from unittest import mock

import flashattn2.attention as attention
import numpy
import pytest
import torch
from flashattn2 import (
    FlashAttentionTorch,
    FlashAttentionTriton,
    attention_reference,
    explain,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)

Q = torch.zeros(1, 4, 8, 16)
KV = torch.zeros(1, 2, 8, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0, 0]}, r"\(batch, heads, seq, dim\) or .* got 2 dimensions, shape \(8, 16\)"),
        ({"q": Q[0]}, r"of q, .* shape \(4, 8, 16\), got .* with shape \(1, 2, 8, 16\)"),
        ({"v": KV[:, :, :7]}, r"got shape \(1, 2, 8, 16\) and \(1, 2, 7, 16\)"),
        ({"q": Q.expand(2, -1, -1, -1)}, r"got batch 2 for q and 1 for k; expand\(\)"),
        ({"q": Q[..., :8]}, r"got head dim 8 for q and 16 for k"),
        (
            {"k": KV.half()},
            r"k to have the dtype, .* got torch.float16 .*; k.to\(q\) or q.to\(k\) converts",
        ),
        ({"v": KV.to("meta")}, r"v to have .* of q, .* on cpu .* got .* on meta .*; v.to\(q\)"),
        ({"q": Q[:, :3]}, r"heads % kv_heads == 0.* got 3 query heads and 2 key heads"),
        (dict.fromkeys("qkv", Q.int()), r"expected float64, .* got dtype torch.int32"),
        (dict.fromkeys("qkv", Q[..., :0]), r"head dim 0"),
        ({"k": KV.to_sparse()}, r"k to be a dense tensor, got layout torch.sparse_coo"),
        ({"scale": 0.0}, r"<= scale <= .* got 0.0"),
        ({"scale": float("nan")}, r"<= scale <= .* got nan"),
        ({"softcap": -1.0}, r"<= softcap <= .* got -1.0"),
        ({"softcap": float("inf")}, r"<= softcap <= .* got inf"),
        (
            {"softcap": 1e-40},
            r"<= softcap <= .* got 1e-40",
        ),
        ({"softcap": 1e38}, r"scale / softcap within the normal range of float32, .* 1e\+38"),
        ({"scale": 1e3, "softcap": 1e-36}, r"scale / softcap within .* 1000.0 and softcap 1e-36"),
        ({"scale": 1e39}, r"<= scale <= .* got 1e\+39"),
        (
            {"sinks": torch.tensor([0, torch.inf, 0, 0])},
            r"finite sinks, got \[0.0, inf, 0.0, 0.0\]",
        ),
        ({"sinks": torch.full((4,), -torch.inf)}, r"finite sinks, got \[-inf, .* such as -1e4"),
        ({"window": -1}, r"window to be an int >= 0, .* got -1"),
        ({"window": (3, -2)}, r"got \(3, -2\)"),
        ({"window": (1, 2, 3)}, r"got \(1, 2, 3\) with 3 sides"),
        ({"window": 1.5}, r"window to be an int >= 0, .* got 1.5"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("function", [flash_attention, attention_reference, explain])
def test_wrong_tensors_and_options_are_refused(function, change, message):
    arguments = {"q": Q, "k": KV, "v": KV, **change}
    with pytest.raises(ValueError, match=message):
        function(**arguments)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated:FutureWarning")
def test_traces_which_would_contain_the_lengths_of_their_example_are_refused():
    x = torch.randn(1, 2, 9, 16)
    cu = torch.tensor([0, 9], dtype=torch.int32)
    calls = [
        lambda q: flash_attention(q, q, q, is_causal=True),
        lambda q: flash_attention_varlen(q[0], q[0], q[0], cu[:2], cu[:2]),
        lambda q: flash_attention_with_kvcache(q, x, x.clone(), cache_seqlens=5),
    ]
    flash_attention(x, x, x, is_causal=True)  # store a plan, with which a call skips validation
    for call in calls:
        with pytest.raises(NotImplementedError, match=r"use torch.export"):
            torch.jit.trace(call, (x,), check_trace=False)


def test_checked_signature_does_not_skip_checks_of_another():
    for window in (1, (1, 1)):
        for _ in range(2):
            flash_attention(Q, KV, KV, window=window, scale=1.0, softcap=1.0)
            flash_attention(Q, KV, KV, window=window, scale=1.0)
    for wrong, error in (
        ({"window": 1.5}, ValueError),
        ({"window": True}, ValueError),
        ({"window": (True, 1)}, ValueError),
        ({"window": (1, True)}, ValueError),
        ({"window": (1,)}, ValueError),
        ({"is_causal": 0.0}, TypeError),
        ({"scale": True}, TypeError),
        ({"scale": True, "softcap": "1"}, TypeError),
        ({"softcap": True}, TypeError),
        ({"v": KV[:, :, :7]}, ValueError),
        ({"v": KV.half()}, ValueError),
        ({"k": None}, TypeError),
        ({"backend": "cuda"}, ValueError),
        ({"sinks": torch.zeros(3)}, ValueError),
    ):
        for _ in range(2):
            with pytest.raises(error):
                flash_attention(**{"q": Q, "k": KV, "v": KV, "window": 1, "scale": 1.0, **wrong})


@pytest.mark.parametrize("compiled", [False, True])
def test_infinite_sinks_whose_values_cannot_be_read_give_nan(compiled):
    def run(q, sinks):
        return flash_attention(q, q, q, sinks=sinks)

    q, sinks = torch.randn(1, 2, 5, 16), torch.tensor([0.0, torch.inf])
    if compiled:
        out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, sinks)
    else:
        out = torch.func.vjp(run, q, sinks)[0]
    assert out[:, 1].isnan().all()
    assert out[:, 0].isfinite().all()


def test_plan_follows_changes_of_the_torch_precision(interpreter):
    seen, run = [], attention.run_attention
    with mock.patch.object(attention, "run_attention", lambda *a: seen.append(a[-1]) or run(*a)):
        try:
            for precision in ("highest", "high", "highest"):
                torch.set_float32_matmul_precision(precision)
                flash_attention(Q, KV, KV, backend="triton")
        finally:
            torch.set_float32_matmul_precision("highest")
    assert [method.precision for method in seen] == ["ieee", "tf32", "ieee"]


NO_TENSORS = (None, [[1.0]], Q.numpy(), 3.0)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("function", [flash_attention, attention_reference, explain])
def test_other_types_than_tensors_are_refused(function, name, value):
    with pytest.raises(
        TypeError, match=rf"{name} to be a .*, got .*{type(value).__name__}; .*as_tensor"
    ):
        function(**{"q": Q, "k": KV, "v": KV, name: value})


@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda x: type(x).__name__)
def test_other_types_are_refused_by_packed_and_paper_functions(value):
    q, cu = torch.zeros(8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    for index in range(5):
        arguments = [q, q, q, cu, cu]
        arguments[index] = value
        with pytest.raises(TypeError, match=r"to be a torch\.Tensor"):
            flash_attention_varlen(*arguments)
    for index in range(3):
        arguments = [Q[0], Q[0], Q[0]]
        arguments[index] = value
        with pytest.raises(TypeError, match=r"to be a torch\.Tensor"):
            FlashAttentionTorch.apply(*arguments)
    with pytest.raises(TypeError, match=r"cu_seqlens_k to be a torch\.Tensor, got NoneType"):
        explain(q, q, q, cu_seqlens_q=cu)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "0.3"}, r"scale to be a float, or None for 1/sqrt.* got '0.3'"),
        ({"scale": torch.tensor(0.3)}, r"scale to be a float, .* got tensor\(0.3000\)"),
        ({"softcap": [2.0]}, r"softcap to be a float, or None for no cap, got \[2.0\]"),
        ({"is_causal": None}, "is_causal to be True or False, got None"),
        ({"is_causal": "yes"}, "is_causal to be True or False, got 'yes'"),
        ({"is_causal": 1.0}, "is_causal to be True or False, got 1.0"),
        ({"scale": True}, "scale to be a float, or None for 1/sqrt.* got True"),
        ({"softcap": numpy.bool_(True)}, "softcap to be a float, .* got .*True"),
        ({"scale": numpy.ones(1)}, r"scale to be a float, .* got array\(\[1.\]\)"),
        ({"scale": 1j}, "scale to be a float, .* got 1j"),
    ],
)
@pytest.mark.parametrize("function", [flash_attention, attention_reference, explain])
def test_options_of_wrong_types_are_refused(function, options, message):
    with pytest.raises(TypeError, match=message):
        function(Q, KV, KV, **options)


@pytest.mark.parametrize(
    ("dim", "options", "message"),
    [
        (16, {"backend": "cuda"}, r"one of auto, triton, gluon, aten, torch, got 'cuda'"),
        (300, {"backend": "triton"}, r'head_dim <= 256, got head dim 300; pass backend="torch"'),
        (12, {"backend": "triton"}, r"a multiple of 8 from 16 to 256, got head dim 12"),
        (16, {"backend": "aten", "window": 3}, "it has a window"),
        (16, {"backend": "aten", "softcap": 3.0}, "it has a softcap"),
        (16, {"backend": "aten", "is_causal": True}, "causal with seq_q 4 and seq_k 3"),
    ],
)
def test_unsupported_input_of_a_backend_is_refused(dim, options, message):
    q, k = torch.zeros(1, 1, 4, dim), torch.zeros(1, 1, 3, dim)
    with pytest.raises(ValueError, match=message):
        flash_attention(q, k, k, **options)
    with pytest.raises(ValueError, match="float32, bfloat16 or float16, got"):
        flash_attention(q.double(), q.double(), q.double(), backend="triton")


def test_bfloat16_is_refused_where_the_interpreter_multiplies_it_wrongly(monkeypatch):
    """Without the corrected product of the fixture `interpreter`, results are off by 1e8."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = torch.randn(1, 1, 20, 16).bfloat16()
    for run in (
        lambda: flash_attention(q, q, q, backend="triton"),
        lambda: FlashAttentionTriton.apply(q[0], q[0], q[0]),
        lambda: explain(q, q, q, backend="triton"),
        lambda: flash_attention_with_kvcache(q, q, q, cache_seqlens=20, backend="triton"),
    ):
        with pytest.raises(ValueError, match="multiplies bfloat16 bit patterns as integers"):
            run()


@pytest.mark.parametrize("function", [FlashAttentionTorch, FlashAttentionTriton])
def test_paper_functions_need_three_dimensions(function):
    with pytest.raises(ValueError, match=r"expected Q to be \(batch, seq, dim\)"):
        function.apply(Q, Q, Q)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ([0, 3, 8], [0, 8], "got 2 in cu_seqlens_q and 1 in cu_seqlens_k"),
        ([0, 5, 3, 8], [0, 1, 2, 8], r"cu_seqlens_q must .* never decrease, .* got \[0, 5, 3, 8\]"),
        ([1, 8], [0, 8], r"cu_seqlens_q must start at 0, .* got \[1, 8\]"),
        ([0, 8], [0, 9], r"cu_seqlens_k must .* end at 8, .* got \[0, 9\]"),
        ([0], [0], r"cu_seqlens_q must .* end at 8, .* got \[0\]"),
        ([], [], r"cu_seqlens_q to be int32 .* got torch.int32 of shape \(0,\)"),
    ],
)
def test_malformed_boundaries_are_refused(cu_q, cu_k, message):
    q = torch.zeros(8, 2, 16)
    boundaries = (torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k))
    with pytest.raises(ValueError, match=message):
        flash_attention_varlen(q, q, q, *boundaries)


def test_boundaries_are_int32_and_packed_input_has_three_dimensions():
    q, cu = torch.zeros(8, 2, 16), torch.tensor([0, 8])
    with pytest.raises(ValueError, match=r"cu_seqlens_q to be int32 .* got torch\.int64"):
        flash_attention_varlen(q, q, q, cu, cu)
    with pytest.raises(ValueError, match=r"expected q to be \(total, heads, dim\)"):
        flash_attention_varlen(q[None], q[None], q[None], cu.int(), cu.int())
