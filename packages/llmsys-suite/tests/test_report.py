"""A report says what was found and what failed, never fails for it, and fits every screen."""

import html
import json
import math
import random
import re
import shutil
import statistics
import subprocess
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest import mock

import pytest
from llmsys_suite import results as of
from llmsys_suite.audit import run as audit
from llmsys_suite.config import STAGES, RunConfig
from llmsys_suite.folder import RunFolder
from llmsys_suite.measure.interleaved import Interleaved
from llmsys_suite.measure.samples import CORE_WAIT
from llmsys_suite.report import page, plots, sections
from llmsys_suite.report.page import format_headline, format_title, write_report
from llmsys_suite.report.sections import build_plan_rows
from llmsys_suite.report.sentences import compare_times, compute_median_interval, describe_fastest
from llmsys_suite.report.unaudited import NOT_AUDITED, OF_THE_RUN, UNAUDITED, describe_unaudited
from run_folders import create_folder

ENVIRONMENT = {
    "date": "a day", "gpus": [], "processor": "abacus", "cores": 2, "torch": "2", "python": "3",
    "load_average": 0.0,
}  # fmt: skip
#: In the page, for each of some widths: which elements are wider than the page, which words of a
#: picture lie on one another, which pictures have no size, and the contrast of text with paper.
MEASURE_LAYOUT = """
<script>addEventListener("load", () => { const d = document;
  const all = WIDTHS.map(w => { const found = {};
  d.body.style.width = w + "px"; const root = d.body.getBoundingClientRect();
  found.over = [...d.querySelectorAll("body *")].filter(e => !e.closest(".scroll, details, svg")
    && e.getBoundingClientRect().right > root.left + w + 1).map(e => e.tagName);
  found.pictures = d.querySelectorAll("svg").length;
  found.empty = [...d.querySelectorAll("svg")].filter(s => s.getBoundingClientRect().height < 40
    || s.querySelectorAll("path").length < 5).length;
  found.overlaps = []; for (const svg of d.querySelectorAll("svg")) {
    const boxes = [...svg.querySelectorAll("text")].filter(t => t.textContent.trim())
      .map(t => [t.textContent.trim(), t.getBoundingClientRect()]);
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
      const x = Math.min(p.right, q.right) - Math.max(p.left, q.left),
        y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (x > 2 && y > 3) found.overlaps.push(a + " / " + b); })); }
  found.cut = [...d.querySelectorAll(".scroll")].filter(e => !e.closest("details")
    && e.scrollWidth > e.clientWidth + 1).map(e => e.closest("section").id);
  const luminance = c => { const f = x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4,
    [r, g, b] = c.match(/[\\d.]+/g).map(n => f(n / 255)); return .2126 * r + .7152 * g + .0722 * b; };
  const paper = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(c)) return c; } return "rgb(255, 255, 255)"; };
  found.faint = [...d.querySelectorAll("body, body *")].filter(e => [...e.childNodes].some(n =>
    n.nodeType == 3 && n.textContent.trim()) && !["SCRIPT", "STYLE"].includes(e.tagName)
    && (!e.closest("svg") || e.tagName == "text")).filter(e => {
    const s = getComputedStyle(e), ink = luminance(e.closest("svg") ? s.fill : s.color),
      ground = luminance(paper(e)); return (Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05) < 4.5;
    }).map(e => e.tagName + " " + e.textContent.slice(0, 30));
  const light = c => c.match(/\\d+/g).slice(0, 3).reduce((s, n) => s + +n, 0), s = getComputedStyle(d.body);
  found.contrast = light(s.color) - light(s.backgroundColor); return found; });
  const pre = d.createElement("pre"); pre.id = "found"; pre.textContent = JSON.stringify(all);
  d.body.append(pre); });</script>
"""  # noqa: E501


