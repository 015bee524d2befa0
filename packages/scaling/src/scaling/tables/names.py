"""Recognition of the columns that contain parameters, tokens, compute and loss.

The most specific name has the highest rank: `train_tokens` is preferred to `d`, which may be a
width. A name may also state a unit, that embeddings are not counted, or that the loss is in bits;
see `Column`.
"""

import math
import re
import tomllib
from collections.abc import Container
from dataclasses import dataclass, replace
from importlib.resources import files

_DATA: dict[str, dict[str, str]] = tomllib.loads(
    files("scaling.tables").joinpath("names.toml").read_text("utf-8")
)


def _split_word_lists(table: str) -> dict[str, list[str]]:
    return {key: words.split() for key, words in _DATA[table].items()}


#: Recognized names of each column of `Runs`, in lower case without punctuation.
NAMES = _split_word_lists("names")

#: Recognized names of each column of a learning-rate sweep.
SWEEP_NAMES = _split_word_lists("sweeps")

#: Names of the factors of the number of tokens.
PRODUCT_NAMES = _split_word_lists("products")

#: Factor of each unit word.
UNITS = {word: float(unit) for unit, words in _split_word_lists("units").items() for word in words}

#: Number of bytes of each unit of a size of text; the difference between GB and GiB is ignored.
TEXT_UNITS = {
    w: float(unit) for unit, words in _split_word_lists("text_units").items() for w in words
}

#: Lists of words with a common meaning: see names.toml.
WORDS = _split_word_lists("words")

#: Words for the states of runs.
STATES = {kind: frozenset(words) for kind, words in _split_word_lists("states").items()}

#: For each column of `Runs`, the names of the other columns.
OTHER_NAMES = {
    quantity: {"token", *(name for kind in NAMES if kind != quantity for name in NAMES[kind])}
    for quantity in NAMES
}

PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18, "z": 1e21, "y": 1e24}
PETAFLOP_DAY = 86_400e15
FLOPS = re.compile("([kmgtpezy])(?:ilo|ega|iga|era|eta|xa|etta|otta)?flops?")
PETAFLOP_DAYS = re.compile(r"(?:petaflops?|pf|pflops?)s?days?$")
POWER_OF_TEN = re.compile(r"1?e(\d+)")
LOGARITHMS = {"log", "ln", "log2", "log10", "logn", "logd", "logc"}
#: Inside a path, such as run/log/tokens, `log` is a folder and `ln` a layer norm.
FOLDER = re.compile(r"(?<=[^a-z0-9])(?:log|ln)[/.]", re.IGNORECASE)

#: Names that are functions of a column, such as 1/tokens, 2*params, exp(loss) and loss - 1.69.
FUNCTION = re.compile(
    r"(?:^|.*[(*+ -])(?:\d+(?:\.\d+)? *[*/]|(?:exp|sqrt|square|inv|inverse) *\()"
    r"|.*loss *[-+] *(?:\d*\.\d+|e)$"
)

EMBEDDINGS = "(?:emb|embd|embed|embedding)s?"

#: Kinds of parameters that a name may state, and the pattern of each.
KINDS = (
    ("non-embedding", f"(?:non?|w/?o|without|excl?|excluding|exclude){EMBEDDINGS}"),
    ("with embeddings", f"(?:w|with|incl?|including|include){EMBEDDINGS}"),
    ("active", "activ(?:e|ated)"),
    ("total", "total"),
)

#: Rank of a usual name of a loss, with or without words such as "final" and "val".
FULL_LOSS_RANK = 20.0
#: Added to the rank of a held-out loss, and subtracted from the rank of a training loss.
HELD_OUT_RANK = 10.0
#: Added to the rank of a loss in another unit than nats.
OTHER_UNIT_RANK = -3.0

#: Added to the rank of a name with `macro` or `micro`, such as levanter's `eval/macro_loss`. A loss
#: without such a word is preferred.
AVERAGE_RANK = -1.0


@dataclass(frozen=True)
class Column:
    """A recognized column and the information in its name."""

    name: str
    unit: float = 1.0
    #: The information in the name: "non-embedding", "bits per byte", "perplexity", …
    description: str = ""
    #: Higher ranks are more specific.
    rank: float = 0.0
    #: Parameters that the column counts: "non-embedding", "with embeddings", "active", "total".
    kinds: frozenset[str] = frozenset()
    #: True if the name ends with a single letter, which may also stand for layers or a width.
    is_letter: bool = False


