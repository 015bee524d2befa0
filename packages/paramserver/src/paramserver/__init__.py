"""Training against a parameter server: synchronous, stale and asynchronous.

Workers pull parameters and push gradients; servers hold the parameters and apply the updates. How
far apart the workers may drift is one argument: a consistency.
"""

from paramserver.consistency import Asynchronous, BulkSynchronous, StaleSynchronous
from paramserver.launch import Result, run
from paramserver.messages import PeerLost
from paramserver.partition import Shard, partition
from paramserver.server import Server
from paramserver.transport.distributed import join
from paramserver.worker import Worker

__all__ = [
    "Asynchronous",
    "BulkSynchronous",
    "PeerLost",
    "Result",
    "Server",
    "Shard",
    "StaleSynchronous",
    "Worker",
    "join",
    "partition",
    "run",
]
