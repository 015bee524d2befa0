"""Make one site of all pages: with search, the public names of each package, and linked files.

    make site        or, where sphinx, myst-parser and furo are installed, python docs/website.py

The site is written to docs/_site and opens from disk. Pages are first copied into one folder,
because a site has one root. A link to a package's folder becomes a link to its README, and a link
to a source file becomes a link to a page that shows it. A broken link is an error.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import api_examples

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = DOCS / "_site"
PACKAGES = (
    "accounting",
    "flashattn2",
    "collectives",
    "ddp",
    "zero",
    "paramserver",
    "scaling",
    "interp",
    "tinyml",
    "llmsys-suite",
)
GUIDES = (
    "architecture",
    "choosing",
    "scaling_out",
    "answers",
    "numerics",
    "benchmarking",
    "guarantees",
    "contributing",
    "changelog",
)
FIRST_GUIDES = ("Getting started <getting_started>", "Reading order, glossary, help <overview>")
PICTURES = (".svg", ".png")
#: Front matter of a page that the sidebar does not list, and of one without a list of its headings.
UNLISTED = "---\norphan: true\n---\n"
WIDE = "---\nhide-toc: true\n---\n"
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")
SETTINGS: dict[str, Any] = {
    "project": "llmsys",
    "extensions": ["myst_parser", "sphinx.ext.autodoc"],
    "myst_heading_anchors": 4,
    "html_theme": "furo",
    "html_title": "llmsys",
    "html_show_copyright": False,
    "html_copy_source": False,
    "html_static_path": [str(DOCS / "static")],
    "html_css_files": ["tables.css"],
    "default_role": "code",
    # A block without a language is a picture or output, never Python.
    "highlight_language": "text",
    "autodoc_member_order": "bysource",
    "autodoc_typehints": "signature",
    # Docstrings are written for readers at a prompt, so that warnings about reST in them are
    # suppressed, and the warning that `bytes` is also the name of a field.
    "suppress_warnings": [
        "docutils",
        "myst.header",
        "misc.highlighting_failure",
        "autodoc",
        "ref.python",
    ],
    "exclude_patterns": [],
}


def main() -> int:
    """Stage the pages and build the site; return the status of sphinx."""
    from sphinx.application import Sphinx

    shutil.rmtree(SITE, ignore_errors=True)
    source = SITE / "_source"
    stage_pages(source)
    app = Sphinx(
        str(source),
        None,
        str(SITE),
        str(SITE / "_trees"),
        "html",
        SETTINGS,
        status=None,
        warning=sys.stderr,
    )
    app.connect("autodoc-process-docstring", _escape_bars)
    app.build(force_all=True)
    shutil.rmtree(source)
    shutil.rmtree(SITE / "_trees")
    print(SITE / "index.html")
    return int(app.statuscode)


def _escape_bars(
    _app: Any, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]
) -> None:
    """Escape |x|, a norm, which reST would read as a substitution, except in code."""
    for i, line in enumerate(lines):
        if not line.startswith("    "):
            lines[i] = re.sub(r"`[^`]*`|\|", lambda m: "\\|" if m[0] == "|" else m[0], line)


def stage_pages(folder: Path) -> None:
    """Copy every page to its path in the site, with rewritten links."""
    pages = list_site_paths()
    shown: set[Path] = set()
    for page, site_path in pages.items():
        rewrite = partial(_rewrite_link, page=page, site_path=site_path, pages=pages, shown=shown)
        text = LINK.sub(rewrite, page.read_text())
        if site_path.startswith("results/"):
            text = WIDE + text  # tables of many columns
        if site_path == "index.md":
            text += _format_contents()
        _write(folder / site_path, text)
    for name in PACKAGES:
        _write(folder / "api" / f"{name}.md", _format_api_page(name, shown))
    for path in sorted(shown):
        if path.suffix in PICTURES:
            target = folder / _get_picture_path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        else:
            _write(folder / "files" / f"{path.relative_to(ROOT)}.md", _format_file_page(path))
    _write(folder / "results" / "index.md", _list_results())


def list_site_paths() -> dict[Path, str]:
    """Return the path in the site of each page of the repository."""
    pages = {DOCS / f"{guide}.md": f"{guide}.md" for guide in GUIDES}
    pages |= {ROOT / "README.md": "getting_started.md", DOCS / "index.md": "overview.md"}
    # The first page of the site is the tutorial, which uses every package on one model.
    pages |= {DOCS / "tutorial.md": "index.md"}
    pages |= {path: f"results/{path.name}" for path in sorted(DOCS.glob("results/*.md"))}
    return pages | {ROOT / "packages" / p / "README.md": f"packages/{p}.md" for p in PACKAGES}


def _rewrite_link(
    match: re.Match[str], page: Path, site_path: str, pages: Any, shown: set[Path]
) -> str:
    target = (page.parent / match[1]).resolve()
    if not target.exists():
        raise FileNotFoundError(f"{page.relative_to(ROOT)} links to the missing {match[1]}")
    if target == DOCS / "results":
        reached = "results/index.md"
    elif target in pages:
        reached = pages[target]
    elif target / "README.md" in pages:
        reached = pages[target / "README.md"]
    elif target.suffix in PICTURES:
        shown.add(target)
        reached = str(_get_picture_path(target))
    else:
        shown.add(target)
        reached = f"files/{target.relative_to(ROOT)}.md"
    up = "../" * site_path.count("/")
    return f"]({up}{reached}{match[2] or ''})"


def _get_picture_path(path: Path) -> Path:
    """Return the path in the site of a picture."""
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT)


def _format_file_page(path: Path) -> str:
    """Return a page that shows one file."""
    language = {".py": "python", ".toml": "toml", ".md": "markdown"}.get(path.suffix, "text")
    return f"{UNLISTED}# {path.relative_to(ROOT)}\n\n````{language}\n{path.read_text()}\n````\n"


def _format_api_page(name: str, shown: set[Path]) -> str:
    """Return a page of every public name, in the order of `__all__`.

    Each name has its docstring, a link to its source file, which is added to `shown`, and its
    example.
    """
    module = importlib.import_module(name.replace("-", "_"))
    examples = api_examples.read_examples(name)
    parts = [f"# {name}: public names", api_examples.read_introduction(name)]
    for public in module.__all__:
        directive = "\n".join(_format_directive(module, public))
        source = _find_source(module, public)
        shown.add(source)
        link = f"[Source](../files/{source.relative_to(ROOT)}.md)"
        parts += [f"## {public}", f"```{{eval-rst}}\n{directive}\n```", link, examples[public]]
    return "\n\n".join([*parts, ""])


def _format_directive(module: ModuleType, public: str) -> list[str]:
    """Return the lines of autodoc's directive for a public name."""
    thing = getattr(module, public)
    where = f"{module.__name__}.{public}"
    if inspect.isclass(thing):
        options = ["   :members:"]
        # A private base or `object` says nothing to a reader.
        if all(base is not object and base.__name__[0] != "_" for base in thing.__bases__):
            options.append("   :show-inheritance:")
        return [f".. autoclass:: {where}", *options]
    if inspect.isroutine(thing):
        return [f".. autofunction:: {where}"]
    if inspect.ismodule(thing):
        return [f".. automodule:: {thing.__name__}", "   :members:"]
    return [f".. py:data:: {where}", f"   :type: {type(thing).__name__}"]


