import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from accounting import Plan, Transformer, communication
from accounting.hardware import Link
from accounting.model.records import Experts
from accounting.time.collective import Collective
from hypothesis import given, settings
from hypothesis import strategies as st
from random_shapes import draw_shapes, make_divisible

SMALL = Transformer(layers=4, d_model=64, heads=8, kv_heads=4, vocab_size=96)
SPARSE = Transformer(
    layers=4,
    d_model=64,
    heads=8,
    vocab_size=96,
    experts=Experts(count=8, per_token=2, layers=(1, 3)),
)


def count_ring_all_reduce_bytes(ranks: int, elements: int) -> list[int]:
    """Return the bytes that each rank of a ring of threads sends, and check the reduced sum."""
    data = [torch.full((elements,), float(r + 1)) for r in range(ranks)]
    sent = [0] * ranks
    inbox: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    barrier = threading.Barrier(ranks)

    def run(rank: int) -> None:
        chunks = list(data[rank].chunk(ranks))
        for step in range(2 * (ranks - 1)):
            out = (
                (rank - step) % ranks if step < ranks - 1 else (rank + 1 - step + ranks - 1) % ranks
            )
            message = chunks[out].clone()
            sent[rank] += message.numel() * message.element_size()
            barrier.wait()
            inbox[(rank + 1) % ranks].append(message)
            barrier.wait()
            into = (out - 1) % ranks
            got = inbox[rank].pop()
            chunks[into].copy_(chunks[into] + got if step < ranks - 1 else got)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((d == ranks * (ranks + 1) / 2).all() for d in data)
    return sent


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_wire_bytes_equal_simulated_ring(ranks: int) -> None:
    elements = 12 * ranks
    ring = Collective(
        name="x", operation="all_reduce", axis="data", ranks=ranks, count=1, call_bytes=4 * elements
    )
    assert count_ring_all_reduce_bytes(ranks, elements) == [ring.wire] * ranks
    link = Link(name="slow", bandwidth=1.0, latency=1e-3)
    assert ring.compute_seconds(link) == pytest.approx(2 * (ranks - 1) * 1e-3 + ring.wire)
    # With many ranks and small messages, a tree has less latency.
    many = replace(ring, ranks=1024, call_bytes=1)
    assert many.compute_seconds(replace(link, bandwidth=1e9)) == pytest.approx(2 * 10 * 1e-3)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_payload_equals_tensors_of_torch_fsdp(reshard: bool, microbatches: int) -> None:
    """Compare with the collectives of torch's FSDP2 on a fake process group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    class Bytes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, int] = {}

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name = str(function)
            if name.startswith("c10d."):
                # The larger side of either collective is the payload.
                sizes = [t.nbytes for a in args for t in _list_tensors(a)]
                key = name.split(".")[1].strip("_")
                self.seen[key] = self.seen.get(key, 0) + max(sizes, default=0)
            return function(*args, **(kwargs or {}))

    from reference import Model

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        shape = Transformer(layers=2, d_model=32, heads=4, d_ff=64, vocab_size=40)
        model = Model(shape)
        mesh = init_device_mesh("cpu", (4,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        with Bytes() as moved:
            for _ in range(microbatches):
                model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    finally:
        dist.destroy_process_group()
    plan = Plan(data=4, zero=3, microbatches=microbatches, reshard_after_forward=reshard)
    ours = communication(shape, plan, weights="fp32", gradients="fp32")
    gathered = sum(v for k, v in moved.seen.items() if "allgather" in k)
    scattered = sum(v for k, v in moved.seen.items() if "reduce_scatter" in k)
    assert gathered == sum(c.payload for c in ours if c.operation == "all_gather")
    assert scattered == sum(c.payload for c in ours if c.operation == "reduce_scatter")


def _list_tensors(argument: object) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, list | tuple):
        return [t for item in argument for t in _list_tensors(item)]
    return []


def test_zero_traffic_equals_zero_paper() -> None:
    # Section 7: stages 1 and 2 move as much as plain data parallelism, stage 3 half as much again.
    # The paper has no weights outside the blocks.
    blocks = replace(SMALL, vocab_size=0, final_norm=False)
    plain = communication(blocks, Plan(data=8)).wire.total
    assert communication(blocks, Plan(data=8, zero=1)).wire.total == plain
    assert communication(blocks, Plan(data=8, zero=2)).wire.total == plain
    assert communication(blocks, Plan(data=8, zero=3)).wire.total == 1.5 * plain
    saved = Plan(data=8, zero=3, reshard_after_forward=False)
    assert communication(blocks, saved).wire.total == plain


def test_sequence_parallelism_moves_half_as_much_again_in_the_backward() -> None:
    run = {"batch": 2, "seq": 16}
    plain = communication(SMALL, Plan(tensor=4), **run)
    split = communication(SMALL, Plan(tensor=4, sequence_parallel=True), **run)
    forward = plain["tensor-parallel forward"].wire
    gathers = split["sequence-parallel forward gathers"].wire
    scatters = split["sequence-parallel forward scatters"].wire
    assert gathers + scatters == forward
    assert plain["tensor-parallel forward"].count == 2 * 4 + 1


def test_model_without_head_has_no_all_reduce_for_it() -> None:
    counts = {}
    for head in (True, False):
        model = replace(SMALL, lm_head=head)
        for collective in communication(model, Plan(tensor=2), batch=1, seq=8):
            counts[head, collective.name] = collective.count
    assert counts[True, "tensor-parallel backward"] == 2 * SMALL.layers + 1
    assert counts[False, "tensor-parallel backward"] == 2 * SMALL.layers
    assert counts[False, "tensor-parallel forward"] == 2 * SMALL.layers + 1


def test_parallel_block_has_one_all_reduce() -> None:
    shape = Transformer(layers=4, d_model=64, heads=8, vocab_size=0, parallel_block=True)
    assert communication(shape, Plan(tensor=4), batch=1, seq=4).payload.total == (
        2 * 4 * 4 * 64 * 2
    )


def test_experts_send_every_token_copy_both_ways() -> None:
    traffic = communication(SPARSE, Plan(data=4, expert=4), batch=4, seq=10)
    copies = 10 * 2 * 64 * 2
    for name in ("tokens to experts", "tokens from experts, backward"):
        assert traffic[name].payload == 2 * copies
        assert traffic[name].wire == 2 * copies * 3 / 4
    # Each expert is on a single rank, so its gradients are not reduced.
    assert "gradients of experts" not in [c.name for c in traffic]
    shared = communication(SPARSE, Plan(data=8, expert=4), batch=8, seq=10)
    assert shared["gradients of experts"].ranks == 2


def test_context_parallelism_passes_keys_and_values_around() -> None:
    traffic = communication(SMALL, Plan(context=4), batch=2, seq=64)
    local = 2 * 16 * 4 * (8 + 8) * 2
    assert traffic["keys and values"].wire == 4 * 3 * local
    assert traffic["keys, values and gradients"].wire == 2 * 4 * 3 * local


def test_inner_stages_send_activations_and_gradients() -> None:
    plan = Plan(pipeline=4, microbatches=4)
    inner = communication(SMALL, plan, batch=8, seq=16, stage=1)
    assert {collective.payload for collective in inner} == {8 * 16 * 64 * 2}
    # 4-bit numbers of 3 tokens do not fill a byte.
    narrow = Transformer(layers=2, d_model=65, heads=5, vocab_size=100)
    halves = communication(narrow, Plan(pipeline=2), batch=1, seq=3, activations="int4")
    assert halves["activations to the next stage"].payload == 97.5
    ends = [communication(SMALL, plan, batch=8, seq=16, stage=s).collectives for s in (0, 1, 3)]
    assert [[c.name.split()[0] for c in end] for end in ends] == [
        ["activations"],
        ["activations", "gradients"],
        ["gradients"],
    ]


@settings(deadline=None, max_examples=60)
@given(draw_shapes(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(0, 3))
def test_wire_is_sum_and_only_model_parallel_traffic_grows_with_the_batch(
    shape: Transformer, tensor: int, pipeline: int, zero: int
) -> None:
    plan = Plan(data=2, tensor=tensor, pipeline=pipeline, zero=zero, microbatches=2)
    small, large = (communication(make_divisible(shape), plan, batch=n, seq=8) for n in (4, 8))
    assert small.wire.total == sum(c.wire for c in small)
    if tensor * pipeline > 1:
        assert small.wire.total < large.wire.total
    else:
        assert small.wire.total == large.wire.total
