"""Plain pip, in a fresh environment, installs our packages and never a stranger's of that name.

What a package says it needs from the index is lent by the environment that runs the tests, so that
this costs seconds; nothing else is, least of all our own packages.
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
from workspace import LEAVES, PACKAGES, ROOT, SUITE, folder, module, project, source

# Where an import would find each package. Imported they are once, beside the suite.
REPORT = """
import importlib.metadata, importlib.util, json, sys
found = {}
for package in sys.argv[1:]:
    about = importlib.metadata.metadata(package)
    file = importlib.util.find_spec(package.replace("-", "_")).origin
    found[package] = [about["Summary"], about.get_all("Classifier"), file]
print(json.dumps(found))
"""


def strangers(package):
    """Every distribution of others that `package` needs, and that those need in turn."""
    todo = [(package, "")]
    for name, extra in todo:
        for line in metadata.distribution(name).requires or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                todo += {(canonicalize_name(need.name), e) for e in {"", *need.extras}} - {*todo}
    return {name for name, _ in todo} - {*PACKAGES}


def lend(package, place):
    """Link what `package` needs of others into a folder of its own."""
    place.mkdir()
    here = Path(sysconfig.get_paths()["purelib"])
    for name in strangers(package):
        for entry in {file.parts[0] for file in metadata.files(name)} - {"..", "__pycache__"}:
            if not (place / entry).exists():
                (place / entry).symlink_to(here / entry)


@pytest.fixture
def install(tmp_path):
    """Install a package from an address into a fresh environment; return its python."""

    def install(package, address):
        lent = tmp_path / "lent"
        lend(package, lent)
        home = tmp_path / "fresh"
        venv.create(home, with_pip=False)
        paths = sysconfig.get_paths("venv", {"base": str(home), "platbase": str(home)})
        (Path(paths["purelib"]) / "lent.pth").write_text(f"{lent}\n")
        python = home / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", python]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [*pip, "install", "--quiet", address],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return python

    return install


def assert_ours(python, packages):
    done = subprocess.run(
        [python, "-c", REPORT, *packages], capture_output=True, text=True, check=True, cwd="/"
    )
    for package, (summary, classifiers, file) in json.loads(done.stdout).items():
        assert summary == project(package)["description"]
        assert "Private :: Do Not Upload" in classifiers
        assert Path(file).is_relative_to(python.parent.parent)


# The suite's installation builds and places all nine; that each declares what it imports is held
# without installing anything (test_siblings.py). So two by themselves tell what the others would.
ALONE = {"flashattn2", "tinyml"}


@pytest.mark.parametrize(
    "leaf", [pytest.param(p, marks=[pytest.mark.exhaustive] * (p not in ALONE)) for p in LEAVES]
)
def test_pip_install_of_a_folder_gives_ours(leaf, install):
    python = install(leaf, folder(leaf))
    assert_ours(python, [leaf])
    # Tables and other data files are part of the wheel.
    place = next((python.parent.parent / "lib").glob(f"python*/site-packages/{leaf}"))
    for file in source(leaf).rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert (place / file.relative_to(source(leaf))).exists(), file


def test_pip_install_of_the_suite_brings_our_nine(install):
    python = install(SUITE, folder(SUITE))
    assert_ours(python, PACKAGES)
    listed = subprocess.run(
        [python.parent / "llmsys", "list"], capture_output=True, text=True, check=True
    )
    assert "tiny" in listed.stdout
    imports = f"import {', '.join(map(module, PACKAGES))}"
    subprocess.run([python, "-c", imports], check=True, cwd="/")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this copy is no git checkout")
@pytest.mark.parametrize("package", ["zero", pytest.param(SUITE, marks=pytest.mark.exhaustive)])
def test_pip_install_from_git_and_a_subdirectory_gives_ours(package, install):
    address = f"git+file://{ROOT}#subdirectory=packages/{package}"
    assert_ours(install(package, address), PACKAGES if package == SUITE else [package])


def test_this_environment_runs_the_workspace_itself():
    for package in PACKAGES:
        spec = importlib.util.find_spec(module(package))
        assert Path(spec.origin).is_relative_to(ROOT)