def make_run(path, **config):
    """Return a folder with the results of every stage, without running any."""
    folder = create_folder(RunConfig(out=path, **config), ENVIRONMENT)
    noise, samples = random.Random(0), []
    ways = ("single process", "torch DDP", "ddp flat", "zero 1", "fsdp")
    for step in range(20):
        for name in ways:
            samples.append(
                {"stage": "train", "variant": name, "phase": "step", "step": step, "rank": 0,
                 "warmup": False, "loss": 3.0, "seconds": 1 + (name == "fsdp") + noise.random()}
            )  # fmt: skip
    folder.append_samples(samples)
    row = {"step_ms": 80.0, "ratio_p50": 1.0, "forward_share": 0.3, "backward_share": 0.6,
           "communication_share": 0.05, "optimizer_share": 0.05, "hidden_ms": 8.0,
           "exposed_ms": 2.0, "mfu": 0.4, "final_loss": 2.6}  # fmt: skip
    contenders = ("float32", "SDPA", "plain")
    rounds = {k: [1.0 + 0.1 * i] * 7 for i, k in enumerate(contenders)}
    interleaved = Interleaved(rounds, 9.0)
    sample = {"prompt": "def f(", "written": "x" * 120 + "<b>"}
    peaks = {"context": 128, "inference_peak_mib": 1.0, "training_peak_mib": 3.0,
             "checkpointed_peak_mib": 2.0, "residual_stream_mib": 0.5}  # fmt: skip
    line = [("forward", 1.0), ("backward", 3.0), ("optimizer", 2.0)]
    runs = [
        {
            "compute_flops": c,
            "width": w,
            "parameters": w * 500,
            "tokens": 9,
            "steps": 3,
            "loss": 3 - c / 1e11 + (w - 12) ** 2 / 500,
        }
        for c in (1e9, 2e9, 4e9)
        for w in (8, 12, 16)
    ]
    rest = dict.fromkeys((field.name for field in fields(of.Plan)), 0)
    results = {
        "plan": of.Plan(**rest | {"parameters": 918656, "step_flops_full": 10**9,
                 "training_peak_bytes": 2**26,
                 "measured_peak_bytes": 2**26, "ddp_wire_bytes_per_rank": 2**21,
                 "training_bytes_by_part": {"weights": 2**22, "optimizer": 2**23}, "peak": 1e11,
                 "derivation": "one\ntwo"}),
        "links": of.Links([
            {"case": "all_reduce", "algorithm": a, "size_bytes": n, "time_us": 9.0, "wrong": 0,
             "busbw_gbps": n / 1e6, "wire_bytes": n, "ratio_p50": 1, "ratio_p10": 1, "ratio_p90": 1}
            for a in ("gloo", "ring", "halving_doubling") for n in (2**10, 2**16, 2**20)]),
        "attention": of.Attention(
            [1], [{"kernel": k, "forward_backward_ms": 2.0, "ratio_to_sdpa_p50": 1.0,
                   "max_error": 1e-7} for k in ("plain", "SDPA")], "because", interleaved),
        "train": of.Train([row | {"variant": name} for name in ways],
                          {"single process": [5.0, 3.0]},
                          {"ddp flat": {"stored": [{"parameters": 9, "moments": 9, "all": 9}]}}),
        "learn": of.Learn(variant="zero 1", begun_at=0, rows=8, learning_rate=2e-3,
                          probed_step=None,
                          losses=[5.0, 3.0, 2.0], heldout=[(1, 4.0), (3, 1.7)], tokens=3072,
                          written=sample),
        "parallel": of.Parallel([{"split": s, "iteration_ms": 9.0, "loss": 5.0, "single_loss": 5.0,
                               "trained_loss": 4.0, "bubble": 0.2, "waiting": 0.3}
                              for s in ("pipeline (GPipe)", "tensor")]),
        "memory": of.Memory(rows=4, peaks=[peaks],
                            training_timeline=line, largest=""),
        "scale": of.Scale(
            runs, ["few"], {"exponent": 0.4, "scale": 1.0},
            {"compute_flops": 4e10, "parameters": 9e3, "low": 7e3, "high": 1.2e4}),
        "inspect": of.Inspect(
            heads=[{"kind": "previous", "layer": 1, "head": 2, "score": 0.5,
                                          "chance": 0.1, "by_chance": False}],
                    lens=[{"after": "blocks.1", "target_loss": 2.0, "entropy": 1.0}]),
        "compress": of.Compress([{"method": f"method {i}", "size_bytes": 2**20 / (1 + i),
                               "smaller": 1.0 + i, "heldout_loss": 1.7 + i / 9, "speedup_p50": 1.0}
                              for i in range(7)], interleaved),
        "audit": of.Audit(1, []),
    }  # fmt: skip
    for stage, result in results.items():
        folder.add_stage(stage, result, 1.0, 500.0)
    check = {"name": "n", "source": "s", "actual": 1, "against": "a", "expected": 1, "low": 0,
             "high": 2, "where": "", "passed": True}  # fmt: skip
    folder.write_json("checks.json", [check])
    counted = {"parameters": 918656, "flops_full": 10**9}
    folder.write_json("evidence.json", {"model_counts": counted})
    folder.finish()
    return folder


