"""torch's trainers on the registered backend, compared with gloo."""

import os
import random
import threading
import time
from datetime import timedelta

import collectives
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from collectives.algorithms import dispatch
from collectives.execution.work import Work
from collectives.groups import _creating, get_communicator
from collectives.shared_memory import segment
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from worker_pool import run_on_shared_ranks, run_ranks


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 33), nn.GELU(), nn.Linear(33, 5))


def draw_batches():
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [torch.randn(4, 12, generator=generator) for _ in range(3)]


def run_steps(network, optimizer):
    for batch in draw_batches():
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()


def train_ddp():
    network = DistributedDataParallel(build_model(), bucket_cap_mb=0.001)
    run_steps(network, torch.optim.AdamW(network.parameters(), lr=0.01))
    return [p.detach() for p in network.parameters()]


def train_zero():
    # Importing it warns of torch.jit on torch 2.11.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    network = DistributedDataParallel(build_model())
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, lr=0.01)
    run_steps(network, optimizer)
    return [p.detach() for p in network.parameters()]


def train_fsdp2():
    network = build_model()
    for layer in (network[0], network[2], network):
        fully_shard(layer)
    run_steps(network, torch.optim.AdamW(network.parameters(), lr=0.01))
    return [p.full_tensor().detach() for p in network.parameters()]


