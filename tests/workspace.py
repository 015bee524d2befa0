"""Paths and names in this repository, for the tests that check it as a whole."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
LEAVES = (
    "accounting",
    "collectives",
    "ddp",
    "flashattn2",
    "interp",
    "paramserver",
    "scaling",
    "tinyml",
    "zero",
)
SUITE = "llmsys-suite"
#: `uv run` sets the variable; the Makefile installs uv in .uv if it is missing.
UV = os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
PACKAGES = (*LEAVES, SUITE)


def get_folder(package: str) -> Path:
    return ROOT / "packages" / package


def get_module_name(package: str) -> str:
    return package.replace("-", "_")


def get_source_folder(package: str) -> Path:
    return get_folder(package) / "src" / get_module_name(package)


def read_pyproject(package: str) -> dict[str, Any]:
    return tomllib.loads((get_folder(package) / "pyproject.toml").read_text())


def read_project(package: str) -> dict[str, Any]:
    return read_pyproject(package)["project"]


def import_script(name: str) -> ModuleType:
    """Import a script of docs/ and return it as a module."""
    if str(ROOT / "docs") not in sys.path:
        sys.path.append(str(ROOT / "docs"))  # for the modules that scripts import
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
