"""The numbers of the chosen columns, and the reasons for choosing them over other columns.

C = 6 N D needs active parameters and the tokens of all epochs. If a column may count something else
and the caller has not confirmed it, `ValueError` names both readings.
"""

import math
import re
from collections.abc import Container, Mapping

import numpy as np
from numpy.typing import NDArray

from scaling.tables.cells import flag_blank_cells, list_some, parse_numbers, require_unambiguous
from scaling.tables.grouping import SAME_TOKENS
from scaling.tables.matching import (
    TIMES,
    Match,
    classify_factor,
    format_ambiguity,
    list_token_products,
)
from scaling.tables.names import WORDS, Column, parse_text_unit, split_words
from scaling.tables.scales import SMALLEST_MEDIAN
from scaling.tables.states import is_true
from scaling.tables.table import Reading, Table
from scaling.units import Array

#: Relative differences up to this value between columns of compute, or between compute and 6 N D,
#: are not reported.
COMPUTE_TOLERANCE = 0.1

#: Largest relative difference that rounding may cause between columns of the same numbers.
ROUNDING = 0.01

#: Possible tokens per byte of text. A text has at most one token per byte. The bound is 1.1 because
#: GiB and TiB columns are treated as GB and TB, although their units are 7 and 10 % larger. Usual
#: tokenizers make one token of three to five bytes of English.
TOKENS_PER_BYTE = (0.02, 1.1)

#: Names of mixtures of experts, such as Mixtral-8x7B, 30B-A3B, moe-1b and OLMoE.
MIXTURE_NAME = re.compile(
    r"(?i:(?<![\d.a-z])(?:\d+x\d+(?:\.\d+)?b|\d+(?:\.\d+)?b[-_]a\d+(?:\.\d+)?b|moe|olmoe|mixtral)"
    r"(?![a-z\d]))|MoE(?![a-z\d])"
)


def parse_columns(reading: Reading, columns: Mapping[str, Column]) -> dict[str, Array]:
    """Return the numbers of columns, in parameters, tokens, FLOPs and nats.

    Losses in bits per byte or per character are not converted. Raises `ValueError` if a number is
    ambiguous, or is not positive and finite, or if a perplexity is at most 1.
    """
    values = {}
    for quantity, column in columns.items():
        unit = reading.units.get(quantity, column.unit)
        if column.name in reading.table.columns:
            if quantity != "loss" and column.unit != 1:
                losses = reading.table.get_cells(reading.columns["loss"].name)
                # A loss with a point shows that points start decimals.
                if not any(isinstance(cell, str) and "." in cell for cell in losses):
                    cells = reading.table.get_cells(column.name)
                    require_unambiguous(column.name, reading.rows, cells, ".,")
            numbers = parse_positive(reading.table, column.name, unit, quantity != "loss")
        else:
            numbers = np.full(len(reading.rows), unit)
            for name in column.name.split(TIMES):
                # The factors are whole numbers, so commas separate thousands; points are ambiguous.
                require_unambiguous(name, reading.rows, reading.table.get_cells(name), ".")
                numbers = numbers * parse_positive(reading.table, name, 1.0, True)
        values[quantity] = numbers
        if "perplexity" in column.description:
            values[quantity] = np.log(numbers)
            if not (values[quantity] > 0).all():
                raise ValueError(
                    f"column {column.name!r}: every perplexity must be above 1, got"
                    f" {numbers.min():.5g}"
                )
    return values


def parse_positive(table: Table, name: str, unit: float, is_count: bool) -> Array:
    """Return the numbers of a column; raise `ValueError` unless all are positive and finite."""
    numbers = parse_numbers(table.columns[name], unit, is_count)
    invalid = np.flatnonzero(~(np.isfinite(numbers) & (numbers > 0)))
    if len(invalid):
        cells = table.get_cells(name)
        unparsed = [i for i in invalid if np.isnan(numbers[i])]
        requirement = "contain numbers" if unparsed else "be positive and finite"
        bad = [f"row {table.rows[i]}: {cells[i]!r}" for i in unparsed or invalid]
        remedy = ""
        if any("," in text for text in bad):
            remedy = "; decimals start with a point, and commas separate only thousands of counts"
        raise ValueError(f"column {name!r} must {requirement}, but {list_some(bad)}{remedy}")
    return numbers


