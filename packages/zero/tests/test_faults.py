"""Bad input and failures: errors name the rank or the key, and the last checkpoint survives."""

import copy
import errno
import gc
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from worker_pool import run_ranks, try_ranks

sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import case_folder, run_on_shared_ranks
from zero import (
    FSDP,
    Communicator,
    ShardedOptimizer,
    diagnostics,
    direct_reduce_scatter,
    fully_shard,
    load_checkpoint,
)
from zero import save_checkpoint as save
from zero.checkpoint import checkpoint

DEADLINE = 300.0


def mark_exhaustive(value):
    return pytest.param(value, marks=pytest.mark.exhaustive)


def build(stage, width=6, group=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, width), nn.Linear(width, 3))
    if stage == 3:
        model = FSDP(model, group=group)
        return model, torch.optim.Adam(model.parameters())
    return model, ShardedOptimizer(model.parameters(), torch.optim.Adam, group=group)


def take_step(model, optimizer):
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Clock:
    """A clock that stands still until another survivor has reported, and then ends any wait."""

    def __init__(self, survivor):
        self.key = f"zero/alive/{dist.group.WORLD.group_name}/{survivor}"
        self.num_calls = 0
        self.has_reported = False

    def monotonic(self):
        self.num_calls += 1
        if self.has_reported:
            return float("inf")
        # The first call starts the wait. After each later one, the caller reads the reports.
        if self.num_calls > 1:
            self.has_reported = dist.distributed_c10d._get_default_store().check([self.key])
        return 0.0

    def sleep(self, seconds):
        time.sleep(seconds)


def lose_a_rank(stage, how, report_path):
    model, optimizer = build(stage)
    take_step(model, optimizer)
    dist.barrier()
    if how == "hang":
        # From here on every collective must fail, and no other survivor sends a report that
        # could be waited for, so short timeouts cannot change the outcome.
        communicator = model.communicator if stage == 3 else optimizer.communicator
        communicator.group = dist.new_group(timeout=timedelta(seconds=3))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), communicator.group)
        diagnostics.GRACE_SECONDS = 0.1
    else:
        diagnostics.time = Clock(survivor=2 - dist.get_rank())
        diagnostics.GRACE_SECONDS = 60
    if dist.get_rank() == 1:
        if how == "die":
            os._exit(3)
        # Hang until the survivors have reported this rank.
        while not os.path.exists(report_path):
            time.sleep(0.05)
        return
    try:
        take_step(model, optimizer)
    finally:
        with open(report_path, "w"):
            pass


@pytest.mark.parametrize("stage", [mark_exhaustive(1), mark_exhaustive(2), 3])
def test_every_survivor_names_the_rank_that_died(tmp_path, stage):
    report_path = str(tmp_path / "report_path")
    outcomes = try_ranks(lose_a_rank, 3, stage, "die", report_path, timeout=DEADLINE)
    for survivor in (0, 2):
        expected = "rank 1 ended (for example because of fewer inputs), hangs, or raised an error"
        assert expected in str(outcomes[survivor].error)


@pytest.mark.parametrize("stage", [mark_exhaustive(1), mark_exhaustive(2), 3])
def test_every_survivor_names_the_rank_that_hangs(tmp_path, stage):
    report_path = str(tmp_path / "report_path")
    outcomes = try_ranks(lose_a_rank, 2, stage, "hang", report_path, timeout=DEADLINE)
    assert "rank 1 ended" in str(outcomes[0].error)


def exchange_objects_after_a_death():
    communicator = Communicator(dist.new_group(timeout=timedelta(seconds=0.5)))
    diagnostics.GRACE_SECONDS = 1.0
    # All ranks report this failure of another group just before. It must not count as a sign of
    # life later.
    with pytest.raises(RuntimeError, match="ranks wait for different collectives"):
        communicator.all_reduce(torch.ones(1 + dist.get_rank())).wait()
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    Communicator().gather_objects("value")


def test_an_exchange_of_objects_names_the_rank_that_died():
    outcomes = try_ranks(exchange_objects_after_a_death, 2, timeout=DEADLINE)
    assert "all_gather_object failed on rank 0: rank 1 ended" in str(outcomes[0].error)


