"""Checks that N counts active parameters, and that D counts the tokens of all epochs.

C = 6 N D needs both. A table that may count otherwise is refused with the two readings.
"""

import re
from collections.abc import Container

import numpy as np
from numpy.typing import NDArray

from scaling.tables.cells import blank_cells, parse_numbers
from scaling.tables.columns import COMPUTE_TOLERANCE
from scaling.tables.derived import TIMES, factor_kind, products_of_tokens
from scaling.tables.grouping import SAME_TOKENS
from scaling.tables.names import WORDS, ambiguity, split_words, text_unit
from scaling.tables.states import is_true
from scaling.tables.table import Reading
from scaling.units import FLOPS_PER_PARAMETER_TOKEN, Array

#: Possible tokens per byte of text. A byte is at most one token, and 7 % more if the unit
#: is GiB. Usual tokenizers make one token of three to five bytes of English.
TOKENS_PER_BYTE = (0.02, 1.1)

#: Names of mixtures of experts, such as Mixtral-8x7B, 30B-A3B and moe-1b.
MIXTURE_NAME = re.compile(
    r"(?<![\d.a-z])(?:\d+x\d+(?:\.\d+)?b|\d+(?:\.\d+)?b-a\d+(?:\.\d+)?b|moe)(?![a-z\d])"
)


def require_active_parameters(reading: Reading, named: Container[str]) -> None:
    """Raise `ValueError` if N may include idle experts of a mixture.

    `named` has the quantities whose columns the caller has named, which confirms them.
    """
    column = reading.columns.get("parameters")
    if column is None or "parameters" in named or "active" in column.kinds:
        return
    for name in reading.table.columns:
        mixtures = np.flatnonzero(_has_mixtures(reading, name))
        if len(mixtures):
            row = reading.rows[mixtures[0]]
            raise ValueError(
                f"column {column.name!r} may count all parameters or the active ones, because"
                f" {name!r} is {reading.table.cells(name)[mixtures[0]]!r} in row {row}: add a"
                f" column 'active_params', confirm with columns={{'parameters': {column.name!r}}},"
                f" or leave {name!r} out with ignore=[{name!r}]"
            )


def _has_mixtures(reading: Reading, name: str) -> NDArray[np.bool_]:
    """Return flags of the rows that are mixtures of experts, according to a column."""
    cells = reading.table.cells(name)
    words = split_words(name)
    stem = "".join(words).removesuffix("count")
    # A name may also have the singular: n_expert. `experts_per_token` is also above 1 for mixtures.
    if stem.endswith(("expert", "experts", "topk")) and "per" not in words:
        return parse_numbers(cells) > 1
    if stem.endswith("moe"):
        return (parse_numbers(cells) > 1) | np.array([is_true(cell) for cell in cells])
    texts = [str(cell).lower() for cell in cells]
    # One search of all texts is fast if a table has a million rows.
    is_text = reading.table.columns[name].dtype == object
    if not is_text or not MIXTURE_NAME.search("\n".join(texts)):
        return np.zeros(len(cells), bool)
    return np.array([MIXTURE_NAME.search(text) is not None for text in texts])


def require_tokens_of_text(reading: Reading) -> None:
    """Raise `ValueError` if tokens are a size of text without a possible number of tokens per unit.

    The number is `units={"tokens": …}`, and depends on the tokenizer.
    """
    column = reading.columns.get("tokens")
    text_bytes = text_unit(column.name) if column else 0.0
    if not (column and text_bytes):
        return
    low, high = TOKENS_PER_BYTE
    unit = reading.units.get("tokens", 0.0)
    if not low * text_bytes <= unit <= high * text_bytes:
        raise ValueError(
            f"column {column.name!r} is a size of text: expected units={{'tokens': …}} with the"
            f" tokens that your tokenizer makes of one unit, from {low * text_bytes:g} to"
            f" {high * text_bytes:g}, got {unit:g}"
        )


