"""Runs as one self-contained HTML page: data, fits, residuals, backtests, answers, doubts.

Notable: figures are SVG in the text's own color, so that the page is as good in the dark; nothing
is loaded from anywhere; a method that cannot fit the runs says so in its place.
"""

import html
import io
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from scaling.extras import need
from scaling.fit.parametric import ParametricFit, fit_parametric
from scaling.isoflop import IsoflopFit, fit_isoflop
from scaling.law import Interval
from scaling.plot import plot
from scaling.runs import Runs, ScalingWarning
from scaling.uncertainty.backtest import Foretold, backtest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#010203"
"""Drawn in this color is what shall have the color of the text."""

Fit = ParametricFit | IsoflopFit


def report(runs: Runs, *, at: Sequence[float] = (), title: str = "Scaling laws of runs") -> str:
    """The page; `at` are budgets in FLOPs, by default ten and a hundred times the largest run.

    ValueError where neither a law nor IsoFLOP curves can be fitted. Needs matplotlib.
    """
    need("matplotlib", "plot")
    at = list(at) or [float(10 * runs.compute.max()), float(100 * runs.compute.max())]
    fits: dict[str, Fit] = {}
    sorry: list[str] = []
    rows: tuple[Foretold, ...] = ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ScalingWarning)
        for name, fitted in (("Parametric law", fit_parametric), ("IsoFLOP curves", fit_isoflop)):
            try:
                fits[name] = fitted(runs)
            except ValueError as error:
                sorry.append(f"{name}: {error}")
        if not fits:
            raise ValueError("; ".join(sorry))
        try:
            rows = backtest(runs)
        except ValueError as error:
            sorry.append(f"Backtest: {error}")
        answers = _answers(fits, at)
    doubts = list(dict.fromkeys(str(w.message) for w in caught)) + sorry
    parts = ["<h2>Answers</h2>", answers, "<h2>Doubts</h2>", _list(doubts)]
    parts += ["<h2>Data</h2>", f"<pre>{html.escape(runs.explanation or f'{len(runs)} runs')}</pre>"]
    for name, fit in fits.items():
        parts += [f"<h2>{name}</h2>", _constants(fit), _figure(plot(fit, up_to=max(at)))]
    if rows:
        parts += ["<h2>Backtest</h2>", _backtest(rows), _figure(plot(rows))]
    page = Template(files("scaling.report").joinpath("page.html").read_text("utf-8"))
    return page.substitute(title=html.escape(title), body="\n".join(parts))


def _answers(fits: dict[str, Fit], at: Sequence[float]) -> str:
    rows = []
    for compute in at:
        for name, fit in fits.items():
            best = fit.optimal(compute)
            told = [_with(getattr(best, k), (best.intervals or {}).get(k)) for k in _FIELDS]
            rows.append([f"{compute:.3g}", name, *told])
    return _table(["FLOPs", "by", "parameters", "tokens", "loss"], rows)


_FIELDS = ("parameters", "tokens", "loss")


def _constants(fit: Fit) -> str:
    if isinstance(fit, IsoflopFit):
        law = f"N = {fit.scale:.4g} C^{fit.exponent:.4f}"
        bottoms = [
            [
                f"{v.compute:.3g}",
                len(v.runs),
                f"{v.parameters:.4g}",
                f"{v.tokens:.4g}",
                f"{v.loss:.4f}",
            ]
            for v in fit.valleys
        ]
        head = ["budget, FLOPs", "runs", "best parameters", "tokens", "loss"]
        return f"<p>{law}</p>" + _table(head, bottoms)
    names = ("E", "A", "B", "alpha", "beta", "exponent")
    rows = [[k, _with(getattr(fit.law, k), fit.resampled.interval(k))] for k in names]
    law = "<p>L = E + A / N^alpha + B / D^beta. The intervals of the constants are of noise alone;"
    law += f" the answers also allow for drift, {fit.drift.size:.2g} in log N and"
    law += f" {fit.drift.loss:.2g} in log loss per decade beyond the runs.</p>"
    return law + _table(["constant", "95 %, noise alone"], rows)


def _backtest(rows: Sequence[Foretold]) -> str:
    told = []
    for r in rows:
        held = "held" if r.size_held else '<b class="no">missed</b>'
        losses = f"{r.losses_held} of {r.losses}, {r.loss_error:.2%} off" if r.losses else "–"
        size = _with(r.size, r.size_interval)
        cells = [r.method, f"{r.cut:.2g}", r.runs, f"{r.decades:.1f}", size, f"{r.size_by_all:.3g}"]
        told.append([*cells, held, losses])
    head = ["method", "runs up to, FLOPs", "runs", "decades", "best size at the top", "by all"]
    return _table([*head, "", "losses held"], told)


def _with(value: float, interval: Interval | None) -> str:
    if not math.isfinite(value):
        return "–"
    ends = f" [{interval.low:.3g}, {interval.high:.3g}]" if interval else ""
    return f"{value:.4g}{ends}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    titles = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="wide"><table><tr>{titles}</tr>\n{body}</table></div>'


def _list(items: Sequence[str]) -> str:
    if not items:
        return "<p>None.</p>"
    return "<ul>" + "".join(f"<li>{html.escape(item)}</li>\n" for item in items) + "</ul>"


def _figure(figure: "Figure") -> str:
    """As SVG in the color of the text, on no ground."""
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scaling"}):
        for axes in figure.axes:
            axes.patch.set_alpha(0)
            axes.tick_params(which="both", colors=INK)
            for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
                text.set_color(INK)
            for spine in axes.spines.values():
                spine.set_color(INK)
            if legend := axes.get_legend():
                legend.get_frame().set_alpha(0)
                for text in (*legend.get_texts(), legend.get_title()):
                    text.set_color(INK)
            for line in (*axes.lines, *(legend.get_lines() if legend else ())):
                if line.get_color() in ("k", "black"):
                    line.set_color(INK)
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    return f"<figure>{re.sub(r'<metadata>.*?</metadata>', '', svg, flags=re.DOTALL)}</figure>"
