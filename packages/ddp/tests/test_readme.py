"""The quick start of the README runs unchanged, and its sentences agree with measured rows."""

import contextlib
import io
import json
import os
import re
import socket
from pathlib import Path

import pytest
from worker_pool import run_ranks

README = Path(__file__).parents[1] / "README.md"
RESULTS = Path(__file__).parents[3] / "docs" / "results"


def read_rows(run: str, gpu: str = "") -> list[dict]:
    """Return the rows of the newest results of a run, on the GPU whose name contains `gpu`."""
    results = [json.loads(path.read_text()) for path in RESULTS.glob(f"*/{run}.json")]
    chosen = [stored for stored in results if gpu in " ".join(stored["environment"]["gpus"])]
    return max(chosen, key=lambda stored: stored["environment"]["date"])["rows"]


def find_row(rows: list[dict], **columns: str) -> dict:
    (row,) = (r for r in rows if all(r.get(name) == value for name, value in columns.items()))
    return row


def compute_ratio_to_bound(design: str) -> float:
    rows = read_rows("ddp-two-hosts")
    step = find_row(rows, case="step", workload="transformer", design=design)["step_ms"]
    return step / find_row(rows, case="bound", workload="transformer")["overlap_bound_ms"]


def find_one_host_row(**columns: str) -> dict:
    newest = read_rows("ddp-five-runs") if [*RESULTS.glob("*/ddp-five-runs.json")] else None
    return find_row(newest or read_rows("ddp-one-host"), **columns)


def find_ratio_on_gpu(gpu: str) -> float:
    return find_row(read_rows("llmsys-suite-gpu", gpu), case="train", variant="ddp bucketed")[
        "ratio_p50"
    ]


#: A part of a sentence with one figure, and the row that the figure comes from.
FIGURES = {
    "needs {:.2f} times the processor time of `torch tuned`": lambda: find_one_host_row(
        case="step", design="25 MB"
    )["cpu_ratio_to_torch_tuned"],
    "With buckets of 25 MB, a step takes {:.2f} times this lower bound": lambda: (
        compute_ratio_to_bound("25 MB")
    ),
    "With buckets of 10 MB, it takes {:.2f} times the bound": lambda: compute_ratio_to_bound(
        "10 MB"
    ),
    "and with `torch tuned` {:.2f} times": lambda: compute_ratio_to_bound("torch tuned"),
    "exceeds the median later step by {:.1f} ms (median of five runs": lambda: find_row(
        read_rows("ddp-first-steps"), case="step", design="25 MB"
    )["first_steps_excess_ms"],
    "took {:.2f} times as long as with torch's DDP on an H100": lambda: find_ratio_on_gpu("H100"),
    "On an H200, it took {:.2f} times as long": lambda: find_ratio_on_gpu("H200"),
}


@pytest.mark.parametrize("sentence", FIGURES)
def test_figures_in_sentences_are_those_of_the_newest_rows(sentence: str) -> None:
    text = " ".join(README.read_text().split())
    assert sentence.format(FIGURES[sentence]()) in text


def run_example(code: str, port: int) -> tuple[list[float], str]:
    """Return a sum of each parameter, and what the example prints."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), names)
    sums = [float(parameter.detach().sum()) for parameter in names["model"].parameters()]
    return sums, printed.getvalue()


def test_example_leaves_equal_weights_and_prints_the_text_of_the_readme() -> None:
    text = README.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = run_ranks(run_example, 2, code, port, backend="")
    assert ranks[0][0] == ranks[1][0]
    time = r"\d+\.\d{4}"  # differs between ranks and runs
    for _, printed in ranks:
        assert re.sub(time, "T", printed) == re.sub(time, "T", expected)
