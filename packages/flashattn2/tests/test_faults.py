"""Input that cannot be right is a ValueError that names the argument, the value and the remedy."""

import inspect
from typing import Literal, get_overloads
from unittest import mock

import flashattn2.attention as attention
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
        ({"q": Q[0, 0]}, r"q has 2 dimensions, shape \(8, 16\); give \(batch, heads, seq, dim\)"),
        ({"q": Q[0]}, r"q has 3 dimensions and k 4"),
        ({"v": KV[:, :, :7]}, r"k has shape \(1, 2, 8, 16\) and v \(1, 2, 7, 16\)"),
        ({"q": Q.expand(2, -1, -1, -1)}, r"q has batch 2 and k 1; .*expand\(\)"),
        ({"q": Q[..., :8]}, r"q has head dim 8 and k 16"),
        ({"k": KV.half()}, r"dtype torch.float32 and k torch.float16; .*k.to\(q.dtype\)"),
        ({"v": KV.to("meta")}, r"q has device cpu and v meta; .*v.to\(q.device\)"),
        ({"q": Q[:, :3]}, r"3 query heads .* 2 key heads; .* heads % kv_heads == 0"),
        (dict.fromkeys("qkv", Q.int()), r"dtype torch.int32 is not one of float64"),
        (dict.fromkeys("qkv", Q[..., :0]), r"head dim 0"),
        ({"k": KV.to_sparse()}, r"k has layout torch.sparse_coo; give a dense tensor"),
        ({"scale": 0.0}, r"scale 0.0 must be positive and finite"),
        ({"scale": float("nan")}, r"scale nan must be positive"),
        ({"softcap": -1.0}, r"softcap -1.0 must be positive"),
        ({"softcap": float("inf")}, r"softcap inf must be positive and finite"),
        ({"window": -1}, r"window -1: .* an int >= 0, or None"),
        ({"window": (3, -2)}, r"window \(3, -2\)"),
        ({"window": (1, 2, 3)}, r"window \(1, 2, 3\) has 3 sides"),
        ({"window": 1.5}, r"window 1.5"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("function", [flash_attention, attention_reference, explain])
def test_wrong_tensors_and_options(function, change, message):
    arguments = {"q": Q, "k": KV, "v": KV, **change}
    with pytest.raises(ValueError, match=message):
        function(**arguments)


def test_a_signature_that_was_checked_once_vouches_for_no_other():
    flash_attention(Q, KV, KV, window=1, scale=1.0)
    flash_attention(Q, KV, KV, window=1, scale=1.0)
    for wrong, error in (
        ({"window": 1.5}, ValueError),
        ({"window": True}, ValueError),
        ({"scale": True, "softcap": "1"}, TypeError),
        ({"v": KV[:, :, :7]}, ValueError),
        ({"v": KV.half()}, ValueError),
        ({"k": None}, TypeError),
        ({"backend": "cuda"}, ValueError),
        ({"sinks": torch.zeros(3)}, ValueError),
    ):
        for _ in range(2):
            with pytest.raises(error):
                flash_attention(**{"q": Q, "k": KV, "v": KV, "window": 1, "scale": 1.0, **wrong})


def test_what_torch_s_precision_asks_for_is_asked_anew(interpreter):
    seen, run = [], attention.attention
    with mock.patch.object(attention, "attention", lambda *a: seen.append(a[-1]) or run(*a)):
        try:
            for precision in ("highest", "high", "highest"):
                torch.set_float32_matmul_precision(precision)
                flash_attention(Q, KV, KV, backend="triton")
        finally:
            torch.set_float32_matmul_precision("highest")
    assert [method.precision for method in seen] == ["ieee", "tf32", "ieee"]


NO_TENSORS = (None, [[1.0]], Q.numpy(), 3.0)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("given", NO_TENSORS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("function", [flash_attention, attention_reference, explain])
def test_what_is_no_tensor(function, name, given):
    with pytest.raises(TypeError, match=rf"{name} is a .*{type(given).__name__}; .*as_tensor"):
        function(**{"q": Q, "k": KV, "v": KV, name: given})


@pytest.mark.parametrize("given", NO_TENSORS, ids=lambda x: type(x).__name__)
def test_what_is_no_tensor_packed_or_in_the_paper_s_functions(given):
    q, cu = torch.zeros(8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    for place in range(5):
        arguments = [q, q, q, cu, cu]
        arguments[place] = given
        with pytest.raises(TypeError, match=r"give a torch\.Tensor"):
            flash_attention_varlen(*arguments)
    for place in range(3):
        arguments = [Q[0], Q[0], Q[0]]
        arguments[place] = given
        with pytest.raises(TypeError, match=r"give a torch\.Tensor"):
            FlashAttentionTorch.apply(*arguments)
    with pytest.raises(TypeError, match="cu_seqlens_k is a NoneType"):
        explain(q, q, q, cu_seqlens_q=cu)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "0.3"}, r"scale '0.3' is no number; give a float, or None for 1/sqrt"),
        ({"scale": torch.tensor(0.3)}, r"scale tensor\(0.3000\) is no number"),
        ({"softcap": [2.0]}, r"softcap \[2.0\] is no number; give a float, or None for no cap"),
        ({"is_causal": None}, "is_causal None is not a bool; give True or False"),
        ({"is_causal": "yes"}, "is_causal 'yes' is not a bool"),
    ],
)
@pytest.mark.parametrize("function", [flash_attention, attention_reference, explain])
def test_options_of_another_type(function, options, message):
    with pytest.raises(TypeError, match=message):
        function(Q, KV, KV, **options)


