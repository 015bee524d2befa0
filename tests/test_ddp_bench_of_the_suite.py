"""ddp's bench takes any model by its name: here the sizes of the suite's own."""

import pytest
import suite_workloads
import torch
from ddp.assignment import assign_buckets
from ddp.bench import bench
from ddp.bucket import make_bucket
from worker_pool import run_ranks

MIB = 2**20


def run_suite_bench() -> list[dict]:
    return bench(quick=True, model="suite_workloads:small", designs="25 MB", rounds=1)


@pytest.mark.exhaustive
def test_the_suites_small_is_benched_by_its_name() -> None:
    (first,) = run_ranks(run_suite_bench, 1, timeout=300)
    (step,) = (row for row in first if row["case"] == "step")
    # 12 layers of 4 d^2 + 3 d f and two norms, a norm, an embedding and a head.
    d, f = 768, 3072
    numel = 12 * (4 * d * d + 3 * d * f + 2 * d) + d + 2 * 256 * d
    assert (step["workload"], step["gradient_bytes"]) == ("small", 4 * numel)


def test_the_suites_xl_fits_in_buckets_that_hold_one_set_of_gradients() -> None:
    # Without memory behind it: two ranks would take 16 GB in bfloat16, 31 GB in float32.
    model, loss = suite_workloads.xl(torch.device("meta"))
    parameters = list(model.parameters())
    loss(model).backward()
    runs = assign_buckets(parameters, range(len(parameters)), 25 * MIB)
    buckets = [make_bucket(run, parameters, None, None) for run in runs]
    gradients = [view for bucket in buckets for view in bucket.views]
    assert [g.shape for g in gradients] == [p.grad.shape for p in parameters]
    # 48 layers of 4 d^2 + 3 d f and two norms, a norm, an embedding and a head.
    d, f = 1600, 6400
    numel = 48 * (4 * d * d + 3 * d * f + 2 * d) + d + 2 * 256 * d
    assert sum(bucket.gradients.nbytes for bucket in buckets) == 2 * numel
    extra = sum(bucket.flags.nbytes for bucket in buckets)
    assert extra == 2 * (3 * len(buckets) + len(parameters)) < 1e-5 * 2 * numel
