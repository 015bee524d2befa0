"""Run all steps of the tutorial; store what they print and draw their pictures.

    python docs/tutorial/run.py

The page docs/tutorial.md shows the stored outputs and pictures; `make docs` writes it.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

#: Each step's file, the arguments of Python before it, and the options of its picture.
STEPS = {
    "plan": ((), {"title": "Peak memory of a training step", "x": "sequences", "y": "MiB"}),
    "attend": ((), {"title": "Memory of attention", "x": "tokens", "y": "MiB"}),
    "communicate": (TORCHRUN, {"title": "All-reduce of two ranks", "x": "bytes", "y": "ms"}),
    "train": (TORCHRUN, {"title": "Training", "x": "step", "y": "nats per byte"}),
    "shard": (TORCHRUN, {"title": "Memory per rank", "x": "ranks", "y": "MiB"}),
    "extrapolate": ((), {"title": "Held-out loss", "x": "bytes of text", "y": "nats per byte"}),
    "inspect": ((), {"title": "Logit lens", "x": "layers", "y": "nats per byte"}),
    "compress": ((), {"title": "Compressed models", "x": "KiB", "y": "added nats per byte"}),
}
LOGARITHMIC = {"plan", "attend", "communicate", "shard"}
FILES = {"inspect": "inspect_model"}


def get_command(step: str) -> list[str]:
    """Return the command that runs a step."""
    prefix, _ = STEPS[step]
    return [sys.executable, *prefix, str(FOLDER / f"{FILES.get(step, step)}.py")]


def main() -> None:
    """Run the steps in order, in the root of the repository."""
    chart = runpy.run_path(str(ROOT / "docs" / "answers" / "pictures.py"))["Chart"]
    for step, (_, options) in STEPS.items():
        done = subprocess.run(
            get_command(step), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
        (FOLDER / "outputs" / f"{step}.txt").write_text(done.stdout)
        lines = json.loads((ROOT / "runs" / "tutorial" / f"{step}.json").read_text())
        log = step in LOGARITHMIC
        drawing = chart(**options, lines=lines, log_x=log, log_y=log).svg()
        (FOLDER / "pictures" / f"{step}.svg").write_text(drawing)
        print(done.stdout)


if __name__ == "__main__":
    main()
