"""The packages have a common shape, and no package except the suite imports another."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata

import pytest
from source_text import list_imports
from workspace import (
    LEAVES,
    PACKAGES,
    ROOT,
    get_folder,
    get_module_name,
    get_source_folder,
    read_project,
    read_pyproject,
)

SECTIONS = [
    "Install",
    "Quick start",
    "API",
    "How it works",
    "Results",
    "Guarantees",
    "Limits",
    "References",
]


@cache
def list_imported_modules(path):
    """Return the names of the top-level modules that a file imports, also inside functions."""
    imported = set()
    for node in list_imports(path):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif node.level == 0:
            imported.add(node.module.split(".")[0])
    return imported


def test_packages_folder_contains_the_listed_packages_only():
    assert sorted(p.name for p in (ROOT / "packages").iterdir()) == sorted(PACKAGES)


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_imports_no_sibling(leaf):
    siblings = {get_module_name(package) for package in PACKAGES if package != leaf}
    for path in [*get_folder(leaf).rglob("src/**/*.py"), *get_folder(leaf).rglob("tests/*.py")]:
        assert not siblings & list_imported_modules(path), path


def get_distribution_names(requirements):
    return {re.split(r"[ <>=@;\[]", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_depends_on_no_sibling(leaf):
    assert not get_distribution_names(read_project(leaf).get("dependencies", [])) & set(PACKAGES)


@cache
def list_distributions():
    """Return the distributions of each top-level module; the files of all of them are read."""
    return metadata.packages_distributions()


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaf_and_its_tests_import_declared_dependencies_only(leaf):
    tests = [*get_folder(leaf).glob("tests/*.py")]
    ours = {leaf, *(path.stem for path in (*tests, *ROOT.glob("tests/*.py")))}
    text = "".join(path.read_text() for path in tests)
    ours_or_skipped = ours | {*re.findall(r'importorskip\(\s*"(\w+)"', text)}
    development = read_pyproject(leaf)["dependency-groups"]["dev"]
    declared = get_distribution_names(read_project(leaf).get("dependencies", []) + development)
    for path in [*get_folder(leaf).rglob("src/**/*.py"), *tests]:
        for name in list_imported_modules(path) - ours_or_skipped - sys.stdlib_module_names:
            assert declared & {*list_distributions().get(name, [])}, f"{path} imports {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_the_common_shape(package):
    assert (get_source_folder(package) / "py.typed").exists()
    assert list((get_folder(package) / "tests").glob("test_*.py"))
    assert not list((get_folder(package) / "tests").rglob("__init__.py"))
    about = read_project(package)
    assert about["requires-python"] == ">=3.11"
    assert about["license"] == "BSD-3-Clause"
    assert "Private :: Do Not Upload" in about["classifiers"]
    docstring = (get_source_folder(package) / "__init__.py").read_text()
    assert docstring.startswith(f'"""{about["description"]}')


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_a_bench_and_a_test_of_its_readme(package):
    # The bench is a file or a folder.
    files = [
        *get_source_folder(package).glob("bench.py"),
        *get_source_folder(package).glob("bench/*.py"),
    ]
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    bench = next(n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "bench")
    assert {"device", "quick"} <= {argument.arg for argument in bench.args.kwonlyargs}
    assert (get_folder(package) / "tests" / "test_readme.py").exists()


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_has_tests_for_faults(leaf):
    assert (get_folder(leaf) / "tests" / "test_faults.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_init_holds_the_public_names_and_nothing_else(package):
    tree = ast.parse((get_source_folder(package) / "__init__.py").read_text())
    docstring, *rest = tree.body
    assert isinstance(docstring, ast.Expr)
    # A name that needs torch may be imported on first access: then there is an import for type
    # checkers, and a `__getattr__` that uses a table of modules.
    late = [n for n in rest if isinstance(n, ast.If) and n.test.id == "TYPE_CHECKING"]
    lookup = [n for n in rest if isinstance(n, ast.FunctionDef)]
    assert [n.name for n in lookup] == ["__getattr__"] * len(late)
    imports = [n for n in rest if isinstance(n, ast.ImportFrom) and n.module != "typing"]
    imports += [n for node in late for n in node.body]
    assigned = [n for n in rest if isinstance(n, ast.Assign)]
    kinds = (ast.ImportFrom, ast.Assign)
    assert all(isinstance(n, kinds) or n in late or n in lookup for n in rest)
    names = {alias.asname or alias.name for n in imports for alias in n.names}
    assert [n.targets[0].id for n in assigned] == ["_LAZY"] * len(late) + ["__all__"]
    assert set(ast.literal_eval(assigned[-1].value)) == names


@pytest.mark.parametrize("package", PACKAGES)
def test_a_readme_has_the_common_sections(package):
    text = (get_folder(package) / "README.md").read_text()
    assert text.startswith(f"# {package}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS


# Each job runs in a fork of one process, which imports scipy, and torch for all jobs that need it.
JOBS = """
import json, os, sys, traceback
import scipy.optimize
heavy, jobs = json.loads(sys.argv[1])
for name, needs_torch, code in jobs:
    if needs_torch:
        import torch
    if os.fork() == 0:
        error = ""
        try:
            exec(code, {})
        except Exception:
            error = traceback.format_exc()
        report = {"name": name, "error": error, "heavy": sorted({*heavy} & {*sys.modules})}
        print(json.dumps(report), flush=True)
        os._exit(0)
    os.wait()
"""
#: Modules that take as long to import as torch or longer, and torch.
HEAVY = [
    "matplotlib",
    "pandas",
    "sklearn",
    "sympy",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers",
]


def run_jobs(jobs):
    """Run code in separate processes; `jobs` has the name, the code and whether it needs torch.

    Return the report of each job by its name: its error, and the heavy modules it has imported.
    """
    jobs = sorted(jobs, key=lambda job: job[1])
    done = subprocess.run(
        [sys.executable, "-c", JOBS, json.dumps([HEAVY, jobs])],
        capture_output=True,
        text=True,
        check=True,
    )
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return {report["name"]: report for report in reports}


# The suite refuses an impossible run before it imports torch.
WITHOUT_TORCH = ("accounting", "llmsys_suite", "scaling")
IMPORTS = [
    (f"import {name}", name not in WITHOUT_TORCH, f"import {name}")
    for name in map(get_module_name, PACKAGES)
]
MISSING = {
    "accounting[torch]": ("torch", "import accounting; accounting.Ledger"),
    "scaling[plot]": ("matplotlib", "import scaling; scaling.plot(None)"),
    "scaling[sweep]": ("torch", "import scaling; scaling.sweep_learning_rate('linear')"),
}
CALLS_WITHOUT_A_MODULE = [
    (extra, False, f"import sys; sys.modules[{name!r}] = None; {call}")
    for extra, (name, call) in MISSING.items()
]
#: Code that uses fake tensors before the first backward pass of its process.
FAKE_TENSOR_CODE = {
    "accounting": """
import accounting
accounting.fits(torch.nn.Linear(4, 4), torch.ones(2, 4), device="A100")
""",
    "zero": """
import tempfile, zero
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
model = zero.FSDP(torch.nn.Linear(1024, 1024))
with tempfile.TemporaryDirectory() as folder:
    zero.save_checkpoint(folder + "/last", model)
    zero.load_checkpoint(folder + "/last", model)
torch.distributed.destroy_process_group()
""",
    "llmsys-suite": """
from llmsys_suite.ranks.worker import create_autograd_threads
from torch._subclasses.fake_tensor import FakeTensorMode
create_autograd_threads()
with FakeTensorMode():
    torch.ones(1)
""",
}
#: Autograd threads for missing GPUs can abort the process when it ends.
CHECK_THREADS = """
import os
torch.ones(1, requires_grad=True).sum().backward()
tasks = os.listdir("/proc/self/task")
names = [open(f"/proc/self/task/{task}/comm").read() for task in tasks]
assert not any("autograd" in name for name in names), names
"""
FAKE_TENSORS = {
    package: (f"fake tensors: {package}", True, f"import torch\n{code}\n{CHECK_THREADS}")
    for package, code in FAKE_TENSOR_CODE.items()
}


@pytest.fixture(scope="module")
def reports():
    """Run all jobs except the exhaustive ones, and return their reports."""
    return run_jobs([*IMPORTS, *CALLS_WITHOUT_A_MODULE, FAKE_TENSORS["zero"]])


def test_importing_a_package_does_not_import_optional_modules(reports):
    for name, needs_torch, _ in IMPORTS:
        assert not reports[name]["error"]
        assert reports[name]["heavy"] == (["torch"] if needs_torch else []), name


@pytest.mark.parametrize("extra", MISSING)
def test_missing_optional_module_is_reported_with_its_extra(extra, reports):
    missing, _ = MISSING[extra]
    assert f'{missing}, which is missing: pip install "{extra}"' in reports[extra]["error"]


def test_fake_tensors_do_not_start_autograd_threads_for_missing_gpus(reports):
    assert not reports["fake tensors: zero"]["error"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("package", ["accounting", "llmsys-suite"])
def test_no_package_starts_autograd_threads_for_missing_gpus(package):
    (report,) = run_jobs([FAKE_TENSORS[package]]).values()
    assert not report["error"]


def test_make_test_runs_the_tests_of_every_package():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert sorted(options["testpaths"]) == sorted(
        ["tests", *(f"packages/{package}" for package in PACKAGES)]
    )
