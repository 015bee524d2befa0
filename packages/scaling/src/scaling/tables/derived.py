"""Tokens as a product of columns, such as steps times the batch size in tokens.

A column named only "batch size" may count one device, one accumulation step or a whole step, in
sequences or in tokens. A table with only such a column is refused, with an error that lists these
meanings.
"""

from collections.abc import Mapping, Sequence

from scaling.tables.names import PRODUCT_NAMES, WORDS, recognize, split_words

#: Combinations of columns whose product is the number of tokens; names.toml defines the kinds.
PRODUCTS = (
    ("steps", "batch_tokens"),
    ("steps", "global_batch", "length"),
    ("samples", "length"),
)

TIMES = " * "


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
