"""Targets, trained numbers, a cached prefix, and a prompt that is learned to be adapted."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tinyml import SoftPrompt
from torch import nn


class Decoder(nn.Module):
    """One causal attention layer that takes embeddings and, if given, earlier keys and values."""

    def __init__(self, vocabulary=11, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.qkv, self.head = nn.Linear(dim, 3 * dim), nn.Linear(dim, vocabulary)

    def forward(self, embeddings, past=None):
        q, k, v = self.qkv(embeddings).chunk(3, dim=-1)
        if past is not None:
            k, v = torch.cat([past["k"], k], dim=1), torch.cat([past["v"], v], dim=1)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(embeddings + out), {"k": k, "v": v}


def build_decoder():
    torch.manual_seed(0)
    return Decoder().double().requires_grad_(False)


def test_only_the_answer_carries_loss():
    # 5 prompt vectors, 46 question tokens, then a 22-token answer: with the sequence counted from
    # the first prompt vector, outputs 50..71 predict tokens 51..72.
    prompt = SoftPrompt(5, 8)
    tokens = torch.randint(11, (2, 68))
    answer = (torch.arange(68) >= 46).expand(2, -1)
    targets = prompt.targets(tokens, answer)
    assert targets.shape == (2, 73)
    assert (targets[0] != -100).nonzero().flatten().tolist() == list(range(50, 72))
    assert torch.equal(targets[:, 50:72], tokens[:, 46:])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_targets_of_tokens_of_any_integer_type_are_int64(dtype):
    tokens = torch.tensor([[7, 3]])
    answer = torch.tensor([[False, True]])
    targets = SoftPrompt(1, 4).targets(tokens.to(dtype), answer)
    assert targets.dtype == torch.int64
    assert targets.tolist() == [[-100, 3, -100]]


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 10**6))
def test_every_target_is_the_next_token(length, seq, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (3, seq), generator=generator)
    carries = torch.rand(3, seq, generator=generator) < 0.5
    targets = SoftPrompt(length, 4).targets(tokens, carries)
    whole = torch.cat([torch.full((3, length), -100), torch.where(carries, tokens, -100)], dim=1)
    assert torch.equal(targets[:, :-1], whole[:, 1:])
    assert (targets[:, -1] == -100).all()


def test_the_prompt_alone_trains():
    model = build_decoder()
    prompt = SoftPrompt(5, 8).double()
    tokens = torch.randint(11, (3, 7))
    logits, _ = model(prompt(model.embed(tokens)))
    targets = prompt.targets(tokens, torch.ones_like(tokens, dtype=torch.bool))
    F.cross_entropy(logits.transpose(1, 2), targets).backward()
    trained = [p for p in [*model.parameters(), *prompt.parameters()] if p.grad is not None]
    assert [p.numel() for p in trained] == [5 * 8]  # length times width


def test_a_cached_prefix_gives_the_same_outputs():
    model, prompt = build_decoder(), SoftPrompt(5, 8).double()
    tokens = torch.randint(11, (3, 7))
    whole, _ = model(prompt(model.embed(tokens)))
    _, past = model(prompt.embeddings[None])
    shared = {key: value.expand(3, -1, -1) for key, value in past.items()}
    cached, _ = model(model.embed(tokens), shared)
    torch.testing.assert_close(cached, whole[:, 5:], rtol=1e-12, atol=1e-12)


def test_the_embeddings_of_a_text_are_a_prompt():
    model = build_decoder()
    text = torch.tensor([3, 1, 4])
    tokens = torch.randint(11, (2, 5))
    prompt = SoftPrompt(3, 8, init=model.embed(text)).double()
    both = torch.cat([text.expand(2, -1), tokens], dim=1)
    torch.testing.assert_close(model(prompt(model.embed(tokens)))[0], model(model.embed(both))[0])


def adapt(start, loss, steps, first_order=False):
    """Return the prompt after gradient-descent steps, differentiable in `start`.

    With first_order=True, the derivative of each step is taken to be the identity.
    """
    for _ in range(steps):
        point = start.detach().requires_grad_() if first_order else start
        (gradient,) = torch.autograd.grad(loss(point), point, create_graph=not first_order)
        start = start - 0.1 * gradient
    return start


def compute_meta_loss(start, tasks, steps, first_order=False):
    """Return the mean query loss after adapting `start` to the support loss of each task."""
    losses = [query(adapt(start, support, steps, first_order)) for support, query in tasks]
    return torch.stack(losses).mean()


def build_quadratic(matrix, target):
    return lambda p: 0.5 * ((p - target) @ matrix).square().sum()


def draw_tasks():
    generator = torch.Generator().manual_seed(0)
    tasks = []
    for _ in range(4):
        matrix = torch.randn(6, 6, generator=generator, dtype=torch.float64) / 2
        target = torch.randn(3, 6, generator=generator, dtype=torch.float64) + 2
        tasks.append((build_quadratic(matrix, target), build_quadratic(matrix * 1.5, target)))
    return tasks


@pytest.mark.parametrize("first_order", [False, True])
def test_a_learned_start_is_better_after_the_same_steps(first_order):
    start = torch.zeros(3, 6, dtype=torch.float64, requires_grad=True)
    before = compute_meta_loss(start, draw_tasks(), steps=2).item()
    optimizer = torch.optim.SGD([start], lr=0.1)
    for _ in range(40):
        optimizer.zero_grad()
        compute_meta_loss(start, draw_tasks(), steps=2, first_order=first_order).backward()
        optimizer.step()
    assert compute_meta_loss(start, draw_tasks(), steps=2).item() < 0.6 * before


def test_bad_requests_say_what_to_ask_for():
    with pytest.raises(ValueError, match="got 0 and 4"):
        SoftPrompt(0, 4)
    with pytest.raises(ValueError, match=r"init of shape .3, 4., got .2, 4."):
        SoftPrompt(3, 4, init=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="one bool per token"):
        SoftPrompt(3, 4).targets(torch.zeros(2, 5), torch.ones(2, 4))
