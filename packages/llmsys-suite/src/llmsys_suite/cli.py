"""The command `llmsys`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmsys_suite.config import STAGES, UsageError
from llmsys_suite.config_file import MEANING, read_toml, to_toml
from llmsys_suite.resolution import resolve

if TYPE_CHECKING:
    from llmsys_suite.folder import RunFolder
    from llmsys_suite.report.compare import Comparison

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plan, train, inspect, compress and audit one small language model with one command.",
)
USAGE_ERROR = 2
#: Exit status of `compare --fail-above` if the samples cannot show whether a variant is slower.
UNDECIDED = 3


def main() -> None:
    """Run the command line; on a `UsageError`, print one line and exit with status 2."""
    try:
        app()
    except UsageError as error:
        print(f"llmsys: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)


def _parse_path(text: str) -> Path:
    """Return a path; raise ValueError for an empty string, which would name the current folder."""
    if not text:
        raise ValueError("expected a path, got an empty string; leave the option out")
    return Path(text)


def _make_field_option(name: str, **parameters: Any) -> Any:
    """Return an option of `run` that sets a field of the configuration."""
    return typer.Option(f"--{name}", help=MEANING[name], **parameters)


def _make_flag_option(name: str) -> Any:
    """Return an option of `run` that sets a field: True for `--name`, False for `--no-name`."""
    return typer.Option(f"--{name}/--no-{name}", help=MEANING[name])


@app.command()
def run(
    context: typer.Context,
    stages: Annotated[list[str] | None, typer.Argument(help=MEANING["stages"])] = None,
    preset: Annotated[str | None, _make_field_option("preset")] = None,
    size: Annotated[str | None, _make_field_option("size")] = None,
    world: Annotated[int | None, _make_field_option("world")] = None,
    backend: Annotated[str | None, _make_field_option("backend")] = None,
    dtype: Annotated[str | None, _make_field_option("dtype")] = None,
    steps: Annotated[int | None, _make_field_option("steps")] = None,
    warmup: Annotated[int | None, _make_field_option("warmup")] = None,
    learn: Annotated[int | None, _make_field_option("learn")] = None,
    tensor: Annotated[int | None, _make_field_option("tensor")] = None,
    pipeline: Annotated[int | None, _make_field_option("pipeline")] = None,
    recompute: Annotated[bool | None, _make_flag_option("recompute")] = None,
    compile: Annotated[bool | None, _make_flag_option("compile")] = None,
    clip: Annotated[float | None, _make_field_option("clip")] = None,
    trace: Annotated[bool | None, _make_flag_option("trace")] = None,
    log: Annotated[str | None, _make_field_option("log")] = None,
    resume: Annotated[Path | None, _make_field_option("resume", parser=_parse_path)] = None,
    seed: Annotated[int | None, _make_field_option("seed")] = None,
    data: Annotated[Path | None, _make_field_option("data", parser=_parse_path)] = None,
    tokenizer: Annotated[str | None, _make_field_option("tokenizer")] = None,
    vocabulary: Annotated[int | None, _make_field_option("vocabulary")] = None,
    out: Annotated[Path | None, _make_field_option("out", parser=_parse_path)] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="A TOML file; options override its fields.")
    ] = None,
) -> None:
    """Plan, train, extrapolate, inspect, compress and audit one model."""
    from llmsys_suite.start import execute

    is_rank_0 = os.environ.get("RANK", "0") == "0"
    if is_rank_0:
        print("llmsys: checking this machine", file=sys.stderr, flush=True)
    options = read_toml(config_file) if config_file is not None else {}
    for name, value in context.params.items():
        if name in MEANING and name != "stages" and value is not None:
            options[name] = value
    stages_in_file = options.pop("stages", [])
    status, folder = execute(resolve(stages or stages_in_file, **options))
    if is_rank_0 and (folder / "report.md").exists():
        from llmsys_suite.report.page import format_headline

        print(format_headline(folder))
    raise typer.Exit(status)


@app.command()
def config(
    preset: Annotated[str | None, typer.Option(help="cpu, or gpu, the default with a GPU.")] = None,
) -> None:
    """Print a file for `llmsys run --config` with every field, its meaning and its default."""
    print(to_toml(resolve([], preset=preset)), end="")


@app.command()
def step(
    sizes: Annotated[
        str, typer.Option(help="Sizes, such as tiny,small or 256x768x6x8; or all of `llmsys list`.")
    ] = "tiny",
    contexts: Annotated[str, typer.Option(help="Tokens per sequence, such as 128,512.")] = "128",
    dtype: Annotated[str, typer.Option(help="Some of fp32,tf32,bf16,fp16.")] = "fp32",
    compile_: Annotated[
        bool, typer.Option("--compile", help="Also measure torch.compile.")
    ] = False,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Also measure checkpointed blocks.")
    ] = False,
    rows: Annotated[int, typer.Option(help="Sequences per step.")] = 4,
    time_limit: Annotated[float, typer.Option(help="Time limit per case, in seconds.")] = 60.0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write the operators of a step; requires --out.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="A new folder for rows.json.")] = None,
) -> None:
    """Time a training step of each size, context and dtype, each in a separate process."""
    from llmsys_suite.step.report import benchmark

    for line in benchmark(
        sizes=sizes,
        contexts=contexts,
        dtypes=dtype,
        compiled=compile_,
        checkpointed=checkpoint,
        rows=rows,
        limit=time_limit,
        profile=profile,
        device=device,
        out=out,
    ):
        print(line, flush=True)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Rewrite report.md and report.html of a run, and print report.md."""
    from llmsys_suite.report.page import write_report

    print(write_report(_open_run_folder(folder)))