def recognize(name: str, quantity: str) -> Column | None:
    """Return the column if its name stands for `quantity`, a name of `Runs`; otherwise None."""
    if FUNCTION.match(name.lower()):
        return None
    # MLflow's prefix "params." must not make "params.tokens" look like a ratio.
    prefix, _, stem = name.removeprefix("data.").partition(".")
    if prefix in ("params", "metrics") and (column := recognize(stem, quantity)):
        return replace(column, name=name)
    words = [word for word in split_words(FOLDER.sub("", name)) if word != "in"]
    if quantity == "loss":
        return _recognize_loss(name, words)
    if not words or _is_other_measurement(words, quantity):
        return None
    if quantity == "compute" and (days := PETAFLOP_DAYS.search("".join(words))):
        return Column(name, PETAFLOP_DAY, "petaflop/s-days", 8.0 + days.start() / 100)
    words, unit, description = _split_unit(words, quantity)
    kinds: frozenset[str] = frozenset()
    if quantity == "parameters":
        words, kinds = _split_kinds(words)
        if set(words[:-1]) & {*WORDS["parts"]}:
            return None
    if quantity == "tokens":
        words = [word for word in words if word != "total"]
    return _match_stem(Column(name, unit, description, kinds=kinds), words, quantity)


def _match_stem(column: Column, words: list[str], quantity: str) -> Column | None:
    """Return a column with its rank if its last words are a known name; otherwise None."""
    for start in range(len(words)):
        # Paths such as throughput/total_tokens and config.model.n_params match by their last part.
        stem = "".join(words[start:])
        before = words[:start]
        # Ratios such as D/N and tokens/params also contain a name of another column.
        if stem not in NAMES[quantity] or {*before} & OTHER_NAMES[quantity]:
            continue
        # config.size is a path, but batch_size and time_budget are different quantities.
        if stem in WORDS["vague"] and not {*before} <= {*WORDS["paths"], *UNITS}:
            return None
        leading_unit = _parse_leading_unit(before[-1]) if before else None
        if leading_unit is not None:
            unit_text = f"in units of {leading_unit:g}"
            column = replace(column, unit=leading_unit, description=unit_text)
        parts = sorted(column.kinds)
        if column.description:
            parts.append(column.description)
        return replace(
            column,
            description=", ".join(parts),
            rank=len(stem) - start / 10,
            is_letter=len(stem) == 1 and not column.kinds,
        )
    return None


def _is_other_measurement(words: list[str], quantity: str) -> bool:
    """Return True if the words of a name describe a rate, a logarithm or another quantity."""
    if "per" in words and words[-1] in WORDS["rates"]:
        return True
    if "mfu" in words or LOGARITHMS & {*words}:
        return True
    if quantity == "compute":
        return bool({*WORDS["no_compute"]} & set(words))
    if quantity == "tokens":
        return bool({*WORDS["held_out"], *WORDS["no_tokens"]} & set(words))
    return False


def _split_unit(words: list[str], quantity: str) -> tuple[list[str], float, str]:
    """Return the words without a unit at the end, the unit, and its description.

    Examples of names with a unit are params_B, tokens (billions), C [1e18] and exaFLOPs.
    """
    unit = 1.0
    description = ""
    if quantity == "compute":
        for count in (2, 1):
            if scaled := FLOPS.fullmatch("".join(words[-count:])):
                unit = PREFIXES[scaled[1]]
                description = f"in {scaled[0]}"
                words = [*words[:-count], "flops"]
                break
    for end in range(len(words) - 1, 0, -1):
        tail = "".join(words[end:])
        power = POWER_OF_TEN.fullmatch(tail)
        if tail in UNITS or power:
            unit = 10.0 ** int(power[1]) if power else UNITS[tail]
            return words[:end], unit, f"in units of {unit:g}"
    return words, unit, description


def _parse_leading_unit(word: str) -> float | None:
    """Return the factor that a word before a name stands for; None if the word is not a unit.

    An example is 1e18 in "1e18 FLOPs".
    """
    if power := POWER_OF_TEN.fullmatch(word):
        return 10.0 ** int(power[1])
    return UNITS[word] if len(word) > 3 and word in UNITS else None


def _split_kinds(words: list[str]) -> tuple[list[str], frozenset[str]]:
    """Split off the words that name a kind of parameters; return the other words and the kinds.

    A kind may be several words (`non_embedding_params`) or a part of one (`nonembedding`).
    """
    text = " ".join(words)
    kinds = set()
    for kind, form in KINDS:
        spaced = form.replace(EMBEDDINGS, f" ?{EMBEDDINGS}")
        text, count = re.subn(rf"(?:^|(?<= )|(?<=n)){spaced}(?= |$|param)", " ", text)
        if count:
            kinds.add(kind)
    return text.split(), frozenset(kinds)