@pytest.mark.parametrize(
    ("dim", "options", "message"),
    [
        (16, {"backend": "cuda"}, r"backend 'cuda' is not one of auto, triton, gluon, aten, torch"),
        (16, {"precision": "fp8"}, "precision 'fp8' is not one of ieee, tf32x3, tf32"),
        (300, {"backend": "triton"}, r'head dim 300 is above 256, .* use backend="torch"'),
        (12, {"backend": "triton"}, r"head dim 12 is not a multiple of 8 from 16 to 256"),
        (16, {"backend": "aten", "window": 3}, "it has no window"),
        (16, {"backend": "aten", "softcap": 3.0}, "no softcap"),
    ],
)
def test_a_backend_that_cannot_take_the_input(dim, options, message):
    q = torch.zeros(1, 1, 4, dim)
    with pytest.raises(ValueError, match=message):
        flash_attention(q, q, q, **options)


def test_aten_refuses_causal_attention_of_unequal_lengths():
    with pytest.raises(ValueError, match="seq_q 8 differs from seq_k 5"):
        flash_attention(Q, KV[:, :, :5], KV[:, :, :5], is_causal=True, backend="aten")


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


def test_triton_has_no_float64():
    with pytest.raises(ValueError, match="no float64"):
        flash_attention(*(x.double() for x in (Q, KV, KV)), backend="triton")


@pytest.mark.parametrize("function", [FlashAttentionTorch, FlashAttentionTriton])
def test_the_paper_s_functions_take_three_dimensions(function):
    with pytest.raises(ValueError, match=r"give \(batch, seq, dim\)"):
        function.apply(Q, Q, Q)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ([0, 3, 8], [0, 8], "bounds 2 sequences and cu_seqlens_k 1"),
        ([0, 5, 3, 8], [0, 1, 2, 8], r"cu_seqlens_q is \[0, 5, 3, 8\]; .* never fall"),
        ([1, 8], [0, 8], r"cu_seqlens_q is \[1, 8\]; cu_seqlens_q must start at 0"),
        ([0, 8], [0, 9], r"cu_seqlens_k is \[0, 9\]; .* end at 8"),
        ([0], [0], r"cu_seqlens_q is \[0\]; .* end at 8"),
        ([], [], r"cu_seqlens_q is torch.int32 of shape \(0,\)"),
    ],
)
def test_malformed_boundaries(cu_q, cu_k, message):
    q = torch.zeros(8, 2, 16)
    boundaries = (torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k))
    with pytest.raises(ValueError, match=message):
        flash_attention_varlen(q, q, q, *boundaries)


def test_boundaries_are_int32_and_packed_input_has_three_dimensions():
    q, cu = torch.zeros(8, 2, 16), torch.tensor([0, 8])
    with pytest.raises(ValueError, match=r"cu_seqlens_q is torch\.int64"):
        flash_attention_varlen(q, q, q, cu, cu)
    with pytest.raises(ValueError, match=r"give \(total, heads, dim\)"):
        flash_attention_varlen(q[None], q[None], q[None], cu.int(), cu.int())


@pytest.mark.parametrize("function", [flash_attention, flash_attention_varlen])
def test_the_type_of_the_result_follows_return_lse(function):
    signatures = [inspect.signature(overload) for overload in get_overloads(function)]
    pair = tuple[torch.Tensor, torch.Tensor]
    assert {s.parameters["return_lse"].annotation: s.return_annotation for s in signatures} == {
        Literal[False]: torch.Tensor,
        Literal[True]: pair,
        bool: torch.Tensor | tuple[torch.Tensor, ...],
    }
