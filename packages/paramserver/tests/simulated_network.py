"""Servers and workers on a simulated network with a simulated clock.

Messages are delayed, lost, doubled and overtaken; workers die, hang and come back; servers are
killed and restarted from their journals. Nothing here knows how the protocol keeps its promises:
`Oracle` folds the first server's log by itself, and says what each version has to hold.
"""

import copy
import heapq
import itertools
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from paramserver.optimizers import OptimizerSpec
from paramserver.partition import partition
from paramserver.protocol.core import Core
from paramserver.protocol.log import Accept, Join, Leave, Read, Replayed, Staged, Start, Write
from paramserver.protocol.messages import Kind, Message, PeerLost, build_failure, raise_failure
from paramserver.protocol.replica import Replica, format_layout
from paramserver.protocol.session import Session

UNIT_SGD = partial(torch.optim.SGD, lr=1.0)
# Seconds of the simulated clock.
TIMEOUT = 6.0
RETRY = 1.0
BEAT = 1.5


class Oracle:
    """An independent reference: it computes the state after each log entry by counting."""

    def __init__(self, ids, workers, bound, servers, max_norm):
        self.bound, self.position = bound, 0
        self.servers, self.max_norm = servers, max_norm
        self.clocks = dict.fromkeys(range(workers), 0)  # of active workers
        self.ended = {}  # clocks of workers at their last `Leave`
        self.past = Counter()
        self.versions = [torch.zeros(ids, dtype=torch.float64)]
        self.written, self.reads = set(), {}

    def follow(self, entries):
        for entry in entries[self.position :]:
            self.position += 1
            match entry:
                case Join(worker, _, clock):
                    continues = self.clocks.get(worker) == clock
                    assert continues or clock <= min(self.clocks.values(), default=clock)
                    self.clocks[worker] = clock
                case Start(workers):
                    assert not self.clocks
                    self.clocks = dict.fromkeys(range(workers), min(self.ended.values()))
                case Leave(worker):
                    self.ended[worker] = self.clocks.pop(worker)
                case Accept(push):
                    self.count(push)
                case Write(pushes):
                    accepted = [push for push in pushes if push in self.past]
                    assert len(accepted) in (0, len(pushes))
                    change = torch.zeros_like(self.versions[0])
                    for push in pushes:
                        assert push not in self.written  # every push is applied once
                        self.written.add(push)
                        change[push[0]] += 1 / len(pushes)
                        if not accepted:
                            self.count(push)
                    self.versions.append(self.versions[-1] + self.clip(change))
                case Read(worker, epoch, number):
                    ahead = self.clocks[worker] - min(self.clocks.values())
                    assert ahead <= self.bound
                    self.reads[worker, epoch, number] = len(self.versions) - 1

    def clip(self, change):
        """Limit the norm of the gradient, which consists of one change per server."""
        if not self.max_norm:
            return change
        norm = (self.servers * change.square().sum()).sqrt()
        return change * min(1.0, self.max_norm / (norm + 1e-6))

    def count(self, push):
        self.past[push] += 1
        assert self.past[push] == 1
        if push[0] in self.clocks:
            self.clocks[push[0]] += 1


class World:
    """A network, a clock, and the servers and workers that use them."""

    def __init__(
        self, seed, *, servers, workers, joiners, consistency, loss, steps, faults, max_norm=None
    ):
        self.random = random.Random(seed)
        self.now = 0.0
        self.loss = loss
        self.faults = faults
        self.steps = steps
        self.consistency = consistency
        self.optimizer = OptimizerSpec(UNIT_SGD, max_norm=max_norm)
        self.founders = workers
        self.queue, self.order = [], itertools.count()
        self.ids = workers + joiners
        self.parameters = {"x": torch.zeros(servers * self.ids, dtype=torch.float64)}
        self.shards = partition(self.parameters, servers)
        self.oracle = Oracle(self.ids, workers, consistency.bound, servers, max_norm)
        self.servers = [SimulatedServer(self, number) for number in range(servers)]
        self.workers = [SimulatedWorker(self, number) for number in range(self.ids)]
        for worker in self.workers:
            self.after(0 if worker.number < workers else self.random.uniform(0, 20), worker.join)
        self.after(1, self.inject_fault)

    def after(self, seconds, call, *args):
        heapq.heappush(self.queue, (self.now + seconds, next(self.order), call, args))

    def send(self, receive, *args):
        """Call `receive` now, later, twice or never."""
        calm = self.now > self.faults
        copies = 1 if calm else self.random.choices((0, 1, 2), (self.loss, 1, self.loss / 2))[0]
        for _ in range(copies):
            slow = not calm and self.random.random() < 0.05
            self.after(self.random.uniform(0, 8 if slow else 0.4), receive, *args)

    def inject_fault(self):
        """Inject a random fault, and schedule the next one."""
        if self.now > self.faults:
            for peer in (*self.servers, *self.workers):
                peer.revive()
            return
        kind = self.random.choice(["kill", "kill", "hang", "server", "snapshot", "calm", "calm"])
        if kind == "server":
            self.random.choice(self.servers).kill()
        elif kind == "snapshot":
            self.random.choice(self.servers).snapshot()
        elif kind != "calm":
            self.random.choice(self.workers).fail(kind)
        self.after(self.random.uniform(0.5, 8), self.inject_fault)

    def run(self):
        while self.queue and not all(worker.done for worker in self.workers):
            self.now, _, call, args = heapq.heappop(self.queue)
            assert self.now < self.faults + 3000, "no worker makes progress"
            call(*args)

    def log(self):
        """Return all entries that the first server has recorded."""
        recorded = [r.log.entries for r in self.servers[0].journal if isinstance(r, Replayed)]
        return list(itertools.chain.from_iterable(recorded))


