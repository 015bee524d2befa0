"""Training runs: how large the model, how many tokens it saw, what it cost, where its loss ended.

Notable: two of parameters, tokens and compute are enough, the third follows from C = 6 N D; tables
are read as people keep them (see `tables`), and what was understood is said; whatever a fit could
choke on, a wrong scale first of all, is refused here, by row and column.
"""

import math
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaling.equality import ComparesArrays
from scaling.tables.cells import blank, decimal_comma, list_some, numbers
from scaling.tables.names import SETS, Column, Match, ambiguous, match
from scaling.tables.source import Located, located
from scaling.tables.states import keep_finished

Array = NDArray[np.float64]

FLOPS_PER_PARAMETER_TOKEN = 6.0
"""Forward and backward of a dense model: C = 6 N D (Kaplan et al. 2020, section 2.1)."""

LARGEST_LOSS = 20.0
"""Nats; guessing uniformly among a million tokens costs 13.8."""

# No model has fewer parameters, and none is trained on fewer tokens: such numbers are in units.
FEWEST = 1000.0
# Median of tokens per parameter; published tables have 4 to 40, and units that differ by a thousand
# take any of these out of the range.
TOKENS_PER_PARAMETER = (0.1, 2000.0)
# Least median of a table. Both columns in millions would give a tenth of that or less.
USUALLY = {"parameters": 1e5, "tokens": 1e6, "compute": 1e12}
# Two columns of the same numbers differ by less, relatively: by rounding.
SAME_NUMBER = 0.01
# C over 6 N D: attention, embeddings and recomputation are worth a factor, not ten.
FARTHEST = 10.0

COLUMNS = ("parameters", "tokens", "compute", "loss")


class ScalingWarning(UserWarning):
    """The data or the method cannot carry the question as well as the answer looks."""


@dataclass(frozen=True, eq=False)
class Runs(ComparesArrays):
    """A table of finished runs, each column a float64 vector of the same length.

    `load_runs` makes one from a file, from records or from columns, and checks it.
    """

    parameters: Array
    tokens: Array
    compute: Array
    loss: Array
    rows: tuple[int, ...]
    """Where each run stood in its source, for messages: a file's line, or a position from 1."""
    explanation: str = ""
    """What was read: each column's source, unit and range, the rows left out, columns not used."""

    def __len__(self) -> int:
        return len(self.loss)

    def __getitem__(self, which: slice | NDArray[Any] | Sequence[int]) -> "Runs":
        """The runs that a slice, a mask or a list of positions picks."""
        index = np.arange(len(self))[which]
        columns = {name: getattr(self, name)[index] for name in COLUMNS}
        rows = tuple(self.rows[i] for i in index)
        return Runs(**columns, rows=rows, explanation=self.explanation)

    def without_highest(self, count: int) -> "Runs":
        """All but the `count` runs of the highest loss, which are the likeliest to be misread."""
        if not 0 <= count <= len(self):
            raise ValueError(f"count = {count}: there are {len(self)} runs")
        return self[np.sort(np.argsort(self.loss, kind="stable")[: len(self) - count])]

    def budgets(self, tolerance: float = 0.05) -> "list[Runs]":
        """Return the runs grouped by compute, ascending.

        A gap wider than `tolerance` starts a group. Runs spread over decades have no such gaps, so
        a group that spans more than a factor of two is cut into groups as wide as `tolerance`.
        """
        order = np.argsort(self.compute, kind="stable")
        logs, width = np.log(self.compute[order]), math.log1p(tolerance)
        groups = []
        for group in np.split(order, np.flatnonzero(np.diff(logs) > width) + 1):
            inside = np.log(self.compute[group])
            starts = [0]
            for i in range(len(group)):
                if np.ptp(inside) > math.log(2) and inside[i] > inside[starts[-1]] + width:
                    starts.append(i)
            groups += np.split(group, starts[1:])
        return [self[group] for group in groups]


