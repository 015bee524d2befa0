"""What a model costs to train by a plan: `python -m accounting MODEL --gpus 64 --tp 8`.

MODEL is a config.json, the folder it is in, or sizes such as
`layers=32,d_model=4096,heads=32,vocab_size=32000`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from accounting.hardware import HARDWARE, find
from accounting.plan import Plan
from accounting.precision import PRECISIONS
from accounting.report import as_html, as_text, report
from accounting.search import smallest_machine
from accounting.transformer import Transformer


def main(argv: Sequence[str] | None = None) -> int:
    """Print a report; 1 if the model does not fit, 2 if the question makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m accounting", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--gpus", type=int, default=0, help="devices in all")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--cp", type=int, default=1, help="context parallel")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel")
    parser.add_argument("--zero", type=int, default=0, help="ZeRO stage; 3 is FSDP")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--recompute", default="none")
    parser.add_argument(
        "--batch", type=int, help="sequences in all; one a micro-batch if not given"
    )
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--precision", default="mixed_bf16", help=", ".join(PRECISIONS))
    parser.add_argument("--hardware", default="H100", help=", ".join(HARDWARE))
    parser.add_argument("--efficiency", type=float, default=0.5, help="of the matmuls alone")
    parser.add_argument("--search", action="store_true", help="the fewest GPUs, and their plan")
    parser.add_argument("--explain", action="store_true", help="print every derivation")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--html", type=Path, help="write one page with stacked bars")
    options = parser.parse_args(argv)
    try:
        return _run(options)
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    model, device = read_model(options.model), find(options.hardware)
    if options.search:
        batch = options.batch or 1
        plan = smallest_machine(
            model,
            hardware=device,
            batch=batch,
            seq=options.seq,
            precision=options.precision,
        )[0].plan
    else:
        plan = Plan(
            devices=options.gpus,
            tensor=options.tp,
            pipeline=options.pp,
            context=options.cp,
            expert=options.ep,
            zero=options.zero,
            microbatches=options.microbatches,
            schedule=options.schedule,
            recompute=options.recompute,
            sequence_parallel=options.tp > 1,
        )
        batch = options.batch or plan.data * plan.microbatches
    result = report(
        model,
        plan,
        hardware=device,
        batch=batch,
        seq=options.seq,
        precision=options.precision,
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


def read_model(text: str) -> Transformer:
    """A path to a config.json, or `name=value` sizes with commas between them."""
    if Path(text).exists() or "=" not in text:
        return Transformer.from_hf(text)
    sizes: dict[str, object] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name not in Transformer.__dataclass_fields__:
            known = ", ".join(Transformer.__dataclass_fields__)
            raise ValueError(f"{name!r} is no field of a model; the fields are {known}")
        flags = {"true": True, "false": False}
        try:
            sizes[name] = flags[value] if value in flags else int(value)
        except ValueError:
            sizes[name] = value
    return Transformer(**sizes)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
