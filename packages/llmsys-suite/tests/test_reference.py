"""The reference of the audit agrees with the code of the run and shares none of it."""

import ast
import inspect

import numpy as np
import pytest
import torch
import torch.distributed as dist
from llmsys_suite import plain
from llmsys_suite.audit import reference
from llmsys_suite.measure import network
from llmsys_suite.model import Decoder, ModelConfig, plain_attention
from llmsys_suite.text import data
from llmsys_suite.text.data import load_corpus, read_text
from worker_pool import run_ranks

SHAPE = ModelConfig(d_model=24, d_ff=40, num_layers=2, num_heads=3, vocabulary=256, context=9)


def copy_weights(model):
    return {name: p.detach().double() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("seed", "vocabulary"), [*((seed, 256) for seed in range(5)), (0, 1)])
def test_the_reference_computes_what_the_model_does(seed, vocabulary):
    torch.manual_seed(seed)
    model = Decoder(SHAPE, plain_attention).double()
    tokens, targets = torch.randint(0, vocabulary, (2, 3, 9))
    loss, gradients = reference.compute_gradients(copy_weights(model), tokens, targets, 3)
    model.compute_loss(tokens, targets).backward()
    # The model's loss is rounded to float32, and so is its table of rotations.
    assert float(model.compute_loss(tokens, targets).detach()) == pytest.approx(loss, rel=1e-6)
    computed = {n: p.grad for n, p in model.named_parameters()}
    # If all tokens are equal, the gradients of q and k consist of rounding errors only.
    floor = reference.compute_rounding_floor(gradients) if vocabulary == 1 else 0.0
    distance, where = reference.find_largest_distance(computed, gradients, floor)
    assert distance < 2e-6, where


def test_rows_taken_a_few_at_a_time_give_the_same_gradients(monkeypatch):
    weights = copy_weights(Decoder(SHAPE))
    tokens, targets = torch.randint(0, 256, (2, 4, 9))
    whole = reference.compute_gradients(weights, tokens, targets, 3)
    monkeypatch.setattr(reference, "SCORE_BYTES", 1)
    parts = reference.compute_gradients(weights, tokens, targets, 3)
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    assert reference.find_largest_distance(parts[1], whole[1])[0] < 1e-12


#: The minimal implementation, and norms of differences of tensors.
SHARED = {"llmsys_suite", "llmsys_suite.plain", "llmsys_suite.measure.distance"}


@pytest.mark.parametrize(("module", "allowed"), [(plain, set()), (reference, SHARED)])
def test_the_reference_imports_nothing_of_what_it_checks(module, allowed):
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
            assert node.module != "llmsys_suite" or [a.name for a in node.names] == ["plain"]
    assert {name for name in imported if "llmsys" in name} <= allowed
    assert not any("functional" in name for name in imported)


def test_a_few_rows_at_a_time_are_the_batch(monkeypatch):
    weights = copy_weights(Decoder(SHAPE))
    tokens, targets = torch.randint(0, 256, (2, 5, 9))
    whole, expected = plain.backpropagate(weights, tokens, targets, SHAPE.num_heads)
    monkeypatch.setattr(reference, "SCORE_BYTES", 8 * SHAPE.num_heads * 9**2 * 2)
    assert reference.compute_mean_loss(weights, tokens, targets, SHAPE.num_heads) == pytest.approx(
        whole
    )
    value, actual = reference.compute_gradients(weights, tokens, targets, SHAPE.num_heads)
    assert value == pytest.approx(whole)
    assert reference.find_largest_distance(actual, expected)[0] < 1e-12