def load_runs(
    source: str | Path | Mapping[str, ArrayLike] | Iterable[Mapping[str, Any]] | Any,
    *,
    delimiter: str | None = None,
    columns: Mapping[str, str] | None = None,
    units: Mapping[str, float] | None = None,
    where: Mapping[str, Any] | None = None,
    tolerance: float = 0.1,
) -> Runs:
    """Runs from CSV, JSON or JSONL, a DataFrame, a mapping of columns or records.

    Columns go by their usual names (`N`, `params_B`, `train_tokens`, `Training FLOP`, `eval/loss`,
    …); `columns={"loss": "eval/ce"}` names the others. Two of parameters, tokens and compute must
    be there. Cells may be 7B, 1.4T, 49,893,420 or 3,2157; `units={"parameters": 1e6}` multiplies
    plain ones. `where={"dataset": "c4"}` keeps the rows that say so. Exports of wandb and levanter
    are such tables: nested `config` and `summary` are looked into. `Runs.explanation` says what was
    understood.

    Left out, with a warning and a count: rows without a loss, runs that did not finish by a column
    such as `state`, `run_state`, `status`, `failed` or `exit_code`, and all but the last row of
    each run of a history. ValueError names the row and the column of every other value that is
    missing, not a number, zero, negative or infinite, columns of the wrong scale, states that are
    not known, and two columns that may each be meant and differ. ScalingWarning: a compute that
    differs from 6 N D by more than `tolerance`, a loss above 20 nats, repeated rows.
    """
    name = str(source) if isinstance(source, str | Path) else "the table"
    left_out: list[str] = []
    table = located(source, delimiter)
    total = len(table)
    table = _chosen(table, where or {}, name)
    table = keep_finished(table, where or {}, left_out)
    if not table:
        raise ValueError("; ".join([f"{name} holds no runs", *left_out]))
    present = list(dict.fromkeys(column for _, record in table for column in record))
    matched = match(present, columns or {}, name)
    found = matched.found
    measured = [(row, r) for row, r in table if not blank(r.get(found["loss"].name))]
    if not measured:
        raise ValueError(f"{name} holds no runs with a loss in column {found['loss'].name!r}")
    if missing := len(table) - len(measured):
        kept = {row for row, _ in measured}
        lost = list_some(row for row, _ in table if row not in kept)
        where_lost = f"column {found['loss'].name!r} is blank in {missing} rows ({lost})"
        left_out.append(f"{where_lost}: left out")
    values, choices = _values(measured, found, units or {})
    choices += _agreeing(measured, matched, values, units or {}, tolerance)
    rows = [row for row, _ in measured]
    if (last := _last_of_each_run(measured, present, found, values)) is not None:
        left_out.append(
            f"column {last[0]!r} names a run in several rows: of each the row of the most tokens is"
            f" its end; {len(rows) - len(last[1])} earlier ones are left out"
        )
        values = {k: v[last[1]] for k, v in values.items()}
        rows = [rows[i] for i in last[1]]
    for k in ("parameters", "tokens"):
        # n and d of layers and widths, beside columns that say it all.
        beside = k in values and len(values) == 4 and len(found[k].name) == 1
        if beside and values[k].min() < FEWEST:
            choices.append(
                f"column {found[k].name!r} is too small for {k}: they follow from the compute"
            )
            del values[k], found[k]
    scaled = _scaled(measured, found, units or {})
    for k, other in (("parameters", "tokens"), ("tokens", "parameters")):
        if k not in values:
            values[k] = values["compute"] / (FLOPS_PER_PARAMETER_TOKEN * values[other])
    _check_scale(values, found, rows, units or {}, scaled)
    expected = FLOPS_PER_PARAMETER_TOKEN * values["parameters"] * values["tokens"]
    values = {"compute": expected, **values}
    left_out += _mixed(table, present)
    for message in left_out:
        warnings.warn(message, ScalingWarning, stacklevel=2)
    n, d, c, z = (values[k] for k in COLUMNS)
    runs = Runs(n, d, c, z, tuple(rows))
    _warn(runs, runs.compute / expected, found, tolerance)
    lines = [f"{len(runs)} of {total} rows of {name}", *_explained(runs, found, present)]
    lines += [f"  chosen: {choice}" for choice in choices]
    return replace(runs, explanation="\n".join([*lines, *left_out]))


def _chosen(table: Located, where: Mapping[str, Any], name: str) -> Located:
    for column, wanted in where.items():
        seen = dict.fromkeys(str(r[column]) for _, r in table if column in r)
        table = [(row, r) for row, r in table if str(r.get(column)) == str(wanted)]
        if not table:
            told = f"it is {list_some(seen)}" if seen else "there is no such column"
            raise ValueError(f"{name}: {column!r} is nowhere {wanted!r}; {told}")
    return table


