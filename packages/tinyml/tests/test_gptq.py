"""GPTQ is optimal brain quantization in a fixed order, and needs nothing of the data's rank."""

import math
import statistics

import pytest
import torch
from tinyml import gptq, prune, quantize
from tinyml.quantization.gptq import (
    compute_gptq_codes,
    compute_inverse_factor_rows,
    compute_reversed_cholesky,
)
from tinyml.quantization.grid import Grid, as_rows, compute_grid
from torch import nn


def draw_problem(outputs=6, inputs=20, samples=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    x = torch.randn(samples, inputs, generator=generator, dtype=torch.float64)
    x[:, 1:] += 0.9 * x[:, :-1]  # correlated inputs are what makes the difference
    return weight, x


def quantize_by_brute_force(weight, hessian, grid):
    """Quantize in order; after each step, update the remaining weights by the formula of OBQ.

    Everything is from an explicit inverse of the hessian of the weights that are left.
    """
    weight, codes = weight.clone(), torch.zeros_like(weight, dtype=torch.int32)
    for row in range(len(weight)):
        row_grid = Grid(grid.scale[row], grid.zero[row], grid.low, grid.high)
        for i in range(weight.shape[1]):
            inverse = torch.linalg.inv(hessian[i:, i:])
            codes[row, i] = row_grid.quantize(weight[row, i : i + 1])[0]
            error = weight[row, i] - row_grid.dequantize(codes[row, i : i + 1])[0]
            weight[row, i:] -= error / inverse[0, 0] * inverse[:, 0]
    return codes


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("block", [1, 7, 128])
def test_codes_equal_brute_force(bits, block):
    weight, x = draw_problem(seed=bits)
    hessian = x.t() @ x
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(20, dtype=torch.float64)
    grid = compute_grid(weight, bits)
    codes, _ = compute_gptq_codes(weight, hessian, grid, damping=0.01, block=block)
    assert torch.equal(codes, quantize_by_brute_force(weight, damped, grid))


def quantize_groups_by_brute_force(weight, hessian, order, group, fit):
    """Quantize columns in `order`; the grid of a group is fitted when its first column is reached.

    Everything is from an explicit inverse of the hessian of the columns that are left.
    """
    weight, rounded = weight.clone(), torch.zeros_like(weight)
    left, grids = list(order), {}
    while left:
        first = left[0]
        if first // group not in grids:
            columns = [i for i in left if i // group == first // group]
            grids[first // group] = fit(weight[:, columns])
        grid = grids[first // group]
        inverse = torch.linalg.inv(hessian[left][:, left])
        value = weight[:, first : first + 1]
        rounded[:, first : first + 1] = grid.dequantize(grid.quantize(value))
        error = value - rounded[:, first : first + 1]
        weight[:, left] -= error * (inverse[0] / inverse[0, 0])
        left = left[1:]
    return rounded


@pytest.mark.parametrize("activation_order", [False, True])
@pytest.mark.parametrize("block", [1, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_are_fitted_to_updated_weights(activation_order, block, symmetric):
    weight, x = draw_problem(seed=5)
    x = x * torch.linspace(0.5, 3, 20, dtype=torch.float64).flip(0)[torch.randperm(20)]
    hessian = x.t() @ x
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(20, dtype=torch.float64)

    def fit(rows):
        return compute_grid(rows, 3, symmetric=symmetric)

    order = list(range(20))
    if activation_order:  # whole groups, the largest sum first, and the largest column first inside
        size = hessian.diagonal()
        groups = sorted(range(4), key=lambda g: -float(size[5 * g : 5 * g + 5].sum()))
        order = [
            i
            for g in groups
            for i in sorted(range(5 * g, 5 * g + 5), key=lambda i: -float(size[i]))
        ]
    rows = as_rows(weight, 5)
    codes, grid = compute_gptq_codes(
        weight,
        hessian,
        fit(rows),
        block=block,
        activation_order=activation_order,
        refit=fit,
    )
    ours = grid.dequantize(codes.view(rows.shape)).view_as(weight)
    exact = quantize_groups_by_brute_force(weight, damped, order, 5, fit)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


def test_updated_groups_and_activation_order_lose_less():
    def fit(rows):
        return compute_grid(rows, 3)

    ratios = []
    for seed in range(8):
        weight, x = draw_problem(outputs=32, inputs=64, samples=300, seed=seed)
        x = x * torch.logspace(-1, 1, 64, dtype=torch.float64)[torch.randperm(64)]
        rows = as_rows(weight, 16)
        losses = []
        for options in ({}, {"activation_order": True, "refit": fit}):
            codes, grid = compute_gptq_codes(weight, x.t() @ x, fit(rows), **options)
            change = grid.dequantize(codes.view(rows.shape)).view_as(weight) - weight
            losses.append(float((x @ change.t()).norm()))
        ratios.append(losses[1] / losses[0])
    assert statistics.mean(ratios) < 0.95, ratios


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_outputs_are_closer_than_with_rounding_to_the_nearest(bits):
    weight, x = draw_problem(outputs=32, inputs=64, samples=300)
    grid = compute_grid(weight, bits)
    ours = grid.dequantize(compute_gptq_codes(weight, x.t() @ x, grid)[0])
    nearest = grid.dequantize(grid.quantize(weight))
    assert (x @ (ours - weight).t()).norm() < 0.8 * (x @ (nearest - weight).t()).norm()


def test_an_uncorrelated_hessian_rounds_to_the_nearest():
    weight, _ = draw_problem()
    grid = compute_grid(weight, 3)
    codes, _ = compute_gptq_codes(weight, 5.0 * torch.eye(20), grid)
    assert torch.equal(codes, grid.quantize(weight))


@pytest.mark.parametrize("damping", [0.0, 1e-300, 0.01])
@pytest.mark.parametrize("kind", ["one sample", "dead inputs", "equal inputs", "zero", "negative"])
def test_no_hessian_is_an_error(kind, damping):
    weight, x = draw_problem()
    x = {
        "one sample": x[:1],
        "dead inputs": x * (torch.arange(20) % 2),
        "equal inputs": x[:, :1].expand(-1, 20) * 1e150,
        "zero": x * 0,
        "negative": x,
    }[kind]
    hessian = x.t() @ x
    if kind == "negative":  # rounding errors of a real one, made large
        hessian -= 0.5 * hessian.diagonal().max() * torch.eye(20)
    lower = compute_reversed_cholesky(hessian, damping, torch.arange(20))
    factor = compute_inverse_factor_rows(lower, 0, 20)
    assert torch.isfinite(factor).all()
    assert (factor.diagonal() > 0).all()
    grid = compute_grid(weight, 4)
    codes, _ = compute_gptq_codes(weight, hessian, grid, damping=damping)
    assert codes.min() >= grid.low
    assert codes.max() <= grid.high


@pytest.mark.parametrize("group", [20, 5])
def test_every_channel_or_group_has_the_codes_of_its_own_grid(group):
    weight, x = draw_problem()
    hessian = x.t() @ x
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(20, dtype=torch.float64)
    rows = as_rows(weight, group)
    grid = compute_grid(rows, 4)
    codes, _ = compute_gptq_codes(weight, hessian, grid, block=7)
    ours = grid.dequantize(codes.view(rows.shape)).view_as(weight)
    fixed = iter([compute_grid(part, 4) for part in weight.split(group, dim=1)])
    exact = quantize_groups_by_brute_force(weight, damped, range(20), group, lambda _: next(fixed))
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 24)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.unused = nn.Linear(24, 4)
        self.head = nn.Linear(24, 30, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(torch.relu(self.up(x))))


def test_bad_calibration_says_so():
    with pytest.raises(ValueError, match="at least one batch"):
        gptq(nn.Linear(4, 4), [])
    with pytest.raises(ValueError, match="the calibration inputs, got nan or inf"):
        gptq(nn.Linear(4, 4), [torch.full((2, 4), float("nan"))])


@pytest.mark.parametrize("damping", [-0.1, math.nan, math.inf])
def test_damping_that_is_not_a_number_of_at_least_zero_is_refused(damping):
    with pytest.raises(ValueError, match="expected a finite damping of at least 0"):
        gptq(nn.Linear(4, 4), [torch.randn(8, 4)], damping=damping)


def test_layers_that_no_batch_calls_are_rounded_to_the_nearest_and_named_in_a_warning():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x)

    model, calls = Unused(), []
    with pytest.warns(UserWarning, match=r"received no inputs .*, 1 in total: b; calibrate on"):
        small = gptq(model, [torch.randn(8, 4)], progress=lambda *call: calls.append(call))
    assert calls == [("a", 1, 2), ("b", 2, 2)]
    assert torch.equal(small.b.weight, quantize(model, 4).b.weight)


@pytest.mark.parametrize("options", [{}, {"group_size": 8, "symmetric": False}])
def test_zeros_of_a_pruned_model_stay_and_are_compensated(options):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(32, 24)), torch.randn(200, 32) @ torch.randn(32, 32)
    pruned = prune(model, 0.5).model
    rounded = gptq(pruned, [inputs], 3, **options)
    assert not rounded[0].weight[pruned[0].weight == 0].any()
    nearest = quantize(pruned, 3, **options)
    exact = pruned(inputs)
    assert (rounded(inputs) - exact).norm() < (nearest(inputs) - exact).norm()


def test_a_shared_weight_is_rounded_for_the_inputs_of_its_first_layer():
    torch.manual_seed(0)
    model, inputs = (
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)),
        torch.randn(99, 16),
    )
    model[2].weight = model[0].weight
    small = gptq(model, [inputs], 3)
    assert torch.equal(small[0].weight, gptq(model[:1], [inputs], 3)[0].weight)
    assert torch.equal(small[2].weight, small[0].weight)


def test_the_result_shares_no_memory_with_the_model():
    model, inputs = Decoder(), torch.arange(30)[None]
    model.tied, model.also = nn.Linear(24, 48), model.up.weight
    model.tied.weight = model.up.weight
    before = [(p, p.data_ptr(), p.detach().clone(), p._version) for p in model.parameters()]
    with pytest.warns(UserWarning, match="no inputs other than zeros"):
        small = gptq(model, [inputs], 4, protect=["down"])
    assert torch.equal(small.tied.weight, small.up.weight)
    ours = {parameter.data_ptr() for parameter in small.parameters() if parameter.numel()}
    for parameter, pointer, values, version in before:
        assert parameter.data_ptr() == pointer not in ours
        assert torch.equal(parameter, values)
        assert parameter._version == version


def test_layers_that_receive_no_tokens_are_named_in_a_warning():
    model = nn.Sequential(nn.Linear(16, 8))
    for batch in (torch.zeros(0, 16), torch.zeros(3, 16)):
        with pytest.warns(UserWarning, match=r"no inputs other than zeros.*: 0;"):
            small = gptq(model, [batch], 4)
        assert torch.equal(small[0].weight, quantize(model, 4)[0].weight)
