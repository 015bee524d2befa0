"""DiLoCo equals a minimal loop, and compression carries residuals to later pushes."""

import math
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
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
    plain,
    run,
)
from paramserver.parameters import get_trainable_parameters
from paramserver.protocol.gradients import flatten
from paramserver.protocol.messages import Kind, Message
from paramserver.server import LocalConnection
from paramserver.transport.chunks import FiniteCheck
from paramserver.transport.connection import RemoteConnection
from paramserver_training import (
    ADAMW,
    SGD,
    assert_equal_parameters,
    build_model,
    draw_batch,
    run_in_threads,
    train,
    train_to_the_end,
)

INNER = partial(torch.optim.AdamW, lr=0.01)
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


SPEC = OptimizerSpec(INNER)


def compute_warmup_and_cosine(step, warmup=5, total=60):
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


#: Published configurations, with fewer local steps: OpenDiLoCo's train_diloco_torch.py (500 local
#: steps), torchft's train_diloco.py with streaming, and torchtitan's launcher of torchft jobs.
CONFIGURATIONS = {
    "OpenDiLoCo": (
        LocalSteps(10, OUTER),
        OptimizerSpec(
            partial(torch.optim.AdamW, lr=4e-4, weight_decay=0.1, betas=(0.9, 0.95)),
            partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=compute_warmup_and_cosine),
            max_norm=1.0,
        ),
    ),
    "torchft": (
        LocalSteps(20, OUTER, fragments=2, overlap=5, alpha=0.0),
        OptimizerSpec(partial(torch.optim.AdamW, lr=4e-4, weight_decay=0.1, betas=(0.9, 0.95))),
    ),
    "torchtitan": (
        LocalSteps(20, OUTER, fragments=2, overlap=1, alpha=0.0),
        OptimizerSpec(partial(torch.optim.AdamW, lr=8e-4, betas=(0.9, 0.95)), max_norm=1.0),
    ),
}


def compute_loss(module, worker, step):
    inputs, targets = draw_batch(step, worker)
    return F.mse_loss(module(inputs), targets)


def run_diloco_in_twenty_lines(workers, rounds, steps, inner=INNER):
    theta = build_model()
    outer = OUTER(theta.parameters())
    replicas = [build_model() for _ in range(workers)]
    inners = [inner(replica.parameters()) for replica in replicas]
    for number in range(rounds):
        for worker, (replica, inner) in enumerate(zip(replicas, inners, strict=True)):
            replica.load_state_dict(theta.state_dict())
            for step in range(number * steps, (number + 1) * steps):
                inner.zero_grad()
                compute_loss(replica, worker, step).backward()
                inner.step()
        for name, parameter in theta.named_parameters():
            changes = [parameter.detach() - r.get_parameter(name).detach() for r in replicas]
            parameter.grad = sum(changes) / workers
        outer.step()
    return {name: p.detach() for name, p in theta.named_parameters()}


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_local_steps_are_diloco(servers):
    policy = LocalSteps(4, OUTER)
    result = run(train, build_model(), INNER, policy, args=(12,), workers=3, servers=servers)
    assert_equal_parameters(result.parameters, run_diloco_in_twenty_lines(3, 3, 4))
    assert result.versions == [3] * servers


OTHER_INNER = [
    partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    partial(torch.optim.NAdam, lr=0.01),
    partial(torch.optim.RMSprop, lr=0.01),
    partial(torch.optim.Adafactor, lr=0.01),
]


@pytest.mark.parametrize("inner", OTHER_INNER, ids=lambda inner: inner.func.__name__)
def test_local_steps_with_other_inner_optimizers_are_diloco(inner):
    trained, _ = train_in_threads(LocalSteps(4, OUTER), inner, 8)
    assert_equal_parameters(trained, run_diloco_in_twenty_lines(2, 2, 4, inner))


