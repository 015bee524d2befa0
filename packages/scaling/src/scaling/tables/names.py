"""Which column is the parameters, the tokens, the compute and the loss.

Notable: the most telling name wins, so `train_tokens` before a `d` that may be a width; what a
name says besides (a unit, that embeddings are not counted, bits instead of nats) is kept.
"""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

_DATA: dict[str, dict[str, str]] = tomllib.loads(
    files("scaling.tables").joinpath("names.toml").read_text("utf-8")
)
NAMES, SWEPT = ({k: v.split() for k, v in _DATA[t].items()} for t in ("names", "sweeps"))
UNITS = {word: float(unit) for unit, words in _DATA["units"].items() for word in words.split()}
_WORDS = {kind: words.split() for kind, words in _DATA["words"].items()}
HELD_OUT, NO_LOSS, NO_TOKENS, SAYS_NOTHING, RATES, SETS, *_MORE = _WORDS.values()
REPETITIONS, PARTS, NO_COMPUTE, PATHS, VAGUE = _MORE
STATES = {kind: frozenset(words.split()) for kind, words in _DATA["states"].items()}
OTHERS = {
    ours: {"token", *(name for kind in NAMES if kind != ours for name in NAMES[kind])}
    for ours in NAMES
}
PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18, "z": 1e21, "y": 1e24}
PETAFLOP_DAY = 86_400e15
FLOPS = re.compile("([kmgtpezy])(?:ilo|ega|iga|era|eta|xa|etta|otta)?flops?")
LOGARITHMS = ("log", "ln", "log2", "log10", "logn", "logd", "logc")

EMBEDDINGS = "(?:emb|embd|embed|embedding)s?"
KINDS = (
    ("non-embedding", f"(?:non?|w/?o|without|excl?|excluding|exclude){EMBEDDINGS}"),
    ("active", "activ(?:e|ated)"),
    ("total", "total"),
)


@dataclass(frozen=True)
class Column:
    """A column that was recognized, and what its name says of its numbers."""

    name: str
    unit: float = 1.0
    said: str = ""
    """In words: "non-embedding", "bits per byte", "perplexity", …; empty if nothing."""
    rank: float = 0.0
    kinds: frozenset[str] = frozenset()
    """Kinds of parameters that the name says it counts: "non-embedding", "active", "total"."""
    letter: bool = False
    """Whether the name is a single letter, which may stand for layers or a width as well."""


@dataclass(frozen=True)
class Match:
    """The columns of a table by our names, and the columns that could be read instead."""

    found: dict[str, Column]
    rivals: dict[str, list[Column]]
    """Columns that claim to hold the same numbers; they must agree with the column that is used."""
    other: dict[str, list[Column]]
    """Columns of another kind of parameters, or losses that are less to the point."""


def match(present: Sequence[str], given: Mapping[str, str], source: str) -> Match:
    """Match columns to our names; `ValueError` if there are too few or two are equally likely."""
    if unknown := set(given) - set(NAMES):
        raise ValueError(f"columns names {sorted(unknown)}; it may name {list(NAMES)}")
    found: dict[str, Column] = {}
    rivals: dict[str, list[Column]] = {}
    other: dict[str, list[Column]] = {}
    for ours in NAMES:
        if ours in given:
            if given[ours] not in present:
                raise ValueError(f"{source} has no column {given[ours]!r}; it has {list(present)}")
            found[ours] = recognize(given[ours], ours) or Column(given[ours])
            continue
        likely = [c for name in present if (c := recognize(name, ours))]
        if not likely:
            continue
        pool = _preferred(likely)
        best = max(c.rank for c in pool)
        top = [c for c in pool if c.rank == best]
        if len(top) > 1:
            raise ValueError(f"{source}: {ambiguous(ours, [c.name for c in top])}")
        found[ours] = top[0]
        rest = [c for c in likely if c is not top[0]]
        rivals[ours] = [c for c in rest if (c in pool or c.letter) and ours != "loss"]
        other[ours] = [c for c in rest if c not in rivals[ours] and not c.letter]
    if "loss" not in found or len(found) < 3:
        raise ValueError(
            f"{source} has columns {list(present)}; needed are loss and two of parameters, tokens "
            f"and compute, found {sorted(found)}; name the others with columns={{'loss': '…'}}"
        )
    return Match(found, rivals, other)


def ambiguous(ours: str, names: Sequence[str]) -> str:
    """Return that each of these columns may be the one, and how to say which is."""
    readings = " or ".join(f"columns={{{ours!r}: {name!r}}}" for name in names)
    return f"columns {list(names)} may each be the {ours}; say which with {readings}"


def _preferred(likely: list[Column]) -> list[Column]:
    """Return the columns of the kind that C = 6 N D needs, named by more than a letter if any are.

    Active parameters of a mixture of experts come before all of them, since only they compute; with
    embeddings comes before without.
    """
    if any("active" in c.kinds for c in likely):
        likely = [c for c in likely if "active" in c.kinds]
    if any("non-embedding" not in c.kinds for c in likely if not c.letter):
        likely = [c for c in likely if "non-embedding" not in c.kinds]
    return [c for c in likely if not c.letter] or likely


def is_known(name: str) -> bool:
    """Whether a name is one of those that are looked for."""
    return any(recognize(name, ours) for ours in NAMES)


