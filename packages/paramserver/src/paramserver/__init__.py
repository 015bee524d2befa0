"""Training against parameter servers, with workers that come, go and drift apart.

Workers pull parameters and push gradients; servers hold the parameters and apply the updates. How
far apart the workers may drift is one argument: a policy of `paramserver.consistency`.
"""

from paramserver.compression import Integers, TopK
from paramserver.consistency import Asynchronous, BulkSynchronous, LocalSteps, StaleSynchronous
from paramserver.partition import Shard, partition
from paramserver.protocol.messages import PeerLost
from paramserver.running.job import Job, Result
from paramserver.running.launch import run
from paramserver.server import Server
from paramserver.transport.distributed import join
from paramserver.worker import Worker

__all__ = [
    "Asynchronous",
    "BulkSynchronous",
    "Integers",
    "Job",
    "LocalSteps",
    "PeerLost",
    "Result",
    "Server",
    "Shard",
    "StaleSynchronous",
    "TopK",
    "Worker",
    "join",
    "partition",
    "run",
]
