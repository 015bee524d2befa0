"""Training with rounding: gradients by the book, and nothing changes when it is made final."""

import pytest
import torch
from tinyml import convert, prepare_qat, quantize, size_of
from tinyml.quantization.pack import packed_bytes
from tinyml.quantization.qat import round_through
from torch import nn


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))


def test_the_gradient_passes_the_rounding_and_stops_at_the_ends():
    values = torch.tensor([[-5.0, -0.6, 0.2, 1.4, 9.0]], requires_grad=True)
    scale = torch.tensor([[0.5]], requires_grad=True)
    rounded = round_through(values, scale, -3, 3)
    assert rounded.tolist() == [[-1.5, -0.5, 0.0, 1.5, 1.5]]
    rounded.sum().backward()
    assert values.grad.tolist() == [[0, 1, 1, 1, 0]]
    # Esser et al., equation 3: round(v/s) - v/s inside, the end of the range outside.
    inside = sum(round(v / 0.5) - v / 0.5 for v in (-0.6, 0.2, 1.4))
    assert scale.grad.item() == pytest.approx(inside - 3 + 3, abs=1e-6)


@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("group_size", [None, 2])
def test_converting_changes_no_bit(learn_scale, group_size):
    model = prepare_qat(mlp(), 3, learn_scale=learn_scale, group_size=group_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(64, 10), torch.randn(64, 4)
    for _ in range(5):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())
        optimizer.step()
    stored = convert(model)
    assert torch.equal(stored(inputs), model(inputs))
    rows = 32 + 4 if group_size is None else (10 * 32 + 32 * 4) // group_size
    packed = sum(packed_bytes(n, 3) for n in (10 * 32, 32 * 4))
    assert size_of(stored).bytes == packed + 4 * rows + 4 * (32 + 4)


@pytest.mark.parametrize(("bits", "learn_scale"), [(3, False), (2, True)])
def test_training_recovers_most_of_what_rounding_afterwards_loses(bits, learn_scale):
    torch.manual_seed(1)
    inputs = torch.randn(512, 10)
    targets = torch.tanh(inputs @ torch.randn(10, 4))
    model = mlp()

    def train(model, steps):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
        return model

    def loss(model):
        with torch.no_grad():
            return float((model(inputs) - targets).square().mean())

    train(model, 200)
    after = loss(quantize(model, bits))
    trained = loss(convert(train(prepare_qat(model, bits, learn_scale=learn_scale), 200)))
    assert loss(model) < trained < (0.3 if learn_scale else 0.6) * after


def test_layers_that_share_a_weight_train_it_once():
    model = nn.ModuleDict({"embed": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    model["head"].weight = model["embed"].weight
    trained = prepare_qat(model, 4)
    assert len(list(trained.parameters())) == 1
    stored = convert(trained)
    assert torch.equal(stored["head"].weight, stored["embed"].weight)
    assert size_of(stored).bytes == 20 * 8 // 2 + 20 * 4


def test_bad_requests_say_what_to_ask_for():
    with pytest.raises(ValueError, match="1 bits"):
        prepare_qat(mlp(), 1)
    with pytest.raises(ValueError, match="prepare_qat"):
        convert(mlp())
