"""Each public name has an example on its package's page, and the examples run as printed."""

import importlib

import pytest
import torch.distributed as dist
from workspace import PACKAGES, get_module_name, import_script

API_EXAMPLES = import_script("api_examples")


@pytest.fixture
def no_process_group():
    """Destroy the process group of a page whose last block did not run."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("package", PACKAGES)
def test_each_public_name_has_an_example_in_order(package):
    public = importlib.import_module(get_module_name(package)).__all__
    examples = API_EXAMPLES.read_examples(package)
    assert list(examples) == list(public)
    for name, text in examples.items():
        sentence = text.partition("\n")[0]
        assert sentence.endswith("."), (name, sentence)
        assert API_EXAMPLES.BLOCK.search(text), name


@pytest.mark.fixed_seed("pages quote values of one seed")
@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize("package", PACKAGES)
def test_examples_print_their_output(package):
    report = API_EXAMPLES.run(package)
    assert not report, report
