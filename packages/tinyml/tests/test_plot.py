"""Figures hold what they are said to show."""

import pytest
import torch
from tinyml import prune, sensitivity
from tinyml.plot import plot_sensitivity, plot_weights
from torch import nn


def test_weights_are_counted(tmp_path):
    torch.manual_seed(0)
    model = prune(nn.Sequential(nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 5)), 0.5).model
    for nonzero, counts in ((False, [200, 50]), (True, [100, 25])):
        figure = plot_weights(model, nonzero=nonzero)
        drawn = [sum(bar.get_height() for bar in axes.patches) for axes in figure.axes]
        assert drawn == counts
    assert [axes.get_title() for axes in figure.axes] == ["0", "2"]
    figure.savefig(tmp_path / "weights.png")
    assert (tmp_path / "weights.png").stat().st_size > 1000


def test_sensitivity_is_drawn():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    result = sensitivity(
        model,
        [(torch.randn(9, 6), torch.randint(3, (9,)))],
        nn.functional.cross_entropy,
        amounts=(0.2, 0.8),
    )
    figure = plot_sensitivity(result, metric="loss")
    for axes, values in zip(figure.axes, result.values.values(), strict=True):
        assert axes.lines[0].get_ydata() == pytest.approx(list(values.values()))
        assert axes.lines[1].get_ydata() == [result.baseline] * 2
