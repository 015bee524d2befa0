"""In a new environment, pip and uv install these packages, not others of that name on the index.

The dependencies that a package declares are linked from the environment that runs the tests, so
that a test takes seconds. Nothing else is linked, in particular none of these packages.
"""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from workspace import LEAVES, PACKAGES, ROOT, SUITE, UV, folder, module, project, source

# Reports the file from which each package would be imported, without importing it.
REPORT = """
import importlib.metadata, importlib.util, json, sys
found = {}
for package in sys.argv[1:]:
    about = importlib.metadata.metadata(package)
    file = importlib.util.find_spec(package.replace("-", "_")).origin
    found[package] = [about["Summary"], about.get_all("Classifier"), file]
print(json.dumps(found))
"""


def external_requirements(package):
    """Return all distributions from outside that `package` requires, also indirectly."""
    todo = [(package, "")]
    for name, extra in todo:
        for line in metadata.distribution(name).requires or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                todo += {(canonicalize_name(need.name), e) for e in {"", *need.extras}} - {*todo}
    return {name for name, _ in todo} - {*PACKAGES}


def link_requirements(package, folder):
    """Link the external requirements of `package` into a folder."""
    site_packages = Path(sysconfig.get_paths()["purelib"])
    for name in external_requirements(package):
        for entry in {file.parts[0] for file in metadata.files(name)} - {"..", "__pycache__"}:
            if not (folder / entry).exists():
                (folder / entry).symlink_to(site_packages / entry)


@pytest.fixture
def install(tmp_path):
    """Return a function that installs a package into a new environment and returns its python."""

    def install(package, address, installer="pip"):
        home = tmp_path / "environment"
        venv.create(home, with_pip=False)
        paths = sysconfig.get_paths("venv", {"base": str(home), "platbase": str(home)})
        link_requirements(package, Path(paths["purelib"]))
        python = home / "bin" / "python"
        command = {
            "pip": [sys.executable, "-m", "pip", "--python", python, "install"],
            # Without the workspace, whose packages uv would install as links to their sources.
            "uv": [UV, "pip", "install", "--no-sources", "--python", python],
        }[installer]
        done = subprocess.run(
            [*command, "--quiet", address],
            cwd=tmp_path,
            env=without_python_path(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return python

    return install


def without_python_path():
    """Return the environment without PYTHONPATH, which could lead to the sources."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def assert_ours(python, packages):
    done = subprocess.run(
        [python, "-c", REPORT, *packages],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env=without_python_path(),
    )
    for package, (summary, classifiers, file) in json.loads(done.stdout).items():
        assert summary == project(package)["description"]
        assert "Private :: Do Not Upload" in classifiers
        assert Path(file).is_relative_to(python.parent.parent)


# The installation of the suite builds all nine packages, and test_siblings.py checks that each one
# declares what it imports. Two packages installed alone therefore represent the others.
ALONE = {"flashattn2", "tinyml"}


@pytest.mark.parametrize(
    "leaf", [pytest.param(p, marks=[pytest.mark.exhaustive] * (p not in ALONE)) for p in LEAVES]
)
def test_pip_install_of_a_folder_gives_ours(leaf, install):
    python = install(leaf, folder(leaf))
    assert_ours(python, [leaf])
    # Tables and other data files are part of the wheel.
    installed = next((python.parent.parent / "lib").glob(f"python*/site-packages/{leaf}"))
    for file in source(leaf).rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert (installed / file.relative_to(source(leaf))).exists(), file


# uv builds the nine wheels at the same time, pip one after another.
@pytest.mark.parametrize("installer", ["uv", pytest.param("pip", marks=pytest.mark.exhaustive)])
def test_install_of_the_suite_brings_our_nine(installer, install):
    python = install(SUITE, folder(SUITE), installer)
    assert_ours(python, PACKAGES)
    listed = subprocess.run(
        [python.parent / "llmsys", "list"], capture_output=True, text=True, check=True
    )
    assert "tiny" in listed.stdout
    imports = f"import {', '.join(map(module, PACKAGES))}"
    subprocess.run([python, "-c", imports], check=True, cwd="/")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this copy is not a git checkout")
@pytest.mark.parametrize("package", ["zero", pytest.param(SUITE, marks=pytest.mark.exhaustive)])
def test_pip_install_from_git_and_a_subdirectory_gives_ours(package, install):
    address = f"git+file://{ROOT}#subdirectory=packages/{package}"
    assert_ours(install(package, address), PACKAGES if package == SUITE else [package])


def test_this_environment_runs_the_workspace_itself():
    for package in PACKAGES:
        spec = importlib.util.find_spec(module(package))
        assert Path(spec.origin).is_relative_to(ROOT)
