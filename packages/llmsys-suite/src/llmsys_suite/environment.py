"""Facts about the machine and the software that measurements depend on."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

GIB = 2**30


def collect_environment() -> dict[str, Any]:
    """Return the facts about the machine that are stored with every result."""
    import torch

    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": _read_cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_flags": _list_cpu_flags(),
        "cores": count_usable_cores(),
        "memory_gib": round(_read_meminfo("MemTotal") / GIB, 1),
        "threads": torch.get_num_threads(),
        "governor": _read_first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "clock_mhz": _read_cpuinfo("cpu MHz"),
        "driver": _read_driver_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "gpus": [],
    }
    if torch.cuda.is_available():
        facts["cuda"] = torch.version.cuda
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def count_usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_available_memory_bytes(device: str) -> int:
    """Return the bytes that a new process can allocate on the current GPU or in host memory."""
    if device == "cuda":
        if "RANK" not in os.environ:
            # A query creates a CUDA context. This process would keep the context's memory while its
            # child processes need it.
            command = [sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info()[0])"]
            return int(subprocess.run(command, capture_output=True, check=True).stdout)
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return min([_read_meminfo("MemAvailable"), *read_control_group_room()])


def read_control_group_room(
    membership: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup"
) -> list[int]:
    """Return the bytes that each limited control group of this process can still allocate.

    Only control groups of version 2 are read, so the limit of a container on a host with version 1
    is not respected. Cached files count as free memory, because the kernel can discard them.
    """
    room = []
    for line in _read_lines(membership):
        if not line.startswith("0::"):
            continue  # a hierarchy of version 1
        group = Path(mount, line.removeprefix("0::/"))
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            limit, used = (_read_first_line(f"{folder}/memory.{x}") for x in ("max", "current"))
            if limit.isdigit() and used.isdigit():
                statistics = _read_lines(f"{folder}/memory.stat")
                files = dict(line.split(" ", 1) for line in statistics)
                room.append(max(0, int(limit) - int(used) + int(files.get("inactive_file", 0))))
    return room


def read_peak_memory_bytes() -> int:
    """Return the peak resident memory of this process in bytes since `forget_peak_memory`."""
    for line in _read_lines("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    # This value is only a fallback: it includes the parent's peak before the fork and cannot be
    # reset. It is in bytes on macOS, and in KiB on other systems.
    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maximum if sys.platform == "darwin" else maximum * 1024


def forget_peak_memory() -> None:
    """Reset the peak memory of this process if the kernel supports it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def get_signal_name(number: int) -> str:
    """Return the name of a signal, or "signal N", because most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def diagnose_machine() -> list[tuple[str, str, str]]:
    """Return the lines of `llmsys doctor` as (fact, value, remedy or an empty string)."""
    import torch
    import torch.distributed as dist

    facts = collect_environment()
    rows = [(key, str(facts[key]), "") for key in ("python", "torch", "processor", "cores")]
    memory = read_available_memory_bytes("cpu") / GIB
    remedy = "" if memory > 4 else "close other programs until 4 GiB are free"
    rows.append(("memory free", f"{memory:.1f} GiB", remedy))
    is_busy = facts["load_average"] > 0.5 * count_usable_cores()
    remedy = "other programs are running: use ratios, not times" if is_busy else ""
    rows.append(("load average", str(facts["load_average"]), remedy))
    rows.append(("gloo", "yes" if dist.is_gloo_available() else "no", ""))
    rows.append(("CUDA devices", str(torch.cuda.device_count()), ""))
    if torch.cuda.is_available():
        rows.append(("nccl", "yes" if dist.is_nccl_available() else "no", ""))
        # NCCL exchanges data between the GPUs of a host in /dev/shm.
        if os.path.exists("/dev/shm"):
            free = shutil.disk_usage("/dev/shm").free / 2**20
            remedy = "" if free > 256 else "NCCL may need more: docker run --shm-size=1g"
            rows.append(("/dev/shm free", f"{free:.0f} MiB", remedy))
    return rows


def _read_cpuinfo(field: str) -> str:
    for line in _read_lines("/proc/cpuinfo"):
        if line.startswith(field):
            return line.split(":", 1)[1].strip()
    return ""


def _list_cpu_flags() -> list[str]:
    """Return the CPU's vector and matrix extensions, which determine the speed of products."""
    flags = _read_cpuinfo("flags").split() or _read_cpuinfo("Features").split()
    kinds = ("avx", "amx", "fma", "sse4", "asimd", "sve", "i8mm", "bf16", "f16c")
    return sorted(flag for flag in flags if flag.startswith(kinds))


def _read_driver_version() -> str:
    """Return the version of the GPU's kernel module."""
    words = _read_first_line("/proc/driver/nvidia/version").split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def _read_first_line(path: str) -> str:
    return next(iter(_read_lines(path)), "")


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _read_meminfo(field: str) -> int:
    for line in _read_lines("/proc/meminfo"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
