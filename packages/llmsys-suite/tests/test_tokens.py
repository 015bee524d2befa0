"""Texts are encoded once, by a tokenizer that is trained on the text or read from a file."""

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from llmsys_suite import cli
from llmsys_suite.audit.text import read_parts
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.resolution import check, resolve
from llmsys_suite.start import run as start
from llmsys_suite.text import tokens

pytest.importorskip("tokenizers")
SENTENCES = "the cat sat on the mat, and the dog sat on the cat.\n" * 400
CONFIG = RunConfig(stages=("plan", "report"), size="mini", context=16, tokenizer="bpe")
CONFIG = replace(CONFIG, vocabulary=280)


def test_bytes_are_shown_as_the_characters_that_they_encode():
    text = "naïve 日本\tx\n"
    assert tokens.ByteCodec().decode(tokens.ByteCodec().encode(text)) == text
    assert tokens.ByteCodec().decode([0, 65, 0xFF, 13, *"日".encode()[:2]]) == "·A···"


@pytest.fixture
def encoded(tmp_path):
    (tmp_path / "text").write_text(SENTENCES + "zyzzyva " * 400)
    config = replace(CONFIG, data=tmp_path / "text")
    tokens.write_tokens(config, tmp_path)
    return config, tmp_path


def test_tokens_of_both_parts_together_are_the_text(encoded):
    config, folder = encoded
    codec, corpus = tokens.load_codec(config, folder), tokens.load(folder)
    decoded = [codec.decode(part.tolist()) for part in (corpus.train, corpus.heldout)]
    assert "".join(decoded) == (folder / "text").read_text()
    assert 256 < int(corpus.train.max()) < config.vocabulary
    assert len(corpus.train) < len(decoded[0]) / 2
    read, targets = corpus.draw_batch(rows=4, context=16, seed=0, step=0)
    assert torch.equal(read[:, 1:], targets[:, :-1])


def test_the_vocabulary_is_trained_on_the_training_text_only(tmp_path):
    (tmp_path / "text").write_text(SENTENCES + "zyzzyva " * 250)
    config = replace(CONFIG, data=tmp_path / "text", vocabulary=400)
    tokens.write_tokens(config, tmp_path)
    codec = tokens.load_codec(config, tmp_path)
    assert len(codec.encode("the cat")) == 2
    assert len(codec.encode("zyzzyva")) == len("zyzzyva")


@pytest.mark.parametrize("chunk", [4, 5, 100])
def test_lines_keep_their_ends_and_long_ones_are_refused(monkeypatch, chunk):
    monkeypatch.setattr(tokens, "CHUNK_BYTES", chunk)
    batches = [*tokens.iter_line_batches(b"ab\ncde\n\nfg\r\nh")]
    lines = [line for batch in batches for line in batch if line]
    assert lines == [b"ab\n", b"cde\n", b"\n", b"fg\r\n", b"h"]
    with pytest.raises(UsageError, match="a line of the text is longer than"):
        [*tokens.iter_line_batches(b"a" * 201)]


def test_a_text_with_a_long_line_is_refused_before_the_run(monkeypatch, tmp_path):
    (tmp_path / "text").write_text("a short line\n" + "a" * 300)
    config = replace(CONFIG, data=tmp_path / "text")
    tokens.require_tokenizer(config)
    monkeypatch.setattr(tokens, "CHUNK_BYTES", 100)
    with pytest.raises(UsageError, match="break the line"):
        tokens.require_tokenizer(config)


def test_a_tokenizer_whose_numbers_exceed_the_vocabulary_is_refused(encoded, tmp_path):
    config, folder = encoded
    file = json.loads((folder / tokens.TOKENIZER).read_text())
    last = max(file["model"]["vocab"], key=file["model"]["vocab"].get)
    file["model"]["vocab"][last] = 5000
    (tmp_path / "sparse.json").write_text(json.dumps(file))
    sparse = replace(config, tokenizer=str(tmp_path / "sparse.json"))
    with pytest.raises(UsageError, match="pass --vocabulary 5001"):
        tokens.require_tokenizer(sparse)


