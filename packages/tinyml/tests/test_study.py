"""The pictures of the study are what its rows draw to, and little is lost."""

import importlib.util
import json
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[1] / "study"


def study():
    spec = importlib.util.spec_from_file_location("digits_study", STUDY / "digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows():
    return json.loads((STUDY / "rows.json").read_text())


def test_the_pictures_are_what_the_rows_draw_to():
    for name, picture in study().pictures(rows()).items():
        assert (STUDY / "pictures" / f"{name}.svg").read_text() == picture.svg()


@pytest.mark.parametrize(
    ("model", "points"),
    [("linear 8 bits", 0.3), ("integers only, 8 bits", 0.3), ("palette 4 bits, tuned", 0.5),
     ("channels 50 %, tuned", 1.0)],
)  # fmt: skip
def test_little_is_lost_over_seeds(model, points):
    (row,) = [row for row in rows() if row["case"] == "digits" and row["model"] == model]
    assert row["seeds"] >= 3
    assert row["points"] <= points


def test_half_the_channels_are_half_as_fast_again():
    found = {row["model"]: row for row in rows() if row["case"] == "latency"}
    assert found["channels 50 %, tuned"]["times_faster"] >= 1.5
