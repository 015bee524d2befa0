from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interp import LowRank, ov_circuit, qk_circuit
from interp.circuits.heads import compute_circuit_pattern
from interp.circuits.low_rank import synthesize

SIZES = st.integers(1, 9)


def draw_random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 3), m=SIZES, r=SIZES, n=SIZES, s=SIZES, p=SIZES, seed=st.integers(0, 99)
)
def test_every_operation_equals_the_dense_one(
    batch: int, m: int, r: int, n: int, s: int, p: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x = LowRank(draw_random(batch, m, r), draw_random(batch, r, n))
    y = LowRank(draw_random(n, s), draw_random(s, p))
    dense = x.a @ x.b
    assert x.shape == dense.shape
    torch.testing.assert_close(x.dense(), dense)
    torch.testing.assert_close(x.mT.dense(), dense.mT)
    torch.testing.assert_close((x @ y).dense(), dense @ y.dense())
    assert (x @ y).rank == min(r, s)
    torch.testing.assert_close((x @ y.dense()).dense(), dense @ y.dense())
    torch.testing.assert_close(
        (random_left := draw_random(p, m)) @ x.dense(), (random_left @ x).dense()
    )
    torch.testing.assert_close(x.norm(), torch.linalg.matrix_norm(dense))
    torch.testing.assert_close(x.apply(rows := draw_random(batch, 4, n)), rows @ dense.mT)
    torch.testing.assert_close(x.apply(rows[0, 0]), dense @ rows[0, 0])
    torch.testing.assert_close(x[0].dense(), dense[0])
    u, values, vh = x.svd()
    torch.testing.assert_close(u * values[..., None, :] @ vh, dense)
    expected = torch.linalg.svdvals(dense)
    torch.testing.assert_close(values[..., : expected.shape[-1]], expected[..., : values.shape[-1]])


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 9), r=st.integers(1, 9), seed=st.integers(0, 99))
def test_eigenvalues_equal_those_of_the_dense_matrix(n: int, r: int, seed: int) -> None:
    torch.manual_seed(seed)
    r = min(n, r)
    x = LowRank(draw_random(2, n, r), draw_random(2, r, n))
    # Equal power sums up to n show that the dense matrix has these eigenvalues and n - r zeros.
    dense = torch.linalg.eigvals(x.dense())
    for k in range(1, n + 1):
        torch.testing.assert_close(
            (x.eigenvalues() ** k).sum(-1), (dense**k).sum(-1), atol=1e-7, rtol=1e-7
        )


def test_norm_is_more_accurate_than_from_gram_matrices() -> None:
    torch.manual_seed(0)
    q = torch.linalg.qr(draw_random(20, 4))[0]
    a = torch.cat([q, q + 1e-9 * draw_random(20, 4)], 1)
    b = torch.cat([torch.eye(4, 20, dtype=torch.float64), -torch.eye(4, 20, dtype=torch.float64)])
    torch.testing.assert_close(
        LowRank(a, b).norm(), torch.linalg.matrix_norm(a @ b), rtol=1e-6, atol=0
    )


