"""A server's end of a connection: requests that come as messages become calls.

Notable: one thread a worker, because a request blocks until it can be answered.
"""

from __future__ import annotations

from threading import Thread

from paramserver.connection import Channel, Kind, Message
from paramserver.ledger import Log
from paramserver.server import Server

_LAST = (Kind.FINISH, Kind.END)  # of the first server and of the others


def serve(server: Server, channels: dict[int, Channel]) -> list[Thread]:
    """Start a thread for each worker; it ends when that worker has finished or is gone."""
    threads = [
        Thread(target=answer, args=(server, worker, channel), daemon=True)
        for worker, channel in channels.items()
    ]
    for thread in threads:
        thread.start()
    return threads


def answer(server: Server, worker: int, channel: Channel) -> None:
    """Answer one worker's requests until it finishes, fails or is gone. Never raises for those."""
    try:
        while _answer_one(server, worker, channel):
            pass
    except ConnectionError as error:
        server.lose(worker, f"{channel.peer}: {error}")


def _answer_one(server: Server, worker: int, channel: Channel) -> bool:
    request = channel.receive()
    if request.kind is Kind.ABORT:
        server.lose(worker, request.text)
        return False
    if request.kind in (Kind.PUSH, Kind.STAGE):
        channel.receive_data(channel.gradients)
    try:
        reply, data = _reply(server, worker, channel, request)
    except ConnectionError:
        raise
    except Exception as error:  # whatever the optimizer raises, its worker is who has to know
        channel.send(Message(Kind.FAILED, text=f"{type(error).__name__}: {error}"))
        return request.kind not in _LAST
    channel.send(reply)
    if data:
        channel.send_data(channel.parameters)
    return request.kind not in _LAST


def _reply(server: Server, worker: int, channel: Channel, request: Message) -> tuple[Message, bool]:
    """The answer, and whether the parameters follow it."""
    clock, since, text = request.number, request.since, request.text
    out = channel.parameters

    def alive() -> None:
        channel.send(Message(Kind.WAIT))

    match request.kind:
        case Kind.HELLO:
            greeting = server.hello(worker, text)
            return Message(Kind.OK, greeting.position, since=greeting.base_version), False
        case Kind.PULL:
            return Message(Kind.OK, server.pull(worker, clock, out, alive)), True
        case Kind.PUSH:
            return Message(Kind.OK, server.push(worker, clock, channel.gradients)), False
        case Kind.STAGE:
            server.stage(worker, channel.gradients)
            return Message(Kind.OK), False
        case Kind.COMMIT:
            return Message(Kind.OK, text=server.commit(worker, clock, since).to_text()), False
        case Kind.READ:
            return Message(Kind.OK, text=server.read(worker, clock, since, alive).to_text()), False
        case Kind.FETCH | Kind.END:
            return Message(Kind.OK, server.fetch(worker, Log.from_text(text), out)), True
        case Kind.FOLLOW:
            return Message(Kind.OK, server.follow(worker, Log.from_text(text))), False
        case Kind.SYNC:
            waits, log = server.sync(worker, since)
            return Message(Kind.OK, int(waits), log.to_text()), False
        case Kind.FINISH:
            version, log = server.finish(worker, since, out, alive)
            return Message(Kind.OK, version, log.to_text()), True
    raise ValueError(f"{request.kind!r} is no request")
