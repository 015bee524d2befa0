"""Rules on the shape of a package: a minimal implementation, no import cycles, small folders."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter

import pytest
from source_text import list_imports
from workspace import PACKAGES, ROOT, get_folder, get_module_name, get_source_folder

# plain.py states the idea of a package in textbook names; tests compare the package with it.
LONGEST_PLAIN_FILE = 120
MOST_FILES_IN_A_FOLDER = 14


def list_imported_modules(path, package=None):
    """Return the modules of `package` that a file imports, also inside functions.

    Without `package`, return those of the package that contains the file.
    """
    package = package or path.relative_to(ROOT / "packages").parts[2]
    return {name for name in list_imported_names(path) if name.split(".")[0] == package}


@cache
def list_imported_names(path):
    names = set()
    for node in list_imports(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.level == 0:
            # `from package import name`: the name may be a module.
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def iter_modules(package):
    """Yield the dotted name and the file of each module of a package."""
    root = get_source_folder(package)
    for path in sorted(root.rglob("*.py")):
        parts = [get_module_name(package), *path.relative_to(root).with_suffix("").parts]
        yield ".".join(part for part in parts if part != "__init__"), path


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_each_other_in_a_cycle(package):
    # An import of a public name from the package is an import of its file, not of __init__.py.
    files = {name: path for name, path in iter_modules(package) if path.name != "__init__.py"}
    TopologicalSorter(
        {name: list_imported_modules(path) & {*files} - {name} for name, path in files.items()}
    ).prepare()  # raises CycleError with the files of a cycle


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_a_short_minimal_implementation_that_tests_compare_with(package):
    (path,) = get_source_folder(package).rglob("plain.py")
    assert len(path.read_text().splitlines()) <= LONGEST_PLAIN_FILE
    assert not list_imported_modules(path)
    tests = get_folder(package).glob("tests/**/*.py")
    tested = {
        name for test in tests for name in list_imported_modules(test, get_module_name(package))
    }
    assert f"{get_module_name(package)}.plain" in tested


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_has_too_many_files(package):
    for folder_of_files in {path.parent for _, path in iter_modules(package)}:
        assert len([*folder_of_files.glob("*.py")]) <= MOST_FILES_IN_A_FOLDER


BRITISH = re.compile(
    r"[a-z]*"
    r"(?:colour|behaviour|favour|neighbour|honour|centre|artefact|grey|learnt|judgement|whilst)"
    r"|(?:un|re|de)?(?:"
    r"(?:label|model|travel|signal)l(?:ed|ing)"
    r"|(?:initial|material|maxim|minim|modern|normal|optim|organ|parallel|quant|random|real|recogn"
    r"|serial|special|standard|summar|synchron|token|util|vector)is(?:e[srd]?|ing|ation|ations)"
    r")"
)


def test_spelling_is_american():
    misspelled = [
        f"{path.relative_to(ROOT)}: {word}"
        for kind in ("py", "md", "toml", "html")
        for path in iter_files_with_suffix(kind)
        if path.name != "test_house.py"
        for word in set(re.findall("[a-z]+", path.read_text().lower()))
        if is_british(word)
    ]
    assert not misspelled


@cache
def is_british(word):
    return BRITISH.fullmatch(word) is not None


def iter_files_with_suffix(kind):
    """Yield every file of this repository with the suffix `kind`, except the built site."""
    yield from ROOT.glob(f"*.{kind}")
    for top in ("docs", "packages", "tests"):
        for path in (ROOT / top).rglob(f"*.{kind}"):
            if "_site" not in path.relative_to(ROOT).parts:
                yield path
