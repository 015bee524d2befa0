"""The study of a trained model: little is lost over seeds, and half the channels are faster."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def measured():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    path = Path(__file__).parents[1] / "study" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits_study", path)
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    return study, study.study(*study.digits(), seeds=3, epochs=9)


def test_little_is_lost_over_seeds(measured):
    lost = {row["model"]: row["points"] for row in measured[1] if row["case"] == "digits"}
    assert lost["linear 8 bits"] <= 0.3
    assert lost["integers only, 8 bits"] <= 0.3
    assert lost["palette 4 bits, tuned"] <= 0.5
    assert lost["channels 50 %, tuned"] <= 1.0


def test_half_the_channels_are_half_as_fast_again(measured):
    found = {row["model"]: row for row in measured[1] if row["case"] == "latency"}
    assert found["channels 50 %, tuned"]["times_faster"] >= 1.5


def test_every_picture_is_drawn(measured, tmp_path):
    study, rows = measured
    for name, picture in study.pictures(rows).items():
        study.save(picture, tmp_path / name)
        ElementTree.parse(tmp_path / name)
