"""In a new environment, pip installs these packages and not others of the same name on the index.

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
from workspace import (
    LEAVES,
    PACKAGES,
    ROOT,
    SUITE,
    get_folder,
    get_module_name,
    get_source_folder,
    read_project,
)

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


def list_external_requirements(package):
    """Return all distributions from outside that `package` requires, also indirectly."""
    todo = [(package, "")]
    for name, extra in todo:
        for line in metadata.distribution(name).requires or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                todo += {(canonicalize_name(need.name), e) for e in {"", *need.extras}} - {*todo}
    return {name for name, _ in todo} - {*PACKAGES}


def link_requirements(package, folder):
    """Link the external requirements of `package` into a new folder."""
    folder.mkdir()
    site_packages = Path(sysconfig.get_paths()["purelib"])
    for name in list_external_requirements(package):
        for entry in {file.parts[0] for file in metadata.files(name)} - {"..", "__pycache__"}:
            if not (folder / entry).exists():
                (folder / entry).symlink_to(site_packages / entry)


@pytest.fixture
def install(tmp_path):
    """Return a function that installs a package into a new environment and returns its python."""

    def install(package, address):
        linked = tmp_path / "linked"
        link_requirements(package, linked)
        home = tmp_path / "environment"
        venv.create(home, with_pip=False)
        paths = sysconfig.get_paths("venv", {"base": str(home), "platbase": str(home)})
        (Path(paths["purelib"]) / "linked.pth").write_text(f"{linked}\n")
        python = home / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", python]
        done = subprocess.run(
            [*pip, "install", "--quiet", address],
            cwd=tmp_path,
            env=copy_environment_without_python_path(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return python

    return install


def copy_environment_without_python_path():
    """Return the environment without PYTHONPATH, which could lead to the sources."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def assert_ours(python, packages):
    done = subprocess.run(
        [python, "-c", REPORT, *packages],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env=copy_environment_without_python_path(),
    )
    for package, (summary, classifiers, file) in json.loads(done.stdout).items():
        assert summary == read_project(package)["description"]
        assert "Private :: Do Not Upload" in classifiers
        assert Path(file).is_relative_to(python.parent.parent)


# test_siblings.py checks that each package declares what it imports. One package installed alone
# therefore represents the others.
ALONE = {"tinyml"}


@pytest.mark.parametrize(
    "leaf",
    [pytest.param(p, marks=() if p in ALONE else pytest.mark.exhaustive) for p in LEAVES],
)
def test_pip_install_of_a_folder_gives_ours(leaf, install):
    python = install(leaf, get_folder(leaf))
    assert_ours(python, [leaf])
    # Tables and other data files are part of the wheel.
    installed = next((python.parent.parent / "lib").glob(f"python*/site-packages/{leaf}"))
    for file in get_source_folder(leaf).rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert (installed / file.relative_to(get_source_folder(leaf))).exists(), file


def test_requirements_of_the_suite_are_the_folders_of_our_nine():
    requirements = map(Requirement, metadata.requires(SUITE))
    addresses = {need.name: need.url for need in requirements if need.name in LEAVES}
    assert addresses == {leaf: get_folder(leaf).as_uri() for leaf in LEAVES}


# It builds nine wheels, one after the other.
@pytest.mark.exhaustive
def test_pip_install_of_the_suite_brings_our_nine(install):
    python = install(SUITE, get_folder(SUITE))
    assert_ours(python, PACKAGES)
    listed = subprocess.run(
        [python.parent / "llmsys", "list"], capture_output=True, text=True, check=True
    )
    assert "tiny" in listed.stdout
    imports = f"import {', '.join(map(get_module_name, PACKAGES))}"
    subprocess.run([python, "-c", imports], check=True, cwd="/")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this copy is not a git checkout")
@pytest.mark.exhaustive
@pytest.mark.parametrize("package", ["zero", SUITE])
def test_pip_install_from_git_and_a_subdirectory_gives_ours(package, install):
    address = f"git+file://{ROOT}#subdirectory=packages/{package}"
    assert_ours(install(package, address), PACKAGES if package == SUITE else [package])


def test_this_environment_runs_the_workspace_itself():
    for package in PACKAGES:
        spec = importlib.util.find_spec(get_module_name(package))
        assert Path(spec.origin).is_relative_to(ROOT)
