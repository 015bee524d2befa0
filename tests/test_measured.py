"""No number in a README is typed by hand: each table is what the results render to."""

import pytest
from workspace import PACKAGES, ROOT, folder, script

measure = script("measure")


def test_every_package_says_what_it_measures():
    assert set(measure.PACKAGES) == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_measured_section_is_what_the_results_render_to(package):
    text = (folder(package) / "README.md").read_text()
    shown = text.split(measure.BEGIN)[1].split(measure.END)[0]
    assert shown == measure.quoted(package)
    assert shown, "the bench has not been run yet: make bench"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_readme_quotes_one_table_of_at_most_eight_rows_and_seven_columns(package):
    table = [line for line in measure.quoted(package).splitlines() if line.startswith("|")]
    assert len(table) <= 2 + 8
    assert table[0].count("|") <= 1 + 7


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_of_all_rows_is_what_the_results_render_to(package):
    assert (ROOT / "docs" / "results" / f"{package}.md").read_text() == measure.page(package)