def test_circuits_equal_the_scores_and_outputs_of_linear_layers() -> None:
    torch.manual_seed(0)
    layers = 2
    heads, kv_heads = 6, 2
    d_head, d = 3, 10
    w_q, w_o = draw_random(layers, heads * d_head, d), draw_random(layers, d, heads * d_head)
    w_k, w_v = draw_random(layers, kv_heads * d_head, d), draw_random(layers, kv_heads * d_head, d)
    qk = qk_circuit(w_q, w_k, heads=heads, kv_heads=kv_heads)
    ov = ov_circuit(w_v, w_o, heads=heads, kv_heads=kv_heads)
    assert qk.shape == ov.shape == (layers, heads, d, d)
    x, y = draw_random(d), draw_random(d)
    for layer in range(layers):
        for head in range(heads):
            mine, shared = (slice(h * d_head, (h + 1) * d_head) for h in (head, head // 3))
            score = (w_q[layer, mine] @ x) @ (w_k[layer, shared] @ y)
            torch.testing.assert_close(x @ qk[layer, head].dense() @ y, score)
            moved = w_o[layer][:, mine] @ (w_v[layer, shared] @ x)
            torch.testing.assert_close(ov[layer, head].apply(x), moved)


def test_a_head_writes_into_its_write_space_and_is_blind_outside_its_read_space() -> None:
    torch.manual_seed(0)
    ov = LowRank(draw_random(3, 12, 4), draw_random(3, 4, 12))
    write, _, read_rows = ov.svd()
    read = read_rows.mT
    eye = torch.eye(4, dtype=torch.float64).expand(3, 4, 4)
    torch.testing.assert_close(read.mT @ read, eye)
    torch.testing.assert_close(write.mT @ write, eye)
    x = draw_random(3, 5, 12)
    seen = x @ read @ read.mT
    torch.testing.assert_close(ov.apply(seen), ov.apply(x))
    torch.testing.assert_close(ov.apply(x - seen), torch.zeros_like(x))
    out = ov.apply(x)
    torch.testing.assert_close(out @ write @ write.mT, out)


@pytest.mark.parametrize("index", [0, (0, 1), (slice(0, 1), 1), (slice(None), [1, 2]), (..., -1)])
def test_indexing_takes_batch_dimensions_only(index: Any) -> None:
    """All dimensions are equal, so that an index of another dimension has the expected shape."""
    x = LowRank(draw_random(3, 3, 3, 3), draw_random(1, 3, 3, 3))
    index = index if isinstance(index, tuple) else (index,)
    torch.testing.assert_close(x[index].dense(), x.dense()[(*index, slice(None), slice(None))])
    for wrong in ((0, 0, 0), (0, 0, slice(None)), 3):
        with pytest.raises(IndexError, match="exceeds the batch"):
            x[wrong]


def test_circuits_are_synthesized_by_svd_exactly_within_their_rank_and_nearest_beyond() -> None:
    torch.manual_seed(0)
    wanted = torch.randn(3, 7, 2, dtype=torch.float64) @ torch.randn(3, 2, 5, dtype=torch.float64)
    torch.testing.assert_close(synthesize(wanted, 2).dense(), wanted)
    full = torch.randn(3, 7, 5, dtype=torch.float64)
    error = torch.linalg.matrix_norm(full - synthesize(full, 3).dense())
    left = torch.linalg.svdvals(full)[:, 3:].square().sum(-1).sqrt()
    torch.testing.assert_close(error, left)
    # Gradient descent from these factors finds no nearer factors.
    a, b = (x.clone().requires_grad_() for x in (synthesize(full, 3).a, synthesize(full, 3).b))
    (full - a @ b).square().sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert max(a.grad.abs().max(), b.grad.abs().max()) < 1e-12
    with pytest.raises(ValueError, match=r"expected 1 <= rank <= \d, got 6"):
        synthesize(full, 6)


@pytest.mark.parametrize(
    ("qk", "looks_at"),
    [
        (torch.zeros(4, 4), [0.25, 0.25, 0.25, 0.25]),  # nothing is preferred: the mean
        (50 * torch.eye(4), [0.5, 0.0, 0.0, 0.5]),  # the same token
        (-50 * torch.eye(4), [0.0, 0.5, 0.5, 0.0]),  # any token but the same
        (50 * torch.eye(4).roll(1, 1), [0.0, 1.0, 0.0, 0.0]),  # one other token, for each token
    ],
)
def test_attention_of_four_kinds_of_w_qk(qk: torch.Tensor, looks_at: list[float]) -> None:
    """Tokens are unit vectors; the last query is token 0 among the keys 0, 1, 2, 0."""
    x = torch.eye(4)[[0, 1, 2, 0]]
    pattern = compute_circuit_pattern(x, synthesize(qk, 4), causal=True)
    torch.testing.assert_close(pattern[-1], torch.tensor(looks_at), atol=1e-6, rtol=0)