@app.command()
def audit(folder: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Repeat the checks that need only the files of a run; exit with 1 if a check fails.

    The results of all other checks are read from the run folder.
    """
    from llmsys_suite.audit.run import check_again

    checks = check_again(_open_run_folder(folder))
    failed = [check for check in checks if not check.passed]
    for check in failed:
        print(f"FAILED {check}")
    print(f"{len(checks) - len(failed)} of {len(checks)} checks passed")
    raise typer.Exit(1 if failed else 0)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A run folder.")],
    after: Annotated[Path, typer.Argument(help="Another run folder.")],
    fail_above: Annotated[
        float | None,
        typer.Option(
            help="Exit with 0 if no variant is slower by more than this percentage, 1 if one is, "
            "and 3 if the samples do not suffice to decide."
        ),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(
            help="The verdict is `same` if a variant's interval lies within this percentage of 1."
        ),
    ] = 5.0,
) -> None:
    """Print which variants became faster or slower, and whether the samples suffice to decide."""
    from llmsys_suite.report.comparability import list_warnings
    from llmsys_suite.report.compare import compare_runs

    if fail_above is not None and not fail_above >= 0:
        raise UsageError(f"expected --fail-above to be a percentage >= 0, got {fail_above:g}")
    if not 0 < margin < 100:
        raise UsageError(f"expected 0 < --margin < 100, a percentage, got {margin:g}")
    old, new = _open_run_folder(before), _open_run_folder(after)
    rows = compare_runs(old, new, margin=margin / 100)
    for warning in list_warnings(old, new):
        print(f"llmsys: {warning}", file=sys.stderr)
    for row in rows:
        print(row)
    if fail_above is not None:
        raise typer.Exit(_report_fail_above(rows, fail_above))


def _report_fail_above(rows: list[Comparison], percent: float) -> int:
    """Return the exit status of `--fail-above`; print the slower or the undecided variants."""
    slower = [row.variant for row in rows if row.is_slower_by(percent)]
    undecided = [row.variant for row in rows if row.is_slower_by(percent) is None]
    if slower:
        print(f"llmsys: slower by more than {percent:g} %: {', '.join(slower)}", file=sys.stderr)
        return 1
    if undecided:
        names = ", ".join(undecided)
        print(
            "llmsys: the samples do not show whether these variants are slower by more than "
            f"{percent:g} %: {names}; measure more rounds with --steps",
            file=sys.stderr,
        )
        return UNDECIDED
    return 0


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(help="A run folder, of a run with the stage learn.")],
    prompt: Annotated[str, typer.Option(help="Text that the model continues.")] = "The ",
    max_bytes: Annotated[
        int, typer.Option(help="Bytes to generate, or tokens if the run used a tokenizer.")
    ] = 240,
    temperature: Annotated[
        float,
        typer.Option(
            help="Sampling temperature: values near 0 pick the most likely token, values above 1 "
            "are more random."
        ),
    ] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
) -> None:
    """Print a prompt and the text that the trained model of a run generates after it."""
    from llmsys_suite.text.generation import generate_text, load_model
    from llmsys_suite.text.tokens import load_codec

    run_folder = _open_run_folder(folder)
    codec, model = load_codec(run_folder.config, folder), load_model(run_folder)
    written = generate_text(
        model, prompt, max_bytes, temperature=temperature, seed=seed, codec=codec
    )
    print(prompt + written)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A run folder, of a run with the stage learn.")],
    out: Annotated[Path, typer.Argument(help="A new or empty folder for the model.")],
) -> None:
    """Write the trained model as a Hugging Face folder, which AutoModelForCausalLM loads."""
    from llmsys_suite.hugging_face import export_model
    from llmsys_suite.text.generation import load_model

    run_folder = _open_run_folder(folder)
    tokenizer = folder / "tokenizer.json"
    export_model(load_model(run_folder), out, tokenizer if tokenizer.exists() else None)


@app.command()
def doctor() -> None:
    """Print the facts about this machine that affect a run, with remedies for problems."""
    from llmsys_suite.environment import diagnose_machine

    for fact, value, remedy in diagnose_machine():
        print(f"{fact:>16}  {value}" + (f"   -> {remedy}" if remedy else ""))


@app.command("list")
def list_() -> None:
    """List the stages and the model sizes."""
    from llmsys_suite.config import SIZES

    print("stages:", " ".join(STAGES))
    print("sizes:   d_model   d_ff  layers  heads")
    for name, size in SIZES.items():
        print(
            f"{name:>7}  {size.d_model:>7}  {size.d_ff:>5}  {size.num_layers:>6}"
            f"  {size.num_heads:>5}"
        )
    print("Any other size is written as d_model x d_ff x layers x heads, such as 256x768x6x8.")


def _open_run_folder(path: Path) -> RunFolder:
    from llmsys_suite.folder import RunFolder

    return RunFolder.open(path)
