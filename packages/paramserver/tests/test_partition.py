"""Each element is stored on one server, and servers store equal numbers of bytes."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from paramserver import partition

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SHAPES = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=8,
)


def make_tensors(shapes, servers):
    named = {str(i): torch.empty(shape, dtype=dtype) for i, (shape, dtype) in enumerate(shapes)}
    # Each server stores an element, wherever its share of the bytes starts.
    assume(sum(tensor.nbytes for tensor in named.values()) >= 8 * servers)
    return named


@settings(max_examples=30)
@given(shapes=SHAPES, servers=st.integers(1, 6))
def test_each_element_is_stored_once(shapes, servers):
    parameters = make_tensors(shapes, servers)
    shards = partition(parameters, servers)
    assert len(shards) == servers
    counts = {name: torch.zeros(tensor.numel()) for name, tensor in parameters.items()}
    for shard in shards:
        for piece in shard.pieces:
            counts[piece.name][piece.start : piece.stop] += 1
    assert all((part_counts == 1).all() for part_counts in counts.values())


@settings(max_examples=30)
@given(shapes=SHAPES, servers=st.integers(1, 6))
def test_shard_sizes_differ_by_less_than_an_element(shapes, servers):
    parameters = make_tensors(shapes, servers)
    total = sum(tensor.nbytes for tensor in parameters.values())
    for shard in partition(parameters, servers):
        assert abs(shard.nbytes - total / servers) < 8 + 1


@settings(max_examples=30)
@given(shapes=SHAPES, servers=st.integers(1, 4))
def test_views_share_the_buffer_and_never_overlap(shapes, servers):
    for shard in partition(make_tensors(shapes, servers), servers):
        buffer = torch.zeros(shard.buffer_bytes, dtype=torch.uint8)
        views = shard.views(buffer)
        for number, view in enumerate(views):
            view.fill_(number + 1)
        for number, (view, piece) in enumerate(zip(views, shard.pieces, strict=True)):
            assert (view == number + 1).all()
            assert view.dtype == piece.dtype
            if piece.stop - piece.start == math.prod(piece.shape):
                assert view.shape == piece.shape


def test_parameters_that_cannot_be_partitioned_are_refused():
    with pytest.raises(ValueError, match="expected parameters that require a gradient, got none"):
        partition({}, 2)
    with pytest.raises(ValueError, match="expected servers >= 1, got 0"):
        partition({"a": torch.ones(1)}, 0)
    with pytest.raises(ValueError, match="got 4 bytes for 2 servers; pass fewer servers"):
        partition({"a": torch.ones(1)}, 2)
    with pytest.raises(ValueError, match=r"at least 16 bits, got a of torch\.complex64"):
        partition({"a": torch.ones(1, dtype=torch.complex64)}, 1)
