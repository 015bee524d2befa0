from collections.abc import Callable

import pytest
import torch
from interp import attribution, logit_lens, record
from interp.lens import compute_head_outputs, probe_norm
from torch import Tensor, nn

TOKENS = torch.tensor([[1, 2, 3, 4, 2], [6, 5, 4, 3, 0]])


class RMSNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class GemmaNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(d))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).add(1e-5).sqrt() * (1 + self.w)


def build_layer_norm(d: int) -> nn.Module:
    norm = nn.LayerNorm(d)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


NORMS = [build_layer_norm, RMSNorm, GemmaNorm, nn.RMSNorm, lambda d: None]


def test_lens_equals_its_formula_and_ends_in_the_model(
    decoder: nn.Module,
) -> None:
    model = decoder
    with record(model, "embed", "layers.*") as seen:
        logits = model(TOKENS)
    targets = TOKENS.roll(-1, 1)
    lens = logit_lens(seen, model.norm, model.head, targets=targets, top=3)
    assert lens.names == ("embed", "layers.0", "layers.1", "layers.2")
    p = logits.softmax(-1)
    for i, x in enumerate(seen.values()):
        q = (model.norm(x) @ model.head.weight.T).softmax(-1)
        torch.testing.assert_close(lens.top_probabilities[i], q.topk(3).values)
        assert torch.equal(lens.top_tokens[i], q.topk(3).indices)
        torch.testing.assert_close(lens.entropy[i], torch.distributions.Categorical(q).entropy())
        torch.testing.assert_close(lens.kl_to_last[i], (p * (p / q).log()).sum(-1))
        chosen = q.gather(-1, targets[..., None])
        torch.testing.assert_close(lens.target_log_probability[i], chosen[..., 0].log())
    assert torch.equal(lens.top_probabilities[-1], logits.log_softmax(-1).topk(3).values.exp())
    by_weight = logit_lens(list(seen.values()), model.norm, model.head.weight, top=3)
    torch.testing.assert_close(by_weight.top_probabilities, lens.top_probabilities)
    assert by_weight.target_log_probability is None


@pytest.mark.parametrize("make", NORMS)
@pytest.mark.parametrize("d", [2, 7, 64])
def test_norms_are_probed(make: Callable[[int], nn.Module | None], d: int) -> None:
    torch.manual_seed(0)
    norm = make(d)
    norm = norm if norm is None else norm.double()
    x = 5 * torch.randn(3, 4, d, dtype=torch.float64) + 1
    gain, shift, centered = probe_norm(norm, x)
    assert centered == isinstance(norm, nn.LayerNorm)
    projected = x - x.mean(-1, keepdim=True) if centered else x
    torch.testing.assert_close(gain * projected + shift, x if norm is None else norm(x))


def test_streams_whose_squares_overflow_in_float16_are_probed() -> None:
    norm, x = nn.RMSNorm(64, eps=1e-5).half(), 1000 * torch.randn(2, 4, 64).half()
    gain, _, _ = probe_norm(norm, x)
    torch.testing.assert_close(gain * x, norm(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("make", NORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_terms_sum_to_the_logit(
    make: Callable[[int], nn.Module | None], bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm, unembed = make(12), nn.Linear(12, 17, bias=bias).to(dtype)
    norm = norm if norm is None else norm.to(dtype)
    parts = {f"c{i}": torch.randn(2, 5, 12, dtype=dtype) * 4**i for i in range(4)}
    parts["constant"] = torch.randn(12, dtype=dtype)
    stream = sum(parts.values())
    with torch.no_grad():
        logits = unembed(stream if norm is None else norm(stream))
    right, wrong = TOKENS, (TOKENS + 1) % 17
    shares = attribution(parts, norm, unembed, right, final=stream)
    expected = logits.gather(-1, right[..., None])[..., 0]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype] * shares.terms.abs().sum(
        0
    ).max().item()
    torch.testing.assert_close(shares.logits, expected)
    torch.testing.assert_close(shares.terms.sum(0), expected, atol=tolerance, rtol=0)
    lead = attribution(parts, norm, unembed, right, against=wrong)
    expected = expected - logits.gather(-1, wrong[..., None])[..., 0]
    torch.testing.assert_close(lead.terms.sum(0), expected, atol=2 * tolerance, rtol=0)
    assert ("unembed bias" in shares.names) == bias
    assert ("norm bias" in shares.named()) == isinstance(norm, nn.LayerNorm)


def test_term_equals_the_effect_at_a_fixed_norm_scale() -> None:
    torch.manual_seed(0)
    norm, unembed = RMSNorm(6).double(), nn.Linear(6, 9, bias=False).double()
    a, b = torch.randn(2, 1, 3, 6, dtype=torch.float64)
    targets = torch.tensor([[1, 2, 3]])
    terms = attribution({"a": a, "b": b}, norm, unembed, targets).named()
    scale = ((a + b).square().mean(-1, keepdim=True) + 1e-6).sqrt()
    with torch.no_grad():
        expected = (a / scale * norm.weight @ unembed.weight.T).gather(-1, targets[..., None])[
            ..., 0
        ]
    torch.testing.assert_close(terms["a"], expected)


def test_heads_and_mlps_sum_to_the_logits(decoder: nn.Module) -> None:
    model = decoder
    with record(model, "embed", "layers.*.out:input", "layers.*.down", "norm:input") as seen:
        logits = model(TOKENS)
    parts = {"embed": seen["embed"]}
    for i, layer in enumerate(model.layers):
        parts |= compute_head_outputs(
            seen[f"layers.{i}.out:input"], layer.out.weight, heads=3, prefix=f"{i}."
        )
        parts[f"mlp {i}"] = seen[f"layers.{i}.down"]
    shares = attribution(parts, model.norm, model.head, TOKENS, final=seen["norm:input"])
    torch.testing.assert_close(shares.terms.sum(0), logits.gather(-1, TOKENS[..., None])[..., 0])
    assert len(shares.names) == 1 + 3 * 3 + 3


def test_invalid_token_ids_are_refused() -> None:
    parts = {"all": torch.randn(1, 4, 8)}
    ids = torch.tensor([[1, 2, -100, 3]])
    head = nn.Linear(8, 11)
    with pytest.raises(ValueError, match="token ids of at least 0 in targets, got -100"):
        attribution(parts, None, head, ids)
    with pytest.raises(ValueError, match=r"expected token ids \(1, 4\) as against, got \(4, 1\)"):
        attribution(parts, None, head, ids.abs() % 11, against=ids.T)


def test_attribution_without_a_component_is_refused() -> None:
    parts = {name: torch.randn(2, 3, 5) for name in ("a", "b", "c")}
    final = parts["a"] + parts["b"] + parts["c"]
    unembed = torch.randn(7, 5)
    targets = torch.zeros(2, 3, dtype=torch.long)
    attribution(parts, None, unembed, targets, final=final)
    del parts["b"]
    with pytest.raises(ValueError, match=r"got another sum .*; one is missing"):
        attribution(parts, None, unembed, targets, final=final)
