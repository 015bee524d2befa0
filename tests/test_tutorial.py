"""The steps of the tutorial run in their order, and each stores the lines of its picture."""

import importlib
import json
import re
import runpy
import subprocess

import pytest
from workspace import ROOT, import_script

RUN = import_script("tutorial/run")
PAGE = (ROOT / "docs" / "source" / "tutorial.md").read_text()


def run_step(step, folder):
    done = subprocess.run(
        RUN.get_command(step), cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "runs" / "tutorial" / f"{step}.json").read_text())
    return done.stdout


def test_the_first_step_prints_the_stored_output(tmp_path, monkeypatch, capsys):
    # In this process, which has imported torch already.
    _, file = RUN.get_command("plan")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(RUN.FOLDER)
    runpy.run_path(file, run_name="__main__")
    assert capsys.readouterr().out == (RUN.FOLDER / "outputs" / "plan.txt").read_text()
    assert json.loads((tmp_path / "runs" / "tutorial" / "plan.json").read_text())


def test_the_size_that_the_law_predicts_has_all_parameters_but_the_embeddings(monkeypatch):
    # The fitted sizes are counted the same way.
    monkeypatch.syspath_prepend(RUN.FOLDER)
    model = importlib.import_module("model").Decoder()
    embeddings = model.embedding.weight.numel() + model.positions.weight.numel()
    (large,) = re.findall(r"^LARGE = ([\d_]+)$", (RUN.FOLDER / "extrapolate.py").read_text(), re.M)
    assert int(large) == sum(p.numel() for p in model.parameters()) - embeddings


def test_the_stored_output_of_two_ranks_states_half_of_the_parameters():
    output = (RUN.FOLDER / "outputs" / "shard.txt").read_text()
    stored, all_parameters = re.search(r"each rank stores ([\d,]+) of ([\d,]+) ", output).groups()
    assert 2 * int(stored.replace(",", "")) == int(all_parameters.replace(",", ""))


@pytest.mark.exhaustive
def test_all_steps_run_in_their_order(tmp_path):
    for step in RUN.STEPS:
        assert run_step(step, tmp_path), step


def test_the_page_shows_every_step_with_its_command_output_and_picture():
    for step in RUN.STEPS:
        file = RUN.FILES.get(step, step)
        assert re.search(rf"^(?:python|torchrun .*) docs/tutorial/{file}\.py$", PAGE, re.MULTILINE)
        assert f"@script {file}\n" in PAGE
        assert f"@output {step}\n" in PAGE
        assert f"tutorial/pictures/{step}.svg" in PAGE
