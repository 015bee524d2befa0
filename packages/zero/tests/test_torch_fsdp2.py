"""torch's tests of fully_shard, run with zero.fully_shard on the CPU.

Tests that pass with torch's implementation pass with this one, except those in DIFFERS, and those
that end with an error of REFUSALS.
"""

import os
import re
import sys
from pathlib import Path

import pytest
from worker_pool import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

# The folder test/distributed of a checkout of torch's repository, and the tests to run: all.
FOLDER = os.environ.get("TORCH_TESTS")
WANTED = os.environ.get("TORCH_TESTS_WANTED", "")

# Tests that fail with FSDP by the end of their name, with the reason.
INSIDE = "inspects FSDP2's internal objects"
DTENSORS = "requires DTensors between steps"
MESH = "passes a mesh of two dimensions, which is refused"
LATER = "casts, loads or materializes after sharding, which must precede or be part of it here"
DIFFERS = {
    "param_registration_after_forward": DTENSORS,
    "mixed_requires_grad_per_group": DTENSORS,
    "1d_state_dict_save_load": DTENSORS,
    "1d_state_dict_cpu_offload": DTENSORS,
    "shard_tensor_parameters": DTENSORS,
    "1d_process_group_init": DTENSORS,
    "2d_process_group_init": DTENSORS,
    "hsdp_broadcast_across_replicas": MESH,
    "train_parity_hsdp": MESH,
    "to_float64_after_init": LATER,
    "rank0_broadcast_meta_device_init": LATER,
    "meta_device_1d_init": LATER,
    "invalid_meta_device_init": LATER,
    "gradient_accumulation": "counts collectives",
    "communication_count": "counts collectives, and an all-reduce of flags is added here",
    "manual_reshard_with_reshard_after_forward_false": "counts collectives",
    "reduce_dtype": "sums of bfloat16 in another order differ in one element of a thousand",
    "unshard_async": "requires separate groups per layer, and inputs that belong to no module",
    "clip_grad_norm_1d": DTENSORS,
    "double_lazy_init": INSIDE,
    "fully_shard_is_root": INSIDE,
    "module_and_param_fqns": INSIDE,
    "unsupported_module_cls": INSIDE,
    "fully_shard_state": INSIDE,
    "fully_shard_reapply": INSIDE,
    "fully_shard_deepcopy": "expects another message of the refusal",
}

# Substrings of the errors that refuse an argument or a model, with what is refused.
REFUSALS = {
    "expected reshard_after_forward to be True, False or None": "an integer as an argument",
    "which sharding would turn into a plain tensor": "a subclass of Tensor, for example a DTensor",
    "is read while its module does not run": "another method than forward reads parameters",
}


def test_the_page_of_fsdp2_lists_the_tests_that_differ():
    text = (Path(__file__).parent.parent / "FSDP2.md").read_text()
    [section] = re.findall(r"^# torch's tests of `fully_shard`.*?(?=^# |\Z)", text, re.M | re.S)
    listed = {}
    for reason, tests in re.findall(r"^\| (.*) \| (`.*`) \|$", section, re.M):
        for name in re.findall(r"`(\S+)`", tests):
            listed[name.removeprefix("test_").removeprefix("..._")] = reason
    # The page abbreviates some names, and DIFFERS others.
    assert not [name for name in DIFFERS if not has_name(listed, name)]
    refused = [n for n, reason in listed.items() if re.search("raises? `(Value|Runtime)E", reason)]
    assert not [name for name in listed if not has_name(DIFFERS, name) and name not in refused]


def has_name(names, wanted):
    return any(name.endswith(wanted) or wanted.endswith(name) for name in names)


def outcomes(implementation, world, folder_of_stores):
    folder = Path(FOLDER, "_composable", "fsdp")
    files = sorted(path.stem for path in folder.glob("test_fully_shard_*.py"))
    arguments = implementation, world, str(folder), files, WANTED, str(folder_of_stores)
    return run_ranks(judged, world, *arguments, backend="", timeout=3000)


def judged(*arguments):
    import torch_oracle

    return torch_oracle.run(*arguments)


@pytest.mark.exhaustive
@pytest.mark.skipif(FOLDER is None, reason="TORCH_TESTS is not set to a folder of torch's tests")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_torchs_tests_of_fully_shard_pass_on_fsdp(world, tmp_path):
    for implementation in ("torch", "zero"):
        (tmp_path / implementation).mkdir()
    theirs, ours = (
        outcomes(implementation, world, tmp_path / implementation)
        for implementation in ("torch", "zero")
    )
    passed = [name for name in theirs[0] if not any(rank[name] for rank in theirs)]
    assert passed or WANTED, theirs
    failures = {name: next((rank[name] for rank in ours if rank[name]), "") for name in passed}
    unexpected = {
        name: error
        for name, error in failures.items()
        if error
        and not name.endswith(tuple(DIFFERS))
        and not any(text in error for text in REFUSALS)
    }
    unneeded = [
        end
        for end in DIFFERS
        if (errors := [error for name, error in failures.items() if name.endswith(end)])
        and not any(errors)
    ]
    assert not unneeded, "these tests pass now"
    assert not unexpected, "\n\n".join(f"{name}: {error}" for name, error in unexpected.items())
