"""An invalid message of any sender changes nothing and is answered or dropped."""

import copy
import gc
import hashlib
import itertools
import json
import random
import sys
import threading
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from paramserver import (
    Asynchronous,
    BulkSynchronous,
    Integers,
    Job,
    LocalSteps,
    OptimizerSpec,
    Server,
    StaleSynchronous,
)
from paramserver.protocol.messages import Kind, Message
from paramserver.running.serving import answer_requests
from paramserver.running.supervise import join_servers, open_server, read_final_state
from paramserver.transport.distributed import DistributedChannel
from paramserver.transport.shared_memory import create_channel_pairs
from test_zeromq import UNIT_SGD, Vector, count, read_resident_bytes

zmq = pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is not installed")


def make_job(policy, servers):
    # Several servers exchange norms, which are too small to change the gradients.
    spec = OptimizerSpec(UNIT_SGD, max_norm=1e6 if servers > 1 else None)
    return Job(count, Vector(2, 40), spec, policy, workers=0, servers=servers, timeout=20.0)


class Served:
    """Servers of a job in threads, with journals and a record of the received messages."""

    def __init__(self, job, folder):
        self.job = job
        self.folder = folder
        self.received = []
        self.servers = [
            open_server(job, number, f"ipc://{folder}/s{number}", journal=folder / "state")
            for number in range(job.servers)
        ]
        for number, server in enumerate(self.servers):
            server._receive = partial(self._record, number, server._receive)
        self.threads = [threading.Thread(target=server.serve) for server in self.servers]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error):
        for server in self.servers:
            server.stop()
        for thread in self.threads:
            thread.join()
        for server in self.servers:
            server.close()

    @property
    def addresses(self):
        return [server.address for server in self.servers]

    def _record(self, number, receive, frames):
        self.received.append((number, [frame.bytes for frame in frames]))
        return receive(frames)


def train(job, addresses, rank, steps):
    copied = replace(job, module=copy.deepcopy(job.module))
    with join_servers(copied, rank, addresses) as worker:
        count(worker, steps, 0.0)