@pytest.mark.fixed_seed("the independent sampler has its own generator")
def test_the_plain_file_is_the_specification_of_the_single_process():
    torch.manual_seed(0)
    model, text = Decoder(SHAPE), read_text().train
    losses = []
    start = copy_weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(5):
        batch = load_corpus().draw_batch(rows=4, context=9, seed=0, step=step)
        loss = model.compute_loss(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    _, plainly = plain.train(start, text, 3, 5, 2e-3, (4, 9))
    np.testing.assert_allclose(losses, [loss for loss, _ in plainly], rtol=2e-6)
    assert all(seconds > 0 for _, seconds in plainly)


def test_the_plain_gradient_is_the_slope_of_the_plain_loss():
    weights = copy_weights(Decoder(SHAPE))
    tokens, targets = torch.randint(0, 256, (2, 4, 9))
    assert plain.check_gradients(weights, tokens, targets, 3) < 1e-5


@pytest.mark.fixed_seed("the independent sampler has its own generator")
@pytest.mark.parametrize("seed", [0, 1, 4295, 123_456_789])
def test_the_audits_sampler_draws_what_the_runs_does(seed):
    corpus, text = load_corpus(), read_text().train
    for step in (0, 1, 77):
        ours = corpus.draw_batch(rows=6, context=32, seed=seed, step=step)
        theirs = reference.draw_batch(text, 6, 32, seed, step)
        assert all(map(torch.equal, ours, theirs))
    batches = (
        corpus.build_heldout_batch(rows=4, context=32),
        reference.build_evenly_spaced_batch(read_text().heldout, 4, 32),
    )
    assert all(map(torch.equal, *batches))


class Positions:
    """A text whose token at each position is the position."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, window):
        return range(window.start, window.stop)


@pytest.mark.fixed_seed("the independent sampler has its own generator")
@pytest.mark.parametrize("windows", [2**28 - 1, 2**28, 2**28 + 1, 3 * 10**9, 2**33])
def test_the_audits_sampler_draws_what_the_runs_does_from_texts_of_any_length(windows):
    length = windows + 33
    for step in range(3):
        starts = data._draw_starts(length, 6, 32, 7, step)
        tokens, targets = reference.draw_batch(Positions(length), 6, 32, 7, step)
        assert tokens[:, 0].tolist() == starts
        assert targets[:, 0].tolist() == [start + 1 for start in starts]
        assert len({*starts}) == 6
        assert 0 <= min(starts) < max(starts) < windows
        assert max(starts) > windows / 8


def test_adamw_takes_torchs_steps():
    torch.manual_seed(0)
    w = torch.randn(5, 3, dtype=torch.float64)
    ours, theirs = {"w": w.clone()}, torch.nn.Parameter(w.clone())
    optimizer = reference.AdamW(ours, 0.01)
    torchs = torch.optim.AdamW([theirs], lr=0.01)
    for _ in range(4):
        theirs.grad = torch.randn_like(theirs)
        ours = optimizer.step(ours, {"w": theirs.grad})
        torchs.step()
    assert reference.compute_distance(ours["w"], theirs.detach()) < 1e-14


def test_attention_row_by_row_is_softmax_of_the_scores():
    q, k, v = torch.randn(3, 2, 2, 7, 4, dtype=torch.float64)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(reference.compute_attention(q, k, v), exact)


def test_a_distance_is_never_small_by_accident():
    ones = torch.ones(3)
    assert reference.compute_distance(torch.ones(4), ones) == float("inf")
    assert np.isnan(reference.compute_distance(torch.tensor([1.0, float("nan"), 1.0]), ones))
    assert reference.find_largest_distance({"a": ones}, {"b": ones}, 1.0)[0] == float("inf")
    assert reference.compute_distance(ones, 0 * ones) == float("inf")
    assert np.isnan(
        reference.find_largest_distance(
            {"a": ones * float("nan"), "b": ones}, {"a": ones, "b": ones}
        )[0]
    )


def count_all_reduce_bytes(count):
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    received = network.Received()
    dist.barrier()  # nobody sends before all count
    dist.all_reduce(tensor)
    count = received.count_bytes()
    dist.barrier()  # nobody closes a connection, and its count with it, before all have read
    return count


@pytest.mark.skipif(not network.is_available(), reason="this kernel does not count bytes by socket")
@pytest.mark.parametrize("world", [2, 3])
def test_the_kernel_counts_what_a_ring_brings(world):
    expected = 4 * 300_000 * 2 * (world - 1) / world
    for received in run_ranks(count_all_reduce_bytes, world, 300_000):
        assert expected <= received <= 1.01 * expected
