import dataclasses
import html
import json
import re
import shutil
import subprocess
import warnings
from html.parser import HTMLParser

import numpy as np
import pytest
from scaling import (
    Interval,
    Law,
    ScalingWarning,
    backtest,
    fit_isoflop,
    fit_parametric,
    isoflop_runs,
    load_runs,
    plot,
)
from scaling.__main__ import main
from scaling.page import format_backtest, report


def draw_few_runs():
    return isoflop_runs(budgets=np.geomspace(6e18, 3e21, 4), noise=2e-3, seed=3, per_budget=5)


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory):
    """Return the page of a table whose file name contains angle brackets."""
    folder = tmp_path_factory.mktemp("whole")
    runs = draw_few_runs()
    rows = [f"{n},{d},{x}" for n, d, x in zip(runs.parameters, runs.tokens, runs.loss, strict=True)]
    table, target = folder / "runs <of> ours.csv", folder / "page.html"
    table.write_text("\n".join(["N,D,loss", *rows]))
    assert main(["report", str(table), "--at", "1e23", "--to", str(target)]) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["page.html", table.name]
    return target.read_text()


class Balanced(HTMLParser):
    """A parser that fails if a tag is closed that is not open."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_complete_well_formed_and_loads_nothing(whole_page):
    parser = Balanced()
    parser.feed(whole_page)
    assert parser.open == []
    parts = re.findall("<h2>(.*?)</h2>", whole_page)
    assert parts == [
        "Answers",
        "Warnings",
        "Data",
        "Parametric law",
        "IsoFLOP curves",
        "Backtest",
    ]
    assert parser.seen.count("figure") == 4
    assert "runs &lt;of&gt; ours" in whole_page
    assert not re.search(r"(?:src|href)=.(?:https?:|//)|@import|url\(http", whole_page)


@pytest.mark.filterwarnings("ignore:.*the best size lies between:scaling.ScalingWarning")
def test_page_shows_the_answers_of_the_fits(whole_page):
    fit = fit_parametric(draw_few_runs())
    best = fit.optimal(1e23)
    interval = best.intervals["parameters"]
    assert f"{best.parameters:.4g} [{interval.low:.3g}, {interval.high:.3g}]" in whole_page
    assert f"{best.loss:.4g}" in whole_page


def test_method_that_cannot_fit_is_listed_with_its_reason(monkeypatch):
    # The panels are drawn, but not saved, which takes seconds. `whole_page` saves some.
    monkeypatch.setattr("scaling.page._draw_svg", lambda figure: "<figure></figure>")
    # All sizes lie above the best size of their budget, so none of the three budgets has a valley.
    law = Law(1.7, 400, 400, 0.34, 0.28)
    budgets = np.repeat([1e18, 1e19, 1e20], 6)
    best = np.array([law.optimal(c).parameters for c in budgets])
    n = best * np.tile(np.geomspace(3, 20, 6), 3)
    d = budgets / 6 / n
    loss = law.predict(n, d) * (1 + 1e-3 * np.cos(3.0 * np.arange(18)))
    text = report(load_runs({"N": n, "D": d, "loss": loss}))
    assert "<h2>Parametric law</h2>" in text
    assert "<h2>IsoFLOP curves</h2>\n<p>fewer than two budgets have a valley" in text
    assert '<td data-title="parameters">unknown [0, inf]</td>' in text


def test_figures_repeat_neither_labels_nor_colors():
    compute = np.geomspace(1e19, 1.5e20, 14)
    runs = isoflop_runs(budgets=compute, noise=1e-3, seed=1, per_budget=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalingWarning)
        figures = [plot(fit_isoflop(runs)), plot(fit_parametric(runs))]
    for figure in figures:
        for axes in figure.axes:
            if legend := axes.get_legend():
                labels = [text.get_text() for text in legend.get_texts()]
                assert len(set(labels)) == len(labels)
    dots = [line for line in figures[0].axes[0].lines if line.get_marker() == "o"]
    assert len({tuple(line.get_color()) for line in dots}) == 14


def test_failed_backtest_is_shown_as_a_failure():
    runs = isoflop_runs(noise=2e-3, per_budget=5)
    (row,) = backtest(runs, methods=["parametric"], fractions=(0.6,))
    passed = dataclasses.replace(
        row, size_interval=Interval(1.0, np.inf), losses_covered=row.losses
    )
    missed = dataclasses.replace(passed, size_interval=Interval(1.0, 2.0))
    outside = dataclasses.replace(passed, losses_covered=row.losses // 2)
    assert "Failed" not in format_backtest([passed])
    assert '<p class="no"><b>Failed.</b> 1 of 2 intervals miss' in format_backtest([passed, missed])
    assert f"and {row.losses - row.losses // 2} of {row.losses} later" in format_backtest([outside])


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", [0, 1])
def test_page_is_legible_in_dark_and_light_mode(whole_page, tmp_path, scheme):
    from matplotlib.image import imread

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium or google-chrome on the path")
    path, shot = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(whole_page)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    view = [f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1100,3400"]
    subprocess.run(
        [browser, *flags, *view, f"--screenshot={shot}", path.as_uri()],
        capture_output=True,
        timeout=120,
        check=True,
    )
    gray = imread(shot)[..., :3].mean(-1)
    ground = np.median(gray)
    assert ground < 0.2 if scheme == 0 else ground > 0.9
    # Text and axes contrast with the background down to the last figure.
    for strip in np.array_split(gray, 8)[:6]:
        assert np.abs(strip - ground).max() > 0.6


@pytest.mark.exhaustive
def test_page_is_readable_at_390_pixels(whole_page, tmp_path):
    """Nothing is cut or needs horizontal scrolling on a telephone."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium or google-chrome on the path")
    script = """
    <pre id="measured"></pre><script>
    const frame = document.querySelector("iframe");
    frame.onload = () => {
      const body = frame.contentDocument;
      const parts = [body.documentElement, ...body.querySelectorAll("h1, pre, .wide, td, figure")];
      const wide = parts.filter(p => p.scrollWidth > p.clientWidth + 1 && p.clientWidth > 0);
      const text = [...body.querySelectorAll("svg text")];
      const sizes = text.map(t => {
        const parts = t.querySelector("tspan") ? [...t.querySelectorAll("tspan")] : [t];
        const view = frame.contentWindow;
        const scale = t.getScreenCTM().a || Math.abs(t.getScreenCTM().b);  // b if it is rotated
        return parts.map(p => scale * parseFloat(view.getComputedStyle(p).fontSize));
      });
      document.getElementById("measured").textContent = JSON.stringify(
        { wide: wide.map(p => p.tagName), sizes: sizes });
    };
    </script>"""
    long_title = whole_page.replace("<h1>", "<h1>/a/path/" + "without/any/space/" * 12)
    style = "width: 390px; height: 900px; border: 0"
    frame = f'<iframe style="{style}" srcdoc="{html.escape(long_title)}">'
    path = tmp_path / "frame.html"
    path.write_text(f'<!doctype html><meta charset="utf-8">{frame}</iframe>{script}')
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    run = subprocess.run(
        [browser, *flags, "--virtual-time-budget=20000", "--dump-dom", path.as_uri()],
        capture_output=True,
        timeout=120,
        check=True,
        text=True,
    )
    measured = json.loads(re.search(r'<pre id="measured">(.*?)</pre>', run.stdout)[1])
    assert measured["wide"] == []
    # Font sizes in pixels. In a label such as 10^9, the smaller size is that of the exponent.
    sizes = measured["sizes"]
    assert len(sizes) > 50
    assert min(max(of_label) for of_label in sizes) >= 8
    assert min(min(of_label) for of_label in sizes) >= 7
