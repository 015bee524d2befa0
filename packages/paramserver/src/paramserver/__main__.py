"""Commands of servers and workers: `python -m paramserver serve | join | keys | ...`.

    python -m paramserver serve mine:job --server 0 --address tcp://127.0.0.1:5550 --journal state
    python -m paramserver join mine:job --rank 0 --address tcp://127.0.0.1:5550

`mine:job` names a function of an importable module. It returns the same `paramserver.Job` in all
processes. Addresses are in the order of the servers. `keys FILE` writes a pair of CURVE keys.
`recover FOLDER` truncates a damaged journal to its last good record. `convert JOB OLD NEW` converts
the journals in OLD to the job's number of servers and writes them to NEW.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paramserver.journal.recovery import recover
from paramserver.running.conversion import convert_journal
from paramserver.running.job import Job
from paramserver.running.supervise import join_servers, open_server
from paramserver.transport.connection import import_zmq
from paramserver.transport.zeromq_connection import Keys


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, or 2 after printing an error."""
    parser = argparse.ArgumentParser(
        prog="python -m paramserver",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    serve = commands.add_parser("serve", help="serve one shard until SIGTERM")
    serve.add_argument("--server", type=int, default=0, help="number of the server")
    serve.add_argument("--journal", type=Path, help="folder of the journals of all servers")
    serve.add_argument("--fsync", action="store_true", help="sync each record to the disk")
    serve.add_argument(
        "--allow-missing", action="store_true", help="continue training without lost workers"
    )
    serve.set_defaults(call=_serve)
    join = commands.add_parser("join", help="train as one worker")
    join.add_argument("--rank", type=int, required=True, help="number of the worker")
    join.set_defaults(call=_join)
    join.add_argument("--checkpoint", type=Path, help="file of the state of local steps")
    for command in (serve, join):
        command.add_argument("job", help="module:function")
        command.add_argument("--keys", type=Path, help="key pair of this process, from `keys`")
    serve.add_argument("--address", required=True, help="address to bind")
    join.add_argument(
        "--address", action="append", required=True, help="address of a server, once per server"
    )
    serve.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="RANK=FILE",
        help="public key of the worker that may join as RANK",
    )
    join.add_argument("--peer", type=Path, metavar="FILE", help="public key of the server")
    keys = commands.add_parser("keys", help="write a pair of CURVE keys: FILE and FILE.public")
    keys.add_argument("file", type=Path)
    keys.set_defaults(call=_create_keys)
    recover_parser = commands.add_parser(
        "recover", help="truncate a damaged journal to its last good record"
    )
    recover_parser.add_argument(
        "folder",
        type=Path,
        help="journal of one server, or folder of the journals of all servers",
    )
    recover_parser.set_defaults(call=_recover)
    convert = commands.add_parser("convert", help="convert journals to another number of servers")
    convert.add_argument("job", help="module:function of the job with the new number of servers")
    convert.add_argument("source", type=Path, help="folder of the journals of all servers")
    convert.add_argument("target", type=Path, help="folder of the new journals")
    convert.set_defaults(call=lambda c: convert_journal(_load_job(c.job), c.source, c.target))
    arguments = parser.parse_args(argv)
    try:
        arguments.call(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"paramserver: {error}", file=sys.stderr)
        return 2
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    job = _load_job(arguments.job)
    job = replace(
        job,
        fsync=job.fsync or arguments.fsync,
        allow_missing=job.allow_missing or arguments.allow_missing,
    )
    public, secret = _read_key_pair(arguments)
    workers = dict(map(_read_worker_key, arguments.peer))
    if len(workers) < len(arguments.peer):
        raise ValueError(f"expected --peer once per rank, got {' '.join(arguments.peer)}")
    keys = Keys(public, secret, workers=workers) if secret else None
    server = open_server(
        job, arguments.server, arguments.address, journal=arguments.journal, keys=keys
    )
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    print(f"serving at {server.address}", flush=True)
    server.serve()
    # Do not wait for peers or threads: any state to keep is in the journal.
    os._exit(0)


def _join(arguments: argparse.Namespace) -> None:
    job = _load_job(arguments.job)
    public, secret = _read_key_pair(arguments)
    keys = Keys(public, secret, _read_public_key(arguments.peer)) if secret else None
    with join_servers(
        job, arguments.rank, arguments.address, keys=keys, checkpoint=arguments.checkpoint
    ) as worker:
        print(job.train(worker, *job.args), flush=True)


def _create_keys(arguments: argparse.Namespace) -> None:
    zmq = import_zmq()
    public, secret = zmq.curve_keypair()
    descriptor = os.open(arguments.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(public + b"\n" + secret + b"\n")
    Path(f"{arguments.file}.public").write_bytes(public + b"\n")


def _recover(arguments: argparse.Namespace) -> None:
    for line in recover(arguments.folder):
        print(line)


def _read_key_pair(arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the public and the secret key in the file of --keys, or two empty strings."""
    keys = arguments.keys.read_text().split() if arguments.keys else ["", ""]
    if len(keys) != 2:
        raise ValueError(
            f"expected a public and a secret key in {arguments.keys}, got {len(keys)} texts; pass "
            "the file that `keys FILE` wrote, not FILE.public"
        )
    if bool(arguments.keys) != bool(arguments.peer):
        raise ValueError("expected --keys and --peer together, got only one of them")
    public, secret = keys
    return public, secret


def _read_public_key(path: Path) -> str:
    """Return the key in a FILE.public; raise `ValueError` for a file with other content."""
    key = path.read_text().strip()
    if len(key) != 40:
        raise ValueError(
            f"expected a public key of 40 characters in {path}, got {len(key)} characters; pass "
            "the FILE.public that `keys FILE` wrote on the other machine"
        )
    return key


def _read_worker_key(peer: str) -> tuple[int, str]:
    """Return the rank, and the public key in the file, of an argument `--peer RANK=FILE`."""
    rank, separator, path = peer.partition("=")
    if not separator or not rank.isdecimal():
        raise ValueError(f"expected --peer RANK=FILE, such as 0=worker.public, got {peer!r}")
    return int(rank), _read_public_key(Path(path))


def _load_job(name: str) -> Job:
    module, separator, function = name.partition(":")
    if not separator:
        raise ValueError(f"expected a job as MODULE:FUNCTION, got {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"expected a job as MODULE:FUNCTION, got {name!r}: {error}") from error
    job = build()
    if not isinstance(job, Job):
        raise ValueError(f"expected {name} to return a paramserver.Job, got {type(job).__name__}")
    return job


if __name__ == "__main__":
    sys.exit(main())
