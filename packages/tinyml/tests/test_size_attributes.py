"""Only the attributes that count units change when units are removed."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tinyml import prune_channels
from torch import nn
from transformers_cache import get_cache_name

WIDTH, HEADS = 32, 4
TOKENS = torch.arange(6).view(2, 3)
LONG = torch.arange(60).view(3, 20) % 31


class Attention(nn.Module):
    """Causal attention whose heads 1 and 3 matter least.

    `other` is an attribute that equals the number of heads and means something else.
    """

    def __init__(self, heads=HEADS):
        super().__init__()
        torch.manual_seed(0)
        self.num_heads = self.other = heads
        self.head_dim = WIDTH // heads
        self.embed = nn.Embedding(31, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, 7)
        for layer in (self.q, self.k):
            nn.init.normal_(layer.weight)  # sharp attention
        with torch.no_grad():
            self.out.weight.view(7, heads, self.head_dim)[:, 1::2] *= 0.01

    def split(self, x):
        return x.view(*x.shape[:2], self.num_heads, self.head_dim)

    def mask(self, length):
        return torch.ones(length, length, dtype=torch.bool).tril()

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(q.shape[-2]))

    def join(self, x):
        return x.flatten(2)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (self.split(layer(x)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(self.join(self.mix(q, k, v).transpose(1, 2)))


class Window(Attention):
    def mask(self, length):
        ago = torch.arange(length)[:, None] - torch.arange(length)
        return (ago >= 0) & (ago < self.other)


class Band(Attention):
    def mask(self, length):
        return super().mask(length).triu(-self.other)


class Sliced(Attention):
    def forward(self, tokens):
        return super().forward(tokens)[:, -self.other :]


class Divided(Attention):
    def mix(self, q, k, v):
        return super().mix(q / self.other, k, v)


class Root(Attention):
    def mix(self, q, k, v):
        return super().mix(q * self.other**-0.5, k, v)


class Pooled(Attention):
    def forward(self, tokens):
        return F.avg_pool1d(super().forward(tokens).mT, self.other, 1, self.other // 2)


class Blocks(Attention):
    """The tokens are padded to whole blocks: a size that counts no units."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        padded = F.pad(logits, (0, 0, 0, -logits.shape[1] % self.other))
        return padded.unflatten(1, (-1, self.other)).mean(2)


class Passed(Attention):
    """A parent holds the number of heads, and another number like it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.depth = self.num_heads

    def split(self, x):
        return x.reshape((*x.shape[:2], self.num_heads, -1))


class AllHeads(Attention):
    """As BERT's: the width of all heads is an attribute, too."""

    def __init__(self):
        super().__init__()
        self.all_head_size = self.num_heads * self.head_dim

    def join(self, x):
        return x.reshape(*x.shape[:2], self.all_head_size)


class Product(Attention):
    def join(self, x):
        return x.reshape(*x.shape[:2], self.num_heads * self.head_dim)


class Unflattened(Attention):
    def split(self, x):
        return x.unflatten(-1, (self.num_heads, self.head_dim))


class AsManyAsWide(Attention):
    """The number of heads, their width and the number of query groups are all one number."""

    def __init__(self):
        super().__init__()
        self.head_dim = self.other = self.num_heads = 4
        self.q = nn.Linear(32, 64)
        self.k = nn.Linear(32, 16)
        self.v = nn.Linear(32, 16)
        self.out = nn.Linear(64, 7)
        with torch.no_grad():
            self.out.weight.view(7, 4, 16)[:, 1::2] *= 0.01

    def split(self, x):
        return x.view(*x.shape[:2], -1, self.head_dim)

    def mix(self, q, k, v):
        def repeat(x):
            wide = x[:, :, None].expand(-1, self.num_heads, self.other, -1, -1)
            return wide.reshape(len(x), self.num_heads * self.other, -1, self.head_dim)

        return super().mix(q, repeat(k), repeat(v))


MODELS = [
    Attention, Window, Band, Sliced, Divided, Root, Pooled, Blocks, Passed, AllHeads, Product,
    Unflattened, AsManyAsWide,
]  # fmt: skip


def zero_readers_of_small_heads(model):
    """Return the dense model in which nothing reads heads 1 and 3."""
    zeroed = copy.deepcopy(model)
    zeroed.out.weight.data.view(7, HEADS, -1)[:, 1::2] = 0
    return zeroed


EXAMPLES = {"batch": TOKENS, "single": TOKENS[:1], "long": LONG, "one token": TOKENS[:1, :1]}


