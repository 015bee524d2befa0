"""What a model costs, before it runs.

    python -m accounting plan MODEL --gpus 8 --hardware H100 --tokens 1T  the best plan for it
    python -m accounting MODEL --gpus 64 --tp 8                      what one plan costs
    python -m accounting serve MODEL --hardware H100 --seq 8192      what a device can serve
    python -m accounting diff MODEL MODEL                            two models, side by side
    python -m accounting measure this.toml                           a --hardware of this machine

MODEL is a config.json, the folder it is in, or sizes such as
`layers=32,d_model=4096,heads=32,vocab_size=32000`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accounting import checks
from accounting.breakdown import binary_size
from accounting.cli.questions import amount, differences, read_model, serving
from accounting.cli.report import as_html, as_text, report
from accounting.hardware import HARDWARE, find
from accounting.plan import Plan
from accounting.precision import PRECISIONS
from accounting.search.answer import no_room, plan_for
from accounting.search.plans import plans_that_fit, smallest_machine
from accounting.workload import Workload

AXES = {
    "tp": ("tensor", int, "tensor parallel"),
    "pp": ("pipeline", int, "pipeline stages"),
    "cp": ("context", int, "context parallel"),
    "ep": ("expert", int, "expert parallel"),
    "zero": ("zero", int, "ZeRO stage; 3 is FSDP"),
    "microbatches": ("microbatches", int, "pieces of a data rank's batch"),
    "schedule": ("schedule", str, "gpipe, 1f1b or interleaved"),
    "virtual-stages": ("virtual_stages", int, "chunks of an interleaved stage"),
    "recompute": ("recompute", str, "none, selective or full"),
    "offload": ("offload", str, "none, optimizer or activations"),
}
"""The options that give a plan's fields."""
_QUESTIONS = ("plan", "serve", "diff", "measure")
_OPTIONS: dict[str, dict[str, Any]] = {
    "gpus": {"type": int, "help": "devices in all"},
    "hardware": {"default": "H100", "help": ", ".join(HARDWARE)},
    "tokens": {"type": amount, "default": 1e12, "help": "1T, 300B or 1e12"},
    "seq": {"type": int, "default": 4096},
    "batch": {"type": int, "help": "sequences a step, in all"},
    "memory": {"type": float, "help": "GB a device, in place of its own"},
    "price": {"type": float, "help": "USD a device and hour"},
    "precision": {"help": ", ".join(PRECISIONS)},
    "efficiency": {"type": float, "help": "one share of the peak for all arithmetic"},
    "search": {"action": "store_true", "help": "choose what is not given; the fewest GPUs"},
    "explain": {"action": "store_true", "help": "print every derivation"},
    "compiled": {"action": "store_true", "help": "by torch.compile"},
    "loss-chunks": {"type": int, "default": 1, "help": "pieces of head and cross-entropy"},
    "html": {"type": Path, "help": "write one page with pictures"},
    "weights": {"default": "bf16", "help": "dtype of the weights"},
    "cache": {"default": "bf16", "help": "dtype of the cache"},
    "json": {"action": "store_true"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print an answer; 1 if the model does not fit, 2 if the question makes no sense."""
    words = list(sys.argv[1:] if argv is None else argv)
    questions = dict(zip(_QUESTIONS, (_plan, _serve, _diff, _measure), strict=True))
    verb = words.pop(0) if words and words[0] in questions else ""
    try:
        first = words[0] if words and not verb else "/"
        if "/" not in first and "=" not in first and not Path(first).exists():
            near = checks.nearest(first, _QUESTIONS)
            if near:
                raise ValueError(f"{first!r} is neither a question nor a model{near}")
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
    """What was asked for; an option that there is none of is answered with the nearest."""
    options, unknown = parser.parse_known_args(words)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        near = checks.nearest(unknown[0].split("=")[0], [*known, *_QUESTIONS])
        raise ValueError(f"{unknown[0]} is no option of {parser.prog}{near}; --help lists them")
    return options


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a plan that were asked for."""
    fields = {field: getattr(options, field) for field, *_ in AXES.values()}
    return {field: value for field, value in fields.items() if value is not None}


def _plan(words: Sequence[str]) -> int:
    """The fastest plan over all axes, what it holds, how long and for how much."""
    names = "gpus hardware tokens seq batch memory price precision json"
    options = _options(_parser("plan", _plan.__doc__, names, axes=True), words)
    if options.gpus is None:
        raise ValueError("gpus is None; say how many devices there are with --gpus")
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
        **_given(options),
    )
    print(json.dumps(answer.to_dict(), indent=1) if options.json else answer)
    return 0


def _serve(words: Sequence[str]) -> int:
    """What devices hold and do to serve a model: cache, sequences at once, time a token."""
    names = "gpus hardware seq weights cache json"
    parser = _parser("serve", _serve.__doc__, names)
    parser.set_defaults(gpus=1, seq=8192)
    options = vars(_options(parser, words))
    as_json = options.pop("json")
    found = serving(read_model(options.pop("model")), **options)
    rows = [f"{name.replace('_', ' '):<34}{value:>22,.6g}" for name, value in found.items()]
    if not found["sequences_at_once"]:
        needed = found["devices_needed"]
        remedy = (
            f"{needed:,.0f} of them have room"
            if needed
            else "no number that divides the heads has room; give smaller dtypes, or fewer tokens"
        )
        rows.append(
            f"DOES NOT FIT: {binary_size(found['weights_bytes'])} of weights and "
            f"{binary_size(found['cache_bytes_a_sequence'])} of one sequence's cache in "
            f"{binary_size(found['memory_bytes'])}, nine tenths of {options['gpus']} "
            f"{options['hardware']}; {remedy}"
        )
    print(json.dumps(found, indent=1) if as_json else "\n".join(rows))
    return 0 if found["sequences_at_once"] else 1


def _diff(words: Sequence[str]) -> int:
    """Two models, side by side."""
    options = _options(_parser("diff", _diff.__doc__, "seq json"), words)
    first, second = (read_model(text) for text in options.model)
    rows = [*differences(first, second, seq=options.seq)]
    if options.json:
        found = [{"cost": row.name, "first": row.first, "second": row.second} for row in rows]
        print(json.dumps(found, indent=1))
        return 0
    print(f"{'':<34}{first.name:>24}{second.name:>24}{'ratio':>9}")
    for row in rows:
        ratio = f"{row.second / row.first:9.3f}" if row.first else f"{'-':>9}"
        print(f"{row.name:<34}{row.show(row.first):>24}{row.show(row.second):>24}{ratio}")
    return 0


def _measure(words: Sequence[str]) -> int:
    """What this machine's products and memory reach, into a file that --hardware takes."""
    parser = argparse.ArgumentParser(
        prog="python -m accounting measure", description=_measure.__doc__
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = _options(parser, words)
    if options.file.suffix != ".toml":
        raise ValueError(f"file is {options.file}; its name must end in .toml")
    from accounting.time.measure import measured

    _write(options.file, measured(device=options.device))
    print(find(str(options.file)))
    return 0


def _write(path: Path, text: str) -> None:
    """Written beside and renamed, so that no half file is left behind."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _report(words: Sequence[str]) -> int:
    names = (
        "gpus batch seq precision hardware efficiency compiled loss-chunks search explain json html"
    )
    options = _options(_parser("", __doc__, names, axes=True), words)
    model, device, given = read_model(options.model), find(options.hardware), _given(options)
    precision = (
        options.precision
        if options.precision is not None
        else ("mixed_bf16" if "bf16" in device.peaks else "mixed_fp16")
    )
    if options.batch is not None:
        checks.whole("batch", options.batch)
    for name in ("gpus", "batch"):
        if getattr(options, name) is not None:
            checks.whole(name, getattr(options, name))
    about = {"hardware": device, "efficiency": options.efficiency}
    if options.search:
        batch = (options.gpus or 1) if options.batch is None else options.batch
        question = about | {"batch": batch, "seq": options.seq, "precision": precision} | given
        if options.gpus is None:
            found = smallest_machine(model, **question)
        else:
            found = plans_that_fit(model, devices=options.gpus, **question)
        if not found:
            raise ValueError(no_room(model, device, options.gpus, batch, options.seq, given))
        plan = found[0].plan
    else:
        if given.get("schedule") == "interleaved":
            given.setdefault("virtual_stages", 2)
        # Where neither they nor a batch are given, a micro-batch for each stage.
        if options.batch is None:
            given.setdefault("microbatches", given.get("pipeline", 1))
        split = given.get("tensor", 1) > 1
        plan = Plan(devices=options.gpus or 0, sequence_parallel=split, **given)
        batch = plan.data * plan.microbatches if options.batch is None else options.batch
    fused = {"compiled": options.compiled, "loss_chunks": options.loss_chunks}
    work = Workload(batch=batch, seq=options.seq, precision=precision, **fused)
    result = report(model, plan, work, **about)
    if options.html:
        _write(options.html, as_html(result))
    print(json.dumps(result.to_dict(), indent=1) if options.json else as_text(result))
    if options.explain and not options.json:
        print("\n" + "\n\n".join(cost.explain() for _, _, cost, _ in result.costs()))
        print("\n" + result.timeline.explain())
    return 0 if result.fits else 1
