"""Batches are real text, the same at every world size, and never the held-out text."""

import hashlib
import os
import random
from pathlib import Path

import pytest
import torch
from llmsys_suite import environment
from llmsys_suite.config import UsageError
from llmsys_suite.environment import (
    forget_peak_memory,
    read_control_group_room,
    read_peak_memory_bytes,
)
from llmsys_suite.learning import evaluation
from llmsys_suite.resolution import resolve
from llmsys_suite.stages import scale
from llmsys_suite.start import run as start
from llmsys_suite.text.data import (
    load_corpus,
    read_text,
    require_text,
)


def test_the_standard_library_is_text_of_this_interpreter():
    corpus = load_corpus()
    assert len(corpus.train) > 1_000_000
    assert b"import" in bytes(corpus.train[:100_000].tolist())


def test_targets_are_the_next_bytes(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    tokens, targets = load_corpus(tmp_path).draw_batch(rows=4, context=16, seed=3, step=2)
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal((tokens + 1) % 256, targets)


@pytest.mark.parametrize("world", [2, 3, 6])
def test_the_ranks_rows_together_are_the_single_process_batch(world):
    corpus = load_corpus()
    whole, _ = corpus.draw_batch(rows=6, context=32, seed=1, step=5)
    shares = [
        corpus.draw_batch(rows=6, context=32, seed=1, step=5, rank=r, world=world)[0]
        for r in range(world)
    ]
    assert torch.equal(torch.cat(shares), whole)


def test_rows_that_do_not_split_evenly_are_refused():
    with pytest.raises(ValueError, match="expected rows to be a multiple of world=3, got 8"):
        load_corpus().draw_batch(rows=8, context=32, seed=0, step=0, rank=1, world=3)


def test_batches_differ_by_step_and_by_seed():
    corpus = load_corpus()
    first, other_step, other_seed = (
        corpus.draw_batch(rows=2, context=32, seed=seed, step=step)[0]
        for seed, step in ((0, 0), (0, 1), (1, 0))
    )
    assert not torch.equal(first, other_step)
    assert not torch.equal(first, other_seed)


def test_held_out_text_is_never_trained_on(tmp_path):
    (tmp_path / "text").write_bytes(b"a" * 900 + b"z" * 100)
    corpus = load_corpus(tmp_path / "text")
    assert set(corpus.train.tolist()) == {ord("a")}
    assert set(corpus.build_heldout_batch(rows=4, context=8)[0].flatten().tolist()) == {ord("z")}


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_missing_and_empty_texts_are_refused(tmp_path, name):
    (tmp_path / "empty").touch()
    with pytest.raises(UsageError, match=name):
        load_corpus(tmp_path / name)


def test_an_unreadable_text_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="/proc/self/mem cannot be read"):
        read_text(Path("/proc/self/mem"))
    (tmp_path / "text").write_text("some text")
    (tmp_path / "folder").mkdir()

    def scan(path, original=os.scandir):
        if Path(path).name == "folder":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(UsageError, match="folder cannot be read: Permission denied"):
        read_text(tmp_path)


def test_the_text_of_the_current_folder_has_a_name(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("some text")
    monkeypatch.chdir(tmp_path)
    assert read_text(Path()).source == tmp_path.name
    assert read_text(Path("text")).source == "text"
    assert read_text().source == "the standard library of this interpreter"


def test_too_short_a_text_is_refused_with_both_numbers(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 1000)
    text = read_text(tmp_path / "short")
    with pytest.raises(UsageError, match=r"expected at least 10320 bytes .*, got 1000 in short"):
        require_text(text, context=128)


def test_held_out_rows_all_differ_in_the_shortest_text_that_a_run_accepts(tmp_path):
    path, content = tmp_path / "text", random.Random(0).randbytes(5120)
    path.write_bytes(content)
    require_text(read_text(path), context=8)
    for rows, context in ((scale.HELDOUT_ROWS, scale.CONTEXT), (evaluation.HELDOUT_ROWS, 8)):
        tokens, _ = load_corpus(path).build_heldout_batch(rows=rows, context=context)
        assert len(tokens.unique(dim=0)) == rows
    path.write_bytes(content[:5119])
    with pytest.raises(UsageError, match=r"at least 5120 bytes of text .*, got 5119"):
        require_text(read_text(path), context=8)


def test_copies_of_one_held_out_row_are_no_batch(tmp_path):
    (tmp_path / "text").write_bytes(b"to be or not to be, " * 100)
    with pytest.raises(ValueError, match="for 256 different rows of 64 tokens, got 200 tokens"):
        load_corpus(tmp_path / "text").build_heldout_batch(rows=256, context=64)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of a process")
def test_reading_a_large_file_takes_no_memory_of_its_size(tmp_path):
    size = 200 * 2**20
    with (tmp_path / "text").open("wb") as file:
        file.truncate(size)
        file.seek(1000)
        file.write(b"some text")
    load_corpus(Path(__file__)).draw_batch(rows=4, context=64, seed=0, step=0)  # imports torch
    forget_peak_memory()
    before = read_peak_memory_bytes()
    text = read_text(tmp_path / "text")
    text.compute_digest()
    corpus = load_corpus(tmp_path / "text")
    corpus.compute_digest()
    assert bytes(corpus.train[1000:1009].tolist()) == b"some text"
    for step in range(20):
        corpus.draw_batch(rows=4, context=64, seed=0, step=step)
    assert len(corpus.train) + len(corpus.heldout) == size
    assert read_peak_memory_bytes() - before < 50 * 2**20


@pytest.mark.exhaustive
def test_plan_of_a_text_of_one_and_a_half_gigabytes_stays_below_one_gibibyte(tmp_path):
    with (tmp_path / "text").open("wb") as file:
        file.truncate(1_500_000_000)
    config = resolve(
        ["plan"], preset="cpu", size="mini", data=tmp_path / "text", out=tmp_path / "r"
    )
    folder = start(config)
    assert folder.summary["stages"]["plan"]["peak_process_mib"] < 1024


def test_a_folder_that_is_too_large_to_join_is_refused_with_the_remedy(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(300 * 2**20)
    with pytest.raises(UsageError, match=r"at most 256 MiB.*got 300 MiB.*pass one file with"):
        read_text(tmp_path)


def test_the_digest_of_a_mapped_file_is_that_of_its_bytes(tmp_path):
    content = bytes(range(256)) * 100
    (tmp_path / "text").write_bytes(content)
    text = read_text(tmp_path / "text")
    expected = hashlib.sha256(content[:23040] + b"\0" + content[23040:] + b"\0").hexdigest()
    assert text.compute_digest() == expected


def test_the_memory_limit_of_a_container_is_respected(tmp_path):
    group = tmp_path / "app" / "worker"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("700\n")
    (group / "memory.stat").write_text("anon 600\ninactive_file 100\n")
    (group.parent / "memory.max").write_text("max\n")
    (group.parent / "memory.current").write_text("900\n")
    (tmp_path / "cgroup").write_text("4:cpu,memory:/app/worker\n0::/app/worker\n")
    assert read_control_group_room(str(tmp_path / "cgroup"), str(tmp_path)) == [400]


def test_a_machine_without_a_memory_limit_has_the_memory_that_is_free(monkeypatch):
    monkeypatch.setattr(environment, "read_control_group_room", list)
    monkeypatch.setattr(environment, "_read_meminfo", {"MemAvailable": 2**30}.get)
    assert environment.read_available_memory_bytes("cpu") == 2**30