def train_and_checkpoint(folder):
    network = build_model()
    fully_shard(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    run_steps(network, optimizer)
    state = network.state_dict()
    saved = {name: value.full_tensor().clone() for name, value in state.items()}
    dcp.save({"model": state}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    dcp.load({"model": network.state_dict()}, checkpoint_id=folder)
    loaded = {name: value.full_tensor() for name, value in network.state_dict().items()}
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    return list(loaded.values())


def train_hybrid():
    """Train FSDP2 with shards in one dimension of a mesh and copies in the other."""
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=names)
    network = build_model()
    fully_shard(network, mesh=mesh)
    run_steps(network, torch.optim.AdamW(network.parameters(), lr=0.01))
    return [p.full_tensor().detach() for p in network.parameters()]


def train_tensor_parallel():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 6))
    parallelize_module(network, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for batch in draw_batches():
        # All ranks of such a group see the same data.
        dist.broadcast(batch, 0)
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()
    return [p.full_tensor().detach() for p in network.parameters()]


def train_pipeline():
    """Train one layer per rank in a pipeline, whose ranks send activations and gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(world)]
    stage = PipelineStage(layers[rank], rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.1)
    batch, target = torch.randn(2, 8, 12)
    for _ in range(3):
        optimizer.zero_grad()
        schedule.step(*[batch] * (rank == 0), target=target if rank == world - 1 else None)
        optimizer.step()
    return [p.detach() for p in layers[rank].parameters()]


TRAINERS = {
    "ddp": train_ddp,
    "zero": train_zero,
    "fsdp2": train_fsdp2,
    "hybrid": train_hybrid,
    "tensor_parallel": train_tensor_parallel,
    "pipeline": train_pipeline,
    "dcp": train_and_checkpoint,
}


def run_by_backend(function):
    """Return the results of a function on groups of gloo and of the registered backend."""
    results = []
    for backend in ("gloo", "collectives"):
        begin(backend)
        assert dist.get_backend() == backend
        results.append(function())
        dist.destroy_process_group()
    return results


def train_all():
    """Return the parameters of every trainer by name."""
    folder = f"{os.environ['STORE_FILE']}-{dist.get_backend()}-checkpoint"
    return {
        name: [torch.tensor(tensor.tolist()) for tensor in train(*[folder] * (name == "dcp"))]
        for name, train in TRAINERS.items()
    }


def test_trainer_gives_same_parameters_as_on_gloo():
    for on_gloo, on_ours in run_on_shared_ranks(run_by_backend, 2, train_all, backend=""):
        assert on_gloo.keys() == TRAINERS.keys()
        torch.testing.assert_close(on_ours, on_gloo, rtol=1e-6, atol=1e-7)


def redistribute_tensors(hosts):
    """Move random tensors between random placements; the full tensor must stay the same."""
    if hosts > 1:
        segment.identify_host = lambda: f"host {int(os.environ['RANK']) * hosts // 4}"
        dispatch.tune = lambda *_, **options: collectives.CostModel()
    begin()
    meshes = [init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))]
    for seed in range(40):
        choose = random.Random(seed)
        mesh, dims = choose.choice(meshes), choose.choice((1, 2, 3))
        full = torch.randint(-4, 5, [choose.choice((1, 3, 5, 8)) for _ in range(dims)])
        dist.broadcast(full, 0)
        full = full.to(choose.choice((torch.float32, torch.bfloat16, torch.int64, torch.complex64)))
        kinds = [Replicate(), *[Shard(dim) for dim in range(dims)]]
        tensor = distribute_tensor(full, mesh, choose.choices(kinds, k=mesh.ndim))
        for _ in range(4):
            tensor = tensor.redistribute(mesh, choose.choices(kinds, k=mesh.ndim))
            assert torch.equal(tensor.full_tensor(), full), (seed, tensor.placements)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_redistributed_dtensor_keeps_its_values(hosts):
    run_ranks(redistribute_tensors, 4, hosts, backend="")


def begin(backend="collectives", seconds=60):
    import collectives.backend  # noqa: F401

    world = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['STORE_FILE']}-{backend}", world)
    dist.init_process_group(
        backend,
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    return dist.group.WORLD


def use_two_devices():
    """Use tensors of two devices in one group; each device has its own backend.

    Without a GPU the other device is "meta", and its backend records the calls.
    """
    seen = []

    class Recorder(dist.ProcessGroup):
        def getBackendName(self):
            return "recorder"

        def __getattribute__(self, name):
            if name in names.split():
                return lambda *args: seen.append(name) or Work.make_completed()
            return super().__getattribute__(name)

    names = "allreduce broadcast all_gather_single reduce_scatter_single all_to_all_single "
    names += "_allgather_base _reduce_scatter_base alltoall_base allgather"
    dist.Backend.register_backend(
        "recorder", lambda store, rank, world, timeout: Recorder(rank, world), devices=["meta"]
    )
    group = begin("cpu:collectives,meta:recorder")
    group._register_backend = lambda *_: None
    assert dist.get_backend() == "cpu:collectives,meta:recorder"
    world = dist.get_world_size()
    meta_tensor, cpu_tensor = torch.empty(world, device="meta"), torch.ones(world)
    for tensor in (meta_tensor, cpu_tensor):
        dist.all_reduce(tensor)
        collectives.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.all_gather_into_tensor(tensor.new_empty(world), tensor[:1])
        dist.reduce_scatter_tensor(tensor.new_empty(1), tensor)
        dist.all_to_all_single(torch.empty_like(tensor), tensor)
        dist.all_gather([tensor.new_empty(1) for _ in range(world)], tensor[:1])
        dist.barrier()
    assert cpu_tensor.tolist() == [world**2.0] * world
    # torch 2.12 renamed these methods.
    kinds = [name.strip("_").replace("allgather_base", "all_gather_single") for name in seen]
    kinds = [k.replace("reduce_scatter_base", "reduce_scatter_single") for k in kinds]
    kinds = [k.replace("alltoall_base", "all_to_all_single") for k in kinds]
    assert kinds == [
        "allreduce",
        "allreduce",
        "broadcast",
        "all_gather_single",
        "reduce_scatter_single",
        "all_to_all_single",
        "allgather",
    ]


def test_tensors_of_another_device_use_the_backend_of_that_device():
    run_ranks(use_two_devices, 2, backend="")


def run_compiled(with_torchs_function):
    """Return the results of compiled functions that call collectives."""
    begin()

    def double_and_reduce(tensor, async_op):
        tensor = 2 * tensor
        work = collectives.all_reduce(tensor, async_op=async_op)
        if async_op:
            work.wait()
        return tensor + 1

    def by_torchs_function(tensor):
        tensor = 2 * tensor
        dist.all_reduce(tensor)
        return tensor + 1

    ones = torch.ones(2)
    function = torch.compile(double_and_reduce, backend="eager")
    results = [function(ones, False).tolist()]
    if with_torchs_function:
        results += [function(ones, async_op).tolist() for async_op in (True, False)]
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(double_and_reduce, backend="eager", fullgraph=True)(ones, False)
        whole = torch.compile(by_torchs_function, backend="eager", fullgraph=True)
        results.append(whole(ones).tolist())
    return results


@pytest.mark.parametrize(
    ("world", "with_torchs_function"),
    [(1, False), pytest.param(2, True, marks=pytest.mark.exhaustive)],
)
def test_compiled_functions_can_call_collectives(world, with_torchs_function):
    for results in run_ranks(run_compiled, world, with_torchs_function, backend=""):
        assert len(results) == (4 if with_torchs_function else 1)
        assert results == [[2.0 * world + 1] * 2] * len(results)


def use_meta_tensor():
    begin()
    with pytest.raises(ValueError, match="no backend for meta tensors"):
        dist.all_reduce(torch.empty(2, device="meta"))


def test_device_without_backend_is_refused():
    run_ranks(use_meta_tensor, 1, backend="")


def call_without_options():
    """Call the group's methods with every signature of torch."""
    group = begin()
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone = world * (world + 1) / 2
    for call in (
        lambda t: group.allreduce([t]),
        lambda t: group.allreduce(t),
        lambda t: group.allreduce([t], dist.ReduceOp.SUM),
        lambda t: group.allreduce(t, op=dist.ReduceOp.SUM),
        lambda t: group.allreduce([t], dist.AllreduceOptions()),
        lambda t: group.allreduce_coalesced([t]),
    ):
        tensor = torch.full((5,), rank + 1.0)
        work = call(tensor)
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert tensor.tolist() == [everyone] * 5
    for call in (
        lambda t: group.broadcast([t]),
        lambda t: group.broadcast(t, 0),
        lambda t: group.broadcast(t, root=0),
    ):
        tensor = torch.full((5,), rank + 1.0)
        call(tensor).wait()
        assert tensor.tolist() == [1.0] * 5
    group.barrier().wait()
    group.allreduce([torch.full((5,), 3)], dist.ReduceOp.MAX).wait()


def test_methods_accept_every_signature_of_torch():
    assert run_on_shared_ranks(call_without_options, 2, backend="") == [None, None]


def poll_work():
    begin()
    work = dist.all_reduce(torch.ones(300_000), async_op=True)
    end = time.monotonic() + 30
    while not work.is_completed():
        assert time.monotonic() < end
    assert work.is_success()


def test_polled_handle_reports_completion():
    assert run_on_shared_ranks(poll_work, 2, backend="") == [None, None]


def read_futures_of_finished_calls():
    """Read futures right after `wait`, or after `is_completed` returned True."""
    begin()
    for i in range(100):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        future = work.get_future()
        if i % 2:
            work.wait()
        while not work.is_completed():
            pass
        assert future.done()
        assert future.value()[0].tolist() == [2.0] * 3


def test_future_is_completed_when_its_handle_is():
    assert run_on_shared_ranks(read_futures_of_finished_calls, 2, backend="") == [None, None]


def test_future_of_a_call_whose_data_have_moved_is_completed():
    # The thread that runs the call has not noticed yet that the engine has finished it.
    work = Work(lambda: None, [torch.ones(1)], has_moved=lambda: True)
    assert work.is_completed()
    threading.Timer(0.02, work.run).start()
    assert work.get_future().done()
    assert work.is_completed()


def start_nested_collectives():
    """Start collectives in callbacks and wait for them by every method."""
    begin(seconds=20)
    ones = [torch.ones(1000) for _ in range(4)]

    def by_wait(future):
        dist.all_reduce(ones[1], async_op=True).wait()
        return by_future(future)

    def by_future(future):
        work = dist.all_reduce(ones[2], async_op=True)
        return work.get_future().then(synchronously).wait()

    def synchronously(future):
        dist.all_reduce(ones[3])
        return [future.value()[0] + ones[3]]

    first = dist.all_reduce(ones[0], async_op=True).get_future().then(by_wait)
    return first.wait()[0][0].item(), [tensor[0].item() for tensor in ones]


def test_callbacks_can_start_collectives_and_wait_for_them():
    assert run_on_shared_ranks(start_nested_collectives, 2, backend="") == [(4.0, [2.0] * 4)] * 2


def list_hooks():
    """Return the state and the function of each of torch's communication hooks, by name."""
    from torch.distributed.algorithms import ddp_comm_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import (
        default_hooks,
        post_localSGD_hook,
        powerSGD_hook,
        quantization_hooks,
    )

    def low_rank():
        return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)

    everyone, reduce = dist.group.WORLD, default_hooks.allreduce_hook
    local = post_localSGD_hook.PostLocalSGDState(everyone, dist.new_group([0, 1]), 1)
    builtin = ddp_comm_hooks.dist.BuiltinCommHookType
    # In torch 2.11 they fail on gloo too.
    quantized = {
        "quantized": (everyone, quantization_hooks.quantization_pertensor_hook),
        "quantized by channel": (everyone, quantization_hooks.quantization_perchannel_hook),
    }
    return {
        "allreduce": (None, reduce),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "bf16": (None, default_hooks.bf16_compress_hook),
        "fp16 around": (None, default_hooks.fp16_compress_wrapper(reduce)),
        "powerSGD": (low_rank(), powerSGD_hook.powerSGD_hook),
        "fp16 around powerSGD": (
            low_rank(),
            default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        ),
        "local SGD": (local, post_localSGD_hook.post_localSGD_hook),
        **(quantized if torch.__version__ >= "2.15" else {}),
        "built in": (builtin.ALLREDUCE, None),
    }


