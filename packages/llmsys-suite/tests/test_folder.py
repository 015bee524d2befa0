"""A run folder stores all measurements, also if the run is interrupted."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError

import pytest
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.folder import RunFolder
from llmsys_suite.measure.interleaved import Interleaved
from llmsys_suite.results import Compress, Skipped
from run_folders import create_folder


@pytest.fixture
def folder(tmp_path):
    return create_folder(RunConfig(out=tmp_path / "run", data=tmp_path), {"cores": 2})


def test_a_new_folder_is_incomplete_until_finished(folder):
    assert not folder.complete
    folder.finish()
    assert folder.complete


def test_threads_that_write_one_file_at_once_leave_one_whole_text(folder):
    texts = ["1" * 100_000, "2" * 200_000]
    folder.write_text("summary.json", texts[0])

    def write(text):
        for _ in range(100):
            folder.write_text("summary.json", text)

    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(write, text) for text in texts]
        while not all(writer.done() for writer in writers):
            assert (folder.path / "summary.json").read_text() in texts
        for writer in writers:
            writer.result()
    assert not list(folder.path.glob(".*.part"))


def test_a_file_is_not_taken_for_a_folder(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(UsageError, match="run exists and is not a folder; name another"):
        create_folder(RunConfig(out=tmp_path / "run"), {})


def test_the_configuration_comes_back_as_it_was(folder, tmp_path):
    assert folder.config == RunConfig(out=tmp_path / "run", data=tmp_path)


def test_numbers_that_are_not_finite_come_back(folder):
    values = {"low": -math.inf, "rows": [{"high": math.inf, "loss": 1.5}], "text": "NaN"}
    folder.write_json("env.json", values)
    folder.append_samples([values, {"loss": math.nan}])
    assert folder.read_json("env.json") == values
    first, second = folder.samples()
    assert first == values
    assert math.isnan(second["loss"])


def test_finished_stages_stay(folder):
    interleaved = Interleaved({"a": [0.5]}, 0.6)
    results = {
        "parallel": Skipped("one rank"),
        "compress": Compress([{"method": "a", "size_bytes": 3}], interleaved),
    }
    for stage, result in results.items():
        folder.add_stage(stage, result, 2.0, 3.0)
        with pytest.raises(FrozenInstanceError):
            result.rows = []
    folder.add_stage("report", None)
    assert folder.results == results
    assert folder.summary["stages"]["parallel"] == {
        "skipped": "one rank",
        "stage_seconds": 2.0,
        "peak_process_mib": 3.0,
    }


def test_recorded_failure_leaves_the_run_incomplete(folder):
    assert folder.failure is None
    folder.fail("train", "rank 1: ValueError: no")
    assert folder.failure == ("train", "rank 1: ValueError: no")
    assert not folder.complete


def test_samples_cut_short_by_a_kill_lose_their_last_line_only(folder):
    folder.append_samples([{"step": 0}, {"step": 1}])
    path = folder.path / "samples.jsonl"
    path.write_text(path.read_text()[:-4])
    assert folder.samples() == [{"step": 0}]


def test_a_write_that_fails_leaves_the_file_before_it(folder):
    with pytest.raises(TypeError):
        folder.write_json("summary.json", {"status": object()})
    assert json.loads((folder.path / "summary.json").read_text())["status"] == "incomplete"


@pytest.fixture
def finished(folder):
    folder.append_samples([{"step": 0}, {"step": 1}])
    folder.finish()
    return folder


def test_a_finished_folder_opens_as_it_was_written(finished):
    assert RunFolder.open(finished.path).samples() == [{"step": 0}, {"step": 1}]


@pytest.mark.parametrize("name", ["samples.jsonl", "summary.json", "config.json", "env.json"])
def test_an_edited_file_is_named(finished, name):
    path = finished.path / name
    path.write_text(path.read_text() + " ")
    with pytest.raises(UsageError, match=rf"{name} was changed"):
        RunFolder.open(finished.path)


def test_a_missing_file_is_named(finished):
    (finished.path / "samples.jsonl").unlink()
    with pytest.raises(UsageError, match=r"samples.jsonl was changed"):
        RunFolder.open(finished.path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "checks.json"])
def test_a_file_of_another_run_is_refused_and_notes_are_not(finished, name):
    (finished.path / "notes.txt").write_text("a good run")
    RunFolder.open(finished.path)
    (finished.path / name).touch()
    with pytest.raises(UsageError, match=f"{name} was changed"):
        RunFolder.open(finished.path)


@pytest.mark.parametrize("content", [[], {}, {"format": 1, "status": "complete", "stages": {}}])
def test_a_folder_of_another_version_is_refused(folder, content):
    folder.write_json("summary.json", content)
    with pytest.raises(UsageError, match=r"expected a run folder of format .*; repeat the run"):
        RunFolder.open(folder.path)
    folder.write_json("manifest.json", {"format": 1, "files": {}})
    with pytest.raises(UsageError, match=r"expected a run folder of format .*; repeat the run"):
        RunFolder.open(folder.path)


@pytest.mark.parametrize("content", [[], {}])
def test_a_manifest_with_missing_entries_is_refused(finished, content):
    (finished.path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"json was changed"):
        RunFolder.open(finished.path)
    (finished.path / "manifest.json").unlink()
    with pytest.raises(UsageError, match="it was deleted or never written"):
        RunFolder.open(finished.path)


def test_a_file_that_is_not_json_is_named(folder):
    (folder.path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config.json cannot be read"):
        _ = folder.config


def test_a_folder_that_is_not_a_run_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"expected a run folder, got .* has no summary\.json"):
        RunFolder.open(tmp_path)