def compare_columns(reading: Reading, matched: Match) -> list[str]:
    """Return one sentence per column that could have been read instead of the chosen one.

    A rival has the same meaning as the chosen column, so it must contain the same numbers. An
    alternative has another meaning, such as total instead of active parameters, and must not
    contradict the chosen column: active parameters are at most the total, and parameters without
    embeddings at most those with them. Raises `ValueError` with both columns otherwise.
    """
    choices = []
    for quantity, column in matched.chosen.items():
        for rival in matched.rivals.get(quantity, []):
            choices.append(_compare_rival(reading, quantity, column, rival))
        for other in matched.alternatives.get(quantity, []):
            choices.append(_compare_alternative(reading, quantity, column, other))
    return choices


def _compare_rival(reading: Reading, quantity: str, column: Column, rival: Column) -> str:
    """Return the reason why a column is read rather than a rival that should be equal.

    Raises `ValueError` if the rival has plausible numbers that differ.
    """
    other_values = _parse_plausible(reading, quantity, rival)
    if np.isnan(other_values).all():
        return f"{quantity} by {column.name!r}: {rival.name!r} contains no such numbers"
    if rival.is_letter and np.nanmedian(other_values) < SMALLEST_MEDIAN[quantity]:
        return f"{quantity} by {column.name!r}: {rival.name!r} is too small to be that"
    values = reading.values[quantity]
    allowed = COMPUTE_TOLERANCE if quantity == "compute" else ROUNDING
    difference = np.abs(np.log(other_values / values))
    if (difference > math.log1p(allowed)).any():
        i = int(np.nanargmax(difference))
        raise ValueError(
            f"{format_ambiguity(quantity, [column.name, rival.name])}: in row {reading.rows[i]}"
            f" they are {values[i]:.5g} and {other_values[i]:.5g}"
        )
    return f"{quantity} by {column.name!r}, with which {rival.name!r} agrees"


def _compare_alternative(reading: Reading, quantity: str, column: Column, other: Column) -> str:
    """Return the reason why a column of another kind is not read.

    Raises `ValueError` if the order of two counts of parameters contradicts their names, or if a
    perplexity shows that a loss may be in bits.
    """
    reason = f"{quantity} by {column.name!r}, not {other.name!r}"
    if quantity == "loss":
        _require_nats(reading, column, other)
    if quantity != "parameters":
        return reason
    is_active = "active" in column.kinds and "active" not in other.kinds
    # Active parameters with embeddings may be more or fewer than all parameters without them.
    is_ordered = (
        not is_active or "non-embedding" in column.kinds or "non-embedding" not in other.kinds
    )
    other_values = _parse_plausible(reading, quantity, other)
    if is_ordered:
        values = reading.values[quantity]
        wrong = other_values < values if is_active else other_values > values
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(
                f"{format_ambiguity(quantity, [column.name, other.name])}: in row {reading.rows[i]}"
                f" they are {values[i]:.5g} and {other_values[i]:.5g}, which is the wrong order for"
                " their names"
            )
    if is_active:
        return f"{reason}: C = 6 N D counts only active parameters"
    remedy = f"to count without embeddings, pass columns={{{quantity!r}: {other.name!r}}}"
    return f"{reason}: with embeddings; {remedy}"


