"""The shared-memory protocols as machine code, if a C compiler is available.

In Python a step of a collective costs microseconds and needs the GIL. An asynchronous call waits
for the GIL at every step while the caller computes in Python. `engine.c` runs all steps of a call
without the GIL. It is compiled on first use, which takes seconds, and cached in the user's cache
folder. It computes the same bits as the Python implementation. The ranks of a host use the engine
only if all of them have compiled the same one.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("engine.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fwrapv", "-shared", "-fPIC")
MAX_COMPILE_SECONDS = 120
# Results of the engine's `run`: WAITING means that a peer has not reached the tick.
WAITING = 1
MISMATCH = 2
# Capacity of the engine's queue.
ROOM = 1024
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.int32: 3, torch.int64: 4,
          torch.uint8: 5, torch.float16: 6}  # fmt: skip
OPS = {"SUM": 0, "AVG": 1, "PRODUCT": 2, "MIN": 3, "MAX": 4}
JOB_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "tick")


class Memory(ctypes.Structure):
    """The struct `Arena` of engine.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "rank", "world_size", "tick", "slot_bytes", "one_shot_bytes", "piece_bytes",
            "sleepers", "failure", "calls", "call_room", "call_bytes", "notes", "note_room",
            "data", "crowded_until", "completed",
        )),
        ("memory", ctypes.POINTER(ctypes.c_void_p)),
    )  # fmt: skip


class Job(ctypes.Structure):
    """The struct `Job` of engine.c."""

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
        ("done", ctypes.c_int32),
    )  # fmt: skip


class Queue(ctypes.Structure):
    """The struct `Queue` of engine.c: the jobs of the thread that waits in `serve`."""

    _fields_ = (
        ("submitted", ctypes.c_uint32),
        ("taken", ctypes.c_uint32),
        ("jobs", ctypes.c_void_p * ROOM),
    )


# The functions that Python calls, and the types of their arguments.
FUNCTIONS = {"run": (Memory, Job), "serve": (Memory, Queue), "put": (Queue, Job), "is_done": (Job,)}


def get_library() -> ctypes.CDLL | None:
    """Return the compiled engine, or None if it is not available (see `explain_refusal`)."""
    return _load_engine().library


def get_name() -> str:
    """Return a name that differs for different engines, or an empty string without an engine."""
    return _load_engine().name


def explain_refusal() -> str:
    """Return the reason why the engine is not available, or an empty string if it is."""
    return _load_engine().reason


def can_reduce(dtype: torch.dtype, op: str) -> bool:
    """Return True if the engine supports this reduction."""
    compiled = get_library()
    if compiled is None or op not in OPS or dtype not in DTYPES:
        return False
    return bool(compiled.can_reduce(DTYPES[dtype]))


def get_library_with_interpreter() -> ctypes.CDLL:
    """Return the engine for short calls, during which the GIL is not released."""
    compiled = _load_engine().library_with_interpreter
    assert compiled is not None
    return compiled


def is_done(job: Job | None) -> bool:
    """Return True if the engine has run the job, even if no Python thread has noticed yet."""
    return job is not None and bool(get_library_with_interpreter().is_done(job))


def make_address_array(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    """Return addresses as a C array."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


@dataclass(frozen=True)
class _Compiled:
    """The result of compiling the engine."""

    name: str = ""
    library: ctypes.CDLL | None = None
    library_with_interpreter: ctypes.CDLL | None = None
    #: The reason why the library is missing.
    reason: str = ""


@cache
def _load_engine() -> _Compiled:
    """Compile the engine, or load it from the cache."""
    if sys.platform != "linux":
        return _Compiled(reason="it is written for Linux")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return _Compiled(reason="no C compiler")
    try:
        path = _find_folder() / f"engine-{_compute_name(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        library = ctypes.CDLL(str(path))
        with_interpreter = ctypes.PyDLL(str(path))
    except (OSError, AttributeError, ImportError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", b"") or str(error).encode()
        message = output.decode(errors="replace").strip()[-300:]
        return _Compiled(reason=f"{compiler} failed: {message}")
    for loaded in (library, with_interpreter):
        for name, types in FUNCTIONS.items():
            getattr(loaded, name).argtypes = [ctypes.POINTER(kind) for kind in types]
    return _Compiled(path.name, library, with_interpreter)


def _find_folder() -> Path:
    """Return a folder that only this user can write to.

    Any user with write access could make this process load a library.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for folder in (
        Path(cache, "collectives"),
        Path(tempfile.gettempdir(), f"collectives-{os.getuid()}"),
    ):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.lstat()
            is_private = status.st_uid == os.getuid() and not status.st_mode & 0o022
            if is_private and stat.S_ISDIR(status.st_mode) and os.access(folder, os.W_OK):
                return folder
    return Path(tempfile.mkdtemp(prefix="collectives-"))


def _compute_name(compiler: str) -> str:
    """Return a hash of the source, the flags, the processor and the compiler's path."""
    processor = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        known = ("model name", "flags", "Features", "CPU part")
        processor += "".join(sorted({line for line in lines if line.startswith(known)}))
    parts = SOURCE.read_bytes(), " ".join(FLAGS).encode(), processor.encode(), compiler.encode()
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    """Compile the engine to `path`; several ranks of a host may do so at the same time."""
    # Process ids are not unique if containers share the cache, so the folder's name is random.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder, path.name)
        command = [compiler, *FLAGS, "-o", str(output), str(SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=MAX_COMPILE_SECONDS)
            output.rename(path)
        except (OSError, subprocess.SubprocessError):
            if not path.exists():  # otherwise, another rank has compiled it meanwhile
                raise
