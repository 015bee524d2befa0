"""The protocol of `shared_memory` as machine code, where a C compiler is at hand.

A step of a collective in Python costs microseconds, and the interpreter: an asynchronous one waits
for its turn of it at every step, behind whatever the caller computes in Python. `engine.c` does all
steps of a call at once and without the interpreter. It is compiled on first use (seconds, once per
machine and version, kept in the user's cache folder), and does the same steps in the same order
as the Python: a rank without a compiler runs that, in the same collective, with the same bits.

Notable: a function returns when it is done or when a peer lets it wait. Who is missing, and what is
said of it, is decided in one place (`Arena._check_peers`).
"""

import ctypes
import hashlib
import itertools
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("engine.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fwrapv", "-shared", "-fPIC")
SECONDS_TO_COMPILE = 120
DONE, AGAIN, MISMATCH = range(3)
ROOM = 1024
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.int32: 3, torch.int64: 4,
          torch.uint8: 5, torch.float16: 6}  # fmt: skip
OPS = {"SUM": 0, "AVG": 1, "PRODUCT": 2, "MIN": 3, "MAX": 4}
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "meet")


class Memory(ctypes.Structure):
    """`Arena` of engine.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "rank", "world", "tick", "slot_bytes", "one_shot_bytes", "piece_bytes",
            "sleepers", "calls", "call_room", "call_bytes", "nan_at", "notes", "note_room", "data",
        )),
        ("memory", ctypes.POINTER(ctypes.c_void_p)),
    )  # fmt: skip


class Job(ctypes.Structure):
    """`Job` of engine.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "kind", "count", "itemsize", "dtype", "op", "root", "phase", "piece",
        )),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("copies", "inputs", "outputs")),
        ("lengths", ctypes.POINTER(ctypes.c_int64)),
        ("call", ctypes.c_char_p),
        ("note", ctypes.c_char_p),
        *((name, ctypes.c_int32) for name in ("done", "later", "crowded")),
    )  # fmt: skip


class Queue(ctypes.Structure):
    """`Queue` of engine.c: what a thread that waits in `serve` is to do."""

    _fields_ = (
        ("given", ctypes.c_uint32),
        ("taken", ctypes.c_uint32),
        ("jobs", ctypes.c_void_p * ROOM),
    )


# What Python calls, and what it gives it.
FUNCTIONS = {"run": (Memory, Job), "serve": (Memory, Queue), "put": (Queue, Job), "is_done": (Job,)}


def library() -> ctypes.CDLL | None:
    """The compiled engine, or None where it cannot be had; `why_not` tells the reason."""
    return _compiled()[0]


def why_not() -> str:
    """Why there is no engine; empty if there is one."""
    return _compiled()[1]


def reduces(dtype: torch.dtype, op: str) -> bool:
    """Whether the engine knows this reduction; AVG is for floats only."""
    if (found := library()) is None or op not in OPS or dtype not in DTYPES:
        return False
    return bool(found.can_reduce(DTYPES[dtype]))


def at_once() -> ctypes.CDLL:
    """The engine for what is too short to let other threads of Python's run meanwhile."""
    return _compiled()[2]  # type: ignore[return-value]


def is_done(job: Job | None) -> bool:
    """Whether the engine has done it, though nobody in Python may know yet."""
    return job is not None and bool(at_once().is_done(job))


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """The tensors' addresses as C has them."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


@cache
def _compiled() -> tuple[ctypes.CDLL | None, str, ctypes.CDLL | None]:
    if sys.platform != "linux":
        return None, "it is written for Linux", None
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return None, "no C compiler", None
    try:
        path = _folder() / f"engine-{_name(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        both = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
    except (OSError, AttributeError, ImportError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", b"") or str(error).encode()
        return None, f"{compiler} failed: {told.decode(errors='replace').strip()[-300:]}", None
    for found, (name, takes) in itertools.product(both, FUNCTIONS.items()):
        getattr(found, name).argtypes = [ctypes.POINTER(kind) for kind in takes]
    return both[0], "", both[1]


def _folder() -> Path:
    """A folder of the user's alone: who may write there could make this process load a library."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for folder in (
        Path(cache, "collectives"),
        Path(tempfile.gettempdir(), f"collectives-{os.getuid()}"),
    ):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.lstat()
            private = status.st_uid == os.getuid() and not status.st_mode & 0o022
            if private and stat.S_ISDIR(status.st_mode) and os.access(folder, os.W_OK):
                return folder
    return Path(tempfile.mkdtemp(prefix="collectives-"))


def _name(compiler: str) -> str:
    """What the machine code depends on: the source, the flags, the processor, the compiler."""
    processor = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        known = ("model name", "flags", "Features", "CPU part")
        processor += "".join(sorted({line for line in lines if line.startswith(known)}))
    parts = SOURCE.read_bytes(), " ".join(FLAGS).encode(), processor.encode(), compiler.encode()
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    import fcntl  # which Windows has not

    # The ranks of a host start together: one compiles, the others wait for it.
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        beside = path.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, "-o", str(beside), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS_TO_COMPILE)
        beside.rename(path)