def _require_nats(reading: Reading, column: Column, other: Column) -> None:
    """Raise `ValueError` if another column is a perplexity whose logarithm is ln 2 times the loss.

    Either the loss is in bits, or the perplexity is 2 to the power of a loss in nats. A perplexity
    of other text, or of another stage of the training, does not have this ratio in every row.
    """
    has_unit = "loss" in reading.units or "nats" in split_words(column.name)
    is_known = has_unit or column.description not in ("", "training")
    if is_known or not other.description.endswith("perplexity"):
        return
    ratio = np.log(_parse_plausible(reading, "loss", other)) / reading.values["loss"]
    if not (np.abs(ratio / math.log(2) - 1) <= ROUNDING).all():
        return
    raise ValueError(
        f"column {column.name!r} may be in bits, because ln {other.name!r} is ln 2 times this loss"
        f" in every row: pass units={{'loss': {math.log(2):.6f}}} if it is in bits, or"
        " units={'loss': 1} if it is in nats"
    )


def _parse_plausible(reading: Reading, quantity: str, column: Column) -> Array:
    """Return the numbers of a column; nan for cells that are not positive and finite."""
    unit = reading.units.get(quantity, column.unit)
    numbers = parse_numbers(reading.table.get_cells(column.name), unit)
    return np.where((numbers > 0) & np.isfinite(numbers), numbers, np.nan)


def require_active_parameters(reading: Reading, named_quantities: Container[str]) -> None:
    """Raise `ValueError` if N may include experts of a mixture that a token does not use.

    `named_quantities` contains the quantities whose columns the caller named. A named column of
    parameters is confirmed.
    """
    column = reading.columns.get("parameters")
    if column is None or "parameters" in named_quantities or "active" in column.kinds:
        return
    read = {chosen.name for chosen in reading.columns.values()}
    for name in reading.table.columns:
        # Columns that are read contain numbers; skipping them saves seconds per million rows.
        if name in read:
            continue
        mixtures = np.flatnonzero(_has_mixtures(reading, name))
        if len(mixtures):
            row = reading.rows[mixtures[0]]
            raise ValueError(
                f"column {column.name!r} may count all parameters or the active ones, because"
                f" {name!r} is {reading.table.get_cells(name)[mixtures[0]]!r} in row {row}: add a"
                f" column 'active_params', confirm with columns={{'parameters': {column.name!r}}},"
                f" or leave {name!r} out with ignore=[{name!r}]"
            )


def _has_mixtures(reading: Reading, name: str) -> NDArray[np.bool_]:
    """Return flags of the rows that are mixtures of experts, according to a column."""
    cells = reading.table.get_cells(name)
    words = split_words(name)
    stem = "".join(words).removesuffix("count")
    # The last word may be singular: n_expert. Names with `per`, such as tokens_per_expert, do not
    # count experts.
    if stem.endswith(("expert", "experts", "topk")) and "per" not in words:
        return parse_numbers(cells) > 1
    # Granularity is the width of the dense MLP divided by that of an expert. The expansion rate is
    # the ratio of the parameters of the MoE layers to those of the dense MLPs.
    if stem.endswith(("granularity", "expansionrate")):
        return parse_numbers(cells) > 1
    if stem.endswith("activationratio"):  # the ratio of active experts or parameters to all
        return parse_numbers(cells) < 1
    # Sparsity is a fraction of idle experts or pruned weights, unless it is that of attention.
    if words[-1:] == ["sparsity"] and not {"attention", "attn", "activation"} & {*words}:
        return parse_numbers(cells) > 0
    if stem.endswith("moe"):
        return (parse_numbers(cells) > 1) | np.array([is_true(cell) for cell in cells])
    if reading.table.columns[name].dtype != object:
        return np.zeros(len(cells), bool)
    return np.array([MIXTURE_NAME.search(str(cell)) is not None for cell in cells])


