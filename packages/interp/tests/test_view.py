import base64
import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from figures import assert_at_most
from interp import attribution, detect_heads, logit_lens, view

WORDS = ["<b>", "</script>", "a&b", "\u2028", "naïve"]
TOKENS = torch.tensor([[2, 0, 1, 2, 2], [0, 1, 2, 0, 1]])


class Page(HTMLParser):
    """A parser that collects scripts and attributes and checks that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts = []
        self.attributes = []
        self.open = []
        self.headings = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.attributes += attrs
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(text)
        if self.open and self.open[-1] == "h1":
            self.headings.append(text)


@pytest.fixture
def page(tmp_path: Path) -> tuple[str, dict]:
    """Return the page of the second of two examples, and the results that it shows."""
    torch.manual_seed(0)
    patterns = torch.randn(2, 2, 3, 5, 5).softmax(-1)
    streams = torch.randn(2, 2, 5, 4)
    unembed = torch.randn(5, 4)
    parts = {"a": streams[0], "b": streams[1]}
    results = {
        "patterns": patterns,
        "heads": detect_heads(patterns, TOKENS),
        "lens": logit_lens(streams, None, unembed),
        "attributions": attribution(parts, None, unembed, TOKENS),
        "patching": torch.arange(20.0).view(2, 2, 5),
    }
    path = view(
        tmp_path / "page.html",
        tokens=WORDS,
        example=1,
        vocabulary=WORDS,
        title="</title><script>{{data}}",
        **results,
    )
    assert path == tmp_path / "page.html"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    return path.read_text(encoding="utf-8"), results


def test_page_is_self_contained_and_escapes_text(page: tuple[str, dict]) -> None:
    parsed = Page(page[0])
    assert len(parsed.scripts) == 2
    assert parsed.headings == ["</title><script>{{data}}"]
    assert not {name for name, _ in parsed.attributes} & {"src", "href", "srcset", "data", "action"}
    assert not re.search(r"https?:|url\(|@import|import\(|fetch\(|XMLHttp|WebSocket", page[0])


def test_page_data_round_trips(page: tuple[str, dict]) -> None:
    data, results = json.loads(Page(page[0]).scripts[0]), page[1]
    assert data["tokens"] == WORDS
    for layer, pattern in zip(data["patterns"], results["patterns"], strict=True):
        stored = torch.tensor(list(base64.b64decode(layer["weights"]))) / 255
        assert (stored.view(3, 5, 5) - pattern[1]).abs().max() <= 1 / 510 + 1e-6
    heads, lens = results["heads"], results["lens"]
    assert data["heads"]["chance"] == pytest.approx(heads.chance, rel=1e-5)
    numbers = [
        (data["lens"]["probabilities"], lens.top_probabilities[:, 1]),
        (data["lens"]["entropy"], lens.entropy[:, 1]),
        (data["lens"]["kl"], lens.kl_to_last[:, 1]),
        (data["attribution"]["terms"], results["attributions"].terms[:, 1]),
    ]
    for kind in ("previous", "duplicate", "induction", "first", "current"):
        numbers.append((data["heads"]["scores"].pop(kind), heads.scores[kind]))
        numbers.append((data["heads"]["p_values"].pop(kind), heads.p_values[kind]))
    assert not data["heads"]["scores"]
    for stored, expected in numbers:
        torch.testing.assert_close(torch.tensor(stored), expected, rtol=1e-5, atol=1e-6)
    words = [[[WORDS[i] for i in row] for row in layer] for layer in lens.top_tokens[:, 1].tolist()]
    assert data["lens"]["top"] == words
    assert data["attribution"]["names"] == ["a", "b"]
    patched = data["patching"]
    assert patched["rows"] == ["0.0", "0.1", "1.0", "1.1"]
    assert torch.equal(torch.tensor(patched["values"]).view(2, 2, 5), results["patching"])


def render_page(path: Path, folder: Path, *more: str) -> str:
    """Return the page as a browser renders it, after `more` scripts."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium or google-chrome on the path")
    text = path.read_text(encoding="utf-8")
    path = folder / "driven.html"
    path.write_text(
        text.replace("</body>", "".join(f"<script>{m}</script>" for m in more) + "</body>")
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    return subprocess.run(
        [browser, *flags, "--dump-dom", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def test_browser_draws_sorts_and_shows_values(page: tuple[str, dict], tmp_path: Path) -> None:
    sort = "document.querySelectorAll('th button')[3].click();"
    point = """
      const map = document.querySelector("#detail canvas"), area = map.getBoundingClientRect();
      map.dispatchEvent(new PointerEvent("pointermove", {clientX: area.right - 50, clientY: area.bottom - 29}));
      window.scrollTo(0, 0);
    """  # noqa: E501
    text = render_page(tmp_path / "page.html", tmp_path, sort, point)
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == [
        "Attention",
        "Patching",
        "Kinds of heads",
        "Logit lens",
        "Direct logit attribution",
    ]
    # One canvas for each of 2 x 3 heads; a map and its legend for the chosen head, the patches
    # and the attribution; a legend for the heads and for the lens.
    assert text.count("<canvas") == 6 + 2 * 3 + 2
    assert text.count("<tr>") == (1 + 6) + (1 + 2)
    assert 'data-ready-ms="' in text
    assert re.search(r'role="tooltip"[^>]*>query 4 “naïve”\nkey 4 “naïve”', text)
    heads = page[1]["heads"].scores["induction"].flatten()
    order = [f"{i // 3} . {i % 3}" for i in heads.argsort(descending=True).tolist()]
    assert re.findall(r"<tr><th>(\d . \d)</th>", text) == order
    assert 'aria-sort="descending"' in text


def test_browser_draws_more_values_than_a_function_has_arguments(tmp_path: Path) -> None:
    path = view(tmp_path / "page.html", tokens=["a"] * 1024, patching=torch.randn(200, 1024))
    assert 'data-ready-ms="' in render_page(path, tmp_path)


@pytest.mark.timing
def test_large_page_is_written_within_a_second(tmp_path: Path) -> None:
    patterns = torch.randn(12, 12, 128, 128).softmax(-1)
    tokens = torch.randint(50, (128,))
    view(
        tmp_path / "page.html",
        tokens=tokens,
        patterns=patterns,
        heads=detect_heads(patterns[:, None], tokens),
    )
    times = [
        int(re.search(r'data-ready-ms="(\d+)"', render_page(tmp_path / "page.html", tmp_path))[1])
        for _ in range(3)
    ]
    assert_at_most("interp: time to draw a large page", 1000, sorted(times)[1], "ms")


def test_layers_are_labeled_by_their_distinguishing_parts(tmp_path: Path) -> None:
    result = torch.ones(1, 1, 1, 1)
    named = {f"blocks.{i}.attention.pattern": result for i in (0, 1, 10)}
    text = view(tmp_path / "page.html", tokens=["a"], patterns=named).read_text()
    assert [p["name"] for p in json.loads(Page(text).scripts[0])["patterns"]] == ["0", "1", "10"]


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        view(path, tokens=["a"], title="\ud800")
    assert path.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_symbolic_links_are_followed_and_pipes_are_written(tmp_path: Path) -> None:
    target, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(target)
    assert view(link, tokens=["a"]) == link
    assert link.is_symlink()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(pipe.read_text, encoding="utf-8")
        view(pipe, tokens=["a"])
        assert text.result(timeout=10) == target.read_text(encoding="utf-8")


def test_ids_are_shown_as_strings_in_every_form(tmp_path: Path) -> None:
    path, expected = tmp_path / "page.html", '"tokens":["b","a","c"]'
    ids = torch.tensor([[1, 0, 2]])
    for tokens in (ids, ids[0], ids[0].tolist(), {"input_ids": ids}, ["b", "a", "c"]):
        assert expected in view(path, tokens=tokens, vocabulary=["a", "b", "c"]).read_text()
    assert '"tokens":["1","0","2"]' in view(path, tokens=[1, 0, 2]).read_text()
    halves = ["\ud83d", "\\\ud83d", "\U0001f600"]  # Half of an emoji, as byte-level tokens have it.
    data = json.loads(Page(view(path, tokens=halves).read_text(encoding="utf-8")).scripts[0])
    assert data["tokens"] == halves