def train_with_hooks():
    """Return the parameters after three steps with each hook."""
    values = {}
    for name, (state, hook) in list_hooks().items():
        network = DistributedDataParallel(build_model(), bucket_cap_mb=0.001)
        if hook is None:
            network._register_builtin_comm_hook(state)
        else:
            network.register_comm_hook(state, hook)
        # The low-rank approximation starts from random numbers.
        torch.manual_seed(5)
        run_steps(network, torch.optim.SGD(network.parameters(), lr=0.01))
        values[name] = [p.detach().tolist() for p in network.parameters()]
    return values


@pytest.mark.filterwarnings("ignore")
def test_ddp_communication_hooks_give_same_parameters_as_on_gloo():
    results = run_on_shared_ranks(run_by_backend, 2, train_with_hooks, backend="")
    on_gloo, on_ours = zip(*results, strict=True)
    assert len(on_gloo[0]) >= 8
    for name in on_gloo[0]:
        for a, b in zip(on_gloo[0][name], on_ours[0][name], strict=True):
            torch.testing.assert_close(torch.tensor(b), torch.tensor(a), rtol=1e-5, atol=1e-6)
        assert (on_ours[0][name] == on_ours[1][name]) == (on_gloo[0][name] == on_gloo[1][name])


def call_from_two_threads():
    """Make a group's first two calls from two threads at the same time."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    gate, tensors = threading.Barrier(2), [torch.full((100,), rank + 1.0) for _ in range(2)]

    def go(tensor):
        gate.wait()
        collectives.all_reduce(tensor, group=group)

    threads = [threading.Thread(target=go, args=(tensor,)) for tensor in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [tensor[0].item() for tensor in tensors]


def test_first_calls_can_come_from_two_threads():
    assert run_on_shared_ranks(call_from_two_threads, 2) == [[3.0, 3.0]] * 2


def call_groups_from_two_threads():
    """Make the first calls of two groups in opposite orders, each group on its own thread."""
    rank, groups = dist.get_rank(), [dist.new_group() for _ in range(2)]
    tensors = [torch.full((100,), rank + 1.0) for _ in groups]

    def go(i):
        # The other thread's call comes first. It waits for the other rank.
        while i != rank and groups[rank] not in _creating:
            time.sleep(0.001)
        collectives.all_reduce(tensors[i], group=groups[i])

    threads = [threading.Thread(target=go, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [tensor[0].item() for tensor in tensors]


def test_groups_can_be_used_from_threads_in_any_order():
    assert run_on_shared_ranks(call_groups_from_two_threads, 2) == [[3.0, 3.0]] * 2


def change_timeout():
    """Change the timeout by each of torch's functions."""
    group = begin(seconds=60)
    dist.all_reduce(torch.ones(3))
    values = [collectives.describe(group).timeout_seconds]
    for set_timeout in (
        group.set_timeout,
        lambda t: dist.distributed_c10d._set_pg_timeout(t, group),
    ):
        set_timeout(timedelta(seconds=30 + len(values)))
        dist.all_reduce(torch.ones(3))
        values.append(collectives.describe(group).timeout_seconds)
    assert group.split_group([0, 1]).communicator.group_timeout == values[-1]
    with pytest.raises(TypeError, match=r"some of op, timeout; got also \['opp'\]"):
        group.allreduce([torch.ones(3)], opp=dist.ReduceOp.MAX)
    for extra in ({"op": dist.ReduceOp.MAX}, {"timeout": timedelta(seconds=1)}):
        with pytest.raises(TypeError, match="got also"):
            group.allreduce([torch.ones(3)], dist.AllreduceOptions(), **extra)
    with pytest.raises(TypeError, match="got also"):
        group.allreduce([torch.ones(3)], dist.ReduceOp.SUM, op=dist.ReduceOp.MAX)
    store = dist.distributed_c10d._get_default_store()
    group.set_timeout(timedelta(seconds=1))
    dist.barrier()
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(collectives.RankLost, match="rank 1"):
            dist.all_reduce(torch.ones(3))
        assert time.monotonic() - start < 20
        store.set("rank 1 is lost", "")
    else:
        store.wait(["rank 1 is lost"])
    return values


