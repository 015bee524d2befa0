"""The cost of a language model before it runs.

    python -m accounting plan MODEL --gpus 8 --hardware H100 --tokens 1T  search for the best plan
    python -m accounting serve MODEL --hardware H100 --seq 8192           memory and time to serve
    python -m accounting diff MODEL MODEL                                 compare two models

MODEL is a config.json, its folder, or sizes such as
`layers=32,d_model=4096,heads=32,vocab_size=32000`. `--hardware` takes a name or a file.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from accounting import checks
from accounting.breakdown import format_bytes, format_count
from accounting.cli.questions import iter_differences, parse_amount, read_model, read_stored_dtype
from accounting.cli.serving import estimate_serving
from accounting.hardware import HARDWARE
from accounting.precision import PRECISIONS
from accounting.search.answer import plan_for


def _parse_int(text: str) -> int:
    """Return the integer in a text; raise `ArgumentTypeError` with the remedy otherwise.

    Suffixes are refused, because 128k means 131072 in names of models, and 128000 elsewhere.
    """
    exponent = {"k": 1, "m": 2}.get(text[-1:].lower())
    if exponent and text[:-1].isdecimal():
        binary, decimal = (int(text[:-1]) * base**exponent for base in (1024, 1000))
        raise argparse.ArgumentTypeError(
            f"expected an integer, got {text!r}, whose suffix is ambiguous; write {binary} or "
            f"{decimal}"
        )
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


#: Options that fix a field of a plan, each with the field, its type and its help text.
AXES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "tp": ("tensor", _parse_int, "tensor parallel"),
    "pp": ("pipeline", _parse_int, "pipeline stages"),
    "cp": ("context", _parse_int, "context parallel"),
    "ep": ("expert", _parse_int, "expert parallel"),
    "zero": ("zero", _parse_int, "ZeRO stage; 3 is FSDP"),
    "microbatches": ("microbatches", _parse_int, "micro-batches per data rank"),
    "schedule": ("schedule", str, "gpipe, 1f1b or interleaved"),
    "virtual-stages": ("virtual_stages", _parse_int, "chunks per interleaved stage"),
    "recompute": ("recompute", str, "none, selective or full"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 1 if `serve` finds too little memory, 2 for an error, 0 otherwise.

    argparse ends the process for `--help`, and for a value that an option cannot parse.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"plan": _plan, "serve": _serve, "diff": _diff}
    try:
        if not words or words[0] in ("-h", "--help"):
            print(__doc__)
            return 0
        checks.require_choice("the command", words[0], commands)
        return commands[words[0]](words[1:])
    except BrokenPipeError:
        return 0
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _build_parser(command: str, about: str | None, *, models: int = 1) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m accounting {command}", description=about, allow_abbrev=False
    )
    parser.add_argument("models", metavar="MODEL", nargs=models)
    parser.add_argument("--json", action="store_true")
    return parser


def _parse_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse the options; an unknown option raises `ValueError`."""
    options, unknown = parser.parse_known_args(words)
    if unknown:
        raise ValueError(f"expected an option of {parser.prog}, got {unknown[0]}; see --help")
    return options


def _plan(words: Sequence[str]) -> int:
    """Search all axes for the fastest plan, and print its memory, duration and price."""
    parser = _build_parser("plan", _plan.__doc__)
    parser.add_argument("--gpus", type=_parse_int, help="total number of devices")
    parser.add_argument("--hardware", default="H100", help=", ".join(HARDWARE))
    parser.add_argument(
        "--tokens", type=parse_amount, default=1e12, help="1e12, or 1T in powers of 1000"
    )
    parser.add_argument("--seq", type=_parse_int, default=4096)
    parser.add_argument("--batch", type=_parse_int, help="sequences per step")
    parser.add_argument("--memory", type=float, help="memory per device in GB")
    parser.add_argument("--price", type=float, help="USD per device-hour")
    parser.add_argument("--precision", help=", ".join(PRECISIONS))
    parser.add_argument(
        "--time-limit", type=float, help="seconds after which the best plan so far is printed"
    )
    for option, (field, kind, text) in AXES.items():
        parser.add_argument(f"--{option}", dest=field, type=kind, help=text)
    options = _parse_options(parser, words)
    if options.gpus is None:
        raise ValueError("expected the number of devices, got none; pass --gpus")
    fields = {field: getattr(options, field) for field, *_ in AXES.values()}
    answer = plan_for(
        read_model(options.models[0]),
        gpus=options.gpus,
        hardware=options.hardware,
        tokens=options.tokens,
        seq=options.seq,
        batch=options.batch,
        memory_bytes=None if options.memory is None else options.memory * 1e9,
        usd_per_hour=options.price,
        precision=options.precision,
        time_limit=options.time_limit,
        progress=_show_progress if sys.stderr.isatty() else None,
        **{field: value for field, value in fields.items() if value is not None},
    )
    print(json.dumps(answer.to_dict(), indent=1) if options.json else answer)
    return 0