def train_in_threads(policy, spec, steps):
    """Train two workers with two servers in this process; return the parameters of both."""
    parameters = dict(build_model().named_parameters())
    hosts = [
        Server(parameters, spec, policy, workers=2, shard=shard)
        for shard in partition(parameters, 2)
    ]
    workers = [
        Worker(build_model(), hosts, rank=rank, local=policy, optimizer=spec) for rank in range(2)
    ]
    run_in_threads(*(partial(train_to_the_end, worker, steps) for worker in workers))
    modules = [worker.module for worker in workers]
    return [{n: p.detach() for n, p in module.named_parameters()} for module in modules]


class StreamingDiloco:
    """A minimal implementation of Streaming DiLoCo."""

    def __init__(self, workers, policy, servers):
        self.policy = policy
        self.theta = dict(build_model().named_parameters())
        self.replicas = [build_model() for _ in range(workers)]
        #: Per fragment: names and slices of parameters.
        self.cuts = [[] for _ in range(policy.fragments)]
        for shard in partition(self.theta, servers):
            for number, fragment in enumerate(shard.fragments(policy.fragments)):
                pieces = fragment.shard.pieces
                self.cuts[number] += [(p.name, slice(p.start, p.stop)) for p in pieces]
        self.fragments = [
            [self.theta[name].detach().view(-1)[cut].requires_grad_() for name, cut in cuts]
            for cuts in self.cuts
        ]
        self.outers = [OUTER(fragment) for fragment in self.fragments]

    def exchange(self, number):
        """Apply the mean change of a fragment and return its new parameters."""
        for part, (name, cut) in zip(self.fragments[number], self.cuts[number], strict=True):
            replicas = [r.get_parameter(name).detach().view(-1)[cut] for r in self.replicas]
            part.grad = sum(part.detach() - replica for replica in replicas) / len(replicas)
        self.outers[number].step()
        return number, [part.detach().clone() for part in self.fragments[number]]

    def receive(self, number, update):
        """Mix a fragment into the parameters of all workers."""
        alpha = self.policy.alpha if self.policy.overlap else 0
        for (name, cut), part in zip(self.cuts[number], update, strict=True):
            for replica in self.replicas:
                flat = replica.get_parameter(name).data.view(-1)
                flat[cut] = alpha * flat[cut] + (1 - alpha) * part

    def train(self, steps, spec=SPEC):
        """Train `steps` steps, which are whole rounds, and return the final parameters."""
        policy = self.policy
        inners = [spec.optimizer(replica.parameters()) for replica in self.replicas]
        schedulers = [spec.scheduler(inner) for inner in inners] if spec.scheduler else []
        arrives = {}
        for step in range(1, steps + 1):
            for worker, (replica, inner) in enumerate(zip(self.replicas, inners, strict=True)):
                inner.zero_grad()
                compute_loss(replica, worker, step - 1).backward()
                if spec.max_norm:
                    nn.utils.clip_grad_norm_(replica.parameters(), spec.max_norm)
                inner.step()
            for scheduler in schedulers:
                scheduler.step()
            if step % policy.interval == 0:
                number = step // policy.interval % policy.fragments - 1
                arrives[step + policy.overlap] = self.exchange(number)
            if step in arrives:
                self.receive(*arrives.pop(step))
        for number in range(policy.fragments - 1):  # changes since the last exchange
            self.exchange(number)
        return {name: p.detach() for name, p in self.theta.items()}


@pytest.mark.parametrize(
    ("policy", "servers", "transport"),
    [
        (LocalSteps(6, OUTER, fragments=3), 2, "shared_memory"),
        (LocalSteps(6, OUTER, fragments=2, overlap=2, alpha=0.25), 2, "zeromq"),
        *(
            pytest.param(policy, 1, "shared_memory", marks=pytest.mark.exhaustive)
            for policy in (
                LocalSteps(6, OUTER, fragments=3, overlap=1),
                LocalSteps(4, OUTER, overlap=2, alpha=0.0),
            )
        ),
    ],
)
def test_fragments_are_streaming_diloco(policy, servers, transport):
    if transport == "zeromq":
        pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")
    result = run(
        train,
        build_model(),
        INNER,
        policy,
        args=(12,),
        workers=2,
        servers=servers,
        transport=transport,
    )
    expected = StreamingDiloco(2, policy, servers).train(12)
    assert_equal_parameters(result.parameters, expected)
    exchanges = 12 // policy.interval + policy.fragments - 1
    assert result.versions == [exchanges] * servers


