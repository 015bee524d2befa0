"""Training with parameter servers, and with workers that may join, leave and drift apart.

Workers pull parameters and push gradients. Servers store the parameters and apply the updates. One
argument, a policy of `paramserver.consistency`, bounds how far the workers may drift apart.
"""

from paramserver.compression import Integers
from paramserver.consistency import Asynchronous, BulkSynchronous, LocalSteps, StaleSynchronous
from paramserver.optimizers import OptimizerSpec
from paramserver.partition import Shard, partition
from paramserver.protocol.messages import PeerLost
from paramserver.running.conversion import convert_journal
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
    "OptimizerSpec",
    "PeerLost",
    "Result",
    "Server",
    "Shard",
    "StaleSynchronous",
    "Worker",
    "convert_journal",
    "join",
    "partition",
    "run",
]