def record_messages(job, folder):
    """Return the messages of a run of two workers by server."""
    with Served(job, folder) as served:
        workers = [
            threading.Thread(target=train, args=(job, served.addresses, rank, 4)) for rank in (0, 1)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        read_final_state(job, served.addresses)
    by_server = [[frames for n, frames in served.received if n == i] for i in range(job.servers)]
    assert all({Kind.JOIN, Kind.STAGE} <= list_kinds(frames) for frames in by_server)
    return by_server


def list_kinds(messages):
    heads = [json.loads(head) for _, head, *_ in messages]
    return {head[4] for head in heads if not head[3]}


def compute_fingerprint(server, *, waiting=False):
    """Return the state of a server and its journal, and optionally who was seen and who waits.

    A worker whose new request is refused was seen, and does not wait for its previous one any more.
    """
    core, folder = server.core, server._journal.folder
    replica = core.replica
    digest = hashlib.sha256(replica._buffer.numpy().tobytes())
    for name in sorted(replica._staged):
        for gradient in replica._staged[name]:
            digest.update(gradient.numpy().tobytes())
    sizes = {p.name: p.stat().st_size for p in folder.iterdir()}
    known = (core.ledger.to_state(), replica.position, replica.version, sorted(replica._staged),
             replica.next_push, core.failure, core.lost, digest.hexdigest(), sizes,
             {w: request[:2] for w, request in replica._pending_reads.items()})  # fmt: skip
    if waiting:
        known += (sorted(core.waits.waiting), sorted(server._waiting), sorted(server._incoming),
                  sorted(core.waits.last_seen))  # fmt: skip
    return copy.deepcopy(known)


class Player:
    """A server that receives one message at a time, and its answers."""

    def __init__(self, job, number, folder):
        self.server = open_server(job, number, f"ipc://{folder}/p", journal=folder / "state")
        self.server._send = lambda request, reply: self.answers.append(reply)
        self.answers = []

    def receive(self, frames):
        self.answers.clear()
        # Writable, as the buffers of received frames are.
        self.server._receive(
            [SimpleNamespace(bytes=f, buffer=memoryview(bytearray(f))) for f in frames]
        )
        self.server._retry_waiting(0.0)

    def was_refused(self, frames):
        """Return True if the message had no effect, according to the answers or its kind."""
        if self.answers:
            return all(answer.kind is Kind.FAILED for answer in self.answers)
        return not (self.server._waiting or self.server._incoming) and not is_abort(frames)

    def close(self):
        self.server.close()


def is_abort(frames):
    try:
        return json.loads(frames[1])[4] == Kind.ABORT
    except (ValueError, IndexError, TypeError, KeyError, RecursionError):
        return False


NUMBERS = [-1, -(2**63), 0, 1, 2, 3, 5, 17, 19, 2**31, 2**53, 2**62, 2**63, 2**64, 10**40]
OTHERS = [True, False, None, 0.5, 1e300, float("nan"), float("inf"), "", "7", [], [1], {}, {"a": 1}]
TEXTS = [
    "", "[]", "null", "{", "[0]", '[1000000,["leave",0]]', '[0,["leave",0]]', '[0,["after","x"]]',
    '[0,["join",0,1,0,5]]', '[0,["fly",1]]', '[0,["write",[[0,1,0]],[0]]]', "[" * 100_000, "[3",
    '[0,["accept",[0,1,0]]]', '[0,["read",0,1,10000000000000000000000]]', "[1e999,-5]", "\ud800",
    '[Infinity,Infinity]', '[-1,["leave",0]]', '[0,["write",[],[]]]', "x" * 10_000,
]  # fmt: skip


def replace_number(chance, head):
    """Set a random field to a number."""
    head[chance.randrange(len(head))] = chance.choice(NUMBERS)


def replace_value(chance, head):
    """Set a random field to a value of any type."""
    head[chance.randrange(len(head))] = copy.deepcopy(chance.choice(OTHERS))


def replace_kind(chance, head):
    """Set the kind of the message."""
    head[4:5] = [chance.randrange(20)]


def replace_text(chance, head):
    """Set the text of the message."""
    head[-1] = chance.choice(TEXTS)


def replace_character(chance, head):
    """Replace a character of the text of the message, if it has one."""
    if isinstance(head[-1], str) and head[-1]:
        at = chance.randrange(len(head[-1]))
        head[-1] = head[-1][:at] + chance.choice('0123456789,[]"al') + head[-1][at + 1 :]


def change_length(chance, head):
    """Insert a field, or remove one."""
    at = chance.randrange(len(head) + 1)
    head[at : at + chance.choice((0, 1))] = chance.choice(([], [0], [7]))
    if not head:
        head.append(0)


CHANGES = [
    *[replace_number] * 4,
    replace_value,
    replace_kind,
    replace_text,
    replace_character,
    change_length,
]


def mix_field(chance, head, other):
    """Set a random field to the field of another message."""
    at = chance.randrange(min(len(head), len(other)))
    head[at] = other[at]


def mutate_data(chance, frames):
    """Return the data frames of a message, truncated or overwritten, and none to two of them."""
    data = bytearray(frames[2] if len(frames) > 2 and frames[2] else b"x" * 64)
    if chance.random() < 0.5:
        del data[chance.randrange(len(data)) :]
    else:
        at = chance.randrange(len(data))
        data[at : at + 8] = b"\xff" * len(data[at : at + 8])
    return [bytes(data)] * chance.choice((0, 1, 1, 1, 2))


def mutate_message(chance, frames, others):
    """Return a message with one or two random changes."""
    frames = list(frames)
    try:
        head = json.loads(frames[1])
    except ValueError:
        head = [0, 0, 0, 0]
    for _ in range(chance.choice((1, 1, 2))):
        change = chance.randrange(len(CHANGES) + 2)
        if change == len(CHANGES):
            mix_field(chance, head, json.loads(chance.choice(others)[1]))
        elif change > len(CHANGES):
            frames[2:] = mutate_data(chance, frames)
        else:
            CHANGES[change](chance, head)
    frames[1] = json.dumps(head).encode()
    if chance.random() < 0.05:
        raw = bytearray(frames[1])
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        frames[1] = bytes(raw)
    return frames


def iter_flipped(number):
    """Yield each number that the text of `number` becomes if one bit is flipped."""
    for position, bit in itertools.product(range(len(str(number))), range(8)):
        text = bytearray(str(number).encode())
        text[position] ^= 1 << bit
        if text.isdigit():
            yield int(text)


def change_to_unknown_sender(chance, frames):
    """Change the sender to one that knows no session; return False if that has no effect."""
    try:
        head = json.loads(frames[1])
        head[1] = chance.randrange(2**40)
        if head[4:5] == [Kind.JOIN]:
            # With the right layout it would join and end the worker's session.
            head[-1] = f"{head[-1]} x"
    except (ValueError, IndexError, TypeError, KeyError):
        return False
    frames[1] = json.dumps(head).encode()
    return head[0] != -1


def restart_server(job, number, folder):
    """Return the state that another server restores from the journal."""
    server = open_server(job, number, f"ipc://{folder}/r", journal=folder / "state")
    replica = server.core.replica
    members = {w: (m.active, m.epoch, m.clock) for w, m in server.core.ledger.members.items()}
    known = replica.version, replica.position, replica._buffer, members
    server.close()
    return known


def play(job, messages, number, folder, seed, tries):
    """Send mutated messages after a part of a run, and restart the server from its journal."""
    chance = random.Random(seed)
    player = Player(job, number, folder)
    refused = 0
    for frames in messages[: chance.randrange(len(messages))]:
        player.receive(frames)
    for i in range(tries):
        frames = mutate_message(chance, chance.choice(messages), messages)
        is_unknown = i % 3 == 0 and change_to_unknown_sender(chance, frames)
        before = compute_fingerprint(player.server, waiting=is_unknown)
        player.receive(frames)
        if is_unknown or player.was_refused(frames):
            refused += 1
            assert compute_fingerprint(player.server, waiting=is_unknown) == before, frames
        assert not player.server.core.failure
    core = player.server.core
    player.close()
    version, position, parameters, members = restart_server(job, number, folder)
    assert (version, position) == (core.replica.version, core.replica.position)
    assert torch.equal(parameters, core.replica._buffer)
    known = core.ledger.copy()
    for worker, member in known.members.items():
        written = members.get(worker, (False, 0, 0))
        assert written[1:] == (member.epoch, member.clock)
    return refused


POLICIES = [
    *(Asynchronous(), StaleSynchronous(1), BulkSynchronous()),
    *(LocalSteps(2), LocalSteps(2, compression=Integers(4))),
]


def run_fuzzer(tmp_path, tries, tries_per_run, server_counts=(1, 2)):
    runs = []
    for i, (policy, servers) in enumerate((p, s) for p in POLICIES for s in server_counts):
        (tmp_path / f"run{i}").mkdir()
        job = make_job(policy, servers)
        runs.append((job, record_messages(job, tmp_path / f"run{i}")))
    refused = played = seed = 0
    while played < tries:
        for job, by_server in runs:
            for number, messages in enumerate(by_server):
                seed, folder = seed + 1, tmp_path / f"p{seed}"
                folder.mkdir()
                refused += play(job, messages, number, folder, seed, tries_per_run)
                played += tries_per_run
    assert refused > played / 2  # most mutations are invalid


def test_mutated_messages_change_nothing_unless_they_are_valid(tmp_path):
    run_fuzzer(tmp_path, 100, 20, server_counts=(1,))


@pytest.mark.exhaustive
def test_a_hundred_thousand_mutated_messages(tmp_path):
    run_fuzzer(tmp_path, 100_000, 50)


@pytest.mark.parametrize(
    ("policy", "tries"),
    [
        (Asynchronous(), 300),
        *(pytest.param(p, 20_000, marks=pytest.mark.exhaustive) for p in POLICIES),
    ],
    ids=str,
)
def test_a_server_does_not_grow_with_mutated_messages(policy, tries, tmp_path):
    job = make_job(policy, 1)
    (messages,) = record_messages(job, tmp_path)
    folder = tmp_path / "player"
    folder.mkdir()
    player = Player(job, 0, folder)
    chance = random.Random(1)
    for frames in messages:
        player.receive(frames)
    tracemalloc.start()
    sizes = []
    for stop in (tries // 4, tries):
        for i in range(sizes[-1][0] if sizes else 0, stop):
            frames = mutate_message(chance, chance.choice(messages), messages)
            if i % 3 == 0:
                change_to_unknown_sender(chance, frames)
            player.receive(frames)
        gc.collect()
        sizes.append((stop, tracemalloc.get_traced_memory()[0], read_resident_bytes()))
    tracemalloc.stop()
    (_, traced, resident), (_, traced_later, resident_later) = sizes
    assert traced_later - traced < 2**18
    assert resident_later - resident < 2**23
    core = player.server.core
    # Workers of the recorded run, and workers that joined with a mutated number.
    numbers = [0, 1, *NUMBERS]
    numbers += [flipped for number in numbers for flipped in iter_flipped(number)]
    joined = {number for number in numbers if 0 <= number < 2**31}
    assert core.ledger.members.keys() <= joined
    assert core.waits.last_seen.keys() <= joined
    assert len(core.ledger.get_log_from(0).entries) < 100
    assert len(player.server._waiting) + len(player.server._incoming) <= len(joined)
    player.close()


@pytest.mark.parametrize("tries", [300, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_a_job_that_runs_while_mutated_messages_arrive_is_not_disturbed(tries, tmp_path):
    """Unknown senders send mutations of messages of an equal job."""
    job = make_job(Asynchronous(), 1)
    for name in ("recorded", "running"):
        (tmp_path / name).mkdir()
    (messages,) = record_messages(job, tmp_path / "recorded")
    with Served(job, tmp_path / "running") as served, zmq.Context() as context:
        sent = threading.Event()

        def send():
            chance = random.Random(2)
            with context.socket(zmq.DEALER) as unknown:
                unknown.connect(served.addresses[0])
                for _ in range(tries):
                    frames = mutate_message(chance, chance.choice(messages), messages)
                    change_to_unknown_sender(chance, frames)
                    unknown.send_multipart(frames[1:])
                    while unknown.poll(0):
                        unknown.recv_multipart()
                unknown.send_multipart([b'[-1,0,0,0,9,0,0,0,0,0,-1,-1,""]'])
                assert unknown.poll(60_000)  # the server has received all earlier messages
            sent.set()

        sender = threading.Thread(target=send)
        with join_servers(job, 0, served.addresses) as worker:
            sender.start()
            while not sent.is_set():
                pushes = count(worker, worker.pushes + 1, 0.0)
            sender.join()
        assert worker.module.x[:, 0].unique().tolist() == [pushes]
        members = served.servers[0].core.ledger.members
        assert members.keys() == {0}
        assert members[0].epoch == 1
    version, _, _, _ = restart_server(job, 0, tmp_path / "running")
    assert version == pushes


INVALID = [
    b"garbage",
    b"[" * 100_000,
    Message(Kind.OK).to_text().encode(),
    b'[2,0,0,0,0,-5,-1,-1,""]',
    b'[6,0,0,0,0,0,-1,-1,"[1000000,[\\"leave\\",0]]"]',
]


@pytest.mark.parametrize("raw", INVALID)
def test_an_invalid_message_in_a_channel_is_answered_or_names_its_sender(raw):
    parameters = dict(nn.Linear(4, 1).named_parameters())
    server = Server(parameters, UNIT_SGD, Asynchronous(), workers=2)
    before = get_state(server)
    ((worker, channel), _) = create_channel_pairs(["worker 0", "worker 1"], "server 0", 128)
    worker._pipe.send_bytes(raw)
    worker._pipe.close()
    answer_requests(server, 0, channel)
    assert get_state(server) == before
    assert server.core.failure.startswith("worker 0 is gone at clock 0: worker 0")
    # The last message is valid as a message, so only its answer fails: the channel is closed.
    is_answered = "sent an invalid message" not in server.core.failure
    assert is_answered == (raw == INVALID[-1])
    channel.close()


@pytest.mark.parametrize("length", [-1, 2**26 + 1, 2**62])
def test_a_text_of_a_rank_is_limited_before_it_is_received(length):
    channel = DistributedChannel("worker 1", 1, (0, 1), 128, None)

    def receive(data, timeout):
        assert data.shape == (9,)  # no memory for the text
        data.copy_(torch.tensor([Kind.JOIN, 0, 0, 0, 0, 0, -1, -1, length]))

    channel._receive = receive
    with pytest.raises(ValueError, match=f"at most {2**26} bytes, worker 1 announced {length}"):
        channel.receive()


def get_state(server):
    return server.core.ledger.to_state(), server.core.replica._buffer.tolist()


def iter_invalid_requests(layout, position):
    """Yield requests that no worker of the job sends."""
    log = json.dumps([position, ["leave", 0]])
    for kind in range(30):
        yield [kind, 0, 0, 0, 0, 0, -1, -1, ""]
        yield [kind, 1, 3, 2, 0, 0, -1, -1, '[1000000,["leave",0]]']
        yield [kind, 1, 3, 2, 0, 0, -1, -1, log]
        yield [kind, 1, 3, 2, 10**9, 0, -1, -1, ""]
        yield [kind, 1, 3, 2, 2**200, -7, -1, -1, []]
    yield from (
        [Kind.STAGE, 1, 0, 0, 0, size, -1, -1, ""] for size in (-1, 1, 2**40, 2**70, True, 0.5)
    )
    yield [Kind.JOIN, 0, 5, 0, 0, 0, -1, -1, layout + "x"]
    yield [Kind.JOIN, 0, 5, 9, 0, 0, -1, -1, layout]
    yield [Kind.REPLAY, 0, 0, 0, 0, 0, -1, -1, "[" * 200_000]
    yield {"kind": "push"}
    yield []


@pytest.mark.parametrize(
    ("servers", "joined"),
    [
        (1, False),
        (2, True),
        pytest.param(1, True, marks=pytest.mark.exhaustive),
        pytest.param(2, False, marks=pytest.mark.exhaustive),
    ],
)
def test_invalid_senders_do_not_disturb_a_running_job(tmp_path, servers, joined):
    """Send invalid requests in the name of others, unjoined or joined as worker 9."""
    job = make_job(Asynchronous(), servers)
    with Served(job, tmp_path) as served:
        context = zmq.Context()
        with join_servers(job, 0, served.addresses) as worker:
            count(worker, 3, 0.0)
            for number, server in enumerate(served.servers):
                disturb(context, server, number, joined=joined)
                count(worker, worker.pushes + 3, 0.0)
            with join_servers(replace(job, module=Vector(2, 40)), 1, served.addresses) as another:
                count(another, 4, 0.0)
                another.leave()
                another.finish = lambda: None
            if joined:  # it never leaves, and the others would wait for it
                for server in served.servers[:1]:
                    server.core.mark_lost(9, "the test ends")
        context.term()
        reports = read_final_state(job, served.addresses)
        pushes = 3 + 3 * servers + 4
        assert [report.version for report in reports] == [pushes] * servers
        assert not any(server.core.failure for server in served.servers)
        assert 0 not in served.servers[0].core.lost
    for number in range(servers):  # the journals equal those of an undisturbed run
        folder = tmp_path / f"again{number}"
        folder.mkdir()
        server = open_server(job, number, f"ipc://{folder}/s", journal=tmp_path / "state")
        assert server.core.replica.version == pushes
        server.close()


def disturb(context, server, number, *, joined):
    socket = context.socket(zmq.DEALER)
    socket.connect(server.address)
    layout, answers = server.core.replica.layout, 0

    def send_request(rank, session, name, fields, *data):
        socket.send_multipart([json.dumps([rank, session, name, 0, *fields]).encode(), *data])

    if joined:
        position = server.core.replica.position
        send_request(9, 77, 1, [Kind.JOIN, 0, 77, number, position, 0, -1, -1, layout])
        assert socket.poll(5000)
        assert json.loads(socket.recv_multipart()[0])[3] == Kind.OK
    requests = [*iter_invalid_requests(layout, server.core.replica.position)]
    for i, fields in enumerate(requests):
        for rank in (0, 1, 7, 2**31, -2, "0", None):
            if isinstance(fields, dict):
                socket.send_multipart([json.dumps(fields).encode()])
            else:
                data = [bytes(640)] if i % 3 else []
                send_request(rank, 77, 2 + i, fields, *data)
    if joined:  # worker 9 may neither choose a session nor commit a push it did not stage
        send_request(0, 78, 5000, [Kind.JOIN, 0, 6, number, 0, 0, -1, -1, layout])
        send_request(9, 77, 5001, [Kind.COMMIT, 1, 0, 0, 0, 0, -1, -1, ""])
        send_request(9, 77, 5002, [Kind.SYNC, 1, 0, 0, 10**12, 0, -1, -1, ""])
        log = json.dumps([server.core.replica.position, ["write", [[0, 1, 3]], [0]]])
        send_request(9, 77, 5003, [Kind.REPLAY, 1, 0, 0, 0, 0, -1, -1, log])
    send_request(
        0, 77, 9000, [Kind.OK, 0, 0, 0, 0, 0, -1, -1, ""]
    )  # the last message, which is refused too
    names = []
    while 9000 not in names:
        assert socket.poll(60_000)
        head = json.loads(socket.recv_multipart()[0])
        names.append(head[1])
        assert head[3] == Kind.FAILED, head
        answers += 1
    assert answers > 100
    assert not joined or {5000, 5001, 5002, 5003} <= set(names)
    socket.close(linger=0)
