"""Measured rates of this machine: products by shape and dtype, and memory bandwidth.

`python -m accounting measure FILE` writes them in the format of hardware.toml, and `--hardware
FILE` reads them. Other products use the rate of the nearest measured shape.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence

from accounting import checks

WIDTHS = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096, 8192)}


@checks.entry()
def measured(
    *,
    device: str = "cpu",
    dtypes: Sequence[str] = ("fp32", "bf16"),
    widths: Sequence[int] = (),
    seconds: float = 0.05,
) -> str:
    """Measure this machine and return its entry as TOML text.

    The entry has the median time of (m, k) by (k, n) products over all `widths` (64 to 1,024 on a
    CPU, 256 to 8,192 on a GPU), each timed for about `seconds`, and of a copy through memory. The
    peaks are the best rates.
    """
    import platform
    from statistics import median

    import torch

    _check_arguments(device, dtypes, widths)
    widths = widths or WIDTHS[device.split(":")[0]]
    cuda = device.startswith("cuda")

    def timed(call: Callable[[], object]) -> float:
        def once() -> float:
            start = time.perf_counter()
            call()
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - start

        once()
        return median(once() for _ in range(max(3, min(1000, int(seconds / max(once(), 1e-7))))))

    def products(dtype: str) -> Iterator[tuple[int, int, int, float]]:
        kind = getattr(torch, _TORCH[dtype])
        for m, k, n in ((m, k, n) for m in widths for k in widths for n in widths):
            a, b = torch.randn(m, k, device=device, dtype=kind), torch.randn(k, n).to(device, kind)
            out = torch.empty(m, n, device=device, dtype=kind)
            yield m, k, n, 2 * m * k * n / timed(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]

    rates = {dtype: list(products(dtype)) for dtype in dtypes}
    source = torch.randn(1 << (27 if cuda else 24), device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / timed(lambda: target.copy_(source))
    if cuda:
        name = torch.cuda.get_device_name()
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        name = f"{platform.machine()}, {torch.get_num_threads()} threads"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    best = ", ".join(f"{d} = {round(max(r for *_, r in rows))}" for d, rows in rates.items())
    link = f'["memory", {bandwidth / 2:.4g}, 1e-6]'
    tables = []
    for dtype, measurements in rates.items():
        lines = [f"    [{m}, {k}, {n}, {speed:.4g}],\n" for m, k, n, speed in measurements]
        tables.append(f"{dtype} = [\n{''.join(lines)}]")
    rows = "\n".join(tables)
    return f"""# Measured rates in operations per second and bandwidths in bytes per second.
["{name}"]
published = {{ {best} }}
memory_bytes = {memory}
memory_bandwidth = {bandwidth:.4g}
node_link = {link}
network = {link}
host_link = {link}
devices_per_node = 1
power_watts = 0
source = "measured {time.strftime("%Y-%m-%d")}, torch {torch.__version__}, {os.cpu_count()} cores"

["{name}".products]
{rows}
"""


def _check_arguments(device: str, dtypes: Sequence[str], widths: Sequence[int]) -> None:
    for name, values in (("dtypes", dtypes), ("widths", widths)):
        checks.instance(name, values, (list, tuple), "a list")
    checks.choice("device", device.split(":")[0], WIDTHS)
    for dtype in dtypes:
        checks.choice("one of dtypes", dtype, _TORCH)
    for width in widths:
        checks.whole("one of widths", width)


def rate(table: Sequence[tuple[int, int, int, float]], m: float, k: float, n: float) -> float:
    """Return the rate of the nearest product; the distance is logarithmic in the three sides."""

    def distance(row: tuple[int, int, int, float]) -> float:
        pairs = zip(row, (m, k, n), strict=False)
        return sum(math.log(side / max(wanted, 1e-9)) ** 2 for side, wanted in pairs)

    return min(table, key=distance)[3]


_TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
