"""Training with rounding: gradients by the book, and nothing changes when it is made final."""

import pytest
import torch
from tinyml import IntegerModel, convert, prepare_qat, quantize, size_of
from tinyml.quantization.rounded_weight import round_through
from torch import nn


def build_mlp():
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


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_weight_is_trained_if_the_grid_follows_the_extremes(bits):
    # The quotient of the largest weight and the step may be rounded to above the largest code.
    torch.manual_seed(0)
    for layer, options in (
        (nn.Linear(64, 256, bias=False), {}),
        (nn.Linear(64, 256, bias=False).bfloat16(), {}),
        (nn.Linear(64, 256, bias=False), {"group_size": 8}),
        (nn.Conv2d(3, 16, 3, bias=False), {}),
    ):
        model = prepare_qat(layer, bits, **options)
        model.weight.sum().backward()
        assert (model.parametrizations.weight.original.grad == 1).all()


def test_small_rows_of_float16_are_rounded_to_their_own_scale():
    torch.manual_seed(0)
    layer = nn.Linear(64, 8, bias=False).half()
    with torch.no_grad():
        layer.weight.mul_(0.02)
    model = prepare_qat(layer, 8)
    assert (model.weight - layer.weight).norm() < 0.01 * layer.weight.norm()
    assert torch.equal(convert(model).weight, model.weight)


@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("group_size", [None, 2])
def test_converting_changes_no_bit(learn_scale, group_size):
    model = prepare_qat(build_mlp(), 3, learn_scale=learn_scale, group_size=group_size)
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
    packed = sum(n * 3 // 8 for n in (10 * 32, 32 * 4))
    assert size_of(stored).bytes == packed + 4 * rows + 4 * (32 + 4)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_trained_step_is_at_first_not_larger_than_needed(bits):
    torch.manual_seed(0)
    layer = nn.Linear(64, 16, bias=False).requires_grad_(False)
    fixed, trained = prepare_qat(layer, bits), prepare_qat(layer, bits, learn_scale=True)
    error = (trained.weight.detach() - layer.weight).norm()
    assert error <= 1.001 * (fixed.weight - layer.weight).norm()


def measure_loss_ratio(bits, learn_scale, seed):
    """Return the loss after training with rounding over the loss after rounding alone."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
    inputs = torch.randn(512, 10)
    targets = torch.tanh(inputs @ torch.randn(10, 4))

    def train(model, decay):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        for step in range(200):
            if decay:
                optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 200)
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
        return model

    def loss(model):
        with torch.no_grad():
            return float((model(inputs) - targets).square().mean())

    train(model, decay=not learn_scale)
    trained = train(prepare_qat(model, bits, learn_scale=learn_scale), decay=not learn_scale)
    return loss(convert(trained)) / loss(quantize(model, bits))


def test_training_recovers_most_of_what_rounding_afterwards_loses():
    # Over 20 seeds, the mean is 0.19 and the standard deviation 0.08.
    assert measure_loss_ratio(2, learn_scale=True, seed=0) < 0.4


def test_training_with_the_scale_of_the_largest_weight_recovers_a_part():
    # Without a decay the weights keep moving between two codes, and the loss may grow.
    # Over 20 seeds, the mean is 0.72 and the standard deviation 0.08.
    assert measure_loss_ratio(3, learn_scale=False, seed=0) < 0.92


def test_layers_that_share_a_weight_train_it_once():
    model = nn.ModuleDict({"embed": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    model["head"].weight = model["embed"].weight
    trained = prepare_qat(model, 4)
    assert len(list(trained.parameters())) == 1
    stored = convert(trained)
    assert torch.equal(stored["head"].weight, stored["embed"].weight)
    assert size_of(stored).bytes == 20 * 8 // 2 + 20 * 4


def test_integer_networks_and_compiled_graphs_of_rounded_weights():
    first, _, last = build_mlp()
    inputs = torch.randn(32, first.in_features, requires_grad=True)
    # One layer follows its extremes, and the other one learns its step.
    layers = prepare_qat(first, 8), nn.ReLU(), prepare_qat(last, 8, learn_scale=True)
    rounded = nn.Sequential(*layers).eval()
    integer = IntegerModel(rounded, [inputs])
    assert (integer(inputs) - rounded(inputs)).norm() < 0.05 * rounded(inputs).norm()
    # The compiled graph also contains a layer that rounds its inputs.
    last = quantize(nn.Sequential(nn.Linear(last.out_features, 8)), 8, activations="dynamic")
    model = nn.Sequential(rounded, last)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(inputs), model(inputs))
    gradients = [torch.autograd.grad(m(inputs).square().sum(), inputs) for m in (compiled, model)]
    torch.testing.assert_close(*gradients)


def test_weights_that_became_nan_in_training_are_not_converted():
    rounded = prepare_qat(build_mlp(), 4)
    with torch.no_grad():
        rounded[0].parametrizations.weight.original[0, 0] = float("nan")
    assert rounded(torch.ones(1, rounded[0].in_features)).isnan().any()
    with pytest.raises(ValueError, match="finite values in the trained weights"):
        convert(rounded)


def test_bad_requests_say_what_to_ask_for():
    with pytest.raises(ValueError, match="bits of a symmetric grid, got 1"):
        prepare_qat(build_mlp(), 1)
    with pytest.raises(ValueError, match="prepare_qat"):
        convert(build_mlp())


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # by torch.func.jvp
@pytest.mark.parametrize("learn_scale", [False, True])
def test_rounded_weights_have_the_derivatives_of_torch_func(learn_scale):
    model = prepare_qat(nn.Linear(6, 3, bias=False), 4, learn_scale=learn_scale)
    name = "parametrizations.weight.original"
    weight = dict(model.named_parameters())[name].detach()
    inputs = torch.randn(2, 6)

    def outputs(weight):
        return torch.func.functional_call(model, {name: weight}, (inputs,))

    trained = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(outputs(trained).sum(), trained)
    assert torch.equal(torch.func.grad(lambda w: outputs(w).sum())(weight), gradient)
    with pytest.raises(RuntimeError, match="forward mode AD"):  # not silently zero
        torch.func.jvp(outputs, (weight,), (torch.ones_like(weight),))
