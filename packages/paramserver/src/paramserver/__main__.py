"""Start one server, or one worker, by hand: `python -m paramserver serve | join | keys | recover`.

    python -m paramserver serve mine:job --server 0 --address tcp://127.0.0.1:5550 --journal state
    python -m paramserver join mine:job --rank 0 --address tcp://127.0.0.1:5550

`mine:job` names a function of a module that can be imported; it returns a `paramserver.Job`, the
same for all. Addresses stand in the order of the servers. `keys FILE` writes a pair of CURVE keys.
`recover FOLDER` takes a damaged journal back to its last good record.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from paramserver.journal import recover
from paramserver.running.job import Job
from paramserver.running.supervise import join_servers, open_server
from paramserver.transport.connection import extra
from paramserver.transport.zeromq import Keys


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 2 for what was asked wrongly."""
    parser = argparse.ArgumentParser(prog="python -m paramserver", description=__doc__)
    commands = parser.add_subparsers(required=True)
    serve = commands.add_parser("serve", help="serve one shard until SIGTERM")
    serve.add_argument("--server", type=int, default=0, help="its number")
    serve.add_argument("--journal", type=Path, help="a folder: what it holds survives its death")
    serve.set_defaults(call=_serve)
    join = commands.add_parser("join", help="train as one worker")
    join.add_argument("--rank", type=int, required=True, help="the worker's number")
    join.add_argument("--site", action="store_true", help="one of the ranks that are this worker")
    join.set_defaults(call=_join)
    for command in (serve, join):
        command.add_argument("job", help="module:function")
        command.add_argument("--address", action="append", required=True)
        command.add_argument("--keys", type=Path, help="one's own pair, from `keys`")
        command.add_argument("--peer", type=Path, action="append", default=[], help="FILE.public")
    keys = commands.add_parser("keys", help="make a pair of CURVE keys: FILE and FILE.public")
    keys.add_argument("file", type=Path)
    keys.set_defaults(call=_keys)
    back = commands.add_parser("recover", help="take a damaged journal back to a good record")
    back.add_argument("folder", type=Path, help="a server's own, or that of all servers of a job")
    back.add_argument("--before", metavar="FILE:BYTE", help="give up this record too")
    back.set_defaults(call=_recover)
    arguments = parser.parse_args(argv)
    try:
        arguments.call(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"paramserver: {error}", file=sys.stderr)
        return 2
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    job = _job(arguments.job)
    keys, address = _read(arguments), arguments.address[0]
    server = open_server(job, arguments.server, address, journal=arguments.journal, keys=keys)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    print(f"serving at {server.address}", flush=True)
    server.serve()
    # What is to be kept is in the journal; there is nothing to wait for, neither peers nor threads.
    os._exit(0)


def _join(arguments: argparse.Namespace) -> None:
    job, site = _job(arguments.job), None
    if arguments.site:  # by torchrun, say
        dist.init_process_group()
        site = dist.group.WORLD
    keys = _read(arguments)
    with join_servers(job, arguments.rank, arguments.address, keys=keys, site=site) as worker:
        print(job.train(worker, *job.args), flush=True)


def _keys(arguments: argparse.Namespace) -> None:
    zmq = extra("zmq", "zeromq")
    public, secret = zmq.curve_keypair()
    descriptor = os.open(arguments.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(public + b"\n" + secret + b"\n")
    Path(f"{arguments.file}.public").write_bytes(public + b"\n")


def _recover(arguments: argparse.Namespace) -> None:
    before = None
    if arguments.before is not None:
        name, _, byte = arguments.before.rpartition(":")
        before = name, int(byte)
    for line in recover(arguments.folder, before=before):
        print(line)


def _read(arguments: argparse.Namespace) -> Keys | None:
    if arguments.keys is None:
        return None
    public, secret = arguments.keys.read_text().split()
    return Keys(public, secret, tuple(path.read_text().strip() for path in arguments.peer))


def _job(name: str) -> Job:
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    job = getattr(importlib.import_module(module), function)()
    if not isinstance(job, Job):
        raise ValueError(f"{name} returns {type(job).__name__}; it is to return a paramserver.Job")
    return job


if __name__ == "__main__":
    sys.exit(main())
