"""Each command on a page names programs, modules, files, targets and options that exist."""

import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import typer.main
from collectives.shared_memory.fingerprint import ALGORITHMS
from llmsys_suite.cli import app
from llmsys_suite.config import STAGES
from torch.distributed.run import get_args_parser
from typer.exceptions import TyperException
from workspace import PACKAGES, ROOT, get_folder

# The changelog also names what was removed.
PAGES = [
    ROOT / "README.md",
    *sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "changelog.md"}),
    *(page for package in PACKAGES for page in sorted(get_folder(package).glob("*.md"))),
]
PROGRAMS = ("accounting", "llmsys", "make", "pip", "pytest", "python", "torchrun", "uv")
SHELLS = ("", "bash", "console", "sh")
STARTS_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)}) ")
#: Modules whose first argument selects a parser.
WITH_SUBCOMMANDS = ("accounting", "paramserver", "scaling")
OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")


def list_commands(page):
    """Return the commands in the code of a page, each as a list of words."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    fences = re.findall(r"^```(\S*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    # The line below a table has the command of an earlier version that measured it, and the date.
    prose = re.sub(r"^\*`[^`\n]+`, \d{4}-\d\d-\d\d: .*$", "", prose, flags=re.MULTILINE)
    lines = [line for language, code in fences if language in SHELLS for line in code.splitlines()]
    lines += re.findall(r"^ {4}(.*)$", prose, re.MULTILINE)
    lines += re.findall(r"`([^`\n]+)`", prose)
    collected = []
    for line in lines:
        for part in re.split(r"; | && ", line):
            if STARTS_COMMAND.match(part):
                # Brackets mark optional arguments, and > a file that receives the output.
                part = re.sub(r"\[(--[^\]]*)\]", r"\1", re.sub(r" > \S+", "", part))
                collected.append(shlex.split(part, comments=True))
    return collected


def check(words, page):
    """Raise AssertionError if a command names something that does not exist."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *arguments = words
    if "--" in arguments:  # another command follows, which runs on emulated hosts
        split = arguments.index("--")
        check(arguments[split + 1 :], page)
        arguments = arguments[:split]
    CHECKS[program](arguments, page)


def check_make(arguments, page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [word for word in arguments if "=" not in word and not re.fullmatch(r"-j\d+", word)]
    assert named
    assert set(named) <= {*targets}


def check_uv(arguments, page):
    command, *arguments = arguments
    assert command in ("sync", "run")
    if command == "run":
        check(arguments, page)


def check_pip(arguments, page):
    command, *requirements = arguments
    assert command == "install"
    for requirement in requirements:
        location = re.search(r"packages/([\w-]+)(?:\[([\w,]+)\])?$", requirement)
        assert location, requirement
        assert location[1] in PACKAGES


def check_pytest(arguments, page):
    for word in arguments:
        assert "/" not in word or (ROOT / word).exists(), word


def check_python(arguments, page):
    if arguments[:1] == ["-m"]:
        check_module(arguments[1], arguments[2:], page)
    elif arguments:
        check_script(arguments, page)


def check_module(module, arguments, page):
    if module == "llmsys_suite":
        check_llmsys(arguments, page)
        return
    if module.startswith("NAME"):
        return
    assert importlib.util.find_spec(module), module
    verb = arguments[:1] if module in WITH_SUBCOMMANDS and arguments[0].islower() else []
    check_options(arguments, list_help_options(module, *verb))


def check_script(arguments, page):
    file, *arguments = arguments
    path = ROOT / file
    assert path.is_file(), file
    if list_options(arguments):
        check_options(arguments, list_help_options(str(path)))


def check_torchrun(arguments, page):
    parser = get_args_parser()
    if list_options(arguments) == {*arguments}:  # a sentence names an option
        check_options(arguments, {*parser._option_string_actions})
        return
    parsed = parser.parse_args(arguments)
    if parsed.module:
        check_module(parsed.training_script, parsed.training_script_args, page)
    elif "/" in parsed.training_script:  # otherwise it is the reader's own program
        check_script([parsed.training_script, *parsed.training_script_args], page)


def check_accounting(arguments, page):
    check_module("accounting", arguments, page)


def check_llmsys(arguments, page):
    verb, *arguments = arguments
    known = typer.main.get_command(app).commands[verb]
    check_options(arguments, {name for option in known.params for name in option.opts})
    if arguments:  # otherwise a sentence may name the command without its arguments
        known.make_context("llmsys", [*arguments])
    if verb == "run":
        stages = [word for word in arguments[: find_first_option(arguments)] if word.islower()]
        assert set(stages) <= {*STAGES, "audit", "report"}


def find_first_option(arguments):
    return next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))


def list_options(arguments):
    return {word.partition("=")[0] for word in arguments if OPTION.match(word)}


def check_options(arguments, known):
    assert list_options(arguments) <= known, sorted(list_options(arguments) - known)


@cache
def list_help_options(program, *verb):
    """Return all options in the help of a module or of a script, for a subcommand if any."""
    printed = io.StringIO()
    before = sys.argv, sys.path[:]
    sys.argv = [program, *verb, "--help"]
    status = None
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings(action="ignore"):
            if program.endswith(".py"):
                sys.path.insert(0, str(Path(program).parent))
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    finally:
        sys.argv, sys.path[:] = before
    assert status == 0, (program, *verb)
    return {*OPTION.findall(printed.getvalue())}


CHECKS = {
    "accounting": check_accounting,
    "llmsys": check_llmsys,
    "make": check_make,
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    "torchrun": check_torchrun,
    "uv": check_uv,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_name_things_that_exist(page):
    for words in list_commands(page):
        check(words, page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_that_were_removed_since_a_measurement_are_explained(page):
    text = page.read_text()
    ran = re.findall(r"^\*?`[^`\n]*llmsys_suite run ([^`\n]*)`, \d{4}-", text, re.MULTILINE)
    stages = {word for line in ran for word in line.split(" --")[0].split()}
    for stage in stages - {*STAGES, "audit", "report"}:
        assert re.search(rf"earlier\s+version[^.]*`{stage}`", text), stage
    tables = re.findall(r"^(\|.*\| algorithm \| runs \|.*\n(?:\|.*\n)+)", text, re.MULTILINE)
    for table in tables:
        head, _, *lines = table.splitlines()
        column = head.split(" | ").index("runs")
        ran = {line.split(" | ")[column] for line in lines}
        for algorithm in ran - {*ALGORITHMS}:
            words = re.escape(algorithm).replace("_", "[-_]")
            assert re.search(rf"{words}[^|]*removed", text), algorithm


def test_commands_are_found_in_blocks_and_in_sentences():
    lines = [shlex.join(words) for page in PAGES for words in list_commands(page)]
    assert len(lines) > 100
    assert "make run" in lines
    assert "python -m ddp.bench --runs 5" in " ".join(lines)
    assert {line.split()[0] for line in lines} >= {*PROGRAMS} - {"accounting"}


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "pip install packages/nothing",
        "python -m ddp.nothing",
        "python docs/nothing.py",
        "python -m scaling fit RUNS --nothing",
        "llmsys run nothing",
        "llmsys run --nothing",
        "llmsys compare BEFORE AFTER --margin 5%",
        "torchrun --nothing docs/tutorial/train.py",
        "uv run llmsys nothing",
    ],
)
def test_a_command_that_names_something_unknown_is_found(command):
    expected = (AssertionError, KeyError, SystemExit, ModuleNotFoundError, TyperException)
    with pytest.raises(expected):
        check(shlex.split(command), ROOT / "README.md")
