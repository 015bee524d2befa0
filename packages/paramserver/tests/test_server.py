"""Bulk-synchronous training equals one process, and the staleness bound holds in any order."""

import gc
import sys
import threading
import time
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # processes that `run` starts import it by name

from paramserver import (
    Asynchronous,
    BulkSynchronous,
    Integers,
    LocalSteps,
    OptimizerSpec,
    PeerLost,
    Server,
    StaleSynchronous,
    Worker,
    partition,
)
from paramserver.parameters import get_trainable_parameters
from paramserver_training import (
    ADAMW,
    SGD,
    assert_equal_parameters,
    build_model,
    draw_batch,
    run_in_threads,
    train_alone,
    train_to_the_end,
)


@pytest.mark.parametrize(
    ("optimizer", "servers"),
    [
        pytest.param(SGD, 1, id="sgd-1"),
        pytest.param(ADAMW, 2, id="adamw-2"),
        pytest.param(SGD, 3, id="sgd-3"),
        pytest.param(ADAMW, 1, id="adamw-1", marks=pytest.mark.exhaustive),
        pytest.param(SGD, 2, id="sgd-2", marks=pytest.mark.exhaustive),
        pytest.param(ADAMW, 3, id="adamw-3", marks=pytest.mark.exhaustive),
    ],
)
def test_bulk_synchronous_equals_one_process(servers, optimizer):
    parameters = get_trainable_parameters(build_model())
    shards = partition(parameters, servers)
    hosts = [Server(parameters, optimizer, workers=3, shard=shard) for shard in shards]
    workers = [Worker(build_model(), hosts, rank=rank) for rank in range(3)]
    run_in_threads(*(partial(train_to_the_end, worker, 6) for worker in workers))
    expected = train_alone(6, 3, optimizer)
    for worker in workers:
        assert_equal_parameters(dict(worker.module.named_parameters()), expected)
    assert [host.version for host in hosts] == [6] * servers


def train_with(optimizer, servers):
    """Train two workers for five steps and return the parameters of the first one."""
    parameters = get_trainable_parameters(build_model())
    shards = partition(parameters, servers)
    hosts = [Server(parameters, optimizer, workers=2, shard=shard) for shard in shards]
    workers = [Worker(build_model(), hosts, rank=rank) for rank in range(2)]
    run_in_threads(*(partial(train_to_the_end, worker, 5) for worker in workers))
    return dict(workers[0].module.named_parameters())


ADAFACTOR = partial(torch.optim.Adafactor, lr=0.1)


def test_an_optimizer_of_whole_tensors_is_refused_if_a_tensor_is_split():
    with pytest.raises(ValueError, match=r"is split, got Adafactor; pass servers=1"):
        train_with(ADAFACTOR, 3)


def test_an_optimizer_of_whole_tensors_equals_one_process_on_one_server():
    parameters = train_with(ADAFACTOR, 1)
    assert_equal_parameters(parameters, train_alone(5, 2, ADAFACTOR))


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not know: it subtracts the sign of the gradient."""

    elementwise = True

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad.sign(), alpha=0.01)


def test_another_optimizer_can_declare_that_it_is_elementwise():
    assert_equal_parameters(train_with(Lion, 3), train_alone(5, 2, Lion))


class Overridden(torch.optim.SGD):
    """A subclass whose `step` may do anything."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_subclass_with_its_own_step_is_not_assumed_to_be_elementwise():
    with pytest.raises(ValueError, match=r"is split, got Overridden"):
        train_with(partial(Overridden, lr=0.1), 3)


def build_normalizing_sgd(parameters):
    """Return an optimizer with a hook that uses all gradients."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def normalize(optimizer, args, kwargs):
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)

    optimizer.register_step_pre_hook(normalize)
    return optimizer


def build_sgd_with_another_step(parameters):
    """Return an optimizer whose `step` was replaced."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    step = optimizer.step
    optimizer.step = lambda: step()
    return optimizer


def test_step_hooks_need_one_server():
    train_with(build_sgd_with_another_step, 1)
    with pytest.raises(ValueError, match="with the `step` of its class"):
        train_with(build_sgd_with_another_step, 2)
    train_with(build_normalizing_sgd, 1)
    with pytest.raises(ValueError, match=r"without step hooks.*pass servers=1"):
        train_with(build_normalizing_sgd, 2)
    local_steps = LocalSteps(2, build_normalizing_sgd, fragments=2)
    with pytest.raises(ValueError, match="without step hooks"):
        Server(get_trainable_parameters(build_model()), SGD, local_steps, workers=1)


