"""Losses of `learn` reach TensorBoard or wandb, and steps are traced."""

import json
import sys
import types

import pytest
import torch
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.learning.log import TRACED, open_log, trace_steps
from llmsys_suite.resolution import check


class FakeWriter:
    def __init__(self, folder):
        FakeWriter.rows = [("folder", folder)]

    def add_scalar(self, name, value, step):
        self.rows.append((name, value, step))

    def close(self):
        self.rows.append("closed")


class FakeWandb(types.ModuleType):
    def init(self, **options):
        self.options, self.rows = options, []
        return self

    def log(self, values, step):
        self.rows.append((values, step))

    def finish(self):
        self.rows.append("closed")


def make_run(tmp_path, rank=0, **options):
    return types.SimpleNamespace(
        rank=rank,
        out=tmp_path,
        device=torch.device("cpu"),
        config=RunConfig(out=tmp_path, **options),
    )


def test_tensorboard_receives_each_value_on_rank_0(tmp_path, monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with open_log(make_run(tmp_path, log="tensorboard")) as log:
        log(3, {"loss": 2.5, "learning_rate": 0.1})
    expected = [("folder", str(tmp_path / "tensorboard")), ("loss", 2.5, 3)]
    assert FakeWriter.rows == [*expected, ("learning_rate", 0.1, 3), "closed"]
    for other in (make_run(tmp_path, log="tensorboard", rank=1), make_run(tmp_path)):
        with open_log(other) as log:
            log(0, {"loss": 1.0})
    assert len(FakeWriter.rows) == 4


def test_wandb_receives_the_configuration_and_each_value(tmp_path, monkeypatch):
    wandb = FakeWandb("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with open_log(make_run(tmp_path, log="wandb")) as log:
        log(0, {"loss": 2.0})
    assert wandb.options["config"]["size"] == "tiny"
    assert wandb.rows == [({"loss": 2.0}, 0), "closed"]


def test_a_log_whose_program_is_missing_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--log wandb needs a package; run `pip install wandb`"):
        check(RunConfig(log="wandb"))
    with pytest.raises(UsageError, match="log 'mlflow' is unknown; choose from tensorboard, wandb"):
        check(RunConfig(log="mlflow"))


def test_three_steps_are_written_as_a_trace_of_the_rank(tmp_path):
    with trace_steps(make_run(tmp_path, rank=1, trace=True)) as recording:
        for step in range(8):
            with torch.profiler.record_function(f"step {step} of the test"):
                torch.ones(4).sum()
            recording.step()
    events = json.loads((tmp_path / "trace-1.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert sum(f"step {step} of the test" in names for step in range(8)) == TRACED
    with trace_steps(make_run(tmp_path)) as recording:
        assert recording is None
