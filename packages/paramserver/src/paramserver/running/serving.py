"""A server's end of a connection: messages that come through a channel become calls.

Notable: one thread a worker, because a request waits until it can be answered.
"""

from threading import Thread

from paramserver.protocol.messages import Kind, Message, check_request, failure
from paramserver.server import Server
from paramserver.transport.connection import SENDS, Channel
from paramserver.transport.pieces import Finite

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
    """Answer one worker's requests until it finishes, fails or is gone. Never raises for those.

    A worker whose message is none is lost: what follows it in the channel cannot be understood.
    """
    try:
        while _answer_one(server, worker, channel):
            pass
    except ConnectionError as error:
        server.lose(worker, f"{channel.peer}: {error}")
    except Exception as error:
        server.lose(worker, f"{channel.peer} sent an invalid message: {error}")


def _answer_one(server: Server, worker: int, channel: Channel) -> bool:
    request = channel.receive()
    check_request(worker, request)
    if request.kind is Kind.ABORT:
        server.lose(worker, request.text)
        return False
    data = channel.gradients[: request.size or None]
    finite = Finite(server.shard, data)
    if request.kind in SENDS:
        channel.take(data, finite.see)

    def alive() -> None:
        channel.send(Message(Kind.WAIT))

    try:
        reply = server.ask(worker, request, data, channel.deliver, alive, finite=finite.surely())
    except ConnectionError:
        raise
    except Exception as error:  # whatever the optimizer raises, its worker is who has to know
        reply = failure(error)
    channel.send(reply)
    return request.kind not in _LAST