def count_polls_after_a_death():
    """Return how often a rank polls for reports if it has prefetched a unit when a rank dies."""
    model, optimizer = build(3)
    take_step(model, optimizer)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    # The prefetched unit fails within this time after the search.
    diagnostics.GRACE_SECONDS = 2.0
    polls = []
    poll_store = diagnostics._poll_store
    diagnostics._poll_store = lambda *args: polls.append(args) or poll_store(*args)
    with pytest.raises(RuntimeError, match="rank 1 ended"):
        take_step(model, optimizer)
    return len(polls)


def test_a_lost_rank_is_searched_once_although_several_collectives_fail():
    outcomes = try_ranks(count_polls_after_a_death, 2, timeout=DEADLINE)
    assert outcomes[0].value == 1


def clip_on_one_rank(stage):
    model, optimizer = build(stage)
    model(torch.ones(2, 5)).sum().backward()
    communicator = model.communicator if stage == 3 else optimizer.communicator
    dist.barrier()
    # Only the collectives that must fail have a short timeout. Creating the group may take longer.
    communicator.group = dist.new_group(timeout=timedelta(seconds=3))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), communicator.group)
    if dist.get_rank() == 1:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


@pytest.mark.parametrize("stage", [mark_exhaustive(1), 3])
def test_a_collective_that_only_one_rank_calls_is_reported(stage):
    for outcome in try_ranks(clip_on_one_rank, 2, stage, timeout=DEADLINE):
        message = str(outcome.error)
        assert re.search(r"rank 0: all_reduce of \d+ bytes; rank 1: all_reduce of 16 ", message)


def stop_the_host_of_the_store(path):
    rank = int(os.environ["RANK"])
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        path.with_suffix(".draft").write_text(f"{store.port} {os.getpid()}")
        path.with_suffix(".draft").rename(path)
    else:
        while not path.exists():
            time.sleep(0.05)
        port, host = map(int, path.read_text().split())
        store = dist.TCPStore("127.0.0.1", port, 2, False)
    limit = timedelta(seconds=10)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    diagnostics.GRACE_SECONDS = diagnostics.STORE_SECONDS = 0.5
    communicator = Communicator()
    communicator.all_reduce(torch.ones(2)).wait()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    try:
        communicator.all_reduce(torch.ones(2)).wait()
    finally:
        os.kill(host, signal.SIGCONT)


@pytest.mark.exhaustive
def test_a_host_of_the_store_that_hangs_is_named(tmp_path):
    path = tmp_path / "address"
    outcomes = try_ranks(stop_the_host_of_the_store, 2, path, backend="", timeout=60)
    assert "rank 0 ended" in str(outcomes[1].error)


def wrap_different_models(stage):
    with pytest.raises(ValueError, match=r"\(7, 5\).* on rank 1"):
        build(stage, width=6 + dist.get_rank())
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_models_that_differ_are_refused_on_every_rank(stage):
    assert all(run_on_shared_ranks(wrap_different_models, 2, stage))


def refuse_bad_groups():
    model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match="empty parameter list: pass"):
        ShardedOptimizer(iter([]), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match=r"one tensor: pass model\.parameters\(\) or"):
        ShardedOptimizer(model.weight, torch.optim.SGD, lr=0.1)
    for size in (float("inf"), float("nan"), -1.0):
        with pytest.raises(ValueError, match="expected a finite bucket_size_mb >= 0, got"):
            ShardedOptimizer(model.parameters(), torch.optim.SGD, bucket_size_mb=size)
    with pytest.raises(ValueError, match=r"plain dense tensor, .* \(2, 2\), got .*sparse_coo"):
        ShardedOptimizer([torch.eye(2).to_sparse()], torch.optim.SGD, lr=0.1)
    with pytest.raises(
        ValueError, match=r"parameter number 0, of shape \(3, 2\), is in groups 0 and 1"
    ):
        ShardedOptimizer(
            [{"params": [model.weight]}, {"params": model.parameters()}], torch.optim.SGD
        )
    with pytest.raises(ValueError, match="parameter bias, of shape"):
        ShardedOptimizer([("bias", model.bias), ("bias", model.bias)], torch.optim.SGD)
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = ShardedOptimizer(embedding.parameters(), torch.optim.SGD)
    with pytest.raises(TypeError, match=r"got a gradient with layout .* of shape \(4, 2\)"):
        embedding(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"got .*Conv2d.*, which a model of Linear"):
        FSDP(model, shard=(nn.Conv2d,))
    with pytest.raises(RuntimeError, match=r"call .to\(...\) on the module before"):
        FSDP(model).double()
    with pytest.raises(ValueError, match="expected op=SUM, got"):
        direct_reduce_scatter(torch.ones(1), torch.ones(1), op=dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match=r"got input of 3 torch\.float32 and output of 2"):
        direct_reduce_scatter(torch.ones(2), torch.ones(3))
    return True


