"""A self-contained HTML page about runs: answers, warnings, data, fits and backtests.

Figures are SVG in the color of the text, so they are legible in dark mode too. The page loads no
other files. A method that cannot fit the runs, or a backtest that is not possible, is listed among
the warnings with its reason.
"""

import html
import io
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from scaling.extras import require_module
from scaling.fit.parametric import ParametricFit, fit_parametric
from scaling.isoflop.fit import IsoflopFit, fit_isoflop
from scaling.law import OPTIMUM_FIELDS, Interval
from scaling.plot import list_panels
from scaling.runs import Runs, ScalingWarning
from scaling.uncertainty.backtest import BacktestRow, backtest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Placeholder color in figures, which the page replaces by the color of the text.
INK = "#010203"

#: Settings of matplotlib for the figures of a page.
FIGURE_SETTINGS: Any = {
    **dict.fromkeys(["text.color", "axes.edgecolor", "axes.labelcolor"], INK),
    **dict.fromkeys(["xtick.color", "ytick.color"], INK),
    "svg.fonttype": "none",
    "svg.hashsalt": "scaling",
}

#: A backtest fails if more than this fraction of later losses is outside the 95 % intervals, or if
#: an interval misses the best size.
LARGEST_MISS = 0.15

Fit = ParametricFit | IsoflopFit


def report(runs: Runs, *, at: Sequence[float] = (), title: str = "Scaling laws of runs") -> str:
    """Return an HTML page about runs; needs matplotlib.

    `at` contains the budgets in FLOPs whose best models are reported, by default ten and a hundred
    times the largest run. If the runs do not identify an answer, its interval is (0, inf), and the
    reason is a warning. Raises `ValueError` if no method can fit the runs.
    """
    require_module("matplotlib", "plot")
    budgets = list(at) or [float(10 * runs.compute.max()), float(100 * runs.compute.max())]
    fits: dict[str, Fit] = {}
    failures: list[str] = []
    rows: tuple[BacktestRow, ...] = ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ScalingWarning)
        for name, fit_runs in (("Parametric law", fit_parametric), ("IsoFLOP curves", fit_isoflop)):
            try:
                fits[name] = fit_runs(runs)
            except ValueError as error:
                failures.append(f"{name}: {error}")
        if not fits:
            raise ValueError("; ".join(failures))
        try:
            rows = backtest(runs)
        except ValueError as error:
            failures.append(f"Backtest: {error}")
        answers = _format_answers(fits, budgets)
    messages = list(dict.fromkeys(str(w.message) for w in caught)) + failures
    parts = ["<h2>Answers</h2>", answers, "<h2>Warnings</h2>", _format_list(messages)]
    parts += ["<h2>Data</h2>", f"<pre>{html.escape(runs.explanation or f'{len(runs)} runs')}</pre>"]
    for name, fit in fits.items():
        parts.append(f"<h2>{name}</h2>")
        if fit.unidentified:
            parts.append(f"<p>{html.escape(fit.unidentified)}</p>")
        else:
            parts += [_format_constants(fit), _draw_figures(fit, max(budgets))]
    if rows:
        parts += ["<h2>Backtest</h2>", format_backtest(rows)]
    page = Template(files("scaling").joinpath("page.html").read_text("utf-8"))
    return page.substitute(title=html.escape(title), body="\n".join(parts))


def _format_answers(fits: dict[str, Fit], budgets: Sequence[float]) -> str:
    """Return a table of each fit's best model at each budget, in FLOPs."""
    rows = []
    coverage = {}
    for compute in budgets:
        for name, fit in fits.items():
            best = fit.optimal(compute)
            if best.coverage:
                coverage[name] = f"<p>{name}: {html.escape(best.coverage)}.</p>"
            intervals = best.intervals or {}
            cells = [_format_value(getattr(best, k), intervals.get(k)) for k in OPTIMUM_FIELDS]
            rows.append([f"{compute:.3g}", name, *cells])
    return "".join([_format_table(["FLOPs", "by", *OPTIMUM_FIELDS], rows), *coverage.values()])