@pytest.mark.parametrize(("policy", "spec"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_published_configurations_equal_the_reference(policy, spec):
    expected = StreamingDiloco(2, policy, 2).train(40, spec)
    for trained in train_in_threads(policy, spec, 40):
        assert_equal_parameters(trained, expected)
    start = dict(build_model().named_parameters())
    assert all((start[name] - p).abs().max() > 1e-4 for name, p in expected.items())


def test_minimal_implementation_is_diloco():
    expected = run_diloco_in_twenty_lines(2, 3, 5)
    actual = plain.train_diloco(
        build_model(), INNER, OUTER, compute_loss, workers=2, rounds=3, steps=5
    )
    assert_equal_parameters(dict(zip(expected, actual, strict=True)), expected)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_bulk_synchronous_equals_minimal_implementation(optimizer):
    module = build_model()
    # Its gradient is missing, and weight decay changes it.
    module.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    actual = plain.train(module, optimizer, compute_loss, workers=3, steps=5)
    result = run(train, module, optimizer, BulkSynchronous(), args=(5,), workers=3)
    expected = dict(zip(result.parameters, actual, strict=True))
    assert_equal_parameters(result.parameters, expected)


def train_minimal_with_periods(bound, periods, steps=8):
    """Train the minimal implementation; worker w is active in every `periods[w]`-th round only."""
    server = plain.Server(build_model(), SGD, len(periods), bound)
    group = [plain.Worker(w, build_model(), compute_loss) for w in range(len(periods))]
    round_number = 0
    while any(worker.num_steps < steps for worker in group):
        for worker, period in zip(group, periods, strict=True):
            if worker.num_steps < steps and round_number % period == 0:
                worker.step(server)
        round_number += 1
    return server.pull()


@pytest.mark.parametrize("consistency", [StaleSynchronous(2), Asynchronous()], ids=repr)
def test_stale_schedule_equals_minimal_implementation(consistency):
    # Worker 1 is active in every third round only. The timeout is 0, so a worker that would have to
    # wait skips its round.
    server = Server(
        dict(build_model().named_parameters()), SGD, consistency, workers=2, timeout=0.0
    )
    group = [Worker(build_model(), server, rank=rank) for rank in range(2)]
    now = 0
    while any(worker.clock < 8 for worker in group):
        for worker in group:
            if worker.clock < 8 and now % (1, 3)[worker.rank] == 0:
                try:
                    worker.pull()
                except TimeoutError:
                    continue
                compute_loss(worker.module, worker.rank, worker.clock).backward()
                worker.push()
        now += 1
    expected = train_minimal_with_periods(consistency.bound, periods=(1, 3))
    group[0].module.zero_grad()
    actual = server.core.replica._parameters
    flat = torch.cat([p.flatten() for p in expected])
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in actual]), flat)


def test_a_short_last_round_is_pushed_too():
    result = run(train, build_model(), INNER, LocalSteps(4, OUTER), args=(6,), workers=2)
    assert result.versions == [2]


