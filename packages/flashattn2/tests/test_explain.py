"""`explain` names the backend and the tiles that run."""

import pytest
import torch
from flashattn2 import explain, flash_attention
from flashattn2.backends import aten, tiled
from flashattn2.kernels import forward as kernels


def q(dim=16, dtype=torch.float32, seq=8):
    return torch.randn(1, 2, seq, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "backend", "reason"),
    [
        ({}, "aten", "aten is the preferred backend on cpu"),
        ({"is_causal": True}, "aten", "aten is the preferred backend on cpu"),
        ({"window": 3}, "torch", "it has no window"),
        ({"softcap": 2.0}, "torch", "it has no softcap"),
        ({"k": q(seq=5), "v": q(seq=5), "is_causal": True}, "torch", "top left, and seq_q 8"),
        ({"k": q(seq=5), "v": q(seq=5)}, "aten", "preferred"),
        ({"backend": "torch"}, "torch", 'backend="torch" was requested'),
        ({"backend": "triton"}, "triton", 'backend="triton" was requested'),
    ],
)
def test_explanation_names_the_backend_that_runs(
    interpreter, monkeypatch, arguments, backend, reason
):
    x = q()
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


def test_explained_tiles_are_those_of_the_launch(interpreter):
    interpreter(splits=3, tma=False)
    x = q(dim=24)
    text = str(explain(x, x, x, backend="triton"))
    assert text.count("16 queries by 32 keys by head dim 32") == 3
    assert text.count("3 splits, pointers") == 3
    half = explain(*(x.half(),) * 3, backend="triton", deterministic=False)
    assert [tile.split(":")[0] for tile in half.tiles] == ["forward", "atomic"]


def test_autocast_and_packed_input_are_explained_as_they_run(interpreter):
    x, packed = q(dim=64), torch.randn(9, 2, 16)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        half = explain(x, x, x, backend="triton")
    assert half == explain(*(x.bfloat16(),) * 3, backend="triton")
    boundaries = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    kernels_of = explain(packed, packed, packed, backend="triton", **boundaries).tiles
    assert len(kernels_of) == 3
    assert all("1 splits, pointers" in tile for tile in kernels_of)
    # Each sequence by itself may be causal, where dense input of other lengths would be tiled.
    assert explain(packed, packed, packed, is_causal=True, **boundaries).backend == "aten"


def test_precision_follows_the_setting_of_torch():
    def chosen():
        tiles = explain(q(), q(), q(), backend="triton").tiles
        assert len({tile.split(", ")[-1] for tile in tiles}) == 1
        return tiles[0].split(", ")[-1]

    assert chosen() == "ieee products"
    torch.set_float32_matmul_precision("high")
    try:
        assert chosen() == "tf32 products"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_left_window_or_softcap_selects_the_rich_tile(monkeypatch):
    from flashattn2.kernels import configs, launch

    monkeypatch.setattr(
        launch, "device_of", lambda _: launch.Device("Hopper", 227 * 1024, 132, True)
    )
    x = q(dim=64, dtype=torch.float16)
    plain = configs.TILES["tma", "half", "dkdv"][64]
    for options, sizes in (
        ({}, plain),
        ({"window": (None, 3)}, plain),
        ({"softcap": 2.0, "window": 3}, configs.RICH["tma", "half", "dkdv"][64]),
    ):
        block_m, block_n, *_ = sizes
        tile = explain(x, x, x, backend="triton", **options).tiles[1]
        assert f"dkdv: {block_m} queries by {block_n} keys" in tile


def test_splits_select_the_rich_tile(monkeypatch):
    from flashattn2.kernels import configs, launch

    monkeypatch.setattr(
        launch, "device_of", lambda _: launch.Device("Hopper", 227 * 1024, 132, True)
    )
    # Two heads of 32 tiles of keys, and 132 processors.
    x = q(dim=64, dtype=torch.float16, seq=4096)
    tile = explain(x, x, x, backend="triton").tiles[1]
    block_m, block_n, *_ = configs.RICH["tma", "half", "dkdv"][64]
    assert f"dkdv: {block_m} queries by {block_n} keys" in tile
    assert "2 splits" in tile


def test_sdpa_arguments_that_torch_computes_are_explained():
    x = q()
    explanation = explain(x, x, x, attn_mask=torch.ones(8, 8, dtype=torch.bool))
    assert explanation.backend == "torch.nn.functional"
    assert "reads no mask tensor" in explanation.reason
    assert "has no dropout" in explain(x, x, x, dropout_p=0.1).reason


def test_auto_does_not_select_the_kernels_on_rocm(monkeypatch):
    from flashattn2 import dispatch
    from flashattn2.spec import AttentionSpec

    monkeypatch.setattr(torch.version, "hip", "6.4")
    x = torch.empty(1, 2, 8, 16, device="meta")
    method, reason = dispatch.select_backend(x, x, x, AttentionSpec(1.0))
    assert method.backend == "torch"
    assert "ROCm" in reason
    with pytest.raises(ValueError, match="never compiled for ROCm"):
        dispatch.select_backend(x, x, x, AttentionSpec(1.0), backend="triton")
