"""Figures hold what they are said to show."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tinyml import prune, sensitivity
from torch import nn

STUDY = Path(__file__).parents[1] / "study"
spec = importlib.util.spec_from_file_location("study_plots", STUDY / "plots.py")
plots = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plots)


def test_weights_are_counted(tmp_path):
    torch.manual_seed(0)
    model = prune(nn.Sequential(nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 5)), 0.5).model
    for nonzero, counts in ((False, [200, 50]), (True, [100, 25])):
        figure = plots.plot_weights(model, nonzero=nonzero)
        drawn = [sum(bar.get_height() for bar in axes.patches) for axes in figure.axes]
        assert drawn == counts
    pictures = [tmp_path / name for name in ("once.svg", "again.svg")]
    for path in pictures:
        plots.save(plots.plot_weights(model, nonzero=True), path)
    once, redrawn = (path.read_bytes() for path in pictures)
    assert once == redrawn


def test_sensitivity_is_drawn():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    batch = (torch.randn(9, 6), torch.randint(3, (9,)))
    loss = nn.functional.cross_entropy
    result = sensitivity(model, [batch], loss, amounts=(0.2, 0.8))
    figure = plots.plot_sensitivity(result, metric="loss")
    for axes, (name, values) in zip(figure.axes, result.values.items(), strict=True):
        drawn, level = axes.lines
        assert axes.get_title() == name
        assert list(zip(*drawn.get_data(), strict=True)) == list(values.items())
        assert set(level.get_ydata()) == {result.baseline}


def test_points_and_intervals_lie_where_their_numbers_are():
    lines = {"a": [(1.0, 50.0), (10.0, 70.0), (100.0, 90.0)], "b": [(10.0, 60.0, 55.0, 65.0)]}
    (axes,) = plots.plot_frontier(lines, level=80).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert drawn["a"] == [list(point) for point in lines["a"]]
    assert drawn["b"] == [[10, 60]]
    ((low, high),) = axes.collections[0].get_segments()
    assert (low.tolist(), high.tolist()) == ([10, 55], [10, 65])
    assert axes.get_xscale() == "log"


def test_a_model_without_weights_to_draw_is_an_error():
    with pytest.raises(ValueError, match="no layer"):
        plots.plot_weights(nn.ReLU())