@pytest.mark.parametrize(
    ("compression", "servers"),
    [
        *((Integers(8), 1), (Integers(4), 2)),
        pytest.param(Integers(8), 2, marks=pytest.mark.exhaustive),
        pytest.param(Integers(4), 1, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_compressed_workers_have_equal_parameters_and_bounded_errors(compression, servers):
    policy = LocalSteps(3, OUTER, compression)
    start = build_model().float()
    parameters = dict(start.named_parameters())
    shards = partition(parameters, servers)
    hosts = [Server(parameters, INNER, policy, workers=2, shard=shard) for shard in shards]
    group = [
        Worker(copy, hosts, rank=rank, local=policy, optimizer=INNER)
        for rank, copy in enumerate([build_model().float(), build_model().float()])
    ]

    def loss(worker, step):
        inputs, targets = draw_batch(step, worker.rank)
        return F.mse_loss(worker.module(inputs.float()), targets.float())

    def work(worker):
        for step in range(30):
            worker.pull()
            loss(worker, step).backward()
            worker.push()
        worker.finish()

    run_in_threads(*(partial(work, worker) for worker in group))
    first, second = (torch.cat([p.flatten() for p in w.module.parameters()]) for w in group)
    assert torch.equal(first, second)
    for host in hosts:  # published parameters differ by one rounding, not by ten
        replica = host.core.replica
        true, held_out = (
            flatten(replica.shard.views(buffer)) for buffer in (replica._buffer, replica._published)
        )
        change = replica.compression.decode(replica._change, len(true))
        assert (true - held_out).abs().max() <= 2 * change.abs().max() + 1e-3
    assert all(host.version == 10 for host in hosts)


def train_and_return_parameters(worker):
    train(worker, 4)
    worker.finish()
    return {name: p.detach().clone() for name, p in worker.module.named_parameters()}


def test_result_contains_the_parameters_of_the_workers_with_compression():
    policy = LocalSteps(2, OUTER, Integers(4))
    result = run(train_and_return_parameters, build_model(), INNER, policy, workers=1)
    for name, parameter in result.parameters.items():
        assert torch.equal(parameter, result.values[0][name])


@settings(max_examples=40)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=3000),
    bits=st.sampled_from([4, 8]),
)
@example(values=[2.7e-43], bits=8)
@example(values=[0.0, 1e-45], bits=4)
def test_integers_round_each_element_by_half_a_step(values, bits):
    values = torch.tensor(values)
    data = Integers(bits).encode(values)
    decoded = Integers(bits).decode(data, len(values))
    for start in range(0, len(values), 1024):
        block = values[start : start + 1024]
        step = max(block.abs().max() / (2 ** (bits - 1) - 1), torch.finfo(torch.float32).tiny)
        error = (block - decoded[start : start + 1024]).abs().max()
        assert error <= step * 0.5 + 1e-6 * block.abs().max()


def test_four_bit_encoding_uses_less_than_3_2_bits_per_element():
    data = Integers(4).encode(torch.randn(2**20, generator=torch.Generator().manual_seed(0)))
    assert 8 * len(data) / 2**20 < 3.2


def test_error_feedback_bounds_the_rounding_of_a_sum_of_four_bit_integers():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(500, generator=generator)
    residual = torch.zeros(500)
    sent = 0
    for _ in range(200):
        data = Integers(4).encode(values + residual)
        decoded = Integers(4).decode(data, 500)
        residual = values + residual - decoded
        sent = sent + decoded
    # The residual is bounded, so the error of the sum does not grow with the steps.
    assert (sent / 200 - values).abs().max() < 0.01


def test_invalid_compressed_data_is_refused():
    policy = LocalSteps(1, OUTER, Integers(4))
    server = Server(dict(nn.Linear(99, 99).named_parameters()), INNER, policy, workers=1)
    bomb = Integers(4).encode(torch.zeros(10**5))
    with pytest.raises(ValueError, match=r"9900 compressed elements|stream of 4950 bytes for 9900"):
        server.core.replica.unpack((0, 0, 0), bomb)
    with pytest.raises(ValueError, match="expected 10 scales of 4 bytes, got 3 bytes"):
        server.core.replica.unpack((0, 0, 0), bomb[:3])


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_data_that_encode_cannot_have_returned_are_refused(bits):
    coding = Integers(bits)
    data = coding.encode(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    for other in (data[:-1], torch.cat([data, data[:1]])):
        with pytest.raises(ValueError, match="expected a stream of"):
            coding.decode(other, 1000)
    for numel in (998, 1002):
        with pytest.raises(ValueError, match="expected a stream of"):
            coding.decode(data, numel)


@pytest.mark.parametrize(
    "values", [torch.zeros(0), torch.zeros(2, 3), torch.ones(4, dtype=torch.float64)], ids=str
)
def test_values_that_are_not_a_float32_vector_are_not_encoded(values):
    with pytest.raises(ValueError, match="expected a vector of float32 elements, got shape"):
        Integers(8).encode(values)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_values_that_are_not_finite_are_not_encoded(value):
    values = torch.ones(3000)
    values[2000] = value
    with pytest.raises(ValueError, match="expected finite values, got 1 of 3000 elements that are"):
        Integers(4).encode(values)


def test_outer_steps_that_diverge_end_training_with_compression():
    policy = LocalSteps(1, partial(torch.optim.SGD, lr=1e38), Integers(4))
    module = nn.Linear(2, 1)
    sgd = partial(torch.optim.SGD, lr=1.0)
    server = Server(dict(module.named_parameters()), sgd, policy, workers=1)
    worker = Worker(module, server, optimizer=sgd)
    worker.pull()
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    with pytest.raises(ValueError, match="expected finite values, got 3 of 3 elements"):
        worker.push()
    assert "the server is lost: ValueError: expected finite values" in server.core.failure


def test_compressed_data_of_the_buffers_size_are_checked_after_decoding():
    """The bytes look like finite elements of the buffer, but encode elements that overflow."""
    policy = LocalSteps(1, OUTER, Integers(8))
    server = Server({"x": nn.Parameter(torch.zeros(15))}, INNER, policy, workers=1)
    scale = torch.tensor([3e38]).numpy().tobytes()
    four_empty_blocks = sum(2 << 10 * i for i in range(4)).to_bytes(5, "little")
    last_block = b"\x01\x0f\x00\xf0\xff" + bytes([100] * 15)  # not compressed
    data = torch.frombuffer(
        bytearray(scale + 8 * four_empty_blocks + last_block), dtype=torch.uint8
    )
    check = FiniteCheck(server.shard, data)
    check.update(len(data))
    assert check.is_certain()
    with pytest.raises(ValueError, match="gradient of x is not finite in 15 of 15 elements"):
        server.core.replica.unpack((0, 0, 0), data, is_known_finite=True)


def test_a_worker_of_another_policy_is_refused():
    policy = LocalSteps(4, OUTER, fragments=2)
    server = Server(dict(build_model().named_parameters()), INNER, policy, workers=1)
    with pytest.raises(ValueError, match="expected a local `optimizer` with LocalSteps"):
        Worker(build_model(), server)  # would push gradients instead of changes
    others = (
        LocalSteps(4, OUTER),
        LocalSteps(4, OUTER, Integers(8), fragments=2),
        LocalSteps(2, OUTER, fragments=2),
        LocalSteps(4, OUTER, fragments=2, overlap=1),
    )
    for other in others:
        with pytest.raises(ValueError, match="the same policy"):
            Worker(build_model(), server, local=other, optimizer=INNER)
    worker = Worker(build_model(), server, optimizer=INNER)  # the policy is the server's
    with pytest.raises(RuntimeError, match="pull before this step"):
        worker.push()


def test_local_steps_need_an_optimizer_and_a_number():
    with pytest.raises(ValueError, match="expected steps >= 1, got 0"):
        LocalSteps(0)
    with pytest.raises(ValueError, match="expected a local `optimizer` with LocalSteps"):
        Worker(build_model(), [], local=LocalSteps(2))
    with pytest.raises(ValueError, match="a multiple of the 2 fragments, got 5"):
        LocalSteps(5, fragments=2)
    with pytest.raises(ValueError, match=r"expected overlap < 2, .* got 2"):
        LocalSteps(4, fragments=2, overlap=2)
    with pytest.raises(ValueError, match="expected 0 <= alpha <= 1, got 2"):
        LocalSteps(4, alpha=2)
    with pytest.raises(ValueError, match="cannot be split into 90"):
        Server(dict(build_model().named_parameters()), SGD, LocalSteps(90, fragments=90), workers=1)
    with pytest.raises(ValueError, match="expected 4 or 8 bits per element, got 5"):
        Integers(5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, is_sparse):
    module = nn.Sequential(nn.Embedding(4, 2, sparse=is_sparse), nn.Linear(2, 1))
    sgd = partial(torch.optim.SGD, lr=0.1)
    policy = LocalSteps(2)
    server = Server(get_trainable_parameters(module), sgd, policy, workers=1)
    worker = Worker(module, server, local=policy, optimizer=sgd)
    worker.pull()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    (module(torch.tensor([1])).sum() * bad).backward()
    with pytest.raises(ValueError, match=r"worker 0's gradient of .* is not finite"):
        worker.push()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is not None
    assert worker.position == 0
    module.zero_grad()
    module(torch.tensor([1])).sum().backward()
    worker.push()
    assert worker.position == 1


def test_a_worker_that_fails_to_finish_is_reported():
    policy = LocalSteps(2)
    server = Server(get_trainable_parameters(build_model()), SGD, policy, workers=2, timeout=60.0)
    first, second = [
        Worker(build_model(), server, rank=rank, local=policy, optimizer=SGD) for rank in range(2)
    ]
    second.pull()
    compute_loss(second.module, 1, 0).backward()
    second.push()
    nn.init.constant_(second.module[0].bias, math.nan)
    with pytest.raises(ValueError, match="not finite"), second:
        pass
    with pytest.raises(PeerLost, match="worker 1 is gone at clock 0: ValueError"):
        first.pull()


class SlowConnection(LocalConnection):
    """A connection that delays pushes, or fails to push."""

    fails = False

    def request(self, message, written=()):
        if message.kind is Kind.STAGE:
            time.sleep(0.1)
            if self.fails:
                raise ConnectionError("the push is lost")
        return super().request(message, written)


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_leaves_after_its_exchange_in_flight(fails):
    policy = LocalSteps(3, overlap=1)
    server = Server(get_trainable_parameters(build_model()), SGD, policy, workers=1)
    connection = SlowConnection(server, 0)
    worker = Worker(build_model(), [connection], local=policy, optimizer=SGD)
    worker.pull()
    connection.fails = fails
    for step in range(3):
        compute_loss(worker.module, 0, step).backward()
        worker.push()
    if fails:
        with pytest.raises(ConnectionError, match="the push is lost"):
            worker.leave()
    else:
        worker.leave()
        assert server.version == worker.pushes == 1


class RecordingChannel:
    """A channel that records the messages, and waits within a push."""

    peer = "server 0"
    gradients = torch.zeros(2)
    parameters = server_memory = read = None

    def __init__(self):
        self.sent = []
        self.is_pushing = threading.Event()
        self.may_push = threading.Event()

    def send(self, message):
        self.sent.append(message.kind)

    def send_gradients(self, data, written):
        self.is_pushing.set()
        assert self.may_push.wait(10)
        self.sent.append("gradients")

    def receive(self, timeout=None):
        return Message(Kind.OK)


def test_an_abort_is_not_sent_within_a_push_of_another_thread():
    channel = RecordingChannel()
    connection = RemoteConnection(channel, 1.0)
    push = threading.Thread(target=connection.request, args=(Message(Kind.STAGE, size=2),))
    push.start()
    assert channel.is_pushing.wait(10)
    abort = threading.Thread(target=connection.abort, args=("seven",))
    abort.start()
    abort.join(0.05)
    channel.may_push.set()
    push.join()
    abort.join()
    assert channel.sent == [Kind.STAGE, "gradients", Kind.ABORT]