def find_browser():
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    return browser or pytest.skip("no chromium or google-chrome on the path")


def measure_layout(folder, scratch, widths, dark):
    """Return the findings of `MEASURE_LAYOUT` at each width, in the light or the dark scheme."""
    page = (folder.path / "report.html").read_text()
    driven = scratch / "driven.html"
    driven.write_text(
        page.replace("</body>", MEASURE_LAYOUT.replace("WIDTHS", str([*widths])) + "</body>")
    )
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", *scheme,
         "--hide-scrollbars", f"--user-data-dir={scratch}/profile",
         f"--window-size={max(widths)},900", "--dump-dom",
         str(driven)], capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout)[1]))


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """Return a folder with the results of every stage, and the Markdown of its report."""
    folder = make_run(tmp_path_factory.mktemp("reported") / "run")
    return folder, write_report(folder)


def test_the_page_fits_wide_and_narrow_screens_in_both_color_schemes(reported, tmp_path):
    folder, _ = reported
    assert (folder.path / "report.html").stat().st_size <= 1e6
    for widths, dark in (((1280, 390), False), ((390,), True)):
        layouts = measure_layout(folder, tmp_path, widths, dark)
        for width, layout in zip(widths, layouts, strict=True):
            assert layout["over"] == []
            assert layout["overlaps"] == []
            assert layout["empty"] == 0
            assert layout["faint"] == []
            assert width == 390 or layout["cut"] == []
            # Train, learn, memory and scale.
            assert layout["pictures"] == 4
            assert abs(layout["contrast"]) > 500
            assert (layout["contrast"] > 0) == dark


def test_every_stage_has_a_sentence_and_a_small_table(reported):
    folder, text = reported
    for stage in STAGES:
        if stage != "report":
            (part,) = re.findall(rf"## {stage.capitalize()}\n\n(.*?)\n\n(?=## |\Z)", text, re.S)
            finding, *table = part.splitlines()
            assert finding.endswith((".", ")"))
            assert not table or table[1].count("|") <= 9
    page = (folder.path / "report.html").read_text()
    assert "x&lt;b&gt;" in page
    assert not re.search(r"<script|(src|href)=.http", page)
    RunFolder.open(folder.path)


def test_sentences_follow_from_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "draw_svg", lambda *_, **__: "<svg></svg>")
    folder = make_run(tmp_path / "run")
    assert "took the held-out loss from 4.00 to 1.70 nats per byte in 3 steps" in write_report(
        folder
    )
    folder.add_stage("learn", replace(folder.results["learn"], begun_at=2))
    assert (
        "The training took the held-out loss from 4.00 to 1.70 nats per byte in 3 steps of 3,072 "
        "tokens in all. A checkpoint contains the first 2 steps; zero 1 took the other 1."
    ) in write_report(folder)
    assert "after 3 steps, 2 of a checkpoint and 1 of zero 1" in format_headline(folder.path)
    (row, _) = folder.results["parallel"].rows
    folder.add_stage("parallel", of.Parallel([row | {"loss": 6.0}]))
    text = write_report(folder)
    assert "pipeline (GPipe) takes 9 ms per iteration. The largest relative difference" in text
    assert "from one process's loss is 2.0e-01 (pipeline (GPipe))." in text


def test_a_predicted_zero_has_no_ratio(tmp_path):
    """One rank sends no gradients, but under torchrun its connection to the store has bytes."""
    results = make_run(tmp_path / "run").results
    results["plan"] = replace(results["plan"], ddp_wire_bytes_per_rank=0)
    for row in results["train"].rows:
        row["wire_bytes"] = 50.0
    assert [row["figure"] for row in build_plan_rows(results, {})] == ["peak of a step, MiB"]


def test_figures_have_three_digits_and_thousands_have_separators():
    values = [0.12345, 999.4, 999.6, 1234.5, 12, 1234, True]
    shown = ["0.123", "999", "1,000", "1,234", "12", "1,234", "yes"]
    assert [of.format_cell(value) for value in values] == shown


