"""Buckets partition the parameters by dtype and size, in order."""

import math
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from ddp.aliased_gradients import contribute_zeros, move_gradient_in, preserve_aliased_grads
from ddp.assignment import assign_buckets
from ddp.bucket import RANK_FLAGS, make_bucket
from ddp.consistency.shared_gradients import refuse_shared_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
shapes = st.lists(st.integers(0, 7), max_size=3)
models = st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=12)


@settings(max_examples=40)
@given(model=models, bucket_bytes=st.sampled_from([0, 1, 64, 200, 10**6]), data=st.data())
def test_assignment_is_a_partition_within_the_size(model, bucket_bytes, data):
    parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in model]
    order = data.draw(st.permutations(range(len(parameters))))
    runs = assign_buckets(parameters, order, bucket_bytes)

    assert sorted(index for run in runs for index in run) == sorted(order)
    position = {index: at for at, index in enumerate(order)}
    completed = [position[run[-1]] for run in runs]
    assert completed == sorted(completed)
    for run in runs:
        assert len({parameters[index].dtype for index in run}) == 1
        assert [position[index] for index in run] == sorted(position[index] for index in run)
        size = sum(parameters[i].numel() * parameters[i].element_size() for i in run)
        assert len(run) == 1 or (bucket_bytes and size <= bucket_bytes)
    # A bucket is closed only if the next parameter of its dtype does not fit.
    sizes = [parameter.nbytes for parameter in parameters]
    for dtype in {parameter.dtype for parameter in parameters}:
        of_dtype = [run for run in runs if parameters[run[0]].dtype == dtype]
        for run, following in pairwise(sorted(of_dtype, key=lambda run: position[run[0]])):
            used_bytes = sum(sizes[index] for index in run)
            assert bucket_bytes == 0 or used_bytes + sizes[following[0]] > bucket_bytes
    if bucket_bytes == 0:
        assert len(runs) == len(parameters)
    if bucket_bytes == 10**6:
        assert len(runs) == len({dtype for _, dtype in model})


def test_size_of_a_bucket_follows_from_the_number_of_buckets_before_it():
    parameters = [nn.Parameter(torch.empty(2)), *(nn.Parameter(torch.empty(1).double()),) * 3]
    # The second bucket has another dtype than the first one, which is still open.
    assert assign_buckets(parameters, range(4), (8, 16)) == [(0,), (1, 2), (3,)]


@settings(max_examples=40)
@given(model=models)
def test_views_are_in_the_buffer_and_do_not_overlap(model):
    parameters = [nn.Parameter(torch.empty(shape)) for shape, _ in model]
    bucket = make_bucket(range(len(parameters)), parameters, None, None)
    numel = sum(math.prod(shape) for shape, _ in model)
    assert bucket.buffer.numel() == numel + RANK_FLAGS + len(parameters)
    for value, view in enumerate(bucket.views):
        view.fill_(value)
    bucket.missing.add(0)
    bucket.write_flags(is_participating=True, has_stepped=True, is_suspect=False)
    expected = [float(v) for v, (shape, _) in enumerate(model) for _ in range(math.prod(shape))]
    assert bucket.gradients.tolist() == expected
    assert bucket.buffer[numel:].tolist() == [1.0, 1.0, 0.0, 1.0] + [0.0] * (len(parameters) - 1)


def build_bucket_of_ones():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    bucket = make_bucket([0, 1], parameters, None, None)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    return bucket, parameters


def test_alias_of_a_gradient_keeps_its_value_while_another_gradient_accumulates():
    bucket, parameters = build_bucket_of_ones()
    for slot in range(2):
        move_gradient_in(bucket, slot)
    alias = parameters[0].grad.view(-1)
    parameters[0].grad = torch.full((2,), 5.0)
    move_gradient_in(bucket, 0)
    assert alias.tolist() == [1.0, 1.0]
    assert bucket.gradients.tolist() == [5.0, 5.0, 1.0, 1.0]
    assert all(bucket.is_grad_view(slot) for slot in range(2))


def test_zero_contribution_keeps_gradients_and_their_aliases():
    bucket, parameters = build_bucket_of_ones()
    for slot in range(2):
        move_gradient_in(bucket, slot)
    alias = parameters[0].grad
    parameters[0].grad = torch.full((2,), 5.0)
    contribute_zeros(bucket)
    assert bucket.gradients.tolist() == [0.0] * 4
    assert alias.tolist() == [1.0, 1.0]
    assert [parameter.grad.tolist() for parameter in parameters] == [[5.0, 5.0], [1.0, 1.0]]
    assert bucket.ready == {0, 1}


def test_every_gradient_is_scaled_once():
    bucket, _ = build_bucket_of_ones()
    bucket.copy_in(0, 0.5)
    bucket.deferred.append(1)
    bucket.copy_in_deferred(0.5)
    assert bucket.gradients.tolist() == [0.5] * 4


def test_gradient_removed_by_another_hook_is_named():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    bucket = make_bucket([0, 1], parameters, None, None, names=["a", "b"])
    parameters[0].grad = torch.ones(2)
    bucket.deferred.extend([0, 1])
    with pytest.raises(RuntimeError, match=r"expected a gradient of 'b', got None"):
        bucket.copy_in_deferred(0.5)


def test_former_gradients_are_preserved_in_the_listed_slots_only() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    bucket = make_bucket(range(2), parameters, None, None)
    for slot in range(2):
        bucket.views[slot].fill_(slot)
        bucket.set_grad_view(slot)
    former = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    addresses = [gradient.data_ptr() for gradient in former]
    preserve_aliased_grads(bucket, [])
    assert [gradient.data_ptr() for gradient in former] == addresses
    preserve_aliased_grads(bucket)
    bucket.views[0].fill_(5)
    assert former[0].tolist() == [0, 0]


layouts = st.tuples(
    st.sampled_from([torch.int8, torch.float16, torch.float32]),
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=2),
)


@settings(max_examples=100)
@given(layouts=st.lists(layouts, min_size=1, max_size=4))
def test_gradients_with_overlapping_ranges_are_refused(layouts) -> None:
    memory = torch.zeros(400, dtype=torch.int8)
    parameters = {}
    used: set[int] = set()
    is_overlapping = False
    for number, (dtype, offset, dims) in enumerate(layouts):
        shape, strides = zip(*dims, strict=True)
        gradient = memory.view(dtype).as_strided(shape, strides, offset)
        parameters[str(number)] = SimpleNamespace(grad=gradient)
        last = offset + sum((n - 1) * step for n, step in dims)
        covered = set(range(offset * dtype.itemsize, (last + 1) * dtype.itemsize))
        is_overlapping |= not used.isdisjoint(covered)
        used |= covered
    failures = Mock()
    if is_overlapping:
        with pytest.raises(RuntimeError, match="share memory"):
            refuse_shared_gradients(parameters, 0, failures)
    else:
        refuse_shared_gradients(parameters, 0, failures)
        failures.report_failure.assert_not_called()
