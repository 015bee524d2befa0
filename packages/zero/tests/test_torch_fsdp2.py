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

#: The numbers of tests that pass with torch's implementation, and of these with FSDP, by the number
#: of ranks, with torch 2.15 and torch's files of June 2025.
PASSED = {1: (6, 2), 2: (18, 6), 4: (20, 7)}

# Tests that fail with FSDP by the end of their name, with the reason.
INSIDE = "inspects FSDP2's internal objects"
DTENSORS = "requires DTensors between steps"
LATER = "casts or materializes after sharding, which must precede or be part of it here"
DIFFERS = {
    "train_mixed_requires_grad_per_group": DTENSORS,
    "1d_state_dict_save_load": DTENSORS,
    "shard_tensor_parameters": DTENSORS,
    "clip_grad_norm_1d": DTENSORS,
    "hsdp_broadcast_across_replicas": "passes a mesh of two dimensions, which is refused",
    "to_float64_after_init": LATER,
    "invalid_meta_device_init": LATER,
    "manual_reshard_with_reshard_after_forward_false": "counts collectives",
    "unshard_async": "requires separate groups per layer, and inputs that belong to no module",
    "fully_shard_double_lazy_init": INSIDE,
    "fully_shard_is_root": INSIDE,
    "fully_shard_module_and_param_fqns": INSIDE,
    "fully_shard_unsupported_module_cls": INSIDE,
    "fully_shard_state": INSIDE,
    "fully_shard_reapply": INSIDE,
    "fully_shard_deepcopy": "expects another message of the refusal",
}

# Substrings of the errors that refuse an argument or a model, with what is refused.
REFUSALS = {
    "reshard_after_forward=": "an integer as an argument",
    "which sharding would turn into a plain tensor": "a subclass of Tensor, for example a DTensor",
    "is read while its module does not run": "another method than forward reads parameters",
}


def test_the_page_of_fsdp2_lists_the_tests_that_differ():
    text = (Path(__file__).parent.parent / "FSDP2.md").read_text()
    [section] = re.findall(r"^# torch's tests of `fully_shard`.*?(?=^# |\Z)", text, re.M | re.S)
    theirs, ours = zip(*PASSED.values(), strict=True)
    assert (
        f"On one, two and four ranks, {theirs[0]}, {theirs[1]} and {theirs[2]} tests pass with "
        f"torch's implementation, and {ours[0]}, {ours[1]} and {ours[2]} of them with `zero.fully"
    ) in " ".join(section.split())
    reason_of = {}
    for reason, tests in re.findall(r"^\| (.*) \| (`.*`) \|$", section, re.M):
        reason_of |= dict.fromkeys(re.findall(r"`test_(\S+)`", tests), reason)
    refused = {
        n for n, reason in reason_of.items() if re.search("raises? `(Value|Runtime)E", reason)
    }
    assert reason_of.keys() >= DIFFERS.keys()
    assert reason_of.keys() - refused <= DIFFERS.keys()
    assert len(reason_of) == sum(theirs) - sum(ours)
    # The other reasons are other behavior and internal objects.
    inside = {name for name in DIFFERS if DIFFERS[name] == INSIDE or "message" in DIFFERS[name]}
    other = len(reason_of) - len(refused) - len(inside)
    assert (
        f"Of these {sum(theirs)} tests, {sum(ours)} pass and {len(reason_of)} do not. Among the "
        f"{len(reason_of)}, {len(refused)} need features whose use raises an error, {other} expect "
        f"other behavior, and {len(inside)} inspect internal objects"
    ) in " ".join(section.split())


def run_tests(implementation, world, folder_of_stores):
    folder = Path(FOLDER, "_composable", "fsdp")
    files = sorted(path.stem for path in folder.glob("test_fully_shard_*.py"))
    arguments = implementation, world, str(folder), files, WANTED, str(folder_of_stores)
    return run_ranks(judge_tests, world, *arguments, backend="", timeout=3000)


def judge_tests(*arguments):
    import torch_oracle

    return torch_oracle.run(*arguments)


@pytest.mark.exhaustive
@pytest.mark.skipif(FOLDER is None, reason="TORCH_TESTS is not set to a folder of torch's tests")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_torchs_tests_of_fully_shard_pass_on_fsdp(world, tmp_path):
    for implementation in ("torch", "zero"):
        (tmp_path / implementation).mkdir()
    theirs, ours = (
        run_tests(implementation, world, tmp_path / implementation)
        for implementation in ("torch", "zero")
    )
    passed = [name for name in theirs[0] if not any(rank[name] for rank in theirs)]
    failures = {name: next((rank[name] for rank in ours if rank[name]), "") for name in passed}
    if not WANTED:
        assert len(passed) >= PASSED[world][0], theirs
        assert list(failures.values()).count("") >= PASSED[world][1], failures
    unexpected = {
        name: error
        for name, error in failures.items()
        if error
        and not name.endswith(tuple(f": {end}" for end in DIFFERS))
        and not any(text in error for text in REFUSALS)
    }
    unneeded = [
        end
        for end in DIFFERS
        if (errors := [e for name, e in failures.items() if name.endswith(f": {end}")])
        and not any(errors)
    ]
    assert not unneeded, "these tests pass now"
    assert not unexpected, "\n\n".join(f"{name}: {error}" for name, error in unexpected.items())
