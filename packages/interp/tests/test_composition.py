import interp.circuits.composition
import pytest
import torch
from interp import AttentionOnly, LowRank, composition_scores


def draw_circuits(layers: int, heads: int, d: int, rank: int, seed: int) -> tuple[LowRank, LowRank]:
    torch.manual_seed(seed)
    sizes = (layers, heads, d, rank), (layers, heads, rank, d)
    ov, qk = (LowRank(*(torch.randn(s, dtype=torch.float64) for s in sizes)) for _ in range(2))
    return ov, qk


@pytest.mark.parametrize("kind", ["q", "k", "v"])
@pytest.mark.parametrize(("heads", "d", "rank"), [(3, 11, 2), (1, 5, 7)])
@pytest.mark.parametrize("block", [1 << 23, 30])
def test_scores_equal_the_dense_definition(
    monkeypatch: pytest.MonkeyPatch, kind: str, heads: int, d: int, rank: int, block: int
) -> None:
    monkeypatch.setattr(interp.circuits.composition, "_MAX_PRODUCT_ENTRIES", block)
    ov, qk = draw_circuits(4, heads, d, rank, 0)
    scores = composition_scores(ov, qk, kind=kind)  # type: ignore[arg-type]
    for l1 in range(4):
        for h1 in range(heads):
            w1 = ov[l1, h1].dense()
            for l2 in range(4):
                for h2 in range(heads):
                    w2 = {"q": qk.mT, "k": qk, "v": ov}[kind][l2, h2].dense()
                    expected = (w2 @ w1).norm() / (w2.norm() * w1.norm()) if l1 < l2 else 0.0
                    assert scores[l1, h1, l2, h2].item() == pytest.approx(
                        float(expected), rel=1e-12
                    )


def test_unrelated_circuits_score_chance_and_disjoint_circuits_score_zero() -> None:
    ov, qk = draw_circuits(2, 8, 64, 4, 0)
    scores = composition_scores(ov, qk, kind="k")[0, :, 1]
    assert scores.mean().item() == pytest.approx(1 / 8, rel=0.05)
    a = torch.zeros(2, 1, 6, 2, dtype=torch.float64)
    a[..., :2, :] = torch.eye(2, dtype=torch.float64)
    blind = LowRank(a, a.mT.roll(3, -1))
    assert composition_scores(blind, kind="v").abs().max() == 0


@pytest.mark.parametrize("name", ["ov", "qk"])
def test_methods_of_a_decoder_are_refused_as_circuits(name: str) -> None:
    decoder = AttentionOnly(vocabulary=5, context=4, d_model=8, layers=2, heads=2)
    circuits = {"ov": decoder.ov(), "qk": decoder.qk()} | {name: getattr(decoder, name)}
    with pytest.raises(TypeError, match=rf"a LowRank as {name}, got a method; pass decoder"):
        composition_scores(**circuits, kind="k")


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_scores_do_not_depend_on_the_size_of_the_circuits(size: float) -> None:
    ov, qk = (LowRank(x.a.float(), x.b.float()) for x in draw_circuits(3, 2, 9, 2, 0))
    scaled_ov, scaled_qk = (LowRank(size * x.a, size * x.b) for x in (ov, qk))
    expected = composition_scores(ov, qk, kind="q")
    torch.testing.assert_close(composition_scores(scaled_ov, scaled_qk, kind="q"), expected)
