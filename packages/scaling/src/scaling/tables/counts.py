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
from scaling.units import FLOPS_PER_PARAMETER_TOKEN

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
    read = {chosen.name for chosen in reading.columns.values()}
    for name in reading.table.columns:
        if name in read:  # Matching the cells of a million rows takes seconds.
            continue
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
    if reading.table.columns[name].dtype != object:
        return np.zeros(len(cells), bool)
    return np.array([MIXTURE_NAME.search(str(cell).lower()) is not None for cell in cells])


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
    text is read only if it is named, so its name confirms nothing.
    """
    column = reading.columns.get("tokens")
    if column is None or ("tokens" in named and not text_unit(column.name)):
        return
    reason = _reason_for_all_epochs(reading, column.name, is_history)
    if reason:
        reading.choices.append(f"tokens by {column.name!r} are those of all epochs: {reason}")
        return
    for name in reading.table.columns:
        words = split_words(name)
        is_epochs = "".join(words).removesuffix("count").endswith(("epoch", "epochs", "passes"))
        is_other = "per" in words or {*words} & {*WORDS["no_factors"]}
        if not is_epochs or is_other or name in column.name.split(TIMES):
            continue
        cells = reading.table.cells(name)
        epochs = parse_numbers(cells)
        # Epochs that are counted from 0 start with 0, which is the first one.
        is_one = (np.abs(epochs - 1) <= SAME_TOKENS) | (epochs == 0)
        others = np.flatnonzero(~is_one & ~blank_cells(reading.table.columns[name]))
        if len(others):
            confirm = f"columns={{'tokens': {column.name!r}}}"
            if text_unit(column.name):
                confirm = f"ignore=[{name!r}]"
            raise ValueError(
                f"column {column.name!r} may count the tokens of all epochs, or those of one epoch,"
                f" because {name!r} is {cells[others[0]]!r} in row {reading.rows[others[0]]}: for"
                f" all epochs pass {confirm}, and for one epoch pass columns={{'tokens':"
                f" {TIMES.join([name, column.name])!r}}}"
            )


def _reason_for_all_epochs(reading: Reading, name: str, is_history: bool) -> str:
    """Return the reason why the tokens of every row are those of all epochs, or "".

    Raise `ValueError` if they differ from steps times the batch in tokens.
    """
    if _names_all_epochs(name):
        return "the name says so"
    if is_history:
        return "they rise within runs"
    tokens = reading.values["tokens"]
    for factors in products_of_tokens(list(reading.table.columns)):
        product = TIMES.join(factors)
        numbers = np.prod([parse_numbers(reading.table.cells(f)) for f in factors], axis=0)
        if not _names_all_epochs(product) or text_unit(name) or not (numbers > 0).all():
            continue
        differs = np.abs(np.log(numbers / tokens)) > np.log1p(SAME_TOKENS)
        if not differs.any():
            return f"{product!r} is equal in every row"
        i = int(np.argmax(differs))
        raise ValueError(
            f"{ambiguity('tokens', [name, product])}: in row {reading.rows[i]} they are"
            f" {tokens[i]:.5g} and {numbers[i]:.5g}"
        )
    if {"parameters", "compute"} <= {*reading.values}:
        expected = FLOPS_PER_PARAMETER_TOKEN * reading.values["parameters"] * tokens
        off = np.abs(np.log(reading.values["compute"] / expected)) > np.log1p(COMPUTE_TOLERANCE)
        if not off.any():
            return f"{reading.columns['compute'].name!r} is 6 N D in every row"
    return ""


def _names_all_epochs(name: str) -> bool:
    """Return True if a column, or a product of columns, counts the tokens of all epochs by name."""
    if any(factor_kind(factor) == "steps" for factor in name.split(TIMES)):
        return True
    joined = "".join(split_words(name))
    return "data" not in joined and any(word in joined for word in WORDS["trained"])
