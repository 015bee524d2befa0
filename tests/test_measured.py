"""No number in a README is typed by hand: each "Measured" section is what the results render to."""

import importlib.util

import pytest
from workspace import PACKAGES, ROOT, folder

spec = importlib.util.spec_from_file_location("measure", ROOT / "docs" / "measure.py")
measure = importlib.util.module_from_spec(spec)
spec.loader.exec_module(measure)


def test_every_package_has_a_bench_in_the_script():
    assert set(measure.BENCHES) == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_measured_section_is_what_the_results_render_to(package):
    text = (folder(package) / "README.md").read_text()
    shown = text.split(measure.BEGIN)[1].split(measure.END)[0]
    assert shown == measure.rendered(package)
    assert shown, "the bench has not been run yet: make bench"
