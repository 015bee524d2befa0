"""Choice of the columns that are read as parameters, tokens, compute and loss.

Tokens may be a product of columns, such as steps times the batch size in tokens. A column named
only "batch size" may count one device, one accumulation step or a whole step, in sequences or in
tokens. A table with only such a column is refused, with an error that lists these meanings.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scaling.tables.names import (
    LOGARITHMS,
    NAMES,
    PRODUCT_NAMES,
    WORDS,
    Column,
    parse_text_unit,
    recognize,
    split_words,
)

#: Combinations of columns whose product is the number of tokens; names.toml defines the kinds.
PRODUCTS = (
    ("steps", "batch_tokens"),
    ("steps", "global_batch", "length"),
    ("samples", "length"),
)

TIMES = " * "


@dataclass(frozen=True)
class Match:
    """The chosen column for each name of `Runs`, and the columns that could be read instead."""

    chosen: dict[str, Column]
    #: Columns that should contain the same numbers, so they must agree with the chosen column.
    rivals: dict[str, list[Column]]
    #: Columns that count another kind of parameters, and less specific losses.
    alternatives: dict[str, list[Column]]


def match_columns(present: Sequence[str], named: Mapping[str, str], source: str) -> Match:
    """Return the columns of a table that match the names of `Runs`.

    `named` contains the user's choices. Raises `ValueError` if a column is missing or if two
    columns are equally likely.
    """
    if unknown := set(named) - set(NAMES):
        raise ValueError(f"expected names among {list(NAMES)} in columns=…, got {sorted(unknown)}")
    result = Match({}, {}, {})
    for quantity in NAMES:
        if quantity in named:
            name = named[quantity]
            if name not in present:
                raise ValueError(f"{source} has no column {name!r}; it has {list(present)}")
            if other := next((k for k, c in result.chosen.items() if c.name == name), None):
                raise ValueError(f"columns={{…}}: {name!r} cannot be both {other} and {quantity}")
            result.chosen[quantity] = recognize(name, quantity) or Column(name)
            continue
        # A name that the user chose for another quantity, such as the loss "c", is not this one.
        free = [name for name in present if name not in named.values()]
        likely = [c for name in free if (c := recognize(name, quantity))]
        if likely:
            _choose(quantity, likely, source, result)
    if "loss" not in result.chosen or len(result.chosen) < 3:
        missing = [k for k in ("loss", "tokens", "parameters", "compute") if k not in result.chosen]
        raise ValueError(
            f"{source} has columns {list(present)}; expected a loss and two of parameters, tokens"
            f" and compute, recognized {sorted(result.chosen)}; name another column with"
            f" columns={{{missing[0]!r}: '…'}}{_format_bytes_remedy(present)}"
            f"{_format_logarithm_remedy(present, missing)}"
        )
    return result


def _format_logarithm_remedy(present: Iterable[str], missing: Container[str]) -> str:
    """Return the remedies for columns of logarithms of missing quantities; empty without any."""
    remedies = []
    for name in present:
        words = split_words(name)
        start = next((i for i, word in enumerate(words) if word in LOGARITHMS), len(words))
        stem = " ".join(words[start + 1 :])
        quantity = next((k for k in NAMES if k in missing and recognize(stem, k)), "")
        if not quantity:
            continue
        base = {"log10": "10", "log2": "2", "ln": "e"}.get(words[start], "base")
        remedies.append(
            f"; replace the logarithms {name!r} by a column {stem!r} of {base} ** {name!r}, or"
            f" confirm numbers that are not logarithms with columns={{{quantity!r}: {name!r}}}"
        )
    return "".join(remedies)


def _format_bytes_remedy(present: Iterable[str]) -> str:
    """Return the remedy if a column is a size of text, such as bytes; otherwise an empty string."""
    for name in present:
        if parse_text_unit(name):
            return (
                f"; if {name!r} is the size of the text, pass columns={{'tokens': {name!r}}} and"
                " units={'tokens': …} with the tokens that your tokenizer makes of one unit"
            )
    return ""


def _choose(quantity: str, likely: list[Column], source: str, result: Match) -> None:
    """Choose the most specific candidate column; record the others as rivals or alternatives.

    Raises `ValueError` if several candidates are equally specific.
    """
    preferred = _select_preferred(likely)
    best_rank = max(column.rank for column in preferred)
    best = [column for column in preferred if column.rank == best_rank]
    if len(best) > 1:
        raise ValueError(
            f"{source}: {format_ambiguity(quantity, [column.name for column in best])}"
        )
    result.chosen[quantity] = best[0]
    result.rivals[quantity] = []
    result.alternatives[quantity] = []
    for column in likely:
        if column is best[0]:
            continue
        if quantity != "loss" and (column in preferred or column.is_letter):
            result.rivals[quantity].append(column)
        elif not column.is_letter:
            result.alternatives[quantity].append(column)


def format_ambiguity(quantity: str, names: Sequence[str]) -> str:
    """Return the message that several columns may be a quantity, and how to choose one."""
    readings = " or ".join(f"columns={{{quantity!r}: {name!r}}}" for name in names)
    return f"columns {list(names)} may each be the {quantity}; choose one with {readings}"


def _select_preferred(likely: list[Column]) -> list[Column]:
    """Return the columns of the kind that C = 6 N D needs, without single letters if possible.

    Active parameters of a mixture of experts are preferred to all parameters, because only active
    parameters cause compute. Parameters with embeddings are preferred to those without.
    """
    if any("active" in c.kinds for c in likely):
        likely = [c for c in likely if "active" in c.kinds]
    if any("non-embedding" not in c.kinds for c in likely if not c.is_letter):
        likely = [c for c in likely if "non-embedding" not in c.kinds]
    return [c for c in likely if not c.is_letter] or likely


def find_token_factors(present: Sequence[str], named: Mapping[str, str]) -> list[str]:
    """Return the columns whose product is the number of tokens; empty if tokens are a column.

    The user may name the product, as in `{"tokens": "steps * batch"}`. Otherwise a product is used
    only if the table has neither tokens nor compute. Raises `ValueError` if several products are
    possible, if the meaning of a batch size is unclear, or if a named factor is missing.
    """
    name = named.get("tokens", "")
    if name in present or (name and TIMES not in name):
        return []
    if name:
        if unknown := [factor for factor in name.split(TIMES) if factor not in present]:
            raise ValueError(f"columns['tokens'] = {name!r}: there are no columns {unknown}")
        return name.split(TIMES)
    if "compute" in named or any(recognize(p, k) for p in present for k in ("tokens", "compute")):
        return []
    by_kind = _group_by_kind(present)
    products = [p for p in PRODUCTS if all(by_kind[kind] for kind in p)]
    if not products and by_kind["steps"] and by_kind["batch"]:
        factors = [by_kind[kind][0] for kind in ("steps", "batch", "length") if by_kind[kind]]
        batch = by_kind["batch"][0]
        condition = "if it is that of a step, pass"
        if {*split_words(batch)} & {"device", "micro", "local"}:
            factors += ["accumulation_steps", "devices"]
            condition = "if it is that of one device, add columns of these names, and pass"
        raise ValueError(
            f"column {batch!r} may be the batch of one device or of a whole step, in sequences or"
            f" in tokens: {condition} columns={{'tokens': {TIMES.join(factors)!r}}}, for example;"
            " otherwise add a column of tokens"
        )
    if not products:
        return []
    repeated = [by_kind[kind] for kind in products[0] if len(by_kind[kind]) > 1]
    if repeated or len(products) > 1:
        readings = repeated[0] if repeated else [n for p in products for k in p for n in by_kind[k]]
        raise ValueError(
            f"columns {readings} may each be a factor of the tokens: choose the factors with"
            " columns={'tokens': 'steps * batch_tokens'}, for example"
        )
    return [by_kind[kind][0] for kind in products[0]]


def list_token_products(present: Sequence[str]) -> list[list[str]]:
    """Return the factors of each product that is the number of tokens of the whole training."""
    by_kind = _group_by_kind(present)
    products = [[by_kind[kind] for kind in kinds] for kinds in PRODUCTS]
    return [[names[0] for names in p] for p in products if all(len(names) == 1 for names in p)]


def _group_by_kind(present: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns of each kind of factor."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in PRODUCT_NAMES}
    for name in present:
        if kind := classify_factor(name):
            by_kind[kind].append(name)
    return by_kind


def classify_factor(name: str) -> str:
    """Return the kind of factor that a column name stands for, or "" if it is not a factor.

    The kinds are the keys of `PRODUCT_NAMES`, such as "steps" for `train/global_step`. The kind is
    that of the longest known suffix of the name. Names with a word such as "warmup" have none, and
    neither has wandb's `_step`, which may count calls of its logger.
    """
    words = split_words(name)
    if {*words} & {*WORDS["no_factors"]} or name.split(".")[-1] == "_step":
        return ""
    stems = ["".join(words[start:]) for start in range(len(words))]
    for stem in stems:
        for kind, names in PRODUCT_NAMES.items():
            if stem in names:
                return kind
    return ""
