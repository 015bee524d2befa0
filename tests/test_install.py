"""Plain pip, in a fresh environment, installs our packages and never a stranger's of that name.

What the packages need from the index is lent by the environment that runs the tests, so that this
costs seconds; our own packages are not lent.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from workspace import LEAVES, PACKAGES, ROOT, SUITE, folder, module, project

REPORT = """
import importlib, importlib.metadata, json, sys
found = {}
for package in sys.argv[1:]:
    about = importlib.metadata.distribution(package)
    module = importlib.import_module(package.replace("-", "_"))
    classifiers = about.metadata.get_all("Classifier")
    found[package] = [about.metadata["Summary"], classifiers, module.__file__]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def lent(tmp_path_factory):
    """All that this environment holds, our own packages left out."""
    folder = tmp_path_factory.mktemp("lent")
    ours = {module(package) for package in PACKAGES}
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        name = entry.name.split("-")[0]
        if name not in ours | {"__pycache__", "pip", "llmsys"} and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="module")
def pip(tmp_path_factory):
    """A pip of its own; the environments it installs into need none."""
    home = tmp_path_factory.mktemp("pip")
    venv.create(home, with_pip=True)
    return home / "bin" / "python"


@pytest.fixture
def install(pip, lent, tmp_path):
    """Install a requirement into a fresh environment; return its python."""

    def install(requirement):
        home = tmp_path / "fresh"
        venv.create(home, with_pip=False)
        paths = sysconfig.get_paths("venv", {"base": str(home), "platbase": str(home)})
        (Path(paths["purelib"]) / "lent.pth").write_text(f"{lent}\n")
        python = home / "bin" / "python"
        command = [pip, "-m", "pip", "--python", python, "install", "--quiet", requirement]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
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


@pytest.mark.parametrize("leaf", LEAVES)
def test_pip_install_of_a_folder_gives_ours(leaf, install):
    assert_ours(install(str(folder(leaf))), [leaf])


def test_pip_install_of_the_suite_brings_our_nine(install):
    python = install(str(folder(SUITE)))
    assert_ours(python, PACKAGES)
    listed = subprocess.run(
        [python.parent / "llmsys", "list"], capture_output=True, text=True, check=True
    )
    assert "tiny" in listed.stdout


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this copy is no git checkout")
@pytest.mark.parametrize("package", ["zero", SUITE])
def test_pip_install_from_git_and_a_subdirectory_gives_ours(package, install):
    address = f"git+file://{ROOT}#subdirectory=packages/{package}"
    assert_ours(install(address), PACKAGES if package == SUITE else [package])


def test_this_environment_runs_the_workspace_itself():
    done = subprocess.run(
        [sys.executable, "-c", "import zero; print(zero.__file__)"],
        capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    assert Path(done.stdout.strip()).is_relative_to(ROOT)