def test_the_interval_of_a_median_holds_the_true_one_and_few_rounds_cannot_tell():
    for rounds in (6, 7, 20, 61):
        middle, low, high = compute_median_interval(range(1, rounds + 1))
        assert low <= middle <= high
        # The interval from the order statistics `low` to `high` contains the true median if at
        # least `low` and less than `high` values are below it, each with probability one half.
        chances = [math.comb(rounds, below) / 2**rounds for below in range(int(low), int(high))]
        assert 0.95 <= sum(chances) < 0.99
    assert "Cannot tell a from b in 5 rounds" in compare_times("a", "b", [0.5] * 5)
    assert compare_times("a", "b", [0.5 + i / 100 for i in range(9)]).endswith("faster.")
    assert compare_times("a", "b", [0.9, 0.95, 1.0, 1.02, 1.1, 1.2, 1.3]).startswith("Cannot tell")
    assert statistics.median([1, 2]) == compute_median_interval([1, 2])[0]


def test_the_report_of_an_interrupted_run_lists_missing_stages(tmp_path):
    folder = create_folder(RunConfig(out=tmp_path / "run"), ENVIRONMENT)
    folder.add_stage("plan", of.Skipped("no"))
    write_report(folder)
    assert "cut off before the end of links, attention, train, learn" in format_headline(
        folder.path
    )
    assert format_title(folder) == "A decoder of tiny, trained on text"
    untrained = create_folder(RunConfig(out=tmp_path / "memory", stages=("memory",)), {})
    assert format_title(untrained) == "A decoder of tiny"


def test_failure_is_in_the_report_and_in_the_last_lines(tmp_path):
    folder = create_folder(RunConfig(out=tmp_path / "run"), ENVIRONMENT)
    folder.fail("train", "rank 1: ValueError: no")
    assert "FAILED stage train: rank 1: ValueError: no" in write_report(folder)
    assert "FAILED stage train: rank 1: ValueError: no" in format_headline(folder.path)


