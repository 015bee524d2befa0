"""Where the loss is, what trains, the shared prefix, and a learned start."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tinyml import PrefixCache, SoftPrompt, adapt, meta_loss
from torch import nn
from transformers_cache import cache_name


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


def decoder():
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
    model = decoder()
    prompt = SoftPrompt(5, 8).double()
    tokens = torch.randint(11, (3, 7))
    logits, _ = model(prompt(model.embed(tokens)))
    targets = prompt.targets(tokens, torch.ones_like(tokens, dtype=torch.bool))
    F.cross_entropy(logits.transpose(1, 2), targets).backward()
    trained = [p for p in [*model.parameters(), *prompt.parameters()] if p.grad is not None]
    assert [p.numel() for p in trained] == [5 * 8]  # length times width


def test_a_cached_prefix_gives_the_same_outputs():
    model, prompt = decoder(), SoftPrompt(5, 8).double()
    tokens = torch.randint(11, (3, 7))
    whole, _ = model(prompt(model.embed(tokens)))
    cache = PrefixCache.of(prompt, lambda x: model(x)[1])
    assert cache.past["k"].shape == (1, 5, 8)
    past = cache.expand(3)
    assert past["k"].data_ptr() == cache.past["k"].data_ptr()
    cached, _ = model(model.embed(tokens), past)
    torch.testing.assert_close(cached, whole[:, cache.length :], rtol=1e-12, atol=1e-12)


def test_the_embeddings_of_a_text_are_a_prompt():
    model = decoder()
    text = torch.tensor([3, 1, 4])
    tokens = torch.randint(11, (2, 5))
    prompt = SoftPrompt(3, 8, init=model.embed(text)).double()
    both = torch.cat([text.expand(2, -1), tokens], dim=1)
    torch.testing.assert_close(model(prompt(model.embed(tokens)))[0], model(model.embed(both))[0])


def quadratic(matrix, target):
    return lambda p: 0.5 * ((p - target) @ matrix).square().sum()


def tasks():
    generator = torch.Generator().manual_seed(0)
    tasks = []
    for _ in range(4):
        matrix = torch.randn(6, 6, generator=generator, dtype=torch.float64) / 2
        target = torch.randn(3, 6, generator=generator, dtype=torch.float64) + 2
        tasks.append((quadratic(matrix, target), quadratic(matrix * 1.5, target)))
    return tasks


def test_the_meta_gradient_goes_through_the_steps():
    start = torch.zeros(3, 6, dtype=torch.float64, requires_grad=True)

    def loss(point):
        return meta_loss(point, tasks(), steps=3, lr=0.1)

    assert torch.autograd.gradcheck(loss, start)
    (full,) = torch.autograd.grad(loss(start), start)
    (first,) = torch.autograd.grad(
        meta_loss(start, tasks(), steps=3, lr=0.1, first_order=True), start
    )
    assert not torch.allclose(full, first)
    assert (full * first).sum() > 0


@pytest.mark.parametrize("first_order", [False, True])
def test_a_learned_start_is_better_after_the_same_steps(first_order):
    start = torch.zeros(3, 6, dtype=torch.float64, requires_grad=True)
    before = meta_loss(start, tasks(), steps=2, lr=0.1).item()
    optimizer = torch.optim.SGD([start], lr=0.1)
    for _ in range(40):
        optimizer.zero_grad()
        meta_loss(start, tasks(), steps=2, lr=0.1, first_order=first_order).backward()
        optimizer.step()
    assert meta_loss(start, tasks(), steps=2, lr=0.1).item() < 0.6 * before


def test_adapting_leaves_the_start():
    start = torch.zeros(3, 6, dtype=torch.float64, requires_grad=True)
    support, query = tasks()[0]
    adapted = adapt(start, support, steps=5, lr=0.1)
    assert query(adapted) < query(start)
    assert not start.any()
    assert start.grad is None


def test_bad_requests_say_what_to_ask_for():
    with pytest.raises(ValueError, match="0 vectors"):
        SoftPrompt(0, 4)
    with pytest.raises(ValueError, match=r"init is \(2, 4\)"):
        SoftPrompt(3, 4, init=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="one truth value per token"):
        SoftPrompt(3, 4).targets(torch.zeros(2, 5), torch.ones(2, 4))
    with pytest.raises(ValueError, match="at least one task"):
        meta_loss(torch.zeros(2), [], steps=1, lr=0.1)


class Cache:
    """Keys and values that a model extends as it runs, as transformers' caches are."""

    def __init__(self):
        self.layers, self.seen = [], 0


class Extending(Decoder):
    """A decoder that appends to the cache that it is given."""

    def forward(self, embeddings, past=None):
        past = Cache() if past is None else past
        earlier = past.layers[0] if past.layers else None
        logits, cached = super().forward(embeddings, earlier)
        past.layers[:] = [cached]
        past.seen += embeddings.shape[1]
        return logits, past


@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_that_the_model_extends_serves_again(batch):
    torch.manual_seed(0)
    model = Extending().double().requires_grad_(False)
    prompt, tokens = SoftPrompt(5, 8).double(), torch.randint(11, (batch, 7))
    whole, _ = model(prompt(model.embed(tokens)))
    cache = PrefixCache.of(prompt, lambda x: model(x)[1])
    for _ in range(3):
        past = cache.expand(batch)
        cached, _ = model(model.embed(tokens), past)
        torch.testing.assert_close(cached, whole[:, 5:], rtol=1e-12, atol=1e-12)
        assert past.seen == 12
        assert cache.past.seen == 5


def test_writing_into_what_was_expanded_does_not_reach_the_cache():
    past = {"k": [torch.ones(1, 2, 3)], "count": torch.tensor(4)}
    cache = PrefixCache(past, 2)
    single = cache.expand(1)
    single["k"][0].zero_()
    single["count"].add_(1)
    assert past["k"][0].all()
    assert past["count"] == 4
    with pytest.raises(RuntimeError, match="single memory location"):
        cache.expand(2)["k"][0].add_(1)
    with pytest.raises(ValueError, match="batch first, size 1"):
        PrefixCache({"k": torch.ones(2, 3)}, 2).expand(3)


def test_transformers_prefix_cache_can_be_reused():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        vocab_size=19, n_positions=32, n_embd=8, n_layer=2, n_head=2, use_cache=True
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double().eval().requires_grad_(False)
    prompt, tokens = SoftPrompt(5, 8).double(), torch.randint(19, (2, 7))
    embeddings = model.transformer.wte(tokens)
    whole = model(inputs_embeds=prompt(embeddings)).logits[:, 5:]
    name = cache_name(model)
    cache = PrefixCache.of(prompt, lambda x: getattr(model(inputs_embeds=x), name))
    for _ in range(2):
        cached = model(inputs_embeds=embeddings, **{name: cache.expand(2)}).logits
        torch.testing.assert_close(cached, whole, rtol=1e-12, atol=1e-12)


def test_a_cached_parameter_is_refused_and_its_view_trains():
    prefix = nn.Parameter(torch.randn(1, 2, 3, 4))
    for past in ((prefix,), {"keys": [prefix]}):
        with pytest.raises(ValueError, match=r"got an nn\.Parameter.*view_as"):
            PrefixCache(past, 3)
    cache = PrefixCache((prefix.view_as(prefix),), 3)
    for batch in (1, 5):
        cache.expand(batch)[0].sum().backward()
    assert torch.equal(prefix.grad, torch.full_like(prefix, 6.0))