def _values(
    table: Located, found: Mapping[str, Column], units: Mapping[str, float]
) -> tuple[dict[str, Array], list[str]]:
    """Return the columns in parameters, tokens, FLOPs and nats, and how their cells were read."""
    cells = {k: [(row, r.get(c.name)) for row, r in table] for k, c in found.items()}
    comma = decimal_comma((found[k].name, column) for k, column in cells.items())
    choices = ["a comma in a number begins its decimals"] if comma else []
    values = {}
    for k, column in found.items():
        unit = units.get(k, column.unit)
        plain = numbers([cell for _, cell in cells[k]], comma, k != "loss", unit)
        wrong = ~(np.isfinite(plain) & (plain > 0))
        if wrong.any():
            bad = [
                f"row {row}: {cell!r}" for (row, cell), w in zip(cells[k], wrong, strict=True) if w
            ]
            raise ValueError(
                f"column {column.name!r} must be positive and finite, but {list_some(bad)}"
            )
        values[k] = plain
        if "perplexity" in column.said:
            values[k] = np.log(plain)
            if not (values[k] > 0).all():
                raise ValueError(f"column {column.name!r}: a perplexity is above 1")
    return values, choices


def _agreeing(
    table: Located,
    matched: Match,
    values: Mapping[str, Array],
    units: Mapping[str, float],
    tolerance: float,
) -> list[str]:
    """Return why each column was read rather than another one that could have been.

    Raise `ValueError` with both readings if columns that claim to be the same differ, or if active
    parameters exceed all parameters, or those without embeddings exceed those with them.
    """
    choices = []
    for ours, column in matched.found.items():
        for rival in matched.rivals.get(ours, []):
            theirs = _readable(table, ours, rival, units)
            if theirs is None:
                choices.append(f"{ours} by {column.name!r}: {rival.name!r} holds no such numbers")
                continue
            if rival.letter and np.median(theirs) < USUALLY[ours]:
                choices.append(f"{ours} by {column.name!r}: {rival.name!r} is too small to be that")
                continue
            within = tolerance if ours == "compute" else SAME_NUMBER
            apart = np.abs(np.log(theirs / values[ours]))
            if (apart > math.log1p(within)).any():
                at = int(np.argmax(apart))
                raise ValueError(
                    f"{ambiguous(ours, [column.name, rival.name])}: in row {table[at][0]} they are"
                    f" {values[ours][at]:.5g} and {theirs[at]:.5g}"
                )
            choices.append(f"{ours} by {column.name!r}, with which {rival.name!r} agrees")
        for other in matched.other.get(ours, []):
            choices.append(_other_kind(ours, column, other, table, values, units))
    return choices


def _other_kind(
    ours: str,
    column: Column,
    other: Column,
    table: Located,
    values: Mapping[str, Array],
    units: Mapping[str, float],
) -> str:
    """Return why a column of another kind is not the one read; `ValueError` if it contradicts."""
    reason = f"{ours} by {column.name!r}, not {other.name!r}"
    if ours != "parameters":
        return reason
    theirs = _readable(table, ours, other, units)
    fewer = "active" in column.kinds and "active" not in other.kinds
    # Active parameters with embeddings and all parameters without are in no order.
    comparable = not fewer or "non-embedding" in column.kinds or "non-embedding" not in other.kinds
    if theirs is not None and comparable:
        wrong = theirs < values[ours] if fewer else theirs > values[ours]
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(
                f"{ambiguous(ours, [column.name, other.name])}: in row {table[at][0]} they are"
                f" {values[ours][at]:.5g} and {theirs[at]:.5g}, which is the wrong order for what"
                " their names say"
            )
    if fewer:
        return f"{reason}: only active parameters compute, C = 6 N D"
    return f"{reason}: with embeddings; pass columns={{{ours!r}: {other.name!r}}} for without"


def _readable(
    table: Located, ours: str, column: Column, units: Mapping[str, float]
) -> Array | None:
    """Return the numbers of a column, or None if a cell is not positive and finite."""
    try:
        return _values(table, {ours: column}, units)[0][ours]
    except ValueError:
        return None


def _scaled(table: Located, found: Mapping[str, Column], units: Mapping[str, float]) -> set[str]:
    """Return which columns say in which unit they count, by name, by cell or by `units`."""
    known = set(units)
    for k, column in found.items():
        cells = [record.get(column.name) for _, record in table]
        suffixed = [isinstance(c, str) and c.strip()[-1:].isalpha() for c in cells]
        if "unit" in column.said or " in " in f" {column.said}" or all(suffixed):
            known.add(k)
    return known


