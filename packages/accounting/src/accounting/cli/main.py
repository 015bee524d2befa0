"""What a model costs, before it runs.

    python -m accounting plan MODEL --gpus 8 --hardware H100 --tokens 1T  the best plan for it
    python -m accounting MODEL --gpus 64 --tp 8                      what one plan costs
    python -m accounting serve MODEL --hardware H100 --seq 8192      what a device can serve
    python -m accounting diff MODEL MODEL                            two models, side by side

MODEL is a config.json, the folder it is in, or sizes such as
`layers=32,d_model=4096,heads=32,vocab_size=32000`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accounting import checks
from accounting.cli.questions import AXES, QUESTIONS, read_model
from accounting.cli.report import as_html, as_text, report
from accounting.hardware import HARDWARE, Hardware, find
from accounting.model.transformer import Transformer
from accounting.plan import Plan
from accounting.precision import PRECISIONS
from accounting.search.plans import plans_that_fit, smallest_machine


def main(argv: Sequence[str] | None = None) -> int:
    """Print an answer; 1 if the model does not fit, 2 if the question makes no sense."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = words.pop(0) if words and words[0] in QUESTIONS else ""
    try:
        return QUESTIONS[verb](words) if verb else _report(words)
    except BrokenPipeError:
        return 0
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _report(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m accounting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--gpus", type=int, help="devices in all")
    parser.add_argument("--tp", type=int, help="tensor parallel")
    parser.add_argument("--pp", type=int, help="pipeline stages")
    parser.add_argument("--cp", type=int, help="context parallel")
    parser.add_argument("--ep", type=int, help="expert parallel")
    parser.add_argument("--zero", type=int, help="ZeRO stage; 3 is FSDP")
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--schedule", help="gpipe, 1f1b or interleaved")
    parser.add_argument("--virtual-stages", type=int, help="chunks of an interleaved stage")
    parser.add_argument("--recompute", help="none, selective or full")
    parser.add_argument("--offload", help="none, optimizer or activations")
    parser.add_argument(
        "--batch", type=int, help="sequences in all; one a micro-batch if not given"
    )
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--precision", help=", ".join(PRECISIONS))
    parser.add_argument("--hardware", default="H100", help=", ".join(HARDWARE))
    parser.add_argument("--efficiency", type=float, help="one share of the peak for all arithmetic")
    parser.add_argument(
        "--search",
        action="store_true",
        help="choose what is not given; the fewest GPUs without --gpus",
    )
    parser.add_argument("--explain", action="store_true", help="print every derivation")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--html", type=Path, help="write one page with stacked bars")
    return _run(parser.parse_args(words))


def _run(options: argparse.Namespace) -> int:
    model, device = read_model(options.model), find(options.hardware)
    precision = options.precision or ("mixed_bf16" if "bf16" in device.peaks else "mixed_fp16")
    given = {field: getattr(options, name.replace("-", "_")) for name, field in AXES.items()}
    given = {field: value for field, value in given.items() if value is not None}
    if given.get("schedule") == "interleaved" and not options.search:
        given.setdefault("virtual_stages", 2)
    if options.batch is not None:
        checks.whole("batch", options.batch)
    if options.search:
        batch = options.batch or options.gpus or 1
        plan = _searched(model, device, batch, options, precision, given)
    else:
        # Where neither they nor a batch are given, a micro-batch for each stage.
        stages = given.get("pipeline", 1)
        if options.batch is None:
            given.setdefault("microbatches", stages)
        if options.gpus is not None:
            checks.whole("gpus", options.gpus)
        plan = Plan(
            devices=options.gpus or 0, sequence_parallel=given.get("tensor", 1) > 1, **given
        )
        batch = options.batch or plan.data * plan.microbatches
    result = report(
        model,
        plan,
        hardware=device,
        batch=batch,
        seq=options.seq,
        precision=precision,
        efficiency=options.efficiency,
    )
    if options.html:
        # Written beside and renamed, so that no half page is left behind.
        beside = options.html.with_name(options.html.name + ".part")
        beside.write_text(as_html(result), encoding="utf-8")
        beside.replace(options.html)
    if options.json:
        print(json.dumps(result.to_dict(), indent=1))
    else:
        print(as_text(result))
        if options.explain:
            costs = (result.parameters, result.flops, result.memory, result.cache)
            print(
                "\n" + "\n\n".join(c.explain() for c in (*costs, result.traffic.wire, result.step))
            )
    return 0 if result.fits else 1


def _searched(
    model: Transformer,
    device: Hardware,
    batch: int,
    options: argparse.Namespace,
    precision: str,
    given: dict[str, Any],
) -> Plan:
    """The fastest plan that keeps what was given."""
    question: dict[str, Any] = {
        "hardware": device,
        "batch": batch,
        "seq": options.seq,
        "precision": precision,
        "efficiency": options.efficiency,
    }
    if options.gpus is None:
        return smallest_machine(model, **question, **given)[0].plan
    found = plans_that_fit(model, devices=options.gpus, **question, **given)
    if not found:
        kept = ", ".join(f"{name}={value}" for name, value in given.items()) or "no other choice"
        raise ValueError(
            f"no plan over {options.gpus} {device.name} with {kept} has room for "
            f"batch={batch} and seq={options.seq}; give more devices, a smaller batch, or fewer "
            "of the plan's fields"
        )
    return found[0].plan