class SimulatedServer:
    def __init__(self, world, number):
        self.world, self.number = world, number
        self.journal = []
        self.saved = None
        self.saved_at = 0
        self.up = False
        self.start()

    def start(self):
        if self.up:
            return
        world, shard = self.world, self.world.shards[self.number]
        self.up, self.waiting = True, {}
        self.core = Core(
            Replica(shard, world.parameters, world.optimizer, world.consistency),
            world.consistency,
            workers=world.founders,
            timeout=TIMEOUT,
            allow_missing=True,
            elastic=True,
        )
        self.core.journal = self
        journal, self.journal = self.journal, []  # restored records are not recorded again
        # A server may write to a restored tensor; the stored records must not change.
        self.core.restore(*copy.deepcopy((self.saved, journal[self.saved_at :])))
        self.journal = journal
        self.check_silence()

    def record(self, record):
        if isinstance(record, Staged):  # the buffer may be used again
            record = Staged(record.push, record.gradients.clone())
        self.journal.append(record)

    def snapshot(self):
        if self.up:
            self.saved, self.saved_at = self.core.snapshot(), len(self.journal)

    def kill(self):
        if self.up:
            self.up = False
            self.world.after(self.world.random.uniform(0.1, 10), self.start)

    revive = start

    def receive(self, worker, name, message, data):
        if not self.up:
            return
        if message is None:
            self.core.mark_lost(worker.number, "its process has ended")
        else:
            self.waiting[worker.number] = worker, name, message, data
            self.attempt(worker.number)
        for other in list(self.waiting):
            self.attempt(other)
        replica = self.core.replica  # the numbers of pushes and of copies are bounded
        copies = {
            id(preserved)
            for _, _, preserved in replica._pending_reads.values()
            if preserved is not None
        }
        stored = len(replica._staged) + len(copies)
        assert stored <= 2 * self.world.ids + len(replica._accepted) + 1

    def attempt(self, number):
        worker, name, message, data = self.waiting.pop(number)
        data = None if data is None else data.clone()
        try:
            reply = self.core.handle(number, message, data, self.world.now)
        except (PeerLost, ValueError, RuntimeError) as error:
            reply = build_failure(error)
        if reply is None:
            self.waiting[number] = worker, name, message, data
        else:
            reply = Message.from_text(reply.to_text())
            data = self.core.answer_data.clone() if reply.size else None
            self.world.send(worker.receive, self.number, name, reply, data)

    def check_silence(self):
        """Check once per second whether a worker that is waited for is silent."""
        if self.up:
            assert self.core.check(self.world.now) == []  # training continues without it
            for other in list(self.waiting):
                self.attempt(other)
            self.world.after(1.0, self.check_silence)


