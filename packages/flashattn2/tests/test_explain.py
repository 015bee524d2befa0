"""`explain` names the backend that runs, and the kernels' tiles follow the options."""

import pytest
import torch
from flashattn2 import explain, flash_attention
from flashattn2.backends import aten, tiled
from flashattn2.dispatch import select_backend
from flashattn2.kernels import configs, launch
from flashattn2.kernels import forward as kernels
from flashattn2.spec import AttentionSpec


def draw_queries(dim=16, dtype=torch.float32, seq=8):
    return torch.randn(1, 2, seq, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "backend", "reason"),
    [
        ({}, "aten", "aten is the preferred backend on cpu"),
        ({"is_causal": True}, "aten", "aten is the preferred backend on cpu"),
        ({"window": 3}, "torch", "it has a window"),
        ({"softcap": 2.0}, "torch", "it has a softcap"),
        (
            {"k": draw_queries(seq=5), "v": draw_queries(seq=5), "is_causal": True},
            "torch",
            "seq_q 8 and seq_k 5",
        ),
        ({"k": draw_queries(seq=5), "v": draw_queries(seq=5)}, "aten", "preferred"),
        ({"backend": "torch"}, "torch", 'backend="torch" was requested'),
        ({"backend": "triton"}, "triton", 'backend="triton" was requested'),
    ],
)
def test_explanation_names_the_backend_that_runs(
    interpreter, monkeypatch, arguments, backend, reason
):
    x = draw_queries()
    arguments = {"q": x, "k": x, "v": x, **arguments}
    explanation = explain(**arguments)
    assert explanation.backend == backend
    assert reason in explanation.reason

    ran = []

    def watched(name, forward):
        return lambda *a: ran.append(name) or forward(*a)

    for name, module in (("aten", aten), ("torch", tiled), ("triton", kernels)):
        monkeypatch.setattr(module, "forward", watched(name, module.forward))
    flash_attention(**arguments)
    assert ran == [backend]


def test_autocast_and_packed_input_are_explained_as_they_run(interpreter):
    x, packed = draw_queries(dim=64), torch.randn(9, 2, 16)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        half = explain(x, x, x, backend="triton")
    assert half == explain(*(x.bfloat16(),) * 3, backend="triton")
    boundaries = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    # Each sequence by itself may be causal, where dense input of other lengths would be tiled.
    assert explain(packed, packed, packed, is_causal=True, **boundaries).backend == "aten"


def test_precision_follows_the_setting_of_torch():
    def chosen():
        method, _ = select_backend(
            draw_queries(), draw_queries(), draw_queries(), AttentionSpec(1.0)
        )
        return method.precision

    assert chosen() == "ieee"
    torch.set_float32_matmul_precision("high")
    try:
        assert chosen() == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("spec", "seq", "table"),
    [
        (AttentionSpec(1.0), 8, configs.TILES),
        (AttentionSpec(1.0, right=3), 8, configs.TILES),
        (AttentionSpec(1.0, left=3, softcap=2.0), 8, configs.RICH),
        # Two heads of 32 tiles of keys, and 132 processors: the keys are split.
        (AttentionSpec(1.0), 4096, configs.RICH),
    ],
)
def test_left_window_softcap_or_splits_select_the_rich_tile(monkeypatch, spec, seq, table):
    gpu = launch.Device(227 * 1024, 132, launch.HOPPER)
    monkeypatch.setattr(launch, "get_device", lambda _: gpu)
    x = draw_queries(dim=64, dtype=torch.float16, seq=seq)
    plan = launch.plan_launch("dkdv", "ieee", spec, x, x, x, packed=False)
    assert plan.tile == configs.TileConfig(*table["tma", "half", "dkdv"][64])
    splits = plan.meta.SPLITS
    assert splits == (2 if seq == 4096 else 1)


def test_sdpa_arguments_that_torch_computes_are_explained():
    x = draw_queries()
    explanation = explain(x, x, x, attn_mask=torch.ones(8, 8, dtype=torch.bool))
    assert explanation.backend == "torch.nn.functional"
    assert "reads no mask tensor" in explanation.reason
    assert "has no dropout" in explain(x, x, x, dropout_p=0.1).reason


def test_auto_does_not_select_the_kernels_on_rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    x = torch.empty(1, 2, 8, 16, device="meta")
    method, reason = select_backend(x, x, x, AttentionSpec(1.0))
    assert method.backend == "torch"
    assert "ROCm" in reason
    with pytest.raises(ValueError, match="never compiled for ROCm"):
        select_backend(x, x, x, AttentionSpec(1.0), backend="triton")