def _last_of_each_run(
    table: Located, present: Sequence[str], found: Mapping[str, Column], values: Mapping[str, Array]
) -> tuple[str, list[int]] | None:
    """The column that tells the runs of a history apart, and each run's end; None: no history."""
    progress = values.get("tokens", values.get("compute"))
    assert progress is not None
    size = values.get("parameters", progress / progress)
    plain = {"".join(c for c in name.lower() if c.isalnum()): name for name in present}
    steps = any(name in plain for name in ("step", "globalstep", "trainerglobalstep"))
    usual = ["run", "runid", "runname", "uid", "id", *(["name", "experiment"] if steps else [])]
    for column in (plain[name] for name in usual if name in plain):
        groups: dict[str, list[int]] = {}
        for i, (_, record) in enumerate(table):
            groups.setdefault(str(record.get(column)), []).append(i)
        # One size, and tokens that differ from row to row: the same training, further on.
        if len(groups) < len(table) and all(
            np.ptp(size[g]) == 0 and len(np.unique(progress[g])) == len(g) for g in groups.values()
        ):
            return column, sorted(max(g, key=lambda i: progress[i]) for g in groups.values())
    return None


def _mixed(table: Located, present: Sequence[str]) -> list[str]:
    """A doubt where the rows come from several data sets, whose losses are not of one law."""
    for name in present:
        if name.lower().rsplit(".")[-1] in SETS:
            seen = dict.fromkeys(str(record.get(name)) for _, record in table)
            if 1 < len(seen) <= len(table) / 4:
                return [
                    f"column {name!r} tells {len(seen)} sets of runs apart ({list_some(seen)}),"
                    f" read as one: pick one with where={{{name!r}: {next(iter(seen))!r}}}"
                ]
    return []