def refuse_shared_memory(stage):
    for tie in ("data", "transposed", "part", "columns"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        if tie == "part":
            model[3].weight.data = model[0].weight.data[2:5]
        elif tie == "columns":
            flat = torch.randn(6, 9)
            model[0].weight.data, model[2].weight.data = flat[:, :6], flat[:, 3:]
        else:
            weight = model[0].weight.data
            model[2].weight.data = weight if tie == "data" else weight.T
        with pytest.raises(
            ValueError, match=r"and parameter .* share memory, .*separate: assign one"
        ):
            build_sharded(model, stage)
    model = nn.Linear(6, 6)
    for name in ("first", "second"):
        model.register_buffer(name, torch.zeros(6) if name == "first" else model.first)
    build_sharded(copy.deepcopy(model), stage)
    model.first = model.weight.data[2:]
    sgd = partial(ShardedOptimizer, list(model.parameters()), torch.optim.SGD)
    with pytest.raises(ValueError, match=r"and buffer first share memory, .* clone one"):
        FSDP(model) if stage == 3 else sgd(module=model)
    model.weight.requires_grad_(False)  # Its value and that of the buffer stay equal.
    FSDP(model) if stage == 3 else sgd(module=model)
    tied = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LSTM(6, 6))
    tied[2].weight = tied[0].weight
    build_sharded(copy.deepcopy(tied), stage)
    # Columns of the two parameters alternate in memory.
    flat = torch.randn(24, 12)
    tied[0].weight.data, tied[3].weight_ih_l0.data = flat[:6, ::2], flat[:, 1::2]
    with pytest.raises(ValueError, match=r"parameter .* and parameter .* share memory"):
        build_sharded(tied, stage)
    expanded = nn.Linear(6, 6)
    expanded.bias = nn.Parameter(torch.zeros(1).expand(6))
    with pytest.raises(ValueError, match="separate memory for each element of parameter"):
        build_sharded(expanded, stage)
    return True