class SimulatedWorker:
    def __init__(self, world, number):
        self.world, self.number = world, number
        self.done = False
        self.state = "away"
        self.life = 0
        self.acknowledged, self.buffers = [], {}
        self.names = itertools.count()

    def join(self):
        if self.done:
            return
        self.life += 1
        self.state, self.version = "running", 0
        layouts = [format_layout(shard, self.world.consistency) for shard in self.world.shards]
        self.session = Session(self.number, layouts, self.world.random.getrandbits(48))
        self.steps, self.open = self.program(), {}
        self.beat(self.life)
        self.send_next(None)

    def fail(self, kind):
        if self.state != "running":
            return
        if kind == "kill":
            self.state = "dead"
            for server in self.world.servers:
                self.world.send(server.receive, self, None, None, None)
            self.world.after(self.world.random.uniform(0.5, 20), self.restart)
        else:
            self.state = "hung"
            self.world.after(self.world.random.uniform(1, 20), self.wake)

    def restart(self):
        if self.state == "dead":
            self.join()

    def wake(self):
        if self.state == "hung":
            self.state = "running"
            self.beat(self.life)
            self.retry(self.life)

    def revive(self):
        if self.state == "hung":
            self.wake()
        elif self.state in ("dead", "away") and not self.done:
            self.join()

    def beat(self, life):
        if self.state == "running" and life == self.life and not self.done:
            for server in self.world.servers:
                self.world.send(server.receive_beat, self.number)
            self.world.after(BEAT, self.beat, life)

    def program(self):
        session, world = self.session, self.world
        yield from session.join()
        for _ in range(world.random.randint(1, world.steps)):
            version = yield from session.pull()
            self.check(version)
            yield world.random.uniform(0, 1.5)  # the time of a local computation
            for _ in range(1 if world.consistency.averages else world.random.choice((1, 1, 2))):
                yield from session.prepare_push()
                name = (self.number, session.epoch, session.clock)
                yield from session.push()
                self.acknowledged.append(name)
        if world.random.random() < 0.3:
            yield from session.leave()
        else:
            self.check((yield from session.finish()))

    def check(self, version):
        """Compare the parameters that all servers sent with the reference for this version."""
        oracle = self.world.oracle
        oracle.follow(self.world.log())
        assert version >= self.version  # versions only grow
        self.version = version
        shards = [self.buffers[i][: self.world.ids * 8] for i in range(len(self.world.shards))]
        for shard in shards:
            torch.testing.assert_close(shard.view(torch.float64), oracle.versions[version])

    def send_next(self, answers):
        try:
            step = next(self.steps) if answers is None else self.steps.send(answers)
        except StopIteration:
            self.done = True
            return
        if isinstance(step, float):
            self.world.after(step, self.computed, self.life)
            return
        self.open = {r.server: (next(self.names), r.message) for r in step}
        self.expected, self.answers = [r.server for r in step], {}
        self.retry(self.life)

    def computed(self, life):
        if life != self.life or self.state == "dead":
            return
        if self.state == "hung":
            self.world.after(1.0, self.computed, life)
        else:
            self.send_next(None)

    def retry(self, life):
        if self.state != "running" or life != self.life or self.done or not self.open:
            return
        for server, (name, message) in self.open.items():
            data = self.gradient(server) if message.kind is Kind.STAGE else None
            host = self.world.servers[server]
            sized = replace(message, size=0 if data is None else len(data))
            text = Message.from_text(sized.to_text())
            self.world.send(host.receive, self, (self.life, name), text, data)
        self.world.after(RETRY, self.retry, life)

    def gradient(self, server):
        shard = self.world.shards[server]
        buffer = torch.zeros(shard.buffer_bytes, dtype=torch.uint8)
        shard.views(buffer)[0].view(-1)[self.number] = -1.0
        return buffer

    def receive(self, server, name, reply, data):
        if self.state != "running" or self.open.get(server, (None,))[0] != name[1]:
            return
        if name[0] != self.life:
            return
        try:
            raise_failure(f"server {server}", reply)
        except PeerLost:
            self.open = {}
            self.world.after(0.1, self.rejoin, self.life)
            return
        del self.open[server]
        if data is not None:
            self.buffers[server] = data
        self.answers[server] = reply
        if not self.open:
            self.send_next([self.answers[s] for s in self.expected])

    def rejoin(self, life):
        if life != self.life or self.state == "dead":
            return
        if self.state == "hung":
            self.world.after(1.0, self.rejoin, life)
        else:
            self.join()


def _receive_beat(self, number):
    if self.up:
        self.core.handle(number, Message(Kind.HEARTBEAT), None, self.world.now)


SimulatedServer.receive_beat = _receive_beat


def simulate(seed, **options):
    """Run a world to its end and compare its final state with the reference."""
    world = World(seed, **options)
    world.run()
    entries = world.log()
    world.oracle.follow(entries)
    acknowledged = [name for worker in world.workers for name in worker.acknowledged]
    assert len(set(acknowledged)) == len(acknowledged)
    in_log = {push for entry in entries if isinstance(entry, Accept) for push in [entry.push]}
    in_log |= world.oracle.written
    assert set(acknowledged) <= in_log  # no acknowledged push is lost
    first = world.servers[0]
    for server in world.servers:
        server.start()
        server.core._replay(first.core.ledger.get_log_from(server.core.replica.position))
        stored = server.core.replica.newest[: world.ids * 8].view(torch.float64)
        torch.testing.assert_close(stored, world.oracle.versions[-1])
        assert server.core.replica.version == len(world.oracle.versions) - 1
    return world