def recognize(name: str, ours: str) -> Column | None:
    """The column as one of ours, or None."""
    words = [word for word in _words(name) if word != "in"]
    if ours == "loss":
        return _loss(name, words)
    if not words or ("per" in words and words[-1] in RATES) or "mfu" in words:
        return None
    if ours == "compute" and {*NO_COMPUTE} & set(words):
        return None
    if ours == "tokens" and {*HELD_OUT, *NO_TOKENS} & set(words):
        return None
    if words[0] in LOGARITHMS:
        return None
    unit, said = 1.0, ""
    if ours == "compute":
        joined = "".join(words)
        if days := re.search(r"(?:petaflops?|pf|pflops?)s?days?$", joined):
            return Column(name, PETAFLOP_DAY, "petaflop/s-days", 8.0 + days.start() / 100)
        for count in (2, 1):
            if scaled := FLOPS.fullmatch("".join(words[-count:])):
                unit, said = PREFIXES[scaled[1]], f"in {scaled[0]}"
                words = [*words[:-count], "flops"]
                break
    # Another unit stands at the end: params_B, tokens (billions), C [1e18].
    for end in range(len(words) - 1, 0, -1):
        tail = "".join(words[end:])
        power = re.fullmatch(r"1?e(\d+)", tail)
        if tail in UNITS or power:
            unit = 10.0 ** int(power[1]) if power else UNITS[tail]
            words, said = words[:end], f"in units of {unit:g}"
            break
    kinds: frozenset[str] = frozenset()
    if ours == "parameters":
        words, kinds = _without_kinds(words)
        if set(words[:-1]) & {*PARTS}:
            return None
    if ours == "tokens":
        words = [word for word in words if word != "total"]
    for start in range(len(words)):
        # A path is shortened from its front: throughput/total_tokens, config.model.n_params.
        stem = "".join(words[start:])
        # D/N and tokens/params are ratios of two of ours, not paths.
        before = words[:start]
        if stem in NAMES[ours] and not {*before} & OTHERS[ours]:
            # batch_size and time_budget are other things; config.size is a path.
            if stem in VAGUE and not {*before} <= {*PATHS, *UNITS}:
                return None
            last = before[-1] if before else ""
            power = re.fullmatch(r"1?e(\d+)", last)
            if power or (len(last) > 3 and last in UNITS):  # 1e18 FLOPs, billion tokens
                unit = 10.0 ** int(power[1]) if power else UNITS[last]
                said = f"in units of {unit:g}"
            said = ", ".join([*sorted(kinds), *filter(None, [said])])
            rank = len(stem) - start / 10
            return Column(name, unit, said, rank, kinds, len(stem) == 1 and not kinds)
    return None


def _without_kinds(words: list[str]) -> tuple[list[str], frozenset[str]]:
    """Return the words that do not say which parameters are counted, and the kinds that they say.

    A kind may be several words (`non_embedding_params`) or part of one (`nonembedding`).
    """
    text, kinds = " ".join(words), set()
    for kind, form in KINDS:
        spaced = form.replace(EMBEDDINGS, f" ?{EMBEDDINGS}")
        text, count = re.subn(rf"(?:^|(?<= )|(?<=n)){spaced}(?= |$|param)", " ", text)
        if count:
            kinds.add(kind)
    return text.split(), frozenset(kinds)


def _loss(name: str, words: list[str]) -> Column | None:
    joined = "".join(words)
    kinds = {
        "perplexity": r"ppl|perplexity",
        "bits per byte": "bpb|bitsperbyte",
        "bits per character": "bpc",
    }
    said = next((kind for kind, form in kinds.items() if re.search(form, joined)), "")
    unit = 1.0
    # Not the loss of weights of so many bits.
    counted = re.search(r"(?:^| )\d+ bits?\b", " ".join(words))
    if not said and not counted and {"bits", "bitspertoken", "bpt"} & {*words, joined}:
        said, unit = "bits, turned into nats", math.log(2)
    if set(words) & {*NO_LOSS}:
        return None
    units = {"nats", "bits"} if unit != 1 or "nats" in words else set()
    plain = [w for w in words if w not in {*HELD_OUT, *SAYS_NOTHING, *units}]
    core = "".join(plain)
    if core not in NAMES["loss"]:
        # One corpus of several, say eval/c4/loss; taken only if there is no other.
        if not re.search("loss|crossentropy|bpb|bpt|bitspertoken|perplexity|ppl", joined):
            return None
        rank = 0.0
    else:
        rank = 20.0 + len(core) / 10
    told = [h for h in HELD_OUT if h in words or joined.startswith(h)]
    if told:
        rank += 10.0 - HELD_OUT.index(told[0]) / 10
    elif "train" in words or "training" in words or joined.startswith("train"):
        rank -= 10.0
        said = ("training " + said).strip()
    # Nats before bits, bits before perplexity.
    rank -= {"": 0.0, "training": 0.0}.get(said, 3.0)
    return Column(name, unit, said, rank)


def _words(name: str) -> list[str]:
    """Lower-case words of snake_case, camelCase, paths and brackets."""
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    return [w for w in re.split(r"[^a-z0-9.]+|(?<!\d)\.|\.(?!\d)", spaced.lower()) if w]