def _format_constants(fit: Fit) -> str:
    """Return the law of a fit, with a table of its constants or of its valleys."""
    if isinstance(fit, IsoflopFit):
        law = f"N = {fit.scale:.4g} C^{fit.exponent:.4f}"
        bottoms: list[list[object]] = []
        for v in fit.valleys:
            numbers = [f"{v.parameters:.4g}", f"{v.tokens:.4g}", f"{v.loss:.4f}"]
            bottoms.append([f"{v.compute:.3g}", len(v.runs), *numbers])
        head = ["budget, FLOPs", "runs", "best parameters", "tokens", "loss"]
        return f"<p>{law}</p>" + _format_table(head, bottoms)
    names = ("E", "A", "B", "alpha", "beta", "exponent")
    rows = [[k, _format_value(getattr(fit.law, k), fit.posterior.interval(k))] for k in names]
    law = "<p>L = E + A / N^alpha + B / D^beta. The intervals of the constants include noise"
    law += f" alone; the answers also include drift, {fit.drift.size:.2g} in log N and"
    law += f" {fit.drift.loss:.2g} in log loss per decade beyond the runs.</p>"
    return law + _format_table(["constant", "95 %, noise alone"], rows)


def format_backtest(rows: Sequence[BacktestRow]) -> str:
    """Return the predictions of a backtest as a table, below a note if the backtest failed."""
    lines: list[list[object]] = []
    for r in rows:
        verdict = "covered" if r.size_covered else '<b class="no">missed</b>'
        losses = f"{r.losses_covered} of {r.losses}, {r.loss_error:.2%} off" if r.losses else "–"
        size = _format_value(r.size, r.size_interval)
        fitted = [r.method, f"{r.cut:.2g}", r.runs, f"{r.decades:.1f}"]
        lines.append([*fitted, size, f"{r.full_fit_size:.3g}", verdict, losses])
    head = ["method", "runs up to, FLOPs", "runs", "decades", "best size at max FLOPs", "all runs"]
    table = _format_table([*head, "", "losses covered"], lines)
    missed = sum(not row.size_covered for row in rows)
    total = sum(row.losses for row in rows)
    outside = total - sum(row.losses_covered for row in rows)
    if missed or outside > LARGEST_MISS * total:
        table = (
            f'<p class="no"><b>Failed.</b> {missed} of {len(rows)} intervals miss the best size by'
            f" all runs, and {outside} of {total} later losses lie outside: expect the answers"
            f" above to miss too.</p>{table}"
        )
    return table


def _format_value(value: float, interval: Interval | None) -> str:
    """Return a value with its interval; a dash if both are unknown."""
    if not (interval or math.isfinite(value)):
        return "–"
    text = f"{value:.4g}" if math.isfinite(value) else "unknown"
    return f"{text} [{interval.low:.3g}, {interval.high:.3g}]" if interval else text


def _format_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    # On narrow screens, each cell is shown on a separate line with the title of its column.
    lines = []
    for row in rows:
        cells = zip(head, row, strict=True)
        lines.append("".join(f'<td data-title="{name}">{cell}</td>' for name, cell in cells))
    titles = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="wide"><table><tr>{titles}</tr>\n{body}</table></div>'


def _format_list(items: Sequence[str]) -> str:
    if not items:
        return "<p>None.</p>"
    return "<ul>" + "".join(f"<li>{html.escape(item)}</li>\n" for item in items) + "</ul>"


def _draw_figures(result: Fit, up_to: float) -> str:
    """Return each panel of a result as a separate figure, in two columns if there is room."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figures = []
    with rc_context(FIGURE_SETTINGS):
        for draw in list_panels(result, up_to):
            figure = Figure(figsize=(4.4, 3.5))
            figure.set_layout_engine("constrained")
            draw(figure.subplots())
            figures.append(_draw_svg(figure))
    return f'<div class="panels">{"".join(figures)}</div>'


def _draw_svg(figure: "Figure") -> str:
    """Return a figure as SVG in the color of the text, with a transparent background."""
    buffer = io.StringIO()
    for axes in figure.axes:
        axes.patch.set_alpha(0)
        if legend := axes.get_legend():
            legend.get_frame().set_alpha(0)
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    return f"<figure>{re.sub(r'<metadata>.*?</metadata>', '', svg, flags=re.DOTALL)}</figure>"