def test_options_that_depend_on_the_parameters_are_refused_for_a_part():
    def sgd_by_size(parameters):
        parameters = list(parameters)
        return torch.optim.SGD(parameters, lr=1 / sum(p.numel() for p in parameters))

    train_with(sgd_by_size, 1)
    scheduled = OptimizerSpec(sgd_by_size, lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
    for factory in (sgd_by_size, scheduled):
        with pytest.raises(ValueError, match=r"got lr=0\.0.* for a part and lr=0\.01"):
            train_with(factory, 2)


def test_bulk_synchronous_runs_are_bit_equal():
    def once():
        server = Server(get_trainable_parameters(build_model()), SGD, workers=4)
        workers = [Worker(build_model(), [server], rank=rank) for rank in range(4)]
        run_in_threads(*(partial(train_to_the_end, worker, 5) for worker in workers))
        return torch.cat([p.flatten() for p in workers[0].module.parameters()])

    first = once()
    assert all(torch.equal(first, once()) for _ in range(4))


def test_workers_may_have_unequal_numbers_of_batches():
    server = Server(get_trainable_parameters(build_model()), SGD, workers=3)
    workers = [Worker(build_model(), [server], rank=rank) for rank in range(3)]
    run_in_threads(*(partial(train_to_the_end, w, 2 + 3 * w.rank) for w in workers))
    assert server.version == 8
    assert server.staleness == {0: 2 + 5 + 8}
    final = [torch.cat([p.flatten() for p in w.module.parameters()]) for w in workers]
    assert torch.equal(final[0], final[1])
    assert torch.equal(final[0], final[2])


class Counting(nn.Module):
    """Element i counts the gradients of worker i."""

    def __init__(self, workers):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(workers))

    def push_one(self, worker):
        self.counts.grad = -torch.eye(len(self.counts))[worker.rank]
        worker.push()


@settings(deadline=None, max_examples=15)
@given(
    bound=st.integers(0, 4),
    workers=st.integers(2, 4),
    order=st.lists(st.integers(0, 3), min_size=20, max_size=60),
)
def test_a_reader_misses_at_most_the_bound_in_any_order(bound, workers, order):
    # A step is a pull and a push by the next worker of `order`. The timeout is 0, so a pull that
    # must wait fails at once. This must happen if and only if the reader is too far ahead.
    parameters = {"counts": torch.zeros(workers)}
    unit_sgd = partial(torch.optim.SGD, lr=1.0)
    server = Server(parameters, unit_sgd, StaleSynchronous(bound), workers=workers, timeout=0.0)
    group = [Worker(Counting(workers), [server], rank=rank) for rank in range(workers)]
    clocks = [0] * workers
    for number in order:
        worker = group[number % workers]
        ahead = worker.clock - min(clocks)
        if ahead > bound:
            with pytest.raises(TimeoutError, match=rf"worker {worker.rank} waited .* for worker"):
                worker.pull()
            continue
        version = worker.pull()
        seen = worker.module.counts.tolist()
        assert sum(seen) == version
        assert seen[worker.rank] == worker.clock  # it reads its own writes
        assert all(count >= worker.clock - bound for count in seen)
        worker.module.push_one(worker)
        clocks[worker.rank] += 1
    assert server.version == sum(clocks)
    assert max(clocks) - min(clocks) <= bound + 1


def test_pull_reads_a_single_version():
    # Every update adds one to all elements, so half an update would show two values.
    size = 300_000
    server = Server(
        {"x": torch.zeros(size)}, partial(torch.optim.SGD, lr=1.0), Asynchronous(), workers=2
    )

    class Vector(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.zeros(size))

    def work(worker):
        for _ in range(20):
            version = worker.pull()
            assert worker.module.x.min() == worker.module.x.max() == version
            worker.module.x.grad = torch.full((size,), -1.0)
            worker.push()
        worker.finish()

    run_in_threads(*(partial(work, Worker(Vector(), [server], rank=rank)) for rank in range(2)))
    assert server.version == 40


@pytest.mark.parametrize("servers", [1, 2])
def test_staleness_is_the_number_of_updates_since_the_pull(servers):
    module = nn.Linear(2, 1, bias=False)
    parameters = get_trainable_parameters(module)
    with torch.no_grad():
        module.weight.zero_()
    policy = Asynchronous()
    hosts = [
        Server(parameters, partial(torch.optim.SGD, lr=1.0), policy, workers=3, shard=shard)
        for shard in partition(parameters, servers)
    ]
    workers = [Worker(nn.Linear(2, 1, bias=False), hosts, rank=rank) for rank in range(3)]
    for worker in workers:
        worker.pull()
    for worker in workers:  # 0, 1 and 2 versions behind
        worker.module.weight.grad = -torch.ones(1, 2)
        worker.push()
    workers[0].pull()
    torch.testing.assert_close(workers[0].module.weight.detach(), torch.full((1, 2), 3.0))
    assert hosts[0].staleness == {0: 1, 1: 1, 2: 1}


