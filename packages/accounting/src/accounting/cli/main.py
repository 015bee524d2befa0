"""The cost of a language model before it runs.

    python -m accounting plan MODEL --gpus 8 --hardware H100 --tokens 1T  search for the best plan
    python -m accounting MODEL --gpus 64 --tp 8                           cost of one plan
    python -m accounting serve MODEL --hardware H100 --seq 8192           capacity for inference
    python -m accounting diff MODEL MODEL                                 compare two models

MODEL is a config.json, its folder, or sizes such as
`layers=32,d_model=4096,heads=32,vocab_size=32000`. `--hardware` takes a name or a file.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accounting import checks
from accounting.breakdown import binary_size
from accounting.cli.questions import amount, differences, read_model, stored_dtype
from accounting.cli.report import as_text, report
from accounting.cli.serving import serving
from accounting.hardware import HARDWARE, find
from accounting.plan import Plan
from accounting.precision import PRECISIONS
from accounting.search.answer import plan_for
from accounting.workload import Workload

#: Options that set fields of a plan.
AXES = {
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
_QUESTIONS = ("plan", "serve", "diff")
_OPTIONS: dict[str, dict[str, Any]] = {
    "gpus": {"type": int, "help": "total number of devices"},
    "hardware": {"default": "H100", "help": ", ".join(HARDWARE)},
    "tokens": {"type": amount, "default": 1e12, "help": "1T, 300B or 1e12"},
    "seq": {"type": int, "default": 4096},
    "batch": {"type": int, "help": "sequences per step"},
    "memory": {"type": float, "help": "memory per device in GB"},
    "price": {"type": float, "help": "USD per device-hour"},
    "precision": {"help": ", ".join(PRECISIONS)},
    "time-limit": {"type": float, "help": "seconds after which the best plan so far is printed"},
    "explain": {"action": "store_true", "help": "print every derivation"},
    "compiled": {"action": "store_true", "help": "use torch.compile"},
    "transformers": {"action": "store_true", "help": "eager modules of Hugging Face transformers"},
    "loss-chunks": {"type": int, "default": 1, "help": "chunks of head and cross-entropy"},
    "weights": {
        "default": "bf16",
        "help": "dtype of the weights, or that of the config.json",
    },
    "cache": {"default": "bf16", "help": "dtype of the cache"},
    "json": {"action": "store_true"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 1 if the model does not fit in memory, and 2 for invalid options."""
    words = list(sys.argv[1:] if argv is None else argv)
    questions = dict(zip(_QUESTIONS, (_plan, _serve, _diff), strict=True))
    verb = words.pop(0) if words and words[0] in questions else ""
    try:
        first = words[0] if words and not verb else "/"
        if "/" not in first and "=" not in first and not Path(first).exists():
            near = checks.nearest(first, _QUESTIONS)
            if near:
                raise ValueError(f"expected a question or a model, got {first!r}{near}")
        return questions[verb](words) if verb else _report(words)
    except BrokenPipeError:
        return 0
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser(verb: str, about: str | None, options: str, *, axes: bool = False) -> Any:
    parser = argparse.ArgumentParser(
        prog=f"python -m accounting {verb}".rstrip(),
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", nargs=2 if verb == "diff" else None)
    for option in options.split():
        parser.add_argument(f"--{option}", **_OPTIONS[option])
    for option, (field, kind, text) in AXES.items() if axes else ():
        parser.add_argument(f"--{option}", dest=field, type=kind, help=text)
    return parser


def _options(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse the options; an unknown option raises `ValueError` with the nearest known one."""
    options, unknown = parser.parse_known_args(words)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        near = checks.nearest(unknown[0].split("=")[0], [*known, *_QUESTIONS])
        raise ValueError(f"expected an option of {parser.prog}, got {unknown[0]}{near}; see --help")
    return options


def _fixed_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a plan that were passed as options."""
    fields = {field: getattr(options, field) for field, *_ in AXES.values()}
    return {field: value for field, value in fields.items() if value is not None}


def _plan(words: Sequence[str]) -> int:
    """Search all axes for the fastest plan, and print its memory, duration and price."""
    names = "gpus hardware tokens seq batch memory price precision time-limit json"
    options = _options(_parser("plan", _plan.__doc__, names, axes=True), words)
    if options.gpus is None:
        raise ValueError("expected the number of devices, got none; pass --gpus")
    answer = plan_for(
        read_model(options.model),
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
        **_fixed_fields(options),
    )
    print(json.dumps(answer.to_dict(), indent=1) if options.json else answer)
    return 0


def _show_progress(computed: int, plans: int) -> None:
    if computed % 20 == 0:
        print(f"\r{computed:,} of at most {plans:,} plans", end="\r", file=sys.stderr)


def _serve(words: Sequence[str]) -> int:
    """Print the memory and speed of inference: cache, concurrent sequences, time per token."""
    names = "gpus hardware seq batch weights cache json"
    parser = _parser("serve", _serve.__doc__, names)
    parser.add_argument("--pp", dest="pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--ep", type=int, default=1, help="expert parallelism; only 1 is supported")
    parser.set_defaults(gpus=1, seq=8192, batch=1, weights=None)
    options = vars(_options(parser, words))
    expert = options.pop("ep")
    if expert != 1:
        raise ValueError(
            f"expected --ep 1, got {expert}; serve splits every expert over the tensor-parallel "
            "devices and does not model expert parallelism"
        )
    as_json = options.pop("json")
    name = options.pop("model")
    if options["weights"] is None:
        options["weights"] = stored_dtype(name)
    result = serving(read_model(name), **options)
    rows = [f"{name.replace('_', ' '):<34}{value:>22,.6g}" for name, value in result.items()]
    rows.append(
        "times from the roofline to the widest known error of training steps; no published "
        "inference run was compared"
    )
    fits = result["sequences_at_once"] >= options["batch"]
    if not fits:
        needed = result["devices_needed"]
        remedy = (
            f"{needed:,.0f} of them have room"
            if needed
            else "no number that divides the heads has room; give smaller dtypes, or fewer tokens"
        )
        rows.append(
            f"DOES NOT FIT: {binary_size(result['weights_bytes'])} of weights and "
            f"{binary_size(result['cache_bytes_per_sequence'])} of one sequence's cache, for batch="
            f"{options['batch']}, in "
            f"{binary_size(result['memory_bytes'])}, nine tenths of {options['gpus']} "
            f"{options['hardware']}; {remedy}"
        )
    print(json.dumps(result, indent=1) if as_json else "\n".join(rows))
    return 0 if fits else 1


def _diff(words: Sequence[str]) -> int:
    """Compare two models."""
    options = _options(_parser("diff", _diff.__doc__, "seq json"), words)
    first, second = (read_model(text) for text in options.model)
    rows = [*differences(first, second, seq=options.seq)]
    if options.json:
        result = [{"cost": row.name, "first": row.first, "second": row.second} for row in rows]
        print(json.dumps(result, indent=1))
        return 0
    print(f"{'':<34}{first.name[:23]:>24}{second.name[:23]:>24}{'ratio':>9}")
    for row in rows:
        ratio = f"{row.second / row.first:9.3f}" if row.first else f"{'-':>9}"
        print(f"{row.name:<34}{row.show(row.first):>24}{row.show(row.second):>24}{ratio}")
    return 0


def _plan_of_options(options: argparse.Namespace) -> tuple[Plan, int]:
    """Return the plan that the options describe, and its batch."""
    fixed = _fixed_fields(options)
    if fixed.get("schedule") == "interleaved":
        fixed.setdefault("virtual_stages", 2)
    # Without a batch or a number of micro-batches, each stage has one micro-batch.
    if options.batch is None:
        fixed.setdefault("microbatches", fixed.get("pipeline", 1))
    sequence_parallel = fixed.get("tensor", 1) > 1
    plan = Plan(devices=options.gpus or 0, sequence_parallel=sequence_parallel, **fixed)
    batch = plan.data * plan.microbatches if options.batch is None else options.batch
    return plan, batch


def _report(words: Sequence[str]) -> int:
    names = "gpus batch seq precision hardware compiled transformers loss-chunks"
    options = _options(_parser("", __doc__, f"{names} explain json", axes=True), words)
    for name in ("gpus", "batch"):
        if getattr(options, name) is not None:
            checks.whole(name, getattr(options, name))
    model = read_model(options.model)
    device = find(options.hardware)
    precision = options.precision
    if precision is None:
        precision = "mixed_bf16" if "bf16" in device.peaks else "mixed_fp16"
    plan, batch = _plan_of_options(options)
    work = Workload(
        batch=batch,
        seq=options.seq,
        precision=precision,
        compiled=options.compiled,
        transformers=options.transformers,
        loss_chunks=options.loss_chunks,
    )
    result = report(model, plan, work, hardware=device)
    print(json.dumps(result.to_dict(), indent=1) if options.json else as_text(result))
    if options.explain and not options.json:
        print("\n" + "\n\n".join(cost.explain() for _, _, cost, _ in result.costs()))
    return 0 if result.fits else 1
