"""An independent reference: torch's tests of FSDP2, DTensor, tensor parallelism and checkpoints.

They are single files of torch's repository, which its wheel does not contain. TORCH_TESTS is the
folder `test/distributed` of a checkout. Its release may differ from that of the installed torch:
tests that pass on gloo must pass on the registered backend. The tests of FSDP2 require GPUs, so
they run with the replacements of zero's `torch_oracle.py`.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from worker_pool import run_ranks

TESTS = Path(__file__).parent
FOLDER = os.environ.get("TORCH_TESTS")
SECONDS = 300
FILES = (
    "_composable/test_replicate.py",
    "_tensor/experimental/test_local_map.py",
    "_tensor/experimental/test_tp_transform.py",
    "_tensor/test_api.py",
    "_tensor/test_common_rules.py",
    "_tensor/test_dtensor.py",
    "_tensor/test_embedding_ops.py",
    "_tensor/test_experimental_ops.py",
    "_tensor/test_init.py",
    "_tensor/test_math_ops.py",
    "_tensor/test_matrix_ops.py",
    "_tensor/test_optimizers.py",
    "_tensor/test_redistribute.py",
    "_tensor/test_tensor_ops.py",
    "tensor/parallel/test_tp_style.py",
)
ZERO = TESTS.parents[1] / "zero" / "tests"
# Tests that may fail on the registered backend, and the reason. gloo does not report its writes to
# autograd, which therefore computes with the overwritten values.
WRAPPER = "a wrapper subclass (TwoTensor) is refused; gloo's calls are dispatched to the subclass"
DIFFERS = {
    "extensions: all_gather_extensions_train_parity": WRAPPER,
    "extensions: all_gather_extensions_monkey_patch": WRAPPER,
    "test_replicate_to_shard_forward_backward": (
        "autograd refuses to read parts of a tensor that a broadcast has overwritten"
    ),
    "comm: unshard_async": (
        "autograd refuses a backward pass that needs the result of relu, which an all-reduce has "
        "overwritten"
    ),
}


def list_passed_tests(backend, file, folder):
    """Return the names of the tests that pass, and the number of our groups that ranks created."""
    report, marks = folder / f"{backend}.xml", folder / backend
    marks.mkdir()
    path = Path(FOLDER, file)
    search = [str(TESTS), str(path.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "ORACLE": backend,
        "ORACLE_FOLDER": str(marks),
        "PYTHONPATH": os.pathsep.join(search),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    command += ["-p", "in_place_of_gloo", "-c", os.devnull, "--rootdir", str(marks)]
    command += [f"--junitxml={report}", str(path)]
    subprocess.run(command, env=environment, cwd=marks, timeout=SECONDS, capture_output=True)
    failed = {"failure", "error", "skipped"}
    cases = ElementTree.parse(report).iter("testcase")
    names = {case.get("name") for case in cases if not failed & {child.tag for child in case}}
    return names, len(list(marks.glob("group *")))


@pytest.mark.exhaustive
@pytest.mark.skipif(FOLDER is None, reason="TORCH_TESTS names no test/distributed of torch's")
@pytest.mark.parametrize("file", FILES)
def test_files_of_torch_that_pass_on_gloo_pass(file, tmp_path):
    on_gloo, count_on_gloo = list_passed_tests("gloo", file, tmp_path)
    on_ours, count_on_ours = list_passed_tests("collectives", file, tmp_path)
    assert on_gloo, "none of torch's tests passed on gloo"
    assert count_on_gloo == 0 < count_on_ours, "the backend was not used"
    assert on_gloo - on_ours <= set(DIFFERS), sorted(on_gloo - on_ours)


def run_fsdp2(backend, world, folder, folder_of_store):
    """Run torch's tests of fully_shard on this rank; return the failure of each test by name."""
    import collectives.backend  # noqa: F401
    import torch.distributed as dist

    sys.path.insert(0, str(ZERO))
    import torch_oracle

    create = dist.init_process_group

    def init_process_group(_, **options):
        create(backend, **options)
        assert dist.get_backend() == backend

    dist.init_process_group = init_process_group
    names = {path.stem for path in Path(folder).glob("test_fully_shard_*.py")}
    # These tests compile the model with GPUs only.
    files = sorted(names - {"test_fully_shard_compile"})
    return torch_oracle.run("torch", world, folder, files, "", folder_of_store)


@pytest.mark.exhaustive
@pytest.mark.skipif(FOLDER is None, reason="TORCH_TESTS names no test/distributed of torch's")
@pytest.mark.skipif(not ZERO.exists(), reason="zero is not part of this checkout")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_tests_of_fsdp2_that_pass_on_gloo_pass(world, tmp_path):
    on_gloo, on_ours = [], []
    for backend, failures in (("gloo", on_gloo), ("collectives", on_ours)):
        (tmp_path / backend).mkdir()
        arguments = str(Path(FOLDER, "_composable", "fsdp")), str(tmp_path / backend)
        failures += run_ranks(run_fsdp2, world, backend, world, *arguments, backend="", timeout=900)
    names = [name for name in on_gloo[0] if not any(rank[name] for rank in on_gloo)]
    assert names, on_gloo
    failed = {name: rank[name] for name in names for rank in on_ours if rank[name]}
    assert failed.keys() <= set(DIFFERS), failed