def _check_scale(
    values: Mapping[str, Array],
    found: Mapping[str, Column],
    rows: Sequence[int],
    units: Mapping[str, float],
    scaled: Container[str],
) -> None:
    """Raise `ValueError`, with the cell and the remedy, if a column is in thousands, millions, …

    `scaled` are the columns that say their unit.
    """
    # What was not given follows from the compute, and shows a wrong scale of that.
    told = {k: k if k in found else "compute" for k in ("parameters", "tokens")}
    small = [k for k, of in told.items() if of not in units and values[k].min() < FEWEST]
    if small:
        cells, remedy = [], {}
        for k in small:
            at = int(np.argmin(values[k]))
            given = values[told[k]][at]
            cells.append(f"column {found[told[k]].name!r} is {given:.5g} in row {rows[at]}")
            if told[k] != k:
                cells[-1] += f", which leaves {values[k][at]:.3g} {k}"
            remedy[told[k]] = f"1e{_likely_power(k, values, small)}"
        offer = ", ".join(f"{k!r}: {power}" for k, power in remedy.items())
        how = f"they count thousands, millions or billions: pass units={{{offer}}}, say"
        if all(np.median(values[k]) >= FEWEST for k in small):
            how = "other rows are on another scale: mend the cell"
        raise ValueError(
            f"{' and '.join(cells)}: fewer than {FEWEST:g} {' and '.join(small)} are no run; {how}"
        )
    n, d = values["parameters"], values["tokens"]
    each = d / n
    low, high = TOKENS_PER_PARAMETER
    # Two columns of three are enough to know the third and its scale.
    known = sum(k in scaled for k in ("parameters", "tokens", "compute")) >= 2
    confirmed = "compute" in found and "parameters" in found and "tokens" in found
    if not (known or confirmed or low <= np.median(each) <= high):
        at = int(np.argsort(each)[len(each) // 2])
        (a, x), (b, y) = [(found[k].name, values[k][at]) for k in COLUMNS if k in found][:2]
        sure = ", ".join(f"{k!r}: 1" for k in ("parameters", "tokens", "compute") if k in found)
        raise ValueError(
            f"columns {a!r} and {b!r} are {x:.4g} and {y:.4g} in row {rows[at]}, {each[at]:.2g}"
            f" tokens per parameter, outside {low:g} to {high:g}: they are not on"
            " one scale; pass units={'tokens': 1e3} or 1e6 or 1e9, say, or confirm the numbers with"
            f" units={{{sure}}}"
        )
    for k in ("parameters", "tokens"):
        least = USUALLY[k]
        if k in found and not (known or confirmed or np.median(values[k]) >= least):
            raise ValueError(
                f"column {found[k].name!r} is {np.median(values[k]):.4g} in the median, where runs"
                f" have {least:.0e} {k} or more: is it in thousands or millions? Pass"
                f" units={{{k!r}: 1e6}}, say, or confirm both columns with units of 1"
            )
    if "compute" in values:
        ratio = values["compute"] / (FLOPS_PER_PARAMETER_TOKEN * n * d)
        at = int(np.argmax(np.abs(np.log(ratio))))
        if not 1 / FARTHEST < ratio[at] < FARTHEST and "compute" not in units:
            raise ValueError(
                f"column {found['compute'].name!r} is {values['compute'][at]:.4g} in row"
                f" {rows[at]}, {ratio[at]:.3g} times 6 N D of {found['parameters'].name!r} ="
                f" {n[at]:.4g} and {found['tokens'].name!r} = {d[at]:.4g}: a unit is wrong;"
                f" mend the cell, or pass units={{'compute': {1 / ratio[at]:.0e}}}"
            )
    loss = values["loss"]
    if "loss" not in units and np.median(loss) > LARGEST_LOSS:
        raise ValueError(
            f"column {found['loss'].name!r} is {loss[0]:.4g} in row {rows[0]}, and above"
            f" {LARGEST_LOSS:g} nats in most: worse than guessing; of hundredths pass"
            " units={'loss': 0.01}, call a perplexity so, and if they are nats pass {'loss': 1}"
        )


def _likely_power(name: str, values: Mapping[str, Array], small: Sequence[str]) -> int:
    """Of the unit that makes it some twenty tokens a parameter, where the other column is sound."""
    other, plain = ("tokens", 6) if name == "parameters" else ("parameters", 9)
    if other in small:
        return plain
    usual = 20 * values[other] if name == "tokens" else values[other] / 20
    power = 3 * round(float(np.median(np.log10(usual / values[name]))) / 3)
    return power if power > 0 else plain


def _explained(runs: Runs, found: Mapping[str, Column], present: Sequence[str]) -> list[str]:
    lines = []
    for k in COLUMNS:
        values = getattr(runs, k)
        column = found.get(k)
        origin = repr(column.name) if column else {"compute": "6 N D"}.get(k, "C / 6 of the other")
        said = column.said if column else ""
        if k == "parameters" and column and not said:
            said = "taken as given: total or non-embedding, the name does not say"
        if k == "loss" and "bits" not in said:
            said = f"nats{', of ' + said if said else ''}"
        line = f"  {k:<11}{origin:<24}{values.min():.4g} to {values.max():.4g}"
        lines.append(line + (f"  ({said})" if said else ""))
    used = {column.name for column in found.values()}
    if rest := [name for name in present if name and name not in used]:
        lines.append(f"  not used: {list_some(rest)}")
    return lines


def _warn(runs: Runs, ratio: Array, found: Mapping[str, Column], tolerance: float) -> None:
    rows, doubts = np.array(runs.rows), []
    off = np.abs(ratio - 1) > tolerance
    if off.any():
        worst = ratio[np.argmax(np.abs(np.log(ratio)))]
        doubts.append(
            f"column {found['compute'].name!r} is not 6 N D within {tolerance:.0%} in rows "
            f"{list_some(rows[off])} (worst: {worst:.3g} times); a "
            "parametric fit goes by N and D, an IsoFLOP fit takes budgets from it"
        )
    if (absurd := runs.loss > LARGEST_LOSS).any():
        doubts.append(
            f"column {found['loss'].name!r} is above {LARGEST_LOSS:g} nats in rows "
            f"{list_some(rows[absurd])}: worse than guessing; is it a perplexity, or diverged?"
        )
    table = np.stack([runs.parameters, runs.tokens, runs.loss], axis=1)
    _, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    repeated = np.arange(len(runs)) != first[inverse.reshape(-1)]
    if repeated.any():
        doubts.append(
            f"rows {list_some(rows[repeated])} repeat earlier ones in"
            f" {sorted(c.name for c in found.values())}: counted twice, they narrow every interval;"
            " drop them unless they are two runs"
        )
    for doubt in doubts:
        warnings.warn(doubt, ScalingWarning, stacklevel=3)
