"""`explain` names what runs, and what it names is what runs."""

import pytest
import torch
from flashattn2 import explain, flash_attention, function


def q(dim=16, dtype=torch.float32, seq=8):
    return torch.randn(1, 2, seq, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "backend", "reason"),
    [
        ({}, "aten", "aten first on cpu"),
        ({"is_causal": True}, "aten", "aten first on cpu"),
        ({"window": 3}, "torch", "it has no window"),
        ({"softcap": 2.0}, "torch", "it has no softcap"),
        ({"k": q(seq=5), "v": q(seq=5), "is_causal": True}, "torch", "top left, and seq_q 8"),
        ({"k": q(seq=5), "v": q(seq=5)}, "aten", "first"),
        ({"backend": "torch"}, "torch", 'backend="torch" was asked for'),
        ({"backend": "triton"}, "triton", 'backend="triton" was asked for'),
    ],
)
def test_the_backend_and_the_reason(interpreter, monkeypatch, arguments, backend, reason):
    x = q()
    arguments = {"q": x, "k": x, "v": x, **arguments}
    explanation = explain(**arguments)
    assert explanation.backend == backend
    assert reason in explanation.reason

    ran = []
    operator = function.forward_op
    monkeypatch.setattr(function, "forward_op", lambda *a: ran.append(a[9]) or operator(*a))
    flash_attention(**arguments)
    assert ran == [backend]


def test_the_tiles_are_those_of_the_launch(interpreter):
    interpreter(splits=3, tma=False)
    x = q(dim=24)
    text = str(explain(x, x, x, backend="triton"))
    assert text.count("16 queries by 32 keys by head dim 32") == 3
    assert text.count("3 splits, pointers") == 3
    half = explain(*(x.half(),) * 3, backend="triton", deterministic=False)
    assert [tile.split(":")[0] for tile in half.tiles] == ["forward", "atomic"]


def test_precision_follows_torch_s_own_switch():
    from flashattn2.dispatch import choose
    from flashattn2.problem import Score

    def chosen():
        return choose(q(), q(), Score(1.0)).method.precision

    assert chosen() == "ieee"
    torch.set_float32_matmul_precision("high")
    try:
        assert chosen() == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