def _recognize_loss(name: str, words: list[str]) -> Column | None:
    if set(words) & {*WORDS["no_loss"], *LOGARITHMS}:
        return None
    if re.search(r"\bbase ?(?:2|10)\b", " ".join(words)):
        return None
    joined = "".join(words)
    description, unit = _parse_loss_unit(words)
    units = {"nats", "bits"} if unit != 1 or "nats" in words else set()
    ignored = {*WORDS["held_out"], *WORDS["says_nothing"], *units}
    core = "".join(word for word in words if word not in ignored)
    if core in NAMES["loss"]:
        rank = FULL_LOSS_RANK + len(core) / 10
    elif re.search("loss|crossentropy|bpb|bpt|bitspertoken|perplexity|ppl", joined):
        # The loss on one of several corpora, such as eval/c4/loss, is read only as a last resort.
        rank = 0.0
    else:
        return None
    held_out = [h for h in WORDS["held_out"] if h in words or joined.startswith(h)]
    is_nats = not description
    if held_out:
        rank += HELD_OUT_RANK - WORDS["held_out"].index(held_out[0]) / 10
    elif "train" in words or "training" in words or joined.startswith("train"):
        rank -= HELD_OUT_RANK
        description = f"training {description}".strip()
    # Nats are preferred to bits and perplexity.
    if not is_nats:
        rank += OTHER_UNIT_RANK
    if {"macro", "micro"} & {*words}:
        rank += AVERAGE_RANK
    return Column(name, unit, description, rank)


def _parse_loss_unit(words: list[str]) -> tuple[str, float]:
    """Return the unit in a loss's name and its factor to nats, which is 1 if not converted."""
    joined = "".join(words)
    if re.search("ppl|perplexity", joined):
        bases = [unit for unit in ("byte", "word", "char") if unit in joined]
        return " per ".join(["perplexity", *bases]), 1.0
    # A ratio may be written as bits per byte, bits/byte or bits_byte.
    if re.search("bpb|bits?(?:per)?byte", joined):
        return "bits per byte", 1.0
    if re.search("bpc|bits?(?:per)?char", joined):
        return "bits per character", 1.0
    # "4 bits" is the precision of the weights, not the unit of the loss.
    is_precision = re.search(r"(?:^| )\d+ bits?\b", " ".join(words))
    if not is_precision and {"bits", "bitspertoken", "bpt"} & {*words, joined}:
        return "bits, converted to nats", math.log(2)
    for unit in ("byte", "character", "char", "word"):
        if {unit, f"{unit}s"} & {*words} or f"per{unit}" in joined:
            return f"nats per {unit}", 1.0
    return "", 1.0


def parse_text_unit(name: str) -> float:
    """Return the bytes of one unit of a column with the size of the text; 0 for other columns."""
    return next((TEXT_UNITS[word] for word in split_words(name) if word in TEXT_UNITS), 0.0)


def find_set_word(name: str) -> str:
    """Return the word of a name that distinguishes data sets or groups of runs; empty if none.

    An example is "dataset" in `dataset_name`.
    """
    words = split_words(name)
    if words[-2:] == ["vocab", "size"]:
        return "vocab"
    if words[-1:] in (["name"], ["id"]):
        words = words[:-1]
    word = "modeltype" if words[-2:] == ["model", "type"] else "".join(words[-1:])
    return word if word in (*WORDS["sets"], *WORDS["labels"]) else ""


def is_rate_name(name: str) -> bool:
    """Return True if a name stands for a learning rate; a column `eta` is usually a time."""
    words = split_words(name)
    if "lr" in words or words == ["rate"]:
        return True
    # A name such as dropout_rate also ends with `rate`.
    return has_ending(name, {*SWEEP_NAMES["rate"]} - {"eta", "rate"})


def is_setting_name(name: str) -> bool:
    """Return True if a name ends with a setting, such as a learning rate or an optimizer."""
    # A column `eta` is usually the remaining time, and `b` may be anything.
    known = {*SWEEP_NAMES["rate"], *SWEEP_NAMES["batch_size"], *WORDS["settings"]} - {"eta", "b"}
    return has_ending(name, known)


def is_method_name(name: str) -> bool:
    """Return True if a name ends with a choice of the training recipe that is not a number."""
    words = split_words(name)
    while words[-1:] and words[-1] in WORDS["method_fillers"]:
        words = words[:-1]
    # Names such as "N_opt" and "is_opt" mean an optimum.
    if words[-1:] == ["opt"] and not {*words[:-1]} <= {"config", "args", "train", "training"}:
        return False
    return has_ending(" ".join(words), WORDS["methods"])


def is_planned_steps(name: str) -> bool:
    """Return True if a column of this name contains the planned number of steps of a run."""
    words = split_words(name)
    return has_ending(name, WORDS["planned_steps"]) and not {*words} & {*WORDS["no_factors"]}


def is_current_step(name: str) -> bool:
    """Return True if a column of this name contains the last step that a run has logged."""
    words = split_words(name)
    other = {*WORDS["no_factors"], "max", "total", "num"}
    return words[-1:] in (["step"], ["iter"], ["iteration"]) and not {*words} & other


def has_ending(name: str, stems: Container[str]) -> bool:
    """Return True if the last words of a name, without separators, are one of the stems."""
    words = split_words(name)
    return any("".join(words[i:]) in stems for i in range(len(words)))


def split_words(name: str) -> list[str]:
    """Return the words of a name in lower case, split at case changes, paths and brackets."""
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    return [w for w in re.split(r"[^a-z0-9.]+|(?<!\d)\.|\.(?!\d)", spaced.lower()) if w]