def build_sharded(model, stage):
    if stage == 3:
        return FSDP(model)
    return ShardedOptimizer(
        [{"params": iter([p])} for p in model.parameters()], torch.optim.SGD, lr=0.1
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_share_memory_are_refused(stage):
    assert all(run_on_shared_ranks(refuse_shared_memory, 2, stage))


def refuse_expanded_buffers():
    """Refuse buffers that cannot be written to, before anything is changed."""
    path = case_folder()

    def build(buffer):
        model = nn.Linear(4, 4)
        model.register_buffer("mask", buffer)
        return model

    expanded = torch.arange(4.0).expand(3, 4)
    expected = r"separate memory for each element of (buffer )?mask, got .*: register the result"
    with pytest.raises(ValueError, match=expected):
        FSDP(build(expanded))
    model = build(expanded)
    with pytest.raises(ValueError, match=expected):
        ShardedOptimizer(model.parameters(), torch.optim.SGD, module=model)
    save(path, build(expanded.contiguous()))
    model = build(expanded)
    before = model.weight.clone()
    with pytest.raises(RuntimeError, match=expected):
        load_checkpoint(path, model)
    assert torch.equal(model.weight, before)
    # Elements of an expanded dimension of size 1 do not share memory.
    load_checkpoint(path, FSDP(build(torch.zeros(3, 4))))
    FSDP(build(torch.arange(4.0).expand(1, -1)))
    return True


def test_buffers_made_by_expand_are_refused():
    assert all(run_on_shared_ranks(refuse_expanded_buffers, 2))


class Listing(nn.Module):
    """A module that reads its parameter from a list."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.weights = [self.weight]

    def forward(self, x):
        return (x * self.weights[0]).sum()


def refuse_parameters_of_before():
    """Refuse hooks and an optimizer that were created for parameters before FSDP replaced them."""
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        handle = getattr(model[0].weight, register)(lambda value: None)
        with pytest.raises(ValueError, match=r"parameter 0.weight has hooks.* of FSDP\(module\)"):
            FSDP(model)
        handle.remove()
        FSDP(model)
    for shard_model in (FSDP, fully_shard):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shard_model(model)(torch.ones(2, 5)).sum().backward()
        with pytest.raises(RuntimeError, match=r"parameter number 0, .* replaced by .* after FSDP"):
            optimizer.step()
        with pytest.raises(ValueError, match=r"parameter number 0, .* was replaced by a shard"):
            ShardedOptimizer(optimizer.param_groups[0]["params"], torch.optim.SGD)
    with pytest.raises(RuntimeError, match=r"has read a parameter of shape \(4,\) that a shard"):
        FSDP(Listing())(torch.ones(4)).backward()
    return True


def test_hooks_and_optimizers_from_before_sharding_are_refused():
    assert all(run_on_shared_ranks(refuse_parameters_of_before, 2))


def refuse_other_tensors(stage):
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    with pytest.raises(ValueError, match=r"expected a plain dense tensor, .*, got a DTensor"):
        build_sharded(model, stage)
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_of_other_classes_of_tensors_are_refused(stage):
    assert all(run_on_shared_ranks(refuse_other_tensors, 2, stage))


def refuse_ddp():
    whole = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for sharded in (FSDP(copy.deepcopy(whole)), fully_shard(copy.deepcopy(whole))):
        with pytest.raises(RuntimeError, match="DistributedDataParallel is not needed"):
            nn.parallel.DistributedDataParallel(sharded)
    return True


def test_torchs_ddp_refuses_a_sharded_model():
    assert all(run_on_shared_ranks(refuse_ddp, 2))


def refuse_replaced_parameters():
    inputs = torch.randn(2, 5, dtype=torch.float64)
    replacement = torch.zeros(7, 5, dtype=torch.float64)

    def assign(model):
        model.module[0].weight = nn.Parameter(replacement)
        model(inputs)

    def call_with_others(model):
        torch.func.functional_call(model.module, {"0.weight": replacement}, (inputs,))

    def delete(model):
        del model.module[0].weight
        model.module[0].weight = replacement
        model(inputs)

    def replace_module(model):
        model.module[0] = nn.Linear(5, 7).double()
        model(inputs)

    def add_parameter(model):
        model.module[0].weight_scale = nn.Parameter(torch.ones(1))
        model(inputs)

    for replace in (assign, call_with_others, delete, replace_module, add_parameter):
        model = FSDP(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double())
        with pytest.raises(
            RuntimeError, match=r"expected 0.weight.* to be FSDP's .* in place, and"
        ):
            replace(model)
        # A collective could fail on other ranks with another error.
        assert not model.communicator.pop_bytes()
    return True


def test_parameters_that_were_replaced_after_wrapping_are_refused():
    assert all(run_on_shared_ranks(refuse_replaced_parameters, 2))


def test_bad_arguments_are_refused_with_a_remedy():
    assert all(run_on_shared_ranks(refuse_bad_groups, 2))
    with pytest.raises(RuntimeError, match="expected an initialized process group: call"):
        Communicator()


def pass_sets():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    group = {"params": parameters[:1]}
    optimizer = ShardedOptimizer([group], torch.optim.SGD)
    for members in (set(parameters[1:]), frozenset(parameters[1:])):
        with pytest.raises(TypeError, match="expected parameters in an ordered collection, got a"):
            optimizer.add_param_group({"params": members})
        for params in (members, [{"params": members}], [group, {"params": members}]):
            with pytest.raises(TypeError, match="expected parameters in an ordered collection"):
                ShardedOptimizer(params, torch.optim.SGD)
    # A dictionary is ordered.
    optimizer.add_param_group({"params": dict.fromkeys(parameters[1:]).keys()})
    return True


def test_sets_of_parameters_are_refused():
    assert all(run_on_shared_ranks(pass_sets, 2))


def save_first_checkpoint(path):
    model, optimizer = build(1)
    take_step(model, optimizer)
    save(path, model, optimizer, extra={"step": 1})
    return [p.detach().clone() for p in model.parameters()]


def load_it(path, width=6):
    model, optimizer = build(1, width)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        extra = load_checkpoint(path, model, optimizer)
    except RuntimeError as error:
        # Nothing was changed.
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return str(error)
    return extra["step"], [p.detach().clone() for p in model.parameters()]


def fill_the_disk(path):
    save_first_checkpoint(path)
    model, optimizer = build(1)
    if dist.get_rank() == 1:

        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        os.fsync = full
    save(path, model, optimizer, extra={"step": 2})


def die_while_saving(path):
    save_first_checkpoint(path)
    model, optimizer = build(1)
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = lambda *arguments: os._exit(3)
    # No other survivor sends a report that could be waited for.
    diagnostics.GRACE_SECONDS = 0.1
    save(path, model, optimizer, extra={"step": 2})


def has_first_checkpoint(path):
    extra, values = load_it(path)
    expected = save_first_checkpoint(f"{path}-expected")
    return extra == 1 and all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


@pytest.mark.parametrize("fault", [fill_the_disk, die_while_saving])
def test_the_last_good_checkpoint_survives_a_failed_save(tmp_path, fault):
    path = str(tmp_path / "last")
    outcomes = try_ranks(fault, 2, path, timeout=DEADLINE)
    if fault is fill_the_disk:
        for outcome in outcomes:
            assert "was not saved: rank 1: OSError" in str(outcome.error)
            assert "No space left" in str(outcome.error)
    else:
        assert "rank 1 ended" in str(outcomes[0].error)
    assert all(run_on_shared_ranks(has_first_checkpoint, 2, path, timeout=DEADLINE))


def fill_a_small_disk(path):
    """Save to a disk of one MiB until it is full; then free the space of the failed save."""
    model, optimizer = build(1)
    take_step(model, optimizer)
    save(path, model, optimizer, extra={"step": 1})
    before = [p.detach().clone() for p in model.parameters()]
    take_step(model, optimizer)
    with pytest.raises(RuntimeError, match=r"was not saved: rank 0: .*No space left"):
        save(path, model, optimizer, extra={"step": 2, "much": torch.zeros(2**19)})
    assert load_checkpoint(path, model, optimizer) == {"step": 1}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    # The failed save has left no files, so there is space again.
    save(path, model, optimizer, extra={"step": 3})
    return load_checkpoint(path, model, optimizer)["step"]


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no small disk can be made here: {getattr(error, 'stderr', '') or error}")
    try:
        assert run_ranks(fill_a_small_disk, 2, str(disk / "last"), timeout=DEADLINE) == [3, 3]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def load_previous():
    """Load a checkpoint in the state between the renames of a save."""
    path = Path(case_folder(), "last")
    save_first_checkpoint(path)
    dist.barrier()
    if dist.get_rank() == 0:
        path.rename(path.with_name(".last.previous"))
    dist.barrier()
    return load_it(path)[0]


def test_a_save_interrupted_between_its_renames_loads_the_previous():
    assert run_on_shared_ranks(load_previous, 2) == [1, 1]


def refuse_damaged_checkpoints():
    """Load checkpoints that are missing, of another model, newer or damaged."""
    folder = case_folder()
    path = Path(folder, "last")
    save_first_checkpoint(path)
    assert "expected a checkpoint, got" in load_it(f"{folder}/none")
    message = load_it(path, 7)
    assert "0.weight is ((6, 5), torch.float32) in the checkpoint, ((7, 5)" in message
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", 5)
        save_first_checkpoint(f"{folder}/newer")
    assert "expected format 4, got 5" in load_it(f"{folder}/newer")
    checksums = path / "checksums.json"
    file = sorted(path.glob("*.distcp"))[0]
    metadata = path / ".metadata"
    damages = {
        "has lost its checksums": lambda: checksums.rename(Path(folder, checksums.name)),
        f"{file.name} is damaged": lambda: (
            Path(folder, checksums.name).rename(checksums),
            os.truncate(file, file.stat().st_size - 1),
        ),
        f"{file.name} is missing": file.unlink,
        ".metadata is damaged": lambda: metadata.write_bytes(metadata.read_bytes()[:20]),
    }
    for message, damage in damages.items():
        dist.barrier()
        if dist.get_rank() == 0:
            damage()
        dist.barrier()
        assert message in load_it(path)
    return True


def test_damaged_foreign_and_newer_checkpoints_are_refused_by_key():
    assert all(run_on_shared_ranks(refuse_damaged_checkpoints, 2))


def save_an_object():
    path = case_folder()
    model, optimizer = build(1)
    with pytest.raises(
        RuntimeError,
        match=r"rank 0: TypeError: expected plain values .* in `extra`.* load",
    ):
        save(path, model, optimizer, extra={"clock": time.monotonic})
    return True


def test_an_extra_that_could_not_be_loaded_is_not_saved():
    assert all(run_on_shared_ranks(save_an_object, 2))


class DottedKeys(torch.optim.SGD):
    """An optimizer whose state has a name that a checkpoint cannot store."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["a.b"] = torch.zeros_like(parameter)


def save_dotted_keys():
    """Save state that only one rank has, and that a checkpoint cannot store."""
    path = case_folder()
    model = nn.Linear(5, 3, bias=False)
    optimizer = ShardedOptimizer(model.parameters(), DottedKeys, elementwise=False, lr=0.1)
    take_step(model, optimizer)
    refused = pytest.raises(
        RuntimeError, match="was not saved: rank 0: ValueError: expected names without dots"
    )
    with refused:
        save(f"{path}/checkpoint", model, optimizer)
    # The options of a group are read by the same names.
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.param_groups[0]["a.b"] = 1
    with refused:
        save(f"{path}/checkpoint", model, plain)
    return not os.listdir(path)


def test_state_that_one_rank_cannot_save_is_reported_on_every_rank():
    assert all(run_on_shared_ranks(save_dotted_keys, 2))


def refuse_to_wrap_twice():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first = ShardedOptimizer(model.parameters(), torch.optim.SGD)
    with pytest.raises(ValueError, match=r"weight, of shape .4, 4., belongs to another Sharded"):
        ShardedOptimizer(model[0].named_parameters(), torch.optim.SGD)
    del first
    sharded = FSDP(model)
    with pytest.raises(ValueError, match=r"parameter module\.0\.weight is sharded already"):
        FSDP(sharded)
    with pytest.raises(ValueError, match=r"parameter 0\.module\.0\.weight is sharded already"):
        FSDP(nn.Sequential(sharded, nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"parameter 0\.weight is sharded already"):
        FSDP(model)
    with pytest.raises(ValueError, match=r"parameter 0\.weight is a shard of FSDP"):
        ShardedOptimizer(sharded.parameters(), torch.optim.SGD, shard_gradients=True)
    return True


def test_wrapping_twice_is_refused_by_name():
    assert all(run_on_shared_ranks(refuse_to_wrap_twice, 2))


def use_one_after_the_other():
    """Shard parameters of a deleted optimizer by another one, and by FSDP."""
    model = nn.Linear(4, 4)
    first = ShardedOptimizer(model.parameters(), torch.optim.SGD)
    model(torch.ones(2, 4)).sum().backward()
    del first
    second = ShardedOptimizer(model.parameters(), torch.optim.SGD)
    return len(second.flat.shards) > 0 and len(FSDP(model).units) == 1


def delete_with_gradients(stage):
    """Delete a model and its optimizer, or the optimizer only, without clearing the gradients."""
    model = nn.Linear(5, 3)
    options = {"lr": 0.1, "shard_gradients": stage == 2}
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, **options)
    for context in (nullcontext(), optimizer.no_sync()):
        with context:
            model(torch.ones(2, 5)).sum().backward()
    references = [weakref.ref(x) for x in (model, model.weight, optimizer, optimizer.reducer)]
    del model, optimizer
    gc.collect()
    assert not any(reference() is not None for reference in references)
    model = nn.Linear(5, 3)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, **options)
    model(torch.ones(2, 5)).sum().backward()
    del optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match=r"was deleted.*: call zero_grad\(\)"):
        model.weight.grad.norm()
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_models_and_optimizers_are_freed_with_their_gradients(stage):
    assert all(run_on_shared_ranks(delete_with_gradients, 2, stage))


def delete_sharded_model():
    """Delete a model at stage 3 before its first step, and after one that leaves gradients."""
    for has_step in (False, True):
        model, optimizer = build(3)
        if has_step:
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            with model.no_sync():
                model(torch.ones(2, 5)).sum().backward()
        unit = model.units[0]
        first = unit.parameters[0]
        references = [weakref.ref(x) for x in (model, optimizer, unit, first.shard, first.full)]
        del model, optimizer, unit, first
        gc.collect()
        assert not any(reference() is not None for reference in references)
    return True


def test_a_model_of_fsdp_is_freed_when_it_is_deleted():
    assert all(run_on_shared_ranks(delete_sharded_model, 2))


def test_parameters_of_a_deleted_optimizer_can_be_sharded_again():
    assert all(run_on_shared_ranks(use_one_after_the_other, 2))
