"""A run folder keeps what was measured, whatever ends the run."""

import json

import pytest
from llmsys_suite.config import RunConfig
from llmsys_suite.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(RunConfig(out=tmp_path / "run", data=tmp_path), {"cores": 2})


def test_a_new_folder_is_incomplete_until_finished(folder):
    assert not folder.complete
    folder.finish()
    assert folder.complete


def test_the_configuration_comes_back_as_it_was(folder, tmp_path):
    assert folder.config == RunConfig(out=tmp_path / "run", data=tmp_path)


def test_finished_stages_stay(folder):
    folder.add_stage("plan", {"parameters": 7})
    folder.add_stage("train", {"rows": []})
    assert folder.summary["stages"] == {"plan": {"parameters": 7}, "train": {"rows": []}}


def test_samples_cut_short_by_a_kill_lose_their_last_line_only(folder):
    folder.append_samples([{"step": 0}, {"step": 1}])
    path = folder.path / "samples.jsonl"
    path.write_text(path.read_text()[:-4])
    assert folder.samples() == [{"step": 0}]


def test_a_write_that_fails_leaves_the_file_before_it(folder):
    with pytest.raises(TypeError):
        folder.write_json("summary.json", {"status": object()})
    assert json.loads((folder.path / "summary.json").read_text())["status"] == "incomplete"
