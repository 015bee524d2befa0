import pytest
import torch
from interp import LowRank
from interp.circuits.vocabulary import copying_eigenvalues, copying_scores
from torch import Tensor, nn


def draw_random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def ov() -> LowRank:
    torch.manual_seed(0)
    return LowRank(draw_random(2, 3, 8, 3), draw_random(2, 3, 3, 8))


def test_zero_layers_are_bigrams() -> None:
    torch.manual_seed(0)
    embed, unembed = nn.Embedding(11, 4).double(), nn.Linear(4, 11, bias=False).double()
    table = LowRank(unembed.weight, embed.weight.mT).dense()
    for token in range(11):
        torch.testing.assert_close(table[:, token], unembed(embed(torch.tensor(token))))
    assert torch.linalg.matrix_rank(table) == 4


def test_copying_eigenvalues_are_those_of_the_vocabulary_squared_matrix(ov: LowRank) -> None:
    torch.manual_seed(0)
    embed, unembed = draw_random(11, 8), draw_random(11, 8)
    values = copying_eigenvalues(ov, embed, unembed)
    full = torch.linalg.eigvals((unembed @ ov @ embed.mT).dense())
    for power in range(1, 5):
        torch.testing.assert_close((values**power).sum(-1), (full**power).sum(-1))
    expected = full.real.sum(-1) / full.abs().sum(-1)
    torch.testing.assert_close(copying_scores(ov, embed, unembed), expected)


def test_a_head_that_copies_scores_one() -> None:
    torch.manual_seed(0)
    embed = torch.linalg.qr(draw_random(8, 8))[0]
    head = LowRank(torch.eye(8, dtype=torch.float64)[None], torch.eye(8, dtype=torch.float64)[None])
    assert copying_scores(head, embed, embed).item() == pytest.approx(1)
    against = LowRank(-head.a, head.b)
    assert copying_scores(against, embed, embed).item() == pytest.approx(-1)
