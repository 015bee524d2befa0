"""Each guarantee cites a test that exists, and the page of them is what the packages say."""

import pytest
from workspace import PACKAGES, ROOT, get_folder, import_script

guarantees = import_script("guarantees")


def test_every_package_guarantees_something():
    assert set(guarantees.PACKAGES) == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_guarantee_names_tests_that_exist(package):
    for claim, question, tests in guarantees.read_guarantees(package):
        assert question in guarantees.QUESTIONS, claim
        assert tests, claim
        for test in tests:
            file, _, name = test.partition("::")
            (path,) = get_folder(package).glob(f"tests/**/{file}")
            assert f"def {name}(" in path.read_text() if name else True, f"{claim}: {test}"


def test_the_page_is_what_the_packages_say():
    assert (ROOT / "docs" / "guarantees.md").read_text() == guarantees.write_page_text()
