"""An independent reference: flash-attention's tests of its Python interface, on a CPU.

FLASH_ATTN_TESTS is the path of tests/test_flash_attn.py in a checkout.  Its code runs with the CPU
in place of the GPU, and with the functions below in place of those of flash-attention; they call
ours.  Each test has up to a hundred thousand combinations of arguments, of which some are drawn.
"""

import math
import os
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from flashattn2 import flash_attention, flash_attention_varlen, flash_attention_with_kvcache

FILE = os.environ.get("FLASH_ATTN_TESTS")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(FILE is None, reason="FLASH_ATTN_TESTS names no test_flash_attn.py"),
]

THEIRS = (
    "qkvpacked", "varlen_qkvpacked", "output", "varlen_output", "causal", "varlen_causal",
    "splitkv", "kvcache", "race_condition", "bwd_overflow", "bwd_transpose", "bwd_varlen_overflow",
    "deterministic", "varlen_deterministic", "kvcache_paged_block_table_bounds",
)  # fmt: skip
# Tests of functions below the Python interface.
PRIVATE = ("varlen_paged_kv_num_splits", "generator_arg_must_be_none")
# flashattn2 does not support dropout, biases, rotary embeddings, keys that start late and pages of
# packed sequences.  Tests with such an argument run with the value that flashattn2 supports.
OURS = {"dropout_p": 0.0, "alibi": False, "rotary_fraction": 0.0, "has_leftpad": False}
# Repetitions would find results that depend on the order of the programs of a GPU.
SUBSTITUTES = {'"cuda"': '"cpu"', "range(250)": "range(2)", "range(50)": "range(2)"}


def convert_options(scale, causal, window, softcap, deterministic=True):
    left, right = (None if int(side) < 0 else int(side) for side in window)
    return {
        "scale": scale, "is_causal": causal, "window": (left, right), "softcap": softcap or None,
        "deterministic": deterministic,
    }  # fmt: skip


def build_interface(backend):
    """Return the functions of flash-attention, implemented with ours."""

    def dense(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    ):
        assert not dropout_p
        assert alibi_slopes is None
        out, lse = flash_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            return_lse=True,
            backend=backend,
            **convert_options(softmax_scale, causal, window_size, softcap, deterministic),
        )
        out = out.transpose(1, 2)
        return (out, lse, None) if return_attn_probs else out

    def varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert not dropout_p
        assert alibi_slopes is block_table is None
        out, lse = flash_attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            return_lse=True,
            backend=backend,
            **convert_options(softmax_scale, causal, window_size, softcap, deterministic),
        )
        return (out, lse, None) if return_attn_probs else out

    def cached(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
    ):
        assert rotary_cos is cache_batch_idx is cache_leftpad is alibi_slopes is None
        arguments = convert_options(softmax_scale, causal, window_size, softcap)
        del arguments["deterministic"]
        try:
            out = flash_attention_with_kvcache(
                *(x if x is None else x.transpose(1, 2) for x in (q, k_cache, v_cache, k, v)),
                cache_seqlens=cache_seqlens,
                block_table=block_table,
                backend=backend,
                **arguments,
            )
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        return out.transpose(1, 2)

    return {
        "flash_attn_func": dense,
        "flash_attn_kvpacked_func": lambda q, kv, *a, **o: dense(q, *kv.unbind(2), *a, **o),
        "flash_attn_qkvpacked_func": lambda qkv, *a, **o: dense(*qkv.unbind(2), *a, **o),
        "flash_attn_varlen_func": varlen,
        "flash_attn_varlen_kvpacked_func": lambda q, kv, *a, **o: varlen(q, *kv.unbind(1), *a, **o),
        "flash_attn_varlen_qkvpacked_func": lambda qkv, cu, most, *a, **o: varlen(
            *qkv.unbind(1), cu, cu, most, most, *a, **o
        ),
        "flash_attn_with_kvcache": cached,
    }


def unpad_input(x, mask):
    """Return the rows that a mask `(batch, seq)` selects, their indices and the boundaries."""
    lengths = mask.sum(1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    bounds = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[indices], indices, bounds, int(lengths.max()), lengths


def pad_input(x, indices, batch, seq):
    return (
        x.new_zeros(batch * seq, *x.shape[1:]).index_copy(0, indices, x).unflatten(0, (batch, seq))
    )


def build_names(backend="auto"):
    """Return the names of flash-attention's test file, linked to our functions."""
    pytest.importorskip("einops", reason="flash-attention's tests use einops")
    names = {
        "flash_attn": build_interface(backend),
        "flash_attn.bert_padding": {"pad_input": pad_input, "unpad_input": unpad_input},
        "flash_attn.flash_attn_interface": {
            "_get_block_size_n": None, "USE_TRITON_ROCM": False, "flash_attn_gpu": None,
        },
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {"apply_rotary_emb": None},
    }  # fmt: skip
    modules = {}
    for name, attributes in names.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(attributes)
    text = Path(FILE).read_text()
    for written, meant in SUBSTITUTES.items():
        assert written in text
        text = text.replace(written, meant)
    gpu = SimpleNamespace(total_memory=2**40)
    results = {"__name__": "theirs"}
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
    ):
        exec(compile(text, FILE, "exec"), results)
    results["torch"] = SimpleNamespace(
        **{name: getattr(torch, name) for name in dir(torch) if name != "cuda"},
        cuda=SimpleNamespace(get_device_properties=lambda _: gpu),
    )
    return results


def draw_cases(test, count, largest):
    """Draw combinations of a test that flashattn2 supports, up to a size."""
    marks = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    draw, cases = random.Random(test.__name__), []
    for _ in range(20000):
        case = {}
        for names, values in marks:
            split = [name.strip() for name in names.split(",")]
            value = draw.choice(values)
            case |= dict(zip(split, value if len(split) > 1 else [value], strict=True))
        case |= {name: value for name, value in OURS.items() if name in case}
        if test.__name__ == "test_flash_attn_varlen_causal":
            case["paged_kv_block_size"] = None
        sides = [case[name] for name in ("seqlen", "seqlen_q", "seqlen_k") if name in case]
        if len(sides) == 1:
            sides *= 2
        if math.prod(sides) * case.get("d", 64) <= largest and case not in cases:
            cases.append(case)
        if len(cases) == count:
            break
    return cases


def run(backend, name, count, largest, may=lambda case: True):
    test = build_names(backend)[f"test_flash_attn_{name}"]
    cases = [case for case in draw_cases(test, count, largest) if may(case)]
    assert cases
    ran = 0
    for case in cases:
        try:
            test(**case)
            ran += 1
        except pytest.skip.Exception:
            pass
        except BaseException as error:
            error.add_note(f"{name}: {case}")
            raise
    assert ran >= len(cases) / 3


def test_every_flash_attn_test_is_run_or_listed():
    names = {
        name.removeprefix("test_flash_attn_") for name in build_names() if name.startswith("test_")
    }
    assert names == {*THEIRS, *PRIVATE}


@pytest.mark.parametrize("name", THEIRS)
def test_flash_attn_tests_pass_on_a_cpu(name):
    run("auto", name, 15, 2**23)


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "race_condition"])
def test_flash_attn_tests_pass_on_interpreted_kernels(interpreter, name):
    run("triton", name, 3, 2**20, lambda case: case.get("d", 64) % 8 == 0)
