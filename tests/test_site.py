"""The site as a browser shows it: every public name, no broken link, and no overflow."""

import html
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from workspace import PACKAGES, ROOT, get_module_name

pytestmark = pytest.mark.exhaustive
SITE = ROOT / "docs" / "_site"
MEASURE = Path(__file__).with_name("measure_pages.html")


@pytest.fixture(scope="module")
def site():
    """Build the site once; return its folder."""
    pytest.importorskip("sphinx", reason="run it in the environment of `make site`")
    command = [sys.executable, ROOT / "docs" / "website.py"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return SITE


def test_the_site_has_every_public_name_and_can_be_searched(site):
    index = (site / "searchindex.js").read_text()
    for package in PACKAGES:
        names = importlib.import_module(get_module_name(package)).__all__
        shown = (site / "api" / f"{package}.html").read_text()
        assert re.findall(r"<h2>([^<]+)<", shown) == [*names], package
        sources = re.findall(r'href="\.\./files/packages/[^"]+">(?:<[^>]+>)?Source<', shown)
        assert len(sources) == len(names), package
        assert f"packages/{package}" in index


def test_no_link_of_the_site_is_broken(site):
    for page in site.rglob("*.html"):
        assert 'class="problematic"' not in page.read_text(), page
        # A target that begins with < is part of code on the page.
        for target in re.findall(r'href="(?!https?:|#|mailto:)([^"#<]+)', page.read_text()):
            assert (page.parent / target.split("?")[0]).exists(), (page, target)


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_screen(site, width, tmp_path):
    widths = measured_widths(site, width, tmp_path)
    assert len(widths) > 40
    assert {page: size["page"] for page, size in widths.items() if size["page"] > width} == {}
    if width == 1280:
        assert {page: size["tables"] for page, size in widths.items() if size["tables"]} == {}


def measured_widths(site, width, scratch):
    """Return the width of each page's content, and the excess of its tables, in pixels."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium or google-chrome on the path")
    pages = [path.relative_to(site) for path in sorted(site.rglob("*.html"))]
    pages = [str(path) for path in pages if path.parts[0] not in ("files", "_static")]
    text = MEASURE.read_text().replace("PAGES", json.dumps(pages)).replace("WIDTH", str(width))
    driver = site / "measure_pages.html"
    driver.write_text(text)
    try:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
        options += [f"--user-data-dir={scratch}/profile", "--virtual-time-budget=60000"]
        command = [browser, *options, "--dump-dom", driver.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    finally:
        driver.unlink()
    measured = re.search(r'<pre id="measured">(.+?)</pre>', done.stdout, re.DOTALL)
    assert measured, done.stderr
    return json.loads(html.unescape(measured[1]))