def require_tokens_of_all_epochs(reading: Reading, named: Container[str], is_history: bool) -> None:
    """Raise `ValueError` if D may count the tokens of one epoch, and runs have other epochs than 1.

    `named` has the quantities whose columns the caller has named, which confirms them. A size of
    text is read only if it is named, so its name confirms nothing. In a history, the tokens of a
    run rise, so they count the training.
    """
    column = reading.columns.get("tokens")
    if column is None or ("tokens" in named and not text_unit(column.name)):
        return
    for name in reading.table.columns:
        if not _counts_epochs(name) or name in column.name.split(TIMES):
            continue
        epochs = parse_numbers(reading.table.cells(name))
        # Epochs that are counted from 0 start with 0, which is the first one.
        epochs[(epochs == 0) | blank_cells(reading.table.columns[name])] = 1
        others = np.flatnonzero(~(np.abs(epochs - 1) <= SAME_TOKENS))
        if not len(others):
            continue
        evidence = (
            "they rise within runs" if is_history else _evidence_of_all_epochs(reading, epochs)
        )
        choice = f"tokens by {column.name!r} count all epochs: {evidence}"
        if evidence:
            reading.choices += [choice] if choice not in reading.choices else []
            continue
        row = reading.rows[others[0]]
        confirm = f"columns={{'tokens': {column.name!r}}}"
        if text_unit(column.name):
            confirm = f"ignore=[{name!r}]"
        raise ValueError(
            f"column {column.name!r} may count the tokens of all epochs, or those of one epoch,"
            f" because {name!r} is {reading.table.cells(name)[others[0]]!r} in row {row}: for all"
            f" epochs pass {confirm}, and for one epoch pass columns={{'tokens':"
            f" {TIMES.join([name, column.name])!r}}}"
        )


def _counts_epochs(name: str) -> bool:
    """Return True if a column has a number of epochs."""
    words = split_words(name)
    is_other = "per" in words or bool({*words} & {*WORDS["no_factors"]})
    return (
        "".join(words).removesuffix("count").endswith(("epoch", "epochs", "passes"))
        and not is_other
    )


def _evidence_of_all_epochs(reading: Reading, epochs: Array) -> str:
    """Return the reason why the tokens of every row count all of its epochs, or ""."""
    name = reading.columns["tokens"].name
    if _names_all_epochs(name):
        return "the name says so"
    tokens = reading.values["tokens"]
    if {"parameters", "compute"} <= {*reading.values}:
        expected = FLOPS_PER_PARAMETER_TOKEN * reading.values["parameters"] * tokens
        if _shows_all_epochs(reading.values["compute"] / expected, epochs, COMPUTE_TOLERANCE):
            return f"{reading.columns['compute'].name!r} is 6 N D in every row"
    for name, ratio in _product_ratios(reading).items():
        if _shows_all_epochs(ratio, epochs, SAME_TOKENS):
            return f"{name!r} is equal in every row"
    return ""


def compare_with_steps(reading: Reading, named: Container[str]) -> None:
    """Raise `ValueError` if D is a column that differs from steps times the batch in tokens.

    `named` has the quantities whose columns the caller has named. A name such as `tokens_seen`
    excludes the other reading, because a planned number of steps may not have been reached.
    """
    column = reading.columns.get("tokens")
    if column is None or "tokens" in named or TIMES in column.name:
        return
    for name, ratio in _product_ratios(reading).items():
        differs = np.abs(np.log(ratio)) > np.log1p(SAME_TOKENS)
        if not differs.any():
            reading.choices.append(f"tokens by {column.name!r}, with which {name!r} agrees")
        elif _names_all_epochs(column.name):
            reading.choices.append(f"tokens by {column.name!r}, not {name!r}: the name says so")
        else:
            i = int(np.argmax(differs))
            tokens = reading.values["tokens"][i]
            raise ValueError(
                f"{ambiguity('tokens', [column.name, name])}: in row {reading.rows[i]} they are"
                f" {tokens:.5g} and {tokens * ratio[i]:.5g}"
            )


def _product_ratios(reading: Reading) -> dict[str, Array]:
    """Return each product that counts all epochs by its name, divided by the tokens that are read.

    Factors that are not positive numbers give nan.
    """
    ratios = {}
    for factors in products_of_tokens(list(reading.table.columns)):
        numbers = np.prod([parse_numbers(reading.table.cells(f)) for f in factors], axis=0)
        name = TIMES.join(factors)
        if _names_all_epochs(name):
            ratios[name] = np.where(numbers > 0, numbers, np.nan) / reading.values["tokens"]
    return ratios


def _names_all_epochs(name: str) -> bool:
    """Return True if a column, or a product of columns, counts the tokens of all epochs by name."""
    if any(factor_kind(factor) == "steps" for factor in name.split(TIMES)):
        return True
    joined = "".join(split_words(name))
    return "data" not in joined and any(word in joined for word in WORDS["trained"])


def _shows_all_epochs(ratio: Array, epochs: Array, tolerance: float) -> bool:
    """Return True if numbers agree in every row with the tokens of all epochs, and only with them.

    `ratio` is 1 if the tokens count all epochs, and the number of epochs if they count one.
    """
    width = np.log1p(tolerance)
    agrees = np.abs(np.log(ratio)) <= width
    agrees_with_one = np.abs(np.log(ratio / epochs)) <= width
    return bool(agrees.all() and not agrees_with_one.all())
