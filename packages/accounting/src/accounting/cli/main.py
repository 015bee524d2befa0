"""The cost of a language model before it runs.

    python -m accounting plan MODEL --gpus 8 --hardware H100 --tokens 1T  search for the best plan
    python -m accounting serve MODEL --hardware H100 --seq 8192           memory and time to serve
    python -m accounting diff MODEL MODEL                                 compare two models

MODEL is a config.json, its folder, or sizes, which are fields of `accounting.Transformer`, such as
`layers=32,d_model=4096,heads=32,vocab_size=32000`. `--hardware` takes a name or a file.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from accounting.breakdown import format_bytes, format_count
from accounting.cli.questions import iter_differences, parse_amount, read_model, read_stored_dtype
from accounting.cli.serving import estimate_serving
from accounting.hardware import HARDWARE
from accounting.precision import PRECISIONS
from accounting.search.answer import plan_for

#: Options that fix a field of a plan, each with the field, its type and its help text.
AXES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "tp": ("tensor", int, "tensor parallel"),
    "pp": ("pipeline", int, "pipeline stages"),
    "cp": ("context", int, "context parallel"),
    "ep": ("expert", int, "expert parallel"),
    "zero": ("zero", int, "ZeRO stage; 3 is FSDP"),
    "microbatches": ("microbatches", int, "micro-batches per data rank"),
    "schedule": ("schedule", str, "gpipe, 1f1b or interleaved"),
    "virtual-stages": ("virtual_stages", int, "chunks per interleaved stage"),
    "recompute": ("recompute", str, "none, selective or full"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 1 if `serve` finds too little memory, 2 for an error, 0 otherwise.

    argparse ends the process for `--help`, and with status 2 for words that it cannot parse.
    """
    options = _build_parser().parse_args(argv)
    try:
        return int(options.run(options))
    except BrokenPipeError:
        return 0
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m accounting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add_command(
        name: str, run: Callable[[argparse.Namespace], int], models: int
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=run.__doc__, description=run.__doc__, allow_abbrev=False
        )
        command.add_argument("models", metavar="MODEL", nargs=models)
        command.add_argument("--json", action="store_true")
        command.set_defaults(run=run)
        return command

    plan = add_command("plan", _plan, models=1)
    plan.add_argument("--gpus", type=int, required=True, help="total number of devices")
    plan.add_argument("--hardware", default="H100", help=", ".join(HARDWARE))
    plan.add_argument(
        "--tokens", type=parse_amount, default=1e12, help="1e12, or 1T in powers of 1000"
    )
    plan.add_argument("--seq", type=int, default=4096)
    plan.add_argument("--batch", type=int, help="sequences per step")
    plan.add_argument("--memory", type=float, help="memory per device in GB")
    plan.add_argument("--price", type=float, help="USD per device-hour")
    plan.add_argument("--precision", help=", ".join(PRECISIONS))
    plan.add_argument(
        "--time-limit", type=float, help="seconds after which the best plan so far is printed"
    )
    for option, (field, kind, text) in AXES.items():
        plan.add_argument(f"--{option}", dest=field, type=kind, help=text)

    serve = add_command("serve", _serve, models=1)
    serve.add_argument("--gpus", type=int, default=1, help="total number of devices")
    serve.add_argument("--hardware", default="H100", help=", ".join(HARDWARE))
    serve.add_argument("--seq", type=int, default=8192)
    serve.add_argument("--batch", type=int, default=1, help="concurrent sequences, all replicas")
    serve.add_argument("--weights", help="dtype of the weights; default: fp8 if stated, or bf16")
    serve.add_argument("--cache", default="bf16", help="dtype of the cache")
    serve.add_argument("--dp", dest="data", type=int, default=1, help="replicas")
    serve.add_argument("--ep", dest="expert", type=int, default=1, help="expert parallel")
    serve.add_argument("--pp", dest="pipeline", type=int, default=1, help="pipeline stages")

    add_command("diff", _diff, models=2).add_argument("--seq", type=int, default=4096)
    return parser


def _plan(options: argparse.Namespace) -> int:
    """Search all axes for the fastest plan, and print its memory, duration and price."""
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


def _serve(options: argparse.Namespace) -> int:
    """Print the memory and speed of inference: cache, concurrent sequences, time per token."""
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
        rows.append(
            f"DOES NOT FIT: {format_bytes(result['weights_bytes'])} of weights and "
            f"{format_bytes(result['cache_bytes_per_sequence'])} of one sequence's cache, for "
            f"batch={options.batch}, in {format_bytes(result['memory_bytes'])}, nine tenths of "
            f"{options.gpus} {options.hardware}; pass more devices, smaller dtypes (--weights, "
            "--cache), or a smaller --batch or --seq"
        )
    print(json.dumps(result, indent=1) if options.json else "\n".join(rows))
    return 0 if fits else 1


def _diff(options: argparse.Namespace) -> int:
    """Compare two models."""
    first, second = (read_model(text) for text in options.models)
    rows = [*iter_differences(first, second, seq=options.seq)]
    if options.json:
        result = [{"cost": name, "first": left, "second": right} for name, left, right, _ in rows]
        print(json.dumps(result, indent=1))
        return 0
    print(f"{'':<34}{first.name[:23]:>24}{second.name[:23]:>24}{'ratio':>9}")
    for name, left, right, show in rows:
        ratio = f"{right / left:9.3f}" if left else f"{'-':>9}"
        print(f"{name:<34}{show(left):>24}{show(right):>24}{ratio}")
    return 0