def pass_timeouts_to_single_calls():
    """Make single calls with a timeout, which ends long before that of the group."""
    begin(seconds=60)
    limit = timedelta(seconds=0.3)
    barrier_options = dist.BarrierOptions()
    barrier_options.timeout = limit
    tensor = torch.ones(3)

    def before_another_call(group):
        """Submit a call with the group's timeout while the first one runs."""
        comm = get_communicator(group)
        number = comm.operation.number
        first = group.allreduce(tensor, dist.ReduceOp.SUM, limit)
        while comm.operation.number == number:
            time.sleep(0.001)
        dist.all_reduce(torch.ones(3), group=group, async_op=True)
        first.wait()

    calls = [
        before_another_call,
        lambda group: collectives.barrier(group, timeout=limit),
        lambda group: group.barrier(barrier_options).wait(),
        lambda group: group.allreduce(tensor, dist.ReduceOp.SUM, limit).wait(),
    ]
    for call in calls:
        group = dist.new_group(timeout=timedelta(seconds=60))
        collectives.barrier(group, timeout=timedelta(seconds=20))
        assert collectives.describe(group).timeout_seconds == 60
        if dist.get_rank() == 0:
            start = time.monotonic()
            with pytest.raises(collectives.RankLost, match="rank 1"):
                call(group)
            assert time.monotonic() - start < 20
        dist.barrier()
    return True


