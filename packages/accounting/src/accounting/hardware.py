"""Accelerators: peaks, memory, links and power, each with its source.

The entries are in hardware.toml. Peaks are derived from the clock rate, the number of units and
their width. Rates are dense; some data sheets print the rate with structured sparsity, which is
twice as high. Bandwidths are bytes per second in one direction.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accounting import checks


@checks.named
@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection of a device: bandwidth in one direction and the latency of a message."""

    name: str
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        checks.convert_fields(self, latency=0)


@checks.named
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator as described by its manufacturer."""

    name: str
    #: Dense operations per second by dtype.
    peaks: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    #: Link to the devices of the same node, or along one axis of a torus.
    node_link: Link
    #: Link from one device to other nodes.
    network: Link
    devices_per_node: int
    power_watts: float
    #: A rounded rental price. Prices change, so pass your own.
    usd_per_hour: float | None = None
    source: str
    #: Number of devices that one torus connects across hosts; 0 without a torus.
    pod: int = 0
    torus_axes: int = 0

    def __post_init__(self) -> None:
        checks.convert_fields(self, power_watts=0, usd_per_hour=0)
        if not self.peaks or not isinstance(self.peaks, Mapping):
            raise TypeError(f"expected peaks to map dtypes to operations/s, got {self.peaks!r}")
        for dtype, flops in self.peaks.items():
            checks.number(f"the peak of {dtype} in peaks", flops)
        for name in _LINKS:
            checks.instance(name, getattr(self, name), Link, "a Link")

    @checks.entry()
    def peak(self, dtype: str = "bf16") -> int:
        """Return the dense operations per second for a dtype that the device lists."""
        if dtype not in self.peaks:
            raise ValueError(
                f"expected a dtype that {self.name} lists ({', '.join(self.peaks)}), got {dtype!r}"
            )
        return int(self.peaks[dtype])


@checks.entry()
def find(hardware: str | Hardware) -> Hardware:
    """Return the entry of `HARDWARE` with this name, ignoring case and punctuation.

    If `hardware` is a path to a `*.toml` file, the file must contain one table in the format of
    hardware.toml. An entry `like = "H100"` in the file copies the fields of a known device that the
    file does not set. A `Hardware` is returned as it is.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        raise TypeError(f"expected hardware to be a name or a Hardware, got {hardware!r}")
    if hardware.endswith(".toml"):
        return _from_file(Path(hardware))
    for name, entry in HARDWARE.items():
        if _plain(name) == _plain(hardware):
            return entry
    near = checks.nearest(hardware, HARDWARE)
    raise ValueError(
        f"expected hardware to be one of {', '.join(HARDWARE)}, got {hardware!r}{near}"
    )


def _from_file(path: Path) -> Hardware:
    """Return the only device in a file; raise `ValueError` with the reason if it cannot be read."""
    try:
        ((name, entry),) = tomllib.loads(path.read_text(encoding="utf-8")).items()
        known = dict(_ENTRIES[entry.pop("like")]) if "like" in entry else {}
        return _hardware(name, {"source": f"the file {path}"} | known | entry)
    except KeyError as error:
        reason = f"{error} is missing or is not one of {', '.join(_ENTRIES)}"
    except (TypeError, ValueError, AttributeError) as error:
        reason = str(error)
    raise ValueError(
        f"expected {path} to have one table with the fields of hardware.toml, or `like` with the "
        f"name of a known device; {reason}"
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _peaks(entry: dict[str, Any]) -> dict[str, float]:
    """Return the peaks of an entry: copied ones, then `cores`, then published figures."""
    peaks = dict(_peaks(_ENTRIES[entry["peaks_of"]])) if "peaks_of" in entry else {}
    for cores in entry.get("cores", ()):
        for dtype, fma_per_clock in cores["fma"].items():
            peaks[dtype] = cores["clock_hz"] * cores["units"] * fma_per_clock * 2
    for dtype, flops in entry.get("published", {}).items():
        peaks[dtype] = checks.number(f"published {dtype}", flops)
    return peaks


def _hardware(name: str, entry: dict[str, Any]) -> Hardware:
    about = ("cores", "published", "peaks_of", *_LINKS)
    links: dict[str, Any] = {
        field: Link(name=label, bandwidth=bandwidth, latency=latency)
        for field in _LINKS
        for label, bandwidth, latency in [entry[field]]
    }
    rest = {field: value for field, value in entry.items() if field not in about}
    return Hardware(name=name, peaks=_peaks(entry), **links, **rest)


_LINKS = ("node_link", "network")
_ENTRIES = tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))
HARDWARE: dict[str, Hardware] = {name: _hardware(name, entry) for name, entry in _ENTRIES.items()}