def _find_source(module: ModuleType, public: str) -> Path:
    """Return the file that defines a public name; for data, the file from which it is imported."""
    thing = getattr(module, public)
    if inspect.ismodule(thing):
        return Path(str(thing.__file__))
    owner = getattr(thing, "__module__", None)
    if owner is None or owner.split(".")[0] != module.__name__:
        tree = ast.parse(Path(str(module.__file__)).read_text())
        owner = next(
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and public in [alias.name for alias in node.names]
        )
        if str(owner).split(".")[0] != module.__name__:  # the name belongs to another library
            return Path(str(module.__file__))
    return Path(str(importlib.import_module(str(owner)).__file__))


def _list_results() -> str:
    names = sorted(path.stem for path in DOCS.glob("results/*.md"))
    tree = _format_tree([f"{name} <{name}>" for name in names])
    return "# Results\n\nAll rows, by package.\n\n" + tree


def _format_contents() -> str:
    """Return the site's tree, for the end of the first page."""
    return "\n".join(
        [
            "\n",
            _format_tree([*FIRST_GUIDES, *GUIDES, "results/index"], "Guides"),
            _format_tree([f"packages/{name}" for name in PACKAGES], "Packages"),
            _format_tree([f"{name} <api/{name}>" for name in PACKAGES], "Public names"),
        ]
    )


def _format_tree(names: list[str], caption: str = "") -> str:
    head = [f":caption: {caption}", ":hidden:"] if caption else []
    return "\n".join(["```{toctree}", *head, ":maxdepth: 1", "", *names, "```", ""])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