# Scenarios that wait, which run beside the other tests: see `conftest.py`.
WAITING = {
    "test_one_call_can_have_another_timeout": ((pass_timeouts_to_single_calls, 2), {"backend": ""}),
    "test_changed_timeout_applies_to_later_calls": ((change_timeout, 2), {"backend": ""}),
}


def test_one_call_can_have_another_timeout(outcomes):
    assert [outcome.value for outcome in outcomes] == [True, True], outcomes


def test_changed_timeout_applies_to_later_calls(outcomes):
    assert [outcome.value for outcome in outcomes] == [[60.0, 31.0, 32.0]] * 2, outcomes


def list_profiled_events():
    begin()
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10), async_op=True).wait()
        dist.broadcast(torch.ones(10), 0)
        dist.barrier()
    events = [event.name for event in profile.events() if event.name.startswith("collectives:")]
    return sorted(events)


def stop_profiler_early():
    """Stop the profiler while calls of many threads are in progress."""
    begin()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    for i in range(20):
        # In every other round, rank 1 makes its calls after the profiler of rank 0 has stopped.
        if rank == 1 and i % 2:
            store.wait([f"profiler {i} has stopped"])
        with torch.profiler.profile():
            works = [dist.all_reduce(torch.ones(200_000), async_op=True) for _ in range(5)]
        if rank == 0 and i % 2:
            assert not works[0].is_completed()
            store.set(f"profiler {i} has stopped", "")
        for work in works:
            work.wait()


def test_profiler_can_stop_before_an_asynchronous_call_ends():
    assert run_on_shared_ranks(stop_profiler_early, 2, backend="") == [None, None]


def test_profiler_records_our_calls():
    want = ["collectives:all_reduce"] * 2 + ["collectives:barrier", "collectives:broadcast"]
    assert run_on_shared_ranks(list_profiled_events, 2, backend="") == [want] * 2
