"""Accelerators: peaks derived from clock, units and width, memory, links, power, each with its
source. The entries are in hardware.toml.

Rates are dense; where a data sheet prints a figure with structured sparsity it is twice as high,
and `peak` gives it for `sparse=True` only where the device has it. Bandwidths are bytes a second,
one way.
"""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accounting import checks


@dataclass(frozen=True, kw_only=True)
class Peak:
    """`clock_hz * units * fma_per_clock * 2`, or a published figure where the factors are not
    public."""

    clock_hz: int = 0
    units: int = 0
    fma_per_clock: int = 0
    published: int = 0
    sparsity: bool = False

    @property
    def flops(self) -> int:
        """Dense operations a second."""
        return self.published or self.clock_hz * self.units * self.fma_per_clock * 2

    @property
    def derivation(self) -> str:
        """The product, as text."""
        if self.published:
            return "published figure; its factors are not public"
        return f"{self.clock_hz:,} Hz x {self.units} units x {self.fma_per_clock} FMA x 2"


@checks.named
@dataclass(frozen=True, kw_only=True)
class Link:
    """A way out of a device: bytes a second one way, and the time a message takes to start."""

    name: str
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        checks.fields(Link, vars(self), latency=0)


@checks.named
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator as its maker describes it."""

    name: str
    peaks: dict[str, Peak]
    memory_bytes: int
    memory_bandwidth: float
    node_link: Link
    """To the devices of the same node (or along one axis of a torus)."""
    network: Link
    """From one device to other nodes."""
    host_link: Link
    """To the memory of its host."""
    devices_per_node: int
    power_watts: float
    usd_per_hour: float | None = None
    """A round figure for renting one, to be replaced by one's own: prices move."""
    source: str
    products: dict[str, list[tuple[int, int, int, float]]] = field(default_factory=dict, repr=False)
    """Measured rates of (m, k) by (k, n) for a dtype, where there are some."""
    pod: int = 0
    """Devices that one torus joins, beyond their hosts; 0 where there is none."""
    torus_axes: int = 0

    def __post_init__(self) -> None:
        checks.fields(Hardware, vars(self), power_watts=0, usd_per_hour=0)
        if not self.peaks or not isinstance(self.peaks, dict):
            raise TypeError(f"peaks is {self.peaks!r}; it must have a Peak for each dtype")
        for name in ("node_link", "network", "host_link"):
            checks.instance(name, getattr(self, name), Link, "a Link")

    @checks.entry()
    def peak(self, dtype: str = "bf16", *, sparse: bool = False) -> int:
        """Dense operations a second for a dtype; with `sparse`, twice that where the device can."""
        if dtype not in self.peaks:
            raise ValueError(f"dtype is {dtype!r}; {self.name} lists {', '.join(self.peaks)}")
        peak = self.peaks[dtype]
        if sparse and not peak.sparsity:
            raise ValueError(f"{self.name} has no structured sparsity for {dtype}")
        return peak.flops * (2 if sparse else 1)


@checks.entry()
def find(hardware: str | Hardware) -> Hardware:
    """The entry of `HARDWARE` by its name, whatever the case, that of a file that `measure` wrote
    (`*.toml`), or the thing itself."""
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        raise TypeError(f"hardware is {hardware!r}; it must be a name or a Hardware")
    if hardware.endswith(".toml"):
        try:
            ((name, entry),) = tomllib.loads(Path(hardware).read_text(encoding="utf-8")).items()
            return _hardware(name, entry)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{hardware} is no machine that `measure` wrote ({error})") from None
    for name, entry in HARDWARE.items():
        if _plain(name) == _plain(hardware):
            return entry
    near = checks.nearest(hardware, HARDWARE)
    raise ValueError(f"hardware is {hardware!r}; known are {', '.join(HARDWARE)}{near}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _peaks(entry: dict[str, Any]) -> dict[str, Peak]:
    if "peaks_of" in entry:
        return _peaks(_ENTRIES[entry["peaks_of"]])
    sparse = entry.get("sparse", ())
    derived = {
        dtype: Peak(
            clock_hz=cores["clock_hz"],
            units=cores["units"],
            fma_per_clock=width,
            sparsity=dtype in sparse,
        )
        for cores in entry.get("cores", ())
        for dtype, width in cores["fma"].items()
    }
    published = entry.get("published", {}).items()
    return derived | {d: Peak(published=flops, sparsity=d in sparse) for d, flops in published}


def _hardware(name: str, entry: dict[str, Any]) -> Hardware:
    about = ("cores", "published", "sparse", "peaks_of", *_LINKS)
    links: dict[str, Any] = {
        field: Link(name=label, bandwidth=bandwidth, latency=latency)
        for field in _LINKS
        for label, bandwidth, latency in [entry[field]]
    }
    rest = {field: value for field, value in entry.items() if field not in about}
    return Hardware(name=name, peaks=_peaks(entry), **links, **rest)


_LINKS = ("node_link", "network", "host_link")
_ENTRIES = tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))
HARDWARE: dict[str, Hardware] = {name: _hardware(name, entry) for name, entry in _ENTRIES.items()}
