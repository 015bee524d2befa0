"""Accelerators: peaks, memory, links and power, each with its source.

The entries are in hardware.toml. A peak is either published, or derived from the clock rate and the
number and width of the units. Rates are dense; some data sheets print the rate with structured
sparsity, which is twice as high. Bandwidths are bytes per second in one direction.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accounting import checks
from accounting.precision import BYTES

#: Smallest accepted bytes of memory, and bytes or operations per second. Smaller numbers are
#: probably in another unit, such as GB or TFLOP/s.
LEAST_RATE = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection of a device: bytes per second in one direction, and seconds of latency."""

    name: str
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        checks.convert_fields(self, latency=0)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator as described by its manufacturer."""

    name: str
    #: Dense operations per second by dtype.
    peaks: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    #: Link to the devices of the same node, or along one axis of a torus.
    node_link: Link
    #: Link from one device to other nodes.
    network: Link
    devices_per_node: int
    power_watts: float
    #: A rounded rental price. Prices change, so pass your own.
    usd_per_hour: float | None = None
    #: Factor on the rate of large matrix products, for devices that lower their clock under
    #: sustained load. `tests/published_runs.py` fits one factor for all other losses of a step.
    power_factor: float = 1.0
    #: Fraction of the peak that a fused attention kernel reaches, forward and backward together.
    attention_fraction: float = 0.5
    #: Name of the device with the same arithmetic units; the default is this device.
    chip: str = ""
    source: str
    #: Number of devices that one torus connects across hosts; 0 without a torus.
    pod: int = 0
    torus_axes: int = 0

    def __post_init__(self) -> None:
        checks.convert_fields(self, power_watts=0, usd_per_hour=0)
        if not self.peaks or not isinstance(self.peaks, Mapping):
            raise TypeError(f"expected peaks to map dtypes to operations/s, got {self.peaks!r}")
        for dtype, flops in self.peaks.items():
            if dtype not in BYTES:
                checks.require_choice("a dtype in peaks", dtype, BYTES)
            checks.require_number(f"the peak of {dtype} in peaks", flops)
        least = min(self.memory_bytes, self.memory_bandwidth, *self.peaks.values())
        if least < LEAST_RATE:
            raise ValueError(
                "expected memory_bytes, memory_bandwidth (bytes/s) and peaks (operations/s) of at "
                f"least {LEAST_RATE:,}, got {least:g}; check its unit"
            )
        if bool(self.pod) != bool(self.torus_axes):
            raise ValueError(
                f"expected pod and torus_axes together, got pod={self.pod} and "
                f"torus_axes={self.torus_axes}; set both, or omit both without a torus"
            )
        checks.require_number("power_factor", self.power_factor, maximum=1)
        checks.require_number("attention_fraction", self.attention_fraction, maximum=1)
        if not self.chip:
            object.__setattr__(self, "chip", self.name)
        for name, link in (("node_link", self.node_link), ("network", self.network)):
            checks.require_instance(name, link, Link, "a Link")
            if link.bandwidth < LEAST_RATE or link.latency >= 1:
                raise ValueError(
                    f"expected {name} with at least {LEAST_RATE:,} bytes/s and a latency below 1 s,"
                    f" got {link.bandwidth:g} and {link.latency:g}; check the units"
                )

    @checks.validate()
    def peak(self, dtype: str = "bf16") -> int:
        """Return the dense operations per second for a dtype that the device lists."""
        if dtype not in self.peaks:
            raise ValueError(
                f"expected a dtype that {self.name} lists ({', '.join(self.peaks)}), got {dtype!r}"
            )
        return int(self.peaks[dtype])


@checks.validate()
def find(hardware: str | Hardware) -> Hardware:
    """Return the entry of `HARDWARE` with this name, ignoring case and punctuation.

    If `hardware` is a path to a `*.toml` file, the file must contain one table in the format of
    hardware.toml. A `Hardware` is returned unchanged. Raises `ValueError` for an unknown name.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        raise TypeError(f"expected hardware to be a name or a Hardware, got {hardware!r}")
    if hardware.endswith(".toml"):
        return _read_file(Path(hardware))
    for name, entry in HARDWARE.items():
        if _normalize_name(name) == _normalize_name(hardware):
            return entry
    raise ValueError(f"expected hardware to be one of {', '.join(HARDWARE)}, got {hardware!r}")


def _read_file(path: Path) -> Hardware:
    """Return the only device in a file; raise `ValueError` with the reason for invalid content."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        tables = [key for key, value in content.items() if isinstance(value, Mapping)]
        if len(tables) != 1 or len(content) != 1:
            others = [key for key in content if key not in tables]
            raise ValueError(f"tables {tables} and fields {others} outside of tables")
        ((name, entry),) = content.items()
        return _build_hardware(name, {"source": f"the file {path}"} | entry)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected {path} to have one table with the fields of hardware.toml, or `like` with "
            f"one of {', '.join(HARDWARE)}, got the error: {error}"
        ) from None


def _normalize_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _build_hardware(name: str, entry: Mapping[str, Any]) -> Hardware:
    """Return the device of an entry; a device named by `like` supplies missing fields and peaks."""
    if "peaks" in entry:
        raise ValueError("expected peaks as published = { bf16 = ... }, got peaks")
    fields = {key: value for key, value in entry.items() if key not in _DERIVED}
    for key in {"node_link", "network"} & fields.keys():
        label, bandwidth, latency = fields[key]
        fields[key] = Link(name=label, bandwidth=bandwidth, latency=latency)
    if "like" not in entry:
        return Hardware(name=name, peaks=_compute_peaks(entry), **fields)
    known = HARDWARE[entry["like"]]
    peaks = _compute_peaks(entry)
    chip = "" if peaks else known.chip
    own_fields = {"name": name, "chip": chip, "peaks": {**known.peaks, **peaks}}
    return replace(known, **own_fields | fields)


def _compute_peaks(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the peaks by dtype: published figures, and otherwise figures derived from `cores`."""
    peaks = {}
    for cores in entry.get("cores", ()):
        for dtype, fma_per_clock in cores["fma"].items():
            peaks[dtype] = cores["clock_hz"] * cores["units"] * fma_per_clock * 2
    for dtype, flops in entry.get("published", {}).items():
        peaks[dtype] = checks.require_number(f"published {dtype}", flops)
    return peaks


#: Keys of an entry that are not fields of `Hardware`.
_DERIVED = ("like", "cores", "published")
_TEXT = Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8")
HARDWARE: dict[str, Hardware] = {}
for _name, _entry in tomllib.loads(_TEXT).items():
    HARDWARE[_name] = _build_hardware(_name, _entry)
