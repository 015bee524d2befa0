import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from interp import attribution, detect_heads, logit_lens, view

WORDS = ["<b>", "</script>", "a&b", "\u2028", "naïve"]
TOKENS = torch.tensor([[0, 1, 2, 0, 1]])


class Page(HTMLParser):
    """Collects the text of each script and every attribute, and checks that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts, self.attributes, self.open, self.headings = [], [], [], []
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
    torch.manual_seed(0)
    patterns = torch.randn(2, 1, 3, 5, 5).softmax(-1)
    streams = torch.randn(2, 1, 5, 4)
    unembed = torch.randn(5, 4)
    path = view(
        tmp_path / "page.html",
        tokens=WORDS,
        patterns=patterns,
        heads=detect_heads(patterns, TOKENS),
        lens=logit_lens(streams, None, unembed),
        attributions=attribution({"a": streams[0], "b": streams[1]}, None, unembed, TOKENS),
        vocabulary=WORDS,
        title="</title><script>{{data}}",
    )
    assert path == tmp_path / "page.html"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    return path.read_text(encoding="utf-8"), {"patterns": patterns}


def test_the_page_needs_nothing_from_outside_and_no_text_escapes(page: tuple[str, dict]) -> None:
    parsed = Page(page[0])
    assert len(parsed.scripts) == 2
    assert parsed.headings == ["</title><script>{{data}}"]
    assert not {name for name, _ in parsed.attributes} & {"src", "href", "srcset", "data", "action"}
    assert not re.search(r"https?:|url\(|@import|import\(|fetch\(|XMLHttp|WebSocket", page[0])


def test_the_data_comes_back_from_the_page(page: tuple[str, dict]) -> None:
    data = json.loads(Page(page[0]).scripts[0])
    assert data["tokens"] == WORDS
    for layer, pattern in zip(data["patterns"], page[1]["patterns"], strict=True):
        stored = torch.tensor(list(base64.b64decode(layer["weights"]))) / 255
        assert (stored.view(3, 5, 5) - pattern[0]).abs().max() <= 1 / 510 + 1e-6
    assert set(data["heads"]["scores"]) == {
        "previous",
        "duplicate",
        "induction",
        "first",
        "current",
    }
    assert data["lens"]["top"][0][0][0] in WORDS
    assert data["attribution"]["names"] == ["a", "b"]


def test_a_browser_draws_every_part(page: tuple[str, dict], tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium or google-chrome on the path")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    drawn = subprocess.run(
        [browser, *flags, "--virtual-time-budget=2000", "--dump-dom", str(tmp_path / "page.html")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    headings = re.findall(r"<h2>(.*?)</h2>", drawn)
    assert headings == ["Attention", "Kinds of heads", "Logit lens", "Direct logit attribution"]
    # Two layers of three heads and the large one; a row for each head, layer and component.
    assert drawn.count("<canvas") == 7
    assert drawn.count("<tr>") == (1 + 6) + (1 + 2) + (1 + 2)
    assert "query 4 “naïve”" in drawn


def test_layers_are_labelled_by_what_tells_them_apart(tmp_path: Path) -> None:
    one = torch.ones(1, 1, 1, 1)
    named = {f"blocks.{i}.attention.pattern": one for i in (0, 1, 10)}
    text = view(tmp_path / "page.html", tokens=["a"], patterns=named).read_text()
    assert [p["name"] for p in json.loads(Page(text).scripts[0])["patterns"]] == ["0", "1", "10"]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        view(path, tokens=["\ud800"])
    assert path.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1
