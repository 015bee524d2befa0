import torch
from interp import LowRank, ov_circuit, qk_circuit
from interp.circuits.heads import apply_attention_head, compute_circuit_pattern


def draw_random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_a_single_head_by_hand() -> None:
    """The scores in row 1 are 1 and 2, so the weights of its values are 1/(1+e) and e/(1+e)."""
    x = torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 2.0]])
    w = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    expected = torch.tensor([[1.0, 0.0], [1.7311, 0.0], [2.5752, 0.0]])
    torch.testing.assert_close(apply_attention_head(x, w, w), expected, atol=5e-5, rtol=0)
    factored = LowRank(torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0, 1.0]]))
    torch.testing.assert_close(
        apply_attention_head(x, factored, factored), apply_attention_head(x, w, w)
    )


def test_heads_add_up_to_their_concatenation_and_to_torch() -> None:
    torch.manual_seed(0)
    batch, seq = 2, 7
    d, d_head = 12, 3
    heads, kv_heads = 4, 2
    x = draw_random(batch, seq, d)
    w_q, w_o = draw_random(heads * d_head, d), draw_random(d, heads * d_head)
    w_k, w_v = draw_random(kv_heads * d_head, d), draw_random(kv_heads * d_head, d)
    scale = d_head**-0.5
    qk = qk_circuit(w_q, w_k, heads=heads, kv_heads=kv_heads)
    ov = ov_circuit(w_v, w_o, heads=heads, kv_heads=kv_heads)
    added = apply_attention_head(x.unsqueeze(-3), qk, ov, scale=scale).sum(-3)
    q, k, v = ((x @ w.mT).unflatten(-1, (-1, d_head)).transpose(1, 2) for w in (w_q, w_k, w_v))
    torch_says = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(added, torch_says.transpose(1, 2).flatten(-2) @ w_o.mT)


def test_every_scale_is_applied_before_the_causal_mask() -> None:
    torch.manual_seed(0)
    x, w = draw_random(5, 3), draw_random(3, 3)
    uniform = torch.ones(5, 5, dtype=torch.float64).tril()
    uniform = uniform / uniform.sum(-1, keepdim=True)
    torch.testing.assert_close(compute_circuit_pattern(x, w, scale=0.0), uniform)
    torch.testing.assert_close(
        compute_circuit_pattern(x, w, scale=-2.0), compute_circuit_pattern(x, -w, scale=2.0)
    )
