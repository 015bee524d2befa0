"""A server's end of its channels: received messages become calls of `Server.request`.

There is one thread per worker, because a request may wait until it can be answered.
"""

from functools import partial
from threading import Thread

from paramserver.protocol.messages import Kind, Message, build_failure, check_request
from paramserver.server import Server
from paramserver.transport.chunks import FiniteCheck
from paramserver.transport.connection import Channel


def serve(server: Server, channels: dict[int, Channel]) -> list[Thread]:
    """Return one started thread per worker, which ends when the worker has finished or is lost."""
    threads = [
        Thread(target=answer_requests, args=(server, worker, channel), daemon=True)
        for worker, channel in channels.items()
    ]
    for thread in threads:
        thread.start()
    return threads


def answer_requests(server: Server, worker: int, channel: Channel) -> None:
    """Answer one worker's requests until it has finished, has failed or is gone.

    After an invalid message, the worker is marked as lost, because the data that follow in the
    channel cannot be parsed.
    """
    try:
        while _answer_next(server, worker, channel):
            pass
    except ConnectionError as error:
        server.mark_lost(worker, f"{channel.peer}: {error}")
    except Exception as error:
        server.mark_lost(worker, f"{channel.peer} sent an invalid message: {error}")


def _answer_next(server: Server, worker: int, channel: Channel) -> bool:
    """Answer one request; return False if it is the worker's last request."""
    request = channel.receive()
    check_request(worker, request)
    if request.kind is Kind.ABORT:
        server.mark_lost(worker, request.text)
        return False
    data = channel.gradients[: request.size]
    check = FiniteCheck(server.shard, data)
    if request.kind is Kind.STAGE:
        channel.receive_gradients(data, check.update)
    keep_alive = partial(channel.send, Message(Kind.WAIT))
    try:
        reply = server.request(
            worker, request, data, channel.deliver, keep_alive, is_known_finite=check.is_certain()
        )
    except ConnectionError:
        raise
    except Exception as error:  # the optimizer may raise any exception; the worker receives it
        reply = build_failure(error)
    channel.send(reply)
    if reply.kind is Kind.NORMS_REQUIRED:
        return True  # the worker sends its request again
    return request.kind not in (Kind.FINISH, Kind.END)
