"""Accelerators: peaks derived from clock, units and width, memory, links, power, each with its
source.

Rates are dense; where a data sheet prints a figure with structured sparsity it is twice as high,
and `peak` gives it for `sparse=True` only where the device has it. Bandwidths are bytes a second,
one way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way out of a device: bytes a second one way, and the time a message takes to start."""

    name: str
    bandwidth: float
    latency: float


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
    devices_per_node: int
    power_watts: float
    usd_per_hour: float | None
    """A round figure for renting one, to be replaced by one's own: prices move."""
    source: str
    pod: int = 0
    """Devices that one torus joins, beyond their hosts; 0 where there is none."""
    torus_axes: int = 0

    def peak(self, dtype: str = "bf16", *, sparse: bool = False) -> int:
        """Dense operations a second for a dtype; with `sparse`, twice that where the device can."""
        if dtype not in self.peaks:
            raise ValueError(f"dtype is {dtype!r}; {self.name} lists {', '.join(self.peaks)}")
        peak = self.peaks[dtype]
        if sparse and not peak.sparsity:
            raise ValueError(f"{self.name} has no structured sparsity for {dtype}")
        return peak.flops * (2 if sparse else 1)


def find(hardware: str | Hardware) -> Hardware:
    """The entry of `HARDWARE` by its name, whatever the case, or the thing itself."""
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        raise TypeError(f"hardware is {hardware!r}; it must be a name or a Hardware")
    for name, entry in HARDWARE.items():
        if _plain(name) == _plain(hardware):
            return entry
    near = checks.nearest(hardware, HARDWARE)
    raise ValueError(f"hardware is {hardware!r}; known are {', '.join(HARDWARE)}{near}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _tensor_cores(clock: int, units: int, fma: dict[str, int], sparse: str = "") -> dict[str, Peak]:
    return {
        dtype: Peak(
            clock_hz=clock, units=units, fma_per_clock=width, sparsity=dtype in sparse.split()
        )
        for dtype, width in fma.items()
    }


_GB = 10**9
_NETWORK_400G = Link(name="400 Gb/s InfiniBand a GPU", bandwidth=50e9, latency=5e-6)
_SPARSE = "tf32 fp16 bf16 fp8 int8"

# Vector units run at the boost clock of the data sheet, tensor cores at the one its tensor figures
# imply.
_HOPPER = _tensor_cores(1_980_000_000, 132, {"fp64": 64, "fp32": 128}) | _tensor_cores(
    1_830_000_000,
    132,
    {"tf32": 1024, "fp16": 2048, "bf16": 2048, "fp8": 4096, "int8": 4096},
    _SPARSE,
)

_BLACKWELL = {
    "fp64": Peak(clock_hz=1_980_000_000, units=148, fma_per_clock=64),
    "fp32": Peak(clock_hz=1_980_000_000, units=148, fma_per_clock=128),
    "tf32": Peak(published=1_125_000_000_000_000, sparsity=True),
    "fp16": Peak(published=2_250_000_000_000_000, sparsity=True),
    "bf16": Peak(published=2_250_000_000_000_000, sparsity=True),
    "fp8": Peak(published=4_500_000_000_000_000, sparsity=True),
    "int8": Peak(published=4_500_000_000_000_000, sparsity=True),
    "fp4": Peak(published=9_000_000_000_000_000, sparsity=True),
}
_CDNA3 = _tensor_cores(
    2_100_000_000,
    304,
    {"fp64": 128, "fp32": 128, "tf32": 512, "fp16": 1024, "bf16": 1024}
    | {"fp8": 2048, "int8": 2048},
    _SPARSE,
)

_ENTRIES = (
    Hardware(
        name="V100",
        peaks=_tensor_cores(1_530_000_000, 80, {"fp64": 32, "fp32": 64, "fp16": 512}),
        memory_bytes=32 * _GB,
        memory_bandwidth=900e9,
        node_link=Link(name="NVLink 2", bandwidth=150e9, latency=2e-6),
        network=Link(name="100 Gb/s InfiniBand, two GPUs a port", bandwidth=6.25e9, latency=5e-6),
        devices_per_node=8,
        power_watts=300,
        usd_per_hour=1.0,
        source="NVIDIA Tesla V100 GPU Architecture, WP-08608-001 (SXM2)",
    ),
    Hardware(
        name="A100",
        peaks=_tensor_cores(
            1_410_000_000,
            108,
            {"fp64": 64, "fp32": 64, "tf32": 512, "fp16": 1024, "bf16": 1024, "int8": 2048},
            _SPARSE,
        ),
        memory_bytes=80 * _GB,
        memory_bandwidth=2.039e12,
        node_link=Link(name="NVLink 3", bandwidth=300e9, latency=2e-6),
        network=Link(name="200 Gb/s InfiniBand a GPU", bandwidth=25e9, latency=5e-6),
        devices_per_node=8,
        power_watts=400,
        usd_per_hour=1.5,
        source="NVIDIA A100 Tensor Core GPU Architecture, V1.0, and A100 80GB data sheet (SXM4)",
    ),
    Hardware(
        name="H100",
        peaks=_HOPPER,
        memory_bytes=80 * _GB,
        memory_bandwidth=3.35e12,
        node_link=Link(name="NVLink 4", bandwidth=450e9, latency=2e-6),
        network=_NETWORK_400G,
        devices_per_node=8,
        power_watts=700,
        usd_per_hour=2.0,
        source="NVIDIA H100 Tensor Core GPU Architecture, V1.04, and data sheet (SXM5)",
    ),
    Hardware(
        name="H200",
        peaks=_HOPPER,
        memory_bytes=141 * _GB,
        memory_bandwidth=4.8e12,
        node_link=Link(name="NVLink 4", bandwidth=450e9, latency=2e-6),
        network=_NETWORK_400G,
        devices_per_node=8,
        power_watts=700,
        usd_per_hour=2.5,
        source="NVIDIA H200 Tensor Core GPU data sheet (SXM)",
    ),
    Hardware(
        name="B200",
        peaks=_BLACKWELL,
        memory_bytes=180 * _GB,
        memory_bandwidth=8e12,
        node_link=Link(name="NVLink 5", bandwidth=900e9, latency=2e-6),
        network=_NETWORK_400G,
        devices_per_node=8,
        power_watts=1000,
        usd_per_hour=4.0,
        source="NVIDIA HGX/DGX B200 data sheets, an eighth of a system",
    ),
    Hardware(
        name="MI300X",
        peaks=_CDNA3,
        memory_bytes=192 * _GB,
        memory_bandwidth=5.3e12,
        node_link=Link(name="Infinity Fabric, 7 links", bandwidth=448e9, latency=3e-6),
        network=_NETWORK_400G,
        devices_per_node=8,
        power_watts=750,
        usd_per_hour=2.0,
        source="AMD Instinct MI300X data sheet and CDNA 3 architecture white paper",
    ),
    Hardware(
        name="TPU v4",
        peaks=_tensor_cores(1_050_000_000, 8, {"bf16": 128 * 128, "int8": 128 * 128}),
        memory_bytes=32 * 2**30,
        memory_bandwidth=1.2e12,
        node_link=Link(name="ICI, an axis both ways", bandwidth=90e9, latency=1e-6),
        network=Link(name="data-center network", bandwidth=6.25e9, latency=1e-5),
        devices_per_node=4,
        power_watts=192,
        usd_per_hour=3.22,
        source="Jouppi et al. 2023, TPU v4; cloud.google.com/tpu/docs/v4; list price us-central2",
        pod=4096,
        torus_axes=3,
    ),
    Hardware(
        name="TPU v5e",
        peaks=_tensor_cores(1_500_000_000, 4, {"bf16": 128 * 128, "int8": 2 * 128 * 128}),
        memory_bytes=16 * _GB,
        memory_bandwidth=8.19e11,
        node_link=Link(name="ICI, an axis both ways", bandwidth=90e9, latency=1e-6),
        network=Link(name="data-center network", bandwidth=6.25e9, latency=1e-5),
        devices_per_node=8,
        power_watts=200,
        usd_per_hour=1.2,
        source="cloud.google.com/tpu/docs/v5e; Austin et al. 2025, How to Scale Your Model; "
        "power is an estimate",
        pod=256,
        torus_axes=2,
    ),
    Hardware(
        name="TPU v5p",
        peaks=_tensor_cores(1_750_000_000, 8, {"bf16": 128 * 128, "int8": 2 * 128 * 128}),
        memory_bytes=95 * _GB,
        memory_bandwidth=2.765e12,
        node_link=Link(name="ICI, an axis both ways", bandwidth=180e9, latency=1e-6),
        network=Link(name="data-center network", bandwidth=6.25e9, latency=1e-5),
        devices_per_node=4,
        power_watts=350,
        usd_per_hour=4.2,
        source="cloud.google.com/tpu/docs/v5p; Austin et al. 2025, How to Scale Your Model; "
        "power is an estimate",
        pod=8960,
        torus_axes=3,
    ),
    Hardware(
        name="H800",
        peaks=_HOPPER,
        memory_bytes=80 * _GB,
        memory_bandwidth=3.35e12,
        node_link=Link(name="NVLink 4, 400 GB/s both ways", bandwidth=200e9, latency=2e-6),
        network=_NETWORK_400G,
        devices_per_node=8,
        power_watts=700,
        usd_per_hour=2.0,
        source="DeepSeek-V3 report (arXiv 2412.19437), section 3.1: NVLink 160 GB/s measured, "
        "InfiniBand 50 GB/s; otherwise as the H100",
    ),
    Hardware(
        name="GB200",
        peaks=_BLACKWELL
        | {
            dtype: Peak(published=round(peak.published * 10 / 9), sparsity=True)
            for dtype, peak in _BLACKWELL.items()
            if peak.published
        },
        memory_bytes=186 * _GB,
        memory_bandwidth=8e12,
        node_link=Link(name="NVLink 5, NVL72", bandwidth=900e9, latency=2e-6),
        network=_NETWORK_400G,
        devices_per_node=72,
        power_watts=1200,
        usd_per_hour=5.0,
        source="NVIDIA GB200 NVL72 data sheet, a 72nd of a rack: 2.5 PFLOP/s dense bf16",
    ),
    Hardware(
        name="MI325X",
        peaks=_CDNA3,
        memory_bytes=256 * _GB,
        memory_bandwidth=6e12,
        node_link=Link(name="Infinity Fabric, 7 links", bandwidth=448e9, latency=3e-6),
        network=_NETWORK_400G,
        devices_per_node=8,
        power_watts=1000,
        usd_per_hour=2.5,
        source="AMD Instinct MI325X data sheet: the MI300X with 256 GB of HBM3E at 6 TB/s",
    ),
    Hardware(
        name="L40S",
        peaks=_tensor_cores(
            2_520_000_000,
            142,
            {"fp32": 128, "tf32": 256, "fp16": 506, "bf16": 506, "fp8": 1012, "int8": 1012},
            _SPARSE,
        ),
        memory_bytes=48 * _GB,
        memory_bandwidth=8.64e11,
        node_link=Link(name="PCIe 4 x16", bandwidth=32e9, latency=5e-6),
        network=Link(name="100 Gb/s a GPU", bandwidth=12.5e9, latency=5e-6),
        devices_per_node=8,
        power_watts=350,
        usd_per_hour=0.8,
        source="NVIDIA L40S data sheet: 91.6 TFLOP/s fp32, 362 bf16, 733 fp8, dense",
    ),
    Hardware(
        name="TPU v6e",
        peaks={
            "bf16": Peak(published=918_000_000_000_000),
            "int8": Peak(published=1_836_000_000_000_000),
        },
        memory_bytes=32 * _GB,
        memory_bandwidth=1.64e12,
        node_link=Link(name="ICI, an axis both ways", bandwidth=180e9, latency=1e-6),
        network=Link(name="data-center network", bandwidth=12.5e9, latency=1e-5),
        devices_per_node=8,
        power_watts=300,
        usd_per_hour=2.7,
        source="cloud.google.com/tpu/docs/v6e; power is an estimate",
        pod=256,
        torus_axes=2,
    ),
)

HARDWARE: dict[str, Hardware] = {entry.name: entry for entry in _ENTRIES}
