"""Bytes that a rank of `collectives` sends, counted where all its messages begin."""

from contextlib import contextmanager

from collectives.algorithms.point_to_point import PointToPoint


@contextmanager
def counted():
    """The bytes of each message that this rank sends inside, headers not counted."""
    sent, start = [], PointToPoint._start

    def count(wire, sends, receives):
        sent.extend(tensor.nbytes for _, tensor in sends)
        return start(wire, sends, receives)

    PointToPoint._start = count
    try:
        yield sent
    finally:
        PointToPoint._start = start
