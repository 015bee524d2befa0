"""The pins in pyproject.toml are the resolution, and the resolution is reproducible."""

import shutil
import subprocess
import tomllib

import pytest
from pins import UV, list_pins
from workspace import PACKAGES, ROOT, get_folder

needs_uv = pytest.mark.skipif(not shutil.which(UV), reason="uv is not on the PATH")
LOCK = ROOT / "uv.lock"
needs_lock = pytest.mark.skipif(not LOCK.exists(), reason="`uv sync` has not written uv.lock yet")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this copy is not a git checkout")
def test_no_committed_file_names_a_package_index():
    pattern = r"https?://[a-z.]*/(simple|packages)/|files\.pythonhosted"
    command = ["git", "grep", "-lE", pattern]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # Status 1 means that no file matches. A git that fails prints no files either.
    assert done.returncode == 1, done.stdout + done.stderr


@needs_lock
def test_every_package_of_the_resolution_is_pinned_exactly():
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    assert uv["exclude-newer"]
    assert uv["constraint-dependencies"] == list_pins(tomllib.loads(LOCK.read_text()))


@needs_lock
@needs_uv
@pytest.mark.parametrize("cache", ["warm", pytest.param("cold", marks=pytest.mark.exhaustive)])
def test_a_new_resolution_gives_the_same_lock(cache, tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        copy = tmp_path / "packages" / package
        copy.mkdir(parents=True)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(get_folder(package) / name, copy)
    lock = [UV, "lock", "--quiet"]
    # The cache contains what `uv sync` has read, unless it was cleared since.
    warm = [*lock, "--offline"]
    if cache == "cold" or subprocess.run(warm, cwd=tmp_path, check=False).returncode:
        cold = [*lock, "--cache-dir", str(tmp_path / "cache")]
        subprocess.run(cold, cwd=tmp_path, check=True)
    assert (tmp_path / "uv.lock").read_bytes() == LOCK.read_bytes()
