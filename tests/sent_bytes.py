"""Count the bytes that a rank of `collectives` sends, at the call that starts all its messages."""

from contextlib import contextmanager

from collectives.algorithms.point_to_point import PointToPoint


@contextmanager
def counted():
    """Collect the payload bytes of each message that this rank sends in the block."""
    sent, start = [], PointToPoint._start

    def count(wire, sends, receives):
        sent.extend(tensor.nbytes for _, tensor in sends)
        return start(wire, sends, receives)

    PointToPoint._start = count
    try:
        yield sent
    finally:
        PointToPoint._start = start