def create_small_server(policy, workers):
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return Server(dict(nn.Linear(3, 1).named_parameters()), optimizer, policy, workers=workers)


def test_local_optimizer_without_local_steps_is_refused():
    server = create_small_server(BulkSynchronous(), workers=1)
    with pytest.raises(ValueError, match="expected optimizer=None without LocalSteps"):
        Worker(nn.Linear(3, 1), server, optimizer=partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize("policy", [BulkSynchronous(), LocalSteps(2)])
def test_worker_that_leaves_waits_for_no_other_worker(policy):
    server = create_small_server(policy, workers=2)
    is_local = isinstance(policy, LocalSteps)
    optimizer = partial(torch.optim.SGD, lr=0.1) if is_local else None
    modules = [nn.Linear(3, 1) for _ in range(2)]
    other = Worker(modules[1], server, rank=1, optimizer=optimizer)
    # The other worker never pushes, so a wait for it would not end.
    with Worker(modules[0], server, rank=0, optimizer=optimizer) as worker:
        worker.pull()
        modules[0](torch.ones(1, 3)).sum().backward()
        worker.push()
        worker.leave()
    other.pull()
    modules[1](torch.ones(1, 3)).sum().backward()
    other.push()
    assert other.finish() == 1


def replace_parameters(module):
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def add_parameter(module):
    module.register_parameter("scale", nn.Parameter(torch.ones(())))
    module.register_forward_hook(lambda module, args, output: output * module.scale)


def unfreeze_parameters(module):
    module.bias.requires_grad_(True)


@pytest.mark.parametrize("policy", [BulkSynchronous(), LocalSteps(2)])
@pytest.mark.parametrize("change", [replace_parameters, add_parameter, unfreeze_parameters])
def test_gradient_of_a_parameter_that_is_not_on_the_servers_is_refused(policy, change):
    module = nn.Linear(3, 1)
    module.bias.requires_grad_(change is not unfreeze_parameters)
    sgd = partial(torch.optim.SGD, lr=0.1)
    server = Server(get_trainable_parameters(module), sgd, policy, workers=1)
    worker = Worker(module, server, optimizer=sgd if isinstance(policy, LocalSteps) else None)
    worker.pull()
    change(module)
    module(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ValueError, match="added, replaced or unfrozen"):
        worker.push()
    assert server.version == worker.clock == 0
    for parameter in get_trainable_parameters(module).values():
        assert parameter.grad is not None


@pytest.mark.parametrize("policy", [BulkSynchronous(), Asynchronous(), LocalSteps(2)])
def test_a_parameter_that_is_frozen_after_a_push_is_refused(policy):
    module = nn.Linear(3, 1)
    is_local = isinstance(policy, LocalSteps)
    server = Server(get_trainable_parameters(module), SGD, policy, workers=1)
    worker = Worker(module, server, optimizer=SGD if is_local else None)
    for freezes in (False, True):
        worker.pull()
        module.bias.requires_grad_(not freezes)
        module.zero_grad()
        module(torch.ones(1, 3)).sum().backward()
        before = worker.position, server.version, module.weight.clone()
        if not freezes:
            worker.push()
    with pytest.raises(ValueError, match="got frozen bias, which momentum"):
        worker.push()
    assert module.weight.grad is not None
    assert (worker.position, server.version) == before[:2]
    assert torch.equal(module.weight, before[2])


def test_parameter_of_another_shape_is_refused():
    module = nn.Linear(3, 1)
    server = Server(get_trainable_parameters(module), SGD, Asynchronous(), workers=1)
    worker = Worker(module, server, rank=torch.tensor(0))  # an integer of any library
    worker.pull()
    module.weight.data = torch.zeros(1, 4)
    module(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"weight to have the shape \(1, 3\) .* got \(1, 4\)"):
        worker.push()
    assert server.version == 0


@pytest.mark.parametrize("policy", [BulkSynchronous(), Asynchronous(), LocalSteps(4)])
@pytest.mark.parametrize("end", [Worker.finish, Worker.leave])
def test_worker_that_has_ended_neither_pulls_nor_pushes(policy, end):
    sgd = partial(torch.optim.SGD, lr=0.1)
    server = create_small_server(policy, workers=1)
    module = nn.Linear(3, 1)
    worker = Worker(module, server, optimizer=sgd if isinstance(policy, LocalSteps) else None)
    worker.pull()
    end(worker)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    module(torch.ones(1, 3)).sum().backward()
    for call in (worker.pull, worker.push):
        with pytest.raises(RuntimeError, match="can neither pull nor push"):
            call()
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize(
    "policy", [BulkSynchronous(), LocalSteps(2, compression=Integers(8))], ids=["bulk", "local"]
)
def test_defaults_of_the_caller_do_not_change_the_result(policy):
    def trained():
        torch.manual_seed(0)
        module = nn.Linear(40, 3, dtype=torch.float32, device="cpu")
        local = SGD if isinstance(policy, LocalSteps) else None
        inputs = torch.ones(2, 40, dtype=torch.float32, device="cpu")
        server = Server(dict(module.named_parameters()), SGD, policy, workers=1)
        with Worker(module, server, optimizer=local) as worker:
            for _ in range(4):
                worker.pull()
                module(inputs).square().mean().backward()
                worker.push()
        return module.weight.detach()

    expected = trained()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):  # as torch.set_default_device("cuda") on a GPU
            assert torch.equal(trained(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_waiting_worker_retries_its_request_only_after_changes(monkeypatch):
    monkeypatch.setattr("paramserver.server._KEEP_ALIVE_SECONDS", 0.01)
    server = create_small_server(BulkSynchronous(), workers=2)
    requests = []
    handle = server.core.handle

    def count(*arguments, **options):
        requests.append(arguments)
        return handle(*arguments, **options)

    fast, slow = nn.Linear(3, 1), nn.Linear(3, 1)
    first, second = Worker(fast, server, rank=0), Worker(slow, server, rank=1)
    for worker in (first, second):
        worker.pull()
        worker.module(torch.ones(1, 3)).sum().backward()
    first.push()
    monkeypatch.setattr(server.core, "handle", count)
    thread = threading.Thread(target=first.pull)
    thread.start()
    time.sleep(0.2)
    assert len(requests) == 1  # not in a loop
    second.push()
    thread.join()
    assert server.version == 1


def test_a_change_during_a_message_to_a_waiting_worker_ends_the_wait(monkeypatch):
    monkeypatch.setattr("paramserver.server._KEEP_ALIVE_SECONDS", 0.01)
    server = create_small_server(BulkSynchronous(), workers=2)
    first, second = (Worker(nn.Linear(3, 1), server, rank=rank) for rank in range(2))
    for worker in (first, second):
        worker.pull()
    first.push()
    events = []
    wait = server._core_changed.wait

    def keep_alive():  # runs without the lock
        second.push()
        events.append("push")

    monkeypatch.setattr(server._core_changed, "wait", lambda s: events.append("wait") or wait(s))
    (request,) = next(first._exchange.session.pull())
    assert server.request(0, request.message, keep_alive=keep_alive).position == 0
    assert server.version == 1
    assert events[-1] == "push"


@pytest.mark.parametrize(
    ("optimizer", "error"),
    [
        (partial(torch.optim.Adam, capturable=True), "capturable=True"),
        (torch.optim.LBFGS, "'closure'"),
        (partial(torch.optim.SparseAdam, lr=0.1), "does not support dense gradients"),
        (OptimizerSpec(SGD, torch.optim.lr_scheduler.ReduceLROnPlateau), "'metrics'"),
    ],
)
def test_optimizer_whose_step_fails_ends_training_with_the_error_of_torch(optimizer, error):
    module = build_model()
    server = Server(get_trainable_parameters(module), optimizer, workers=1)
    worker = Worker(module, server)
    worker.pull()
    with pytest.raises(Exception, match=error):
        worker.push()
    with pytest.raises(PeerLost, match=f"the server is lost: .*{error}"):
        worker.pull()


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("local", [None, LocalSteps(1, partial(torch.optim.SGD, lr=1.0))])
def test_inference_mode_of_the_caller_does_not_change_the_result(servers, local):
    """An evaluation pulls in inference mode, in which a pull may apply an earlier update."""
    module = build_model()
    parameters = get_trainable_parameters(module)
    with torch.inference_mode():
        shards = partition(parameters, servers)
        hosts = [Server(parameters, SGD, local, workers=1, shard=shard) for shard in shards]
        worker = Worker(module, hosts, optimizer=SGD if local else None)
    for step in range(4):
        with torch.inference_mode(step % 2 == 0):
            worker.pull()
        inputs, targets = draw_batch(step, 0)
        F.mse_loss(module(inputs), targets).backward()
        with torch.inference_mode(step < 2):
            worker.push()
    with torch.inference_mode():
        worker.finish()
    assert_equal_parameters(dict(module.named_parameters()), train_alone(4, 1, SGD))


def test_parameters_without_values_are_refused():
    server = create_small_server(BulkSynchronous(), workers=1)
    with pytest.raises(ValueError, match="expected parameters with values, got weight on the meta"):
        Worker(nn.Linear(3, 1, device="meta"), server)


def build_sgd_with_long_options(parameters):
    optimizer = SGD(parameters)
    optimizer.param_groups[0]["label"] = "x" * 5000
    return optimizer


@pytest.mark.parametrize("odd", [0, pytest.param(1, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize(
    ("optimizer", "policy", "message"),
    [
        (partial(torch.optim.SGD, lr=0.2), BulkSynchronous(), "lr=0.2"),
        (torch.optim.Adam, BulkSynchronous(), '"optimizer": "Adam"'),
        (SGD, Asynchronous(), '"policy": "Asynchronous()"'),
        (OptimizerSpec(SGD, groups=lambda name, _: {"lr": len(name)}), BulkSynchronous(), "lr=6"),
        (OptimizerSpec(SGD, master_dtype=torch.float64), BulkSynchronous(), "float64"),
        (build_sgd_with_long_options, BulkSynchronous(), "SHA-256"),
    ],
)
def test_servers_of_one_job_with_different_optimizers_or_policies_are_refused(
    optimizer, policy, message, odd
):
    parameters = get_trainable_parameters(build_model())
    hosts = [
        Server(
            parameters,
            *((optimizer, policy) if shard.number == odd else (SGD, BulkSynchronous())),
            workers=1,
            shard=shard,
            elastic=True,
        )
        for shard in partition(parameters, 3)
    ]
    with pytest.raises(ValueError, match="expected servers with equal policies and") as error:
        Worker(build_model(), hosts)
    assert message in str(error.value)
    assert [host.core.replica.position for host in hosts] == [0, 0, 0]
    hosts[odd] = Server(
        parameters, SGD, workers=1, shard=partition(parameters, 3)[odd], elastic=True
    )
    train_to_the_end(Worker(build_model(), hosts), 1)
    assert {host.version for host in hosts} == {1}


def test_wrong_ranks_and_orders_of_servers_are_named():
    parameters = get_trainable_parameters(build_model())
    hosts = [Server(parameters, SGD, workers=1, shard=shard) for shard in partition(parameters, 2)]
    with pytest.raises(ValueError, match="expected rank >= 0, got -1"):
        Worker(build_model(), hosts, rank=-1)
    with pytest.raises(ValueError, match="pass the servers in the order of their shards"):
        Worker(build_model(), hosts[::-1])


@pytest.mark.parametrize(
    ("policy", "servers", "pulls", "pushes"),
    [
        (Asynchronous(), 1, True, 120),
        (Asynchronous(), 2, False, 120),
        *(
            pytest.param(policy, servers, pulls, 10_000, marks=pytest.mark.exhaustive)
            for servers in (1, 2)
            for policy, pulls in (
                (Asynchronous(), True),
                (Asynchronous(), False),
                (StaleSynchronous(2), True),
                (BulkSynchronous(), True),
                (LocalSteps(1), True),
            )
        ),
    ],
    ids=str,
)
def test_memory_does_not_grow_with_pushes(policy, servers, pulls, pushes):
    module = nn.Linear(3, 2)
    parameters = dict(module.named_parameters())
    shards = partition(parameters, servers)
    hosts = [Server(parameters, SGD, policy, workers=1, shard=shard) for shard in shards]
    worker = Worker(module, hosts, optimizer=SGD if isinstance(policy, LocalSteps) else None)

    def push(count):
        for _ in range(count):
            if pulls:
                worker.pull()
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            worker.push()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    worker.pull()
    push(20)
    gc.freeze()  # collections need not scan the objects of other tests
    tracemalloc.start()
    growth = -push(pushes // 2) + push(pushes // 2)
    tracemalloc.stop()
    # Less than 14 bytes per push of the exhaustive test. Without a pull, every push has another
    # staleness, whose count takes up to 150 bytes.
    assert growth < 2**16 + (0 if pulls else 150 * pushes // 2)
    # A step has up to three entries, and the worker reports which of them all servers have replayed
    # in its next step.
    assert max(len(host.core.ledger.get_log_from(0).entries) for host in hosts) <= 6
    assert hosts[0].version == 20 + pushes