def _show_progress(computed: int, plans: int) -> None:
    if computed % 20 == 0:
        print(f"\r{computed:,} of at most {format_count(plans, 'plan')}", end="\r", file=sys.stderr)


def _serve(words: Sequence[str]) -> int:
    """Print the memory and speed of inference: cache, concurrent sequences, time per token."""
    parser = _build_parser("serve", _serve.__doc__)
    parser.add_argument("--gpus", type=_parse_int, default=1, help="total number of devices")
    parser.add_argument("--hardware", default="H100", help=", ".join(HARDWARE))
    parser.add_argument("--seq", type=_parse_int, default=8192)
    parser.add_argument(
        "--batch", type=_parse_int, default=1, help="concurrent sequences, all replicas"
    )
    parser.add_argument("--weights", help="dtype of the weights; default: fp8 if stated, or bf16")
    parser.add_argument("--cache", default="bf16", help="dtype of the cache")
    parser.add_argument("--dp", dest="data", type=_parse_int, default=1, help="replicas")
    parser.add_argument("--ep", dest="expert", type=_parse_int, default=1, help="expert parallel")
    parser.add_argument("--pp", dest="pipeline", type=_parse_int, default=1, help="pipeline stages")
    options = _parse_options(parser, words)
    name = options.models[0]
    result = estimate_serving(
        read_model(name),
        gpus=options.gpus,
        hardware=options.hardware,
        seq=options.seq,
        batch=options.batch,
        weights=read_stored_dtype(name) if options.weights is None else options.weights,
        cache=options.cache,
        data=options.data,
        expert=options.expert,
        pipeline=options.pipeline,
    )
    rows = [f"{name.replace('_', ' '):<34}{value:>22,.6g}" for name, value in result.items()]
    rows.append(
        "The times range from the roofline to the widest known error of training steps. No "
        "published inference run was compared."
    )
    fits = result["sequences_at_once"] >= options.batch
    if not fits:
        needed = result["devices_needed"]
        remedy = (
            f"{format_count(needed, 'device')} would have room"
            if needed
            else "no number of devices has room; pass smaller dtypes or fewer tokens"
        )
        rows.append(
            f"DOES NOT FIT: {format_bytes(result['weights_bytes'])} of weights and "
            f"{format_bytes(result['cache_bytes_per_sequence'])} of one sequence's cache, for "
            f"batch={options.batch}, in {format_bytes(result['memory_bytes'])}, nine tenths of "
            f"{options.gpus} {options.hardware}; {remedy}"
        )
    print(json.dumps(result, indent=1) if options.json else "\n".join(rows))
    return 0 if fits else 1


def _diff(words: Sequence[str]) -> int:
    """Compare two models."""
    parser = _build_parser("diff", _diff.__doc__, models=2)
    parser.add_argument("--seq", type=_parse_int, default=4096)
    options = _parse_options(parser, words)
    first, second = (read_model(text) for text in options.models)
    rows = [*iter_differences(first, second, seq=options.seq)]
    if options.json:
        result = [{"cost": row.name, "first": row.first, "second": row.second} for row in rows]
        print(json.dumps(result, indent=1))
        return 0
    print(f"{'':<34}{first.name[:23]:>24}{second.name[:23]:>24}{'ratio':>9}")
    for row in rows:
        ratio = f"{row.second / row.first:9.3f}" if row.first else f"{'-':>9}"
        print(f"{row.name:<34}{row.show(row.first):>24}{row.show(row.second):>24}{ratio}")
    return 0
