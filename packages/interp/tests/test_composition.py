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
@pytest.mark.parametrize("min_product", [0.0, 1e-5, float("inf")])
def test_scores_equal_the_dense_definition(
    monkeypatch: pytest.MonkeyPatch, kind: str, heads: int, d: int, rank: int, min_product: float
) -> None:
    """With 0, all scores follow from Gram matrices; with inf, all are computed directly."""
    monkeypatch.setattr(interp.circuits.composition, "_MIN_INNER_PRODUCT", min_product)
    monkeypatch.setattr(interp.circuits.composition, "_DIRECT_PAIRS", 2)
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


@pytest.mark.parametrize("overlap", [1e-6, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0])
@pytest.mark.parametrize("spread", [0, 4])
def test_small_scores_are_accurate_in_float32(overlap: float, spread: int) -> None:
    """Later heads read little of what earlier heads write, so the terms of Gram matrices cancel.

    The singular values of the earlier circuits are spread over `spread` orders of magnitude.
    """
    torch.manual_seed(0)
    d, rank = 128, 16
    is_written = (torch.arange(d) < d // 2).float()
    columns = 10 ** (-spread * torch.linspace(0, 1, rank))
    a = torch.randn(3, 2, d, rank) * columns * (is_written + overlap * (1 - is_written))[:, None]
    b = torch.randn(3, 2, rank, d) * (overlap * is_written + 1 - is_written)
    ov = LowRank(a, torch.randn(3, 2, rank, d))
    qk = LowRank(torch.randn(3, 2, d, rank), b)
    earlier, later = (LowRank(x.a.double(), x.b.double()).dense() for x in (ov, qk))
    products = torch.linalg.matrix_norm(later[None, None] @ earlier[:, :, None, None])
    norms = [torch.linalg.matrix_norm(x) for x in (earlier, later)]
    expected = products / (norms[0][:, :, None, None] * norms[1])
    scores = composition_scores(ov, qk, kind="k").double()
    for layer in range(2):
        torch.testing.assert_close(
            scores[layer, :, layer + 1 :], expected[layer, :, layer + 1 :], rtol=1e-5, atol=0
        )


def test_circuits_of_zeros_and_models_of_one_layer_have_scores_of_zero() -> None:
    ov, qk = draw_circuits(2, 2, 5, 2, 0)
    zero = LowRank(torch.zeros_like(ov.a), ov.b)
    assert composition_scores(zero, qk, kind="k").abs().max() == 0
    assert composition_scores(ov[:1], qk[:1], kind="k").abs().max() == 0