@pytest.mark.parametrize(
    ("kind", "example"),
    [
        *(
            (kind, {Window: "single", Blocks: "long"}.get(kind, "batch"))
            for kind in MODELS
            if kind not in (Attention, Band, Divided, Product, Passed, AllHeads)
        ),
        *(
            pytest.param(kind, example, marks=pytest.mark.exhaustive)
            for kind in MODELS
            for example in EXAMPLES
            if example != "one token"
        ),
    ],
)
def test_other_numbers_that_equal_the_number_of_heads_stay(kind, example):
    model = kind()
    small = prune_channels(model, 0.5, EXAMPLES[example])
    assert (small.num_heads, small.other, small.head_dim) == (2, HEADS, model.head_dim)
    assert small.k.out_features == 2 * model.head_dim
    exact = zero_readers_of_small_heads(model)
    for tokens in (LONG, LONG[:1, :5], TOKENS):
        torch.testing.assert_close(small(tokens), exact(tokens), rtol=1e-4, atol=1e-5)


def test_a_nested_number_and_the_width_of_all_heads_are_distinguished():
    assert prune_channels(Passed(), 0.5, TOKENS).inner.depth == HEADS
    assert prune_channels(AllHeads(), 0.5, TOKENS).all_head_size == WIDTH // 2


class WindowOfHeads(Window):
    """One attribute is both the number of heads and the window."""

    other = property(lambda self: self.num_heads, lambda self, value: None)


class Configured(Attention):
    """The number of heads is not an attribute of the module."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(heads=HEADS)

    def split(self, x):
        return x.view(*x.shape[:2], self.config.heads, -1)


class HeadBlocks(Blocks):
    other = property(lambda self: self.num_heads, lambda self, value: None)


class First(nn.Module):
    """The first of two pieces along the length, whose sizes are attributes."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv1d(3, 8, 1), nn.Conv1d(8, 2, 1)
        self.length, self.rest = 4, 6

    def forward(self, x):
        return self.b(self.a(x).split([self.length, self.rest], dim=2)[0])


def test_pieces_of_another_dimension_may_be_unread():
    small = prune_channels(First(), 0.5, torch.randn(2, 3, 10))
    assert (small.a.out_channels, small.length, small.rest) == (4, 4, 6)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WindowOfHeads, "num_heads = 4, got 2 in view"),
        (HeadBlocks, "num_heads = 4, got 2 in view"),
        (Configured, "does not compute the same after pruning"),
    ],
)
@pytest.mark.parametrize(
    "example",
    ["one token", *(pytest.param(e, marks=pytest.mark.exhaustive) for e in ("batch", "long"))],
)
def test_an_ambiguous_or_unknown_size_is_refused(kind, message, example):
    model = kind()
    with pytest.raises(ValueError, match=message):
        prune_channels(model, 0.5, EXAMPLES[example])
    assert model.num_heads == HEADS


class Outputs(dict):
    """The outputs of a model of transformers: values by name, which are attributes too."""

    def __init__(self, **values):
        super().__init__(values)
        vars(self).update(values)


class Recorded(Attention):
    """A model with a cache that records the batch size, the length and the cache of its calls."""

    calls = frozenset()

    def forward(self, tokens, past_key_values=None, use_cache=False):
        if past_key_values is not None:
            tokens = torch.cat([past_key_values, tokens], 1)
        Recorded.calls |= {(*tokens.shape, past_key_values is not None)}
        return Outputs(logits=super().forward(tokens), past_key_values=tokens)


def test_outputs_are_compared_at_two_lengths_with_and_without_a_cache_and_in_two_batch_sizes():
    Recorded.calls = frozenset()
    small = prune_channels(Recorded(), 0.5, TOKENS)
    assert small.num_heads == HEADS // 2
    beyond = 2 * HEADS + 1
    assert {(2, 3, False), (1, 3, False), (3, 3, False), (1, beyond, False)} <= Recorded.calls
    assert {call for call in Recorded.calls if call[-1]} == {
        (batch, length, True) for batch in (1, 3) for length in (3, beyond)
    }


def test_layer_numbers_and_the_cache_of_transformers_stay():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97,
        n_embd=24,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    tokens = torch.arange(24).view(3, 8)
    small = prune_channels(model, 0.5, tokens)
    assert [block.attn.layer_idx for block in small.transformer.h] == list(range(2))
    with torch.no_grad():
        whole = small(tokens).logits[:, -1]
        name = get_cache_name(small)
        past = getattr(small(tokens[:, :-1]), name)
        last = small(tokens[:, -1:], **{name: past}).logits[:, -1]
    torch.testing.assert_close(last, whole, rtol=1e-4, atol=1e-5)
    greedy = {"max_new_tokens": 3, "do_sample": False}
    with_cache = small.generate(tokens, use_cache=True, **greedy)
    assert torch.equal(with_cache, small.generate(tokens, use_cache=False, **greedy))
