"""The description of a group."""

import collectives
import pytest
import torch
import torch.distributed as dist
from collectives.choice import describe, tuning
from collectives.shared_memory import engine, segment
from worker_pool import run_ranks


def describe_one_host():
    group = collectives.describe()
    assert group.hosts == ((0, 1),)
    assert group.shared_memory
    assert not group.why_not_shared
    assert set(group.picks("all_reduce").values()) == {"shared_memory"}
    return str(group)


def test_description_of_a_group_on_one_host():
    text = run_ranks(describe_one_host, 2)[0]
    assert "2 ranks on 1 hosts: [0, 1]" in text
    assert "shared memory between all ranks" in text
    assert ("engine: compiled" in text) == (not engine.explain_refusal())


def describe_several_hosts():
    segment.identify_host = lambda: f"host {dist.get_rank()}"
    # Each algorithm is measured in one round and at two sizes only.
    tuning.SECONDS_PER_SIZE = 0.0
    tuning.CALLS_PER_ROUND = {1 << 10: 2, 1 << 20: 1}
    before = str(collectives.describe())
    collectives.all_reduce(torch.ones(10))
    group = collectives.describe()
    assert not group.shared_memory
    picks = group.picks("all_reduce")
    assert set(picks) == set(describe.SIZES)
    for size, name in picks.items():
        assert name == group.models["all_reduce"].choose("all_reduce", size, (1, 1))
    assert group.picks("broadcast") == {}
    with pytest.raises(ValueError, match="got 'allreduce'"):
        group.picks("allreduce")
    return before, str(group)


def test_description_of_a_group_on_two_hosts_gives_reasons_and_prices():
    for rank, (before, after) in enumerate(run_ranks(describe_several_hosts, 2)):
        assert f"no shared memory with rank {1 - rank}: it runs under another kernel" in before
        assert "all_reduce: not measured yet" in before
        assert "all_to_all: gloo if it can run the call, otherwise ring" in before
        assert "message_seconds" in after
        assert "broadcast: not measured yet" in after