def test_a_run_without_an_audit_says_so_instead_of_listing_some_unaudited_figures(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(plots, "draw_svg", lambda *_, **__: "<svg></svg>")
    folder = make_run(tmp_path / "run")
    summary = folder.summary
    del summary["stages"]["audit"]
    folder.write_json("summary.json", summary)
    markdown = write_report(folder)
    for text in (markdown, (folder.path / "report.html").read_text(), format_headline(folder.path)):
        assert text.count("not audited") == text.count(NOT_AUDITED) == 1


def test_an_audit_without_a_failed_check_is_not_reported_as_a_failed_stage(tmp_path, monkeypatch):
    folder = create_folder(RunConfig(out=tmp_path / "run"), ENVIRONMENT)
    monkeypatch.setattr("llmsys_suite.audit.run.audit_run", lambda run: ({}, []))
    folder.add_stage("audit", audit.run(SimpleNamespace(folder=folder)))
    assert "audit: 0/0 passed" in format_headline(folder.path)
    assert "FAILED stage" not in format_headline(folder.path)


@pytest.mark.parametrize(("failed", "kind"), [([], "good"), (["train: losses"], "bad")])
def test_only_an_audit_without_a_failed_check_is_marked_as_good(tmp_path, failed, kind):
    folder = create_folder(RunConfig(out=tmp_path / "run"), ENVIRONMENT)
    folder.add_stage("audit", of.Audit(5, failed))
    line = f'<p class="{kind} finding">audit: {5 - len(failed)}/5 passed</p>'
    assert line in page.format_page(folder, [])


def test_report_names_the_fastest_variant_in_the_rounds_that_compare_uses(tmp_path):
    def run_folder(name, disturbed_rounds):
        folder = create_folder(RunConfig(out=tmp_path / name), ENVIRONMENT)
        samples = []
        for step in range(40):
            is_disturbed = step < disturbed_rounds
            for rank, variant, seconds in ((0, "torch DDP", 2.0), (0, "ddp flat", 1.0)):
                samples.append(
                    {
                        "stage": "train",
                        "variant": variant,
                        "phase": "step",
                        "step": step,
                        "rank": rank,
                        "warmup": False,
                        # Disturbed rounds would reverse the order of the two.
                        "seconds": seconds if not is_disturbed else 3.0 - seconds,
                        CORE_WAIT: 0.9 if is_disturbed else 0.0,
                        "process_s": float(len(samples)),
                        "machine_s": len(samples) * (3.0 if is_disturbed else 1.0),
                    }
                )
        folder.append_samples(samples)
        return folder

    assert describe_fastest(run_folder("few", 10)).startswith(
        "ddp flat takes 0.50 of torch DDP's time"
    )
    assert describe_fastest(run_folder("many", 30)).startswith(
        "Cannot tell which variant is the fastest"
    )
    apart = run_folder("apart", 10)
    rest = dict.fromkeys((field.name for field in fields(of.Plan)), 0)
    apart.add_stage("plan", of.Plan(**rest | {"variants_fit_together": False}))
    assert "ran one after another" in describe_fastest(apart)


def test_figures_that_no_check_covers_are_labeled_in_page_and_markdown(reported):
    folder, markdown = reported
    page = (folder.path / "report.html").read_text()
    for stage, entries in UNAUDITED.items():
        assert describe_unaudited(stage) in markdown
        assert describe_unaudited(stage) in page
        assert all(entry in describe_unaudited(stage) for entry in entries)
    assert markdown.count(OF_THE_RUN) == page.count(OF_THE_RUN) == 1
    # The label is visible without opening the details before it.
    assert page.rindex("</details>") < page.index(OF_THE_RUN)
    assert {*UNAUDITED} == {*STAGES} - {"audit", "report"}


def test_the_report_has_one_generated_text(reported):
    folder, _ = reported
    page = (folder.path / "report.html").read_text()
    assert page.count("<figcaption>written after training") == 1


def test_communication_that_computing_hides_is_drawn_inside_backward():
    row = {"variant": "ddp", "step_ms": 100.0, "forward_share": 0.3, "backward_share": 0.5,
           "communication_share": 0.1, "optimizer_share": 0.1, "hidden_ms": 20.0}  # fmt: skip
    assert "communication inside backward" in plots.plot_phases([row])


def test_many_budgets_have_distinct_lines():
    runs = [
        {"compute_flops": float(c), "parameters": w, "loss": 3 - 0.1 * c + 0.01 * w}
        for c in range(1, 10)
        for w in (8, 12)
    ]
    svg = plots.plot_isoflop(of.Scale(runs, []))
    lines = re.findall(r'<path d="M [^"]*" clip-path[^>]*style="([^"]*)"', svg)
    assert len(set(lines)) >= 9


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.0, math.inf, "wider than 1,000-fold). The runs do not determine it closely."),
        (2.0, 1e40, "wider than 1,000-fold). The runs do not determine it closely."),
        (10.0, 30.0, "10 to 30, 3.0-fold). The runs do not determine it closely."),
        (15.0, 25.0, "it is 20 (95 % interval 15 to 25, 1.7-fold)."),
    ],
)
def test_interval_of_the_best_size_may_be_wide_or_unbounded(low, high, words):
    runs = [{"compute_flops": 1e9, "parameters": w, "loss": 3 + 0.01 * w} for w in (8, 12, 16)]
    at = {"compute_flops": 3.148e9, "parameters": 20.0, "low": low, "high": high}
    result = of.Scale(runs, [], {"exponent": 0.5, "scale": 1.0}, at)
    if high > 100:
        svg = plots.plot_isoflop(result)
        assert "best size at 3.15e+09" in svg
        labels = re.findall(r"<text[^>]*>([\d,]+)</text>", svg)
        assert labels
        assert all(1 <= float(label.replace(",", "")) <= 100 for label in labels)
    table = [{"FLOPs": 1e9, "held out": 3.0}]
    with mock.patch.object(sections, "pick", return_value=table):
        finding = sections._build_scale(result).finding
    assert "at 3.15e+09 FLOPs it is 20" in finding
    assert finding.endswith(words)


def test_a_loss_that_is_not_finite_has_a_sentence():
    row = {"method": "float32", "size_bytes": 4, "heldout_loss": math.nan, "smaller": 1.0}
    compressed = of.Compress([row], Interleaved({"float32": [0.1]}, 0.1))
    folder = SimpleNamespace(config=RunConfig())
    section = sections.MAKERS["compress"](compressed, {}, folder)
    assert section.finding == "The loss of the uncompressed model is nan."


def test_losses_are_per_byte_or_per_token_as_the_tokenizer_decides(reported, tmp_path):
    bpe = make_run(tmp_path / "pairs", tokenizer="bpe", vocabulary=300)
    for folder, markdown, unit, other in (
        (*reported, "nats per byte", "nats per token"),
        (bpe, write_report(bpe), "nats per token", "nats per byte"),
    ):
        page = (folder.path / "report.html").read_text()
        # The stage scale, which a tokenizer excludes, draws nats per byte in its picture.
        page = page.replace("held-out nats per byte", "", 1) if folder is bpe else page
        for text in (markdown, page):
            assert text.count(unit) >= 4
            assert other not in text
