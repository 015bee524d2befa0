"""Torch's own tests of its attention on a CPU, with torch's function or with ours.

Pytest does not collect this file: `test_torch_sdpa` runs it in a separate process, with ORACLE
(torch or flashattn2), ORACLE_FOLDER and TORCH_SDPA_TESTS (the file test/test_transformers.py) set.

Our function replaces torch's for dense tensors without a mask and dropout.  It does not replace the
calls by which a test computes its expected result with torch's math backend.
"""

import os
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from flashattn2 import sdpa
from torch.testing._internal import common_device_type as device_types

FILE = Path(os.environ["TORCH_SDPA_TESTS"])
# The test classes that run on a CPU; the other classes need a GPU.
CLASSES = (
    "TestTransformers",
    "TestSDPA",
    "TestSDPACpuOnly",
    "TestSDPAFailureModes",
    "TestAttnBias",
)
torchs = F.scaled_dot_product_attention
judged = set()
calls = 0


def call_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Call our function, or torch's if ours does not apply."""
    global calls
    arguments = (query, key, value)
    dense = all(
        type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_nested for x in arguments
    )
    reference = not torch._C._get_flash_sdp_enabled()
    if attn_mask is not None or dropout_p or not dense or reference:
        # torch's masks look for torch's function.
        with mock.patch.object(F, "scaled_dot_product_attention", torchs):
            return torchs(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
    calls += 1
    return sdpa(query, key, value, None, 0.0, is_causal, scale, enable_gqa)


@pytest.fixture(autouse=True)
def count(request):
    before = calls
    yield
    if calls > before:
        judged.add(request.node.name)
        (Path(os.environ["ORACLE_FOLDER"]) / "judged.txt").write_text("\n".join(sorted(judged)))


if os.environ["ORACLE"] == "flashattn2":
    F.scaled_dot_product_attention = call_attention

module = ModuleType("theirs")
sys.modules["theirs"] = module
instantiate = device_types.instantiate_device_type_tests


def instantiate_on_cpu(case, scope, *_, **__):
    if case.__name__ in CLASSES:
        instantiate(case, scope, only_for="cpu")
    else:
        del scope[case.__name__]


device_types.instantiate_device_type_tests = instantiate_on_cpu
exec(compile(FILE.read_text(), FILE, "exec"), vars(module))
cases = {
    name: case
    for name, case in vars(module).items()
    if name.startswith("Test") and isinstance(case, type)
}
globals().update(cases)