def test_a_file_of_the_library_is_used_as_it_is(encoded, tmp_path):
    config, folder = encoded
    (tmp_path / "run").mkdir()
    from_file = replace(config, tokenizer=str(folder / tokens.TOKENIZER))
    tokens.require_tokenizer(from_file)
    tokens.write_tokens(from_file, tmp_path / "run")
    both = [tokens.load(path).train for path in (folder, tmp_path / "run")]
    assert torch.equal(*both)
    with pytest.raises(UsageError, match=r"--vocabulary >= 280 .*, got 270; pass --vocabulary 280"):
        tokens.require_tokenizer(replace(from_file, vocabulary=270))
    with pytest.raises(UsageError, match="is not a file of the package tokenizers"):
        tokens.require_tokenizer(replace(from_file, tokenizer=str(folder / "text")))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"tokenizer": "nowhere"},
            "expected --tokenizer bytes, bpe or a file, got nowhere",
        ),
        ({"tokenizer": "bytes"}, "--vocabulary 280 needs --tokenizer bpe or a file"),
        ({"vocabulary": 256}, "merges no bytes; pass a larger vocabulary"),
        ({"vocabulary": 100}, "expected vocabulary to be an integer >= 256, got 100"),
        (
            {"stages": ("plan", "scale", "report")},
            "cannot be used with scale, which .*other stages: llmsys run plan report",
        ),
    ],
)
def test_options_that_tokens_do_not_allow_are_refused(change, complaint):
    check(CONFIG)
    with pytest.raises(UsageError, match=complaint):
        check(replace(CONFIG, **change))


def test_a_missing_library_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match="--tokenizer needs a package; run `pip install tokenizers`"
    ):
        tokens.require_tokenizer(CONFIG)


def test_a_prompt_is_encoded_line_by_line_like_the_training_text(tmp_path):
    from tokenizers import Tokenizer, models

    # Like the tokens of Llama 3, a token of this file can span two lines.
    vocabulary = {"a": 0, "\n": 1, "\n\n": 2}
    Tokenizer(models.BPE(vocabulary, [("\n", "\n")])).save(str(tmp_path / "file.json"))
    (tmp_path / "text").write_text("a\n\n" * 600)
    config = replace(CONFIG, data=tmp_path / "text", tokenizer=str(tmp_path / "file.json"))
    tokens.write_tokens(config, tmp_path)
    codec = tokens.load_codec(config, tmp_path)
    assert codec.encode("a\n\na\n") == tokens.load(tmp_path).train[:5].tolist()
    assert codec.encode("\udcffa") == [0]  # a byte of the command line that is not UTF-8


def test_a_text_of_too_few_tokens_is_refused(tmp_path):
    (tmp_path / "text").write_text(SENTENCES)
    config = replace(CONFIG, data=tmp_path / "text", context=500, vocabulary=300)
    with pytest.raises(ValueError, match=r"expected at least 4008 tokens in .*, eight rows of 500"):
        tokens.write_tokens(config, tmp_path)


@pytest.mark.exhaustive
def test_a_run_with_a_trained_tokenizer_learns_and_writes_text(tmp_path, capsys):
    stages = ["train", "learn", "parallel", "compress", "audit"]
    options = {"size": "mini", "steps": 2, "warmup": 1, "learn": 8, "context": 32}
    tokens_options = {"tokenizer": "bpe", "vocabulary": 300}
    out = tmp_path / "run"
    config = resolve(stages, preset="cpu", out=out, **options, **tokens_options)
    folder = start(config)
    assert folder.results["learn"].losses[-1] < folder.results["learn"].losses[0]
    cli.app(["sample", str(folder.path), "--max-bytes", "5"], standalone_mode=False)
    assert capsys.readouterr().out.startswith("The ")
    cli.app(["export", str(folder.path), str(tmp_path / "model")], standalone_mode=False)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    codec = tokens.load_codec(config, folder.path)
    assert theirs.encode("import os\n", add_special_tokens=False) == codec.encode("import os\n")


def test_a_file_that_cuts_and_pads_inputs_changes_nothing_of_the_text(tmp_path):
    from tokenizers import Tokenizer, processors

    text = tmp_path / "text"
    text.write_text(SENTENCES)
    tokens.write_tokens(replace(CONFIG, data=text), tmp_path)
    library = Tokenizer.from_file(str(tmp_path / tokens.TOKENIZER))
    library.enable_truncation(3)
    library.enable_padding(length=40)
    start = [("the", library.token_to_id("the"))]
    library.post_processor = processors.TemplateProcessing("the $A", special_tokens=start)
    library.save(str(tmp_path / "other.json"))
    (tmp_path / "run").mkdir()
    config = replace(CONFIG, data=text, tokenizer=str(tmp_path / "other.json"))
    config = replace(config, out=tmp_path / "run")
    tokens.write_tokens(config, tmp_path / "run")
    corpus, codec = tokens.load(tmp_path / "run"), tokens.load_codec(config, config.out)
    stored = Tokenizer.from_file(str(tmp_path / "run" / tokens.TOKENIZER))
    assert stored.encode("the cat sat on the mat").ids == codec.encode("the cat sat on the mat")
    parts = (corpus.train, corpus.heldout)
    assert "".join(codec.decode(part.tolist()) for part in parts) == SENTENCES
    for part, audited in zip(parts, read_parts(config), strict=True):
        assert part.tolist() == audited.tolist()
