"""Figures hold what they are said to show."""

import re

import pytest
import torch
from tinyml import prune, sensitivity
from tinyml.plot import plot_frontier, plot_sensitivity, plot_weights
from torch import nn


def test_weights_are_counted(tmp_path):
    torch.manual_seed(0)
    model = prune(nn.Sequential(nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 5)), 0.5).model
    for nonzero, counts in ((False, [200, 50]), (True, [100, 25])):
        picture = plot_weights(model, nonzero=nonzero)
        drawn = [
            sum(y for _, y in panel.lines[name])
            for panel, name in zip(picture.panels, "02", strict=True)
        ]
        assert drawn == counts
    picture.save(tmp_path / "weights.svg")
    text = (tmp_path / "weights.svg").read_text()
    assert text == plot_weights(model, nonzero=True).svg()  # the same bytes each time
    assert text.count("<g ") == 2


def test_sensitivity_is_drawn():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    batch = (torch.randn(9, 6), torch.randint(3, (9,)))
    loss = nn.functional.cross_entropy
    result = sensitivity(model, [batch], loss, amounts=(0.2, 0.8))
    picture = plot_sensitivity(result, metric="loss")
    for panel, (name, values) in zip(picture.panels, result.values.items(), strict=True):
        assert panel.lines == {name: list(values.items())}
        assert panel.level == result.baseline


def test_points_lie_where_their_numbers_are():
    lines = {"a": [(1.0, 50.0), (10.0, 70.0), (100.0, 90.0)], "b <": [(10.0, 60.0, 55.0, 65.0)]}
    text = plot_frontier(lines, level=80).svg()
    dots = [
        (float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', text)
    ]
    (x1, y1), (x2, y2), (x3, y3), (x4, y4) = dots
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.11)  # decades are as far apart as each other
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.11)
    assert (x4, y4) == (x2, pytest.approx((y1 + y2) / 2, abs=0.11))
    assert "b &lt;" in text
    import xml.etree.ElementTree as tree

    tree.fromstring(text)