def require_tokens_of_text(reading: Reading) -> None:
    """Raise `ValueError` if tokens are a size of text and their unit is missing or impossible.

    `units["tokens"]` is the number of tokens per unit of text, and depends on the tokenizer.
    """
    column = reading.columns.get("tokens")
    bytes_per_unit = parse_text_unit(column.name) if column else 0.0
    if not (column and bytes_per_unit):
        return
    low, high = TOKENS_PER_BYTE
    unit = reading.units.get("tokens", 0.0)
    if not low * bytes_per_unit <= unit <= high * bytes_per_unit:
        raise ValueError(
            f"column {column.name!r} is a size of text: expected units={{'tokens': …}} with the"
            f" tokens that your tokenizer makes of one unit, from {low * bytes_per_unit:g} to"
            f" {high * bytes_per_unit:g}, got {unit:g}"
        )


def require_tokens_of_all_epochs(
    reading: Reading, named_quantities: Container[str], is_history: bool
) -> None:
    """Raise `ValueError` if the token column may count one epoch of runs with another number.

    `named_quantities` contains the quantities whose columns the caller named. A named column of
    tokens is confirmed. A size of text must always be named, so naming it does not confirm it.
    """
    column = reading.columns.get("tokens")
    if column is None or ("tokens" in named_quantities and not parse_text_unit(column.name)):
        return
    reason = _explain_all_epochs(reading, column.name, is_history)
    if reason:
        reading.choices.append(f"tokens by {column.name!r} are those of all epochs: {reason}")
        return
    for name in reading.table.columns:
        words = split_words(name)
        stem = "".join(words).removesuffix("count")
        is_epochs = stem.endswith(("epoch", "epochs", "passes", "repeats"))
        is_other = "per" in words or {*words} & {*WORDS["no_factors"]}
        if not is_epochs or is_other or name in column.name.split(TIMES):
            continue
        cells = reading.table.get_cells(name)
        epochs = parse_numbers(cells)
        # If epochs are counted from 0, the number of the first epoch is 0.
        is_single_epoch = (np.abs(epochs - 1) <= SAME_TOKENS) | (epochs == 0)
        has_cell = ~flag_blank_cells(reading.table.columns[name])
        other_rows = np.flatnonzero(~is_single_epoch & has_cell)
        if len(other_rows):
            i = other_rows[0]
            confirm = f"columns={{'tokens': {column.name!r}}}"
            if parse_text_unit(column.name):
                confirm = f"ignore=[{name!r}]"
            raise ValueError(
                f"column {column.name!r} may count the tokens of all epochs, or those of one epoch,"
                f" because {name!r} is {cells[i]!r} in row {reading.rows[i]}: for"
                f" all epochs pass {confirm}, and for one epoch pass columns={{'tokens':"
                f" {TIMES.join([name, column.name])!r}}}"
            )


def _explain_all_epochs(reading: Reading, name: str, is_history: bool) -> str:
    """Return the reason why a column counts the tokens of all epochs, or "" without evidence.

    Raises `ValueError` if its tokens differ from a product of columns that counts all epochs, such
    as steps times batch tokens.
    """
    if _is_name_of_all_epochs(name):
        return "the name says so"
    if is_history:
        return "they rise within runs"
    tokens = reading.values["tokens"]
    for factors in list_token_products(list(reading.table.columns)):
        product = TIMES.join(factors)
        numbers = np.prod([parse_numbers(reading.table.get_cells(f)) for f in factors], axis=0)
        if not _is_name_of_all_epochs(product) or parse_text_unit(name) or not (numbers > 0).all():
            continue
        differs = np.abs(np.log(numbers / tokens)) > np.log1p(SAME_TOKENS)
        if not differs.any():
            return f"{product!r} is equal in every row"
        i = int(np.argmax(differs))
        raise ValueError(
            f"{format_ambiguity('tokens', [name, product])}: in row {reading.rows[i]} they are"
            f" {tokens[i]:.5g} and {numbers[i]:.5g}"
        )
    return ""


def _is_name_of_all_epochs(name: str) -> bool:
    """Return True if a column or product counts tokens of all epochs, according to its name."""
    if any(classify_factor(factor) == "steps" for factor in name.split(TIMES)):
        return True
    joined = "".join(split_words(name))
    return "data" not in joined and any(word in joined for word in WORDS["trained"])
