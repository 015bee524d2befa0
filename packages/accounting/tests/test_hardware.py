from pathlib import Path

import pytest
from accounting import HARDWARE, Plan, Transformer, fermi, roofline, step_time
from accounting.cli.main import main
from accounting.hardware import find
from accounting.time.mesh import compute_bound_batch
from hypothesis import given
from hypothesis import strategies as st

# TFLOP/s as the data sheets print them, dense.
SHEETS = {
    ("V100", "fp16"): 125,
    ("A100", "fp32"): 19.5,
    ("A100", "tf32"): 156,
    ("A100", "bf16"): 312,
    ("A100", "int8"): 624,
    ("H100", "fp32"): 66.9,
    ("H100", "bf16"): 989.4,
    ("H100", "fp8"): 1978.9,
    ("H200", "bf16"): 989.4,
    ("B200", "bf16"): 2250,
    ("B200", "fp4"): 9000,
    ("MI300X", "bf16"): 1307.4,
    ("MI300X", "fp8"): 2614.9,
    ("MI300X", "fp32"): 163.4,
    ("A100 40GB", "bf16"): 312,
    ("L40S", "bf16"): 362,
    ("L40S", "fp8"): 733,
    ("RTX 4090", "fp32"): 82.6,
    ("RTX 4090", "bf16"): 165.2,
    ("RTX 4090", "fp8"): 330.3,
    ("RTX 5090", "fp32"): 104.8,
    ("RTX 5090", "bf16"): 209.5,
    ("RTX 5090", "fp4"): 1676,
    ("TPU v6e", "bf16"): 918,
    ("TPU v4", "bf16"): 275,
    ("TPU v5e", "bf16"): 197,
    ("TPU v5e", "int8"): 394,
    ("TPU v5p", "bf16"): 459,
}


@pytest.mark.parametrize(("device", "dtype"), SHEETS)
def test_derived_peaks_are_those_of_the_data_sheets(device: str, dtype: str) -> None:
    assert HARDWARE[device].peak(dtype) / 1e12 == pytest.approx(SHEETS[device, dtype], rel=0.003)


def test_every_hardware_entry_has_a_source() -> None:
    for name, entry in HARDWARE.items():
        assert len(entry.source) > 20
        assert entry.name == name
        assert entry.node_link.bandwidth > entry.network.bandwidth
    assert find("tpu-v5p") is HARDWARE["TPU v5p"]


DEVICE_FILE = """
[Mine]
cores = [{ clock_hz = 1_000_000_000, units = 10, fma = { fp32 = 64, bf16 = 512 } }]
memory_bytes = 40_000_000_000
memory_bandwidth = 1e12
node_link = ["bridge", 50e9, 2e-6]
network = ["Ethernet", 12.5e9, 1e-5]
devices_per_node = 4
power_watts = 300
source = "a data sheet"
"""


def test_own_hardware_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(DEVICE_FILE)
    device = find(str(file))
    assert device.name == "Mine"
    assert device.peak("bf16") == 2 * 1_000_000_000 * 10 * 512
    file.write_text('["H100 NVL"]\nlike = "H100"\nmemory_bytes = 94e9\n')
    device = find(str(file))
    assert (device.memory_bytes, device.peak("bf16")) == (94_000_000_000, find("H100").peak("bf16"))
    assert main(["serve", "layers=2,d_model=64,heads=4,vocab_size=9", "--hardware", str(file)]) == 0


@pytest.mark.parametrize("known", ["H100", "H200", "B200", "A100"])
def test_file_may_replace_the_peaks_of_a_known_device(known: str, tmp_path: Path) -> None:
    """The peaks of H200 and A100 are those of another device, and B200 has published peaks."""
    file = tmp_path / "mine.toml"
    file.write_text(f'[mine]\nlike = "{known}"\npublished = {{ bf16 = 400e12 }}\n')
    assert find(str(file)).peak("bf16") == 400_000_000_000_000
    assert find(str(file)).peak("fp16") == find(known).peak("fp16")
    cores = "{ clock_hz = 1_000_000_000, units = 10, fma = { bf16 = 512 } }"
    file.write_text(f'[mine]\nlike = "{known}"\ncores = [{cores}]\n')
    assert find(str(file)).peak("bf16") == 2 * 1_000_000_000 * 10 * 512
    for rate in ("0", '"400e12"', "-1"):
        file.write_text(f'[mine]\nlike = "{known}"\npublished = {{ bf16 = {rate} }}\n')
        with pytest.raises(ValueError, match="to have one table with the fields"):
            find(str(file))


def test_copy_of_a_device_is_as_fast_as_the_device(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[mine]\nlike = "H100"\n')
    model = Transformer(layers=2, d_model=1024, heads=8, vocab_size=1000)
    run = {"batch": 8, "seq": 512}
    copied, known = (step_time(model, Plan(), hardware=x, **run) for x in (str(file), "H100"))
    assert copied.total == known.total


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (DEVICE_FILE.replace("power_watts = 300", ""), "power_watts"),
        (DEVICE_FILE.replace('network = ["Ethernet", 12.5e9, 1e-5]', ""), "'network'"),
        (
            DEVICE_FILE.replace("memory_bandwidth = 1e12", "memory_bandwidth = -1"),
            "memory_bandwidth",
        ),
        (DEVICE_FILE + "color = 3\n", "color"),
        ('[mine]\nlike = "H999"\n', "'H999'"),
        (DEVICE_FILE + "[other]\n", "tables ['Mine', 'other'] and fields [] outside of tables"),
        ('like = "H100"\n', "tables [] and fields ['like'] outside of tables"),
        ('like = "H100"\n[mine]\n', "tables ['mine'] and fields ['like'] outside of tables"),
        ("", "tables [] and fields [] outside of tables"),
        ('[mine]\nlike = "H100"\npeaks = { bf16 = 1e15 }\n', "published = { bf16 = ... }"),
        ('[mine]\nlike = "H100"\npublished = { bf17 = 1e15 }\n', "a dtype in peaks"),
        ('[mine]\nlike = "H100"\npod = 3\n', "pod and torus_axes together"),
        # GB, TB/s, TFLOP/s, GB/s and microseconds.
        ('[mine]\nlike = "H100"\nmemory_bytes = 80\n', "memory_bytes"),
        ('[mine]\nlike = "H100"\nmemory_bandwidth = 3.35\n', "memory_bandwidth"),
        ('[mine]\nlike = "H100"\npublished = { bf16 = 989 }\n', "got 989; check its unit"),
        ('[mine]\nlike = "H100"\nnode_link = ["NVLink", 450, 2e-6]\n', "node_link"),
        ('[mine]\nlike = "H100"\nnetwork = ["InfiniBand", 50e9, 5]\n', "network"),
        ("[mine", "Expected"),
        ("mine = 3\n", "fields ['mine'] outside of tables"),
    ],
)
def test_incomplete_hardware_file_reports_reason(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match="to have one table with the fields") as e:
        find(str(file))
    assert reason in str(e.value)


def test_hardware_file_with_two_tables_or_missing_reports_reason(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    with pytest.raises(FileNotFoundError, match=r"mine\.toml"):
        find(str(file))
    for text in ('[first]\nlike = "H100"\n[second]\nlike = "H100"\n', ""):
        file.write_text(text)
        with pytest.raises(ValueError, match="to have one table with the fields"):
            find(str(file))


@given(m=st.integers(1, 9999), k=st.integers(1, 9999), n=st.integers(1, 9999))
def test_an_operation_is_under_its_roof(m: int, k: int, n: int) -> None:
    slot = roofline("H100", shape=(m, k, n), dtype="bf16")
    moved = 2 * (m * k + k * n + m * n)
    assert slot.flops == 2 * m * k * n
    assert slot.intensity == pytest.approx(2 * m * k * n / moved)
    assert slot.seconds == pytest.approx(slot.flops / slot.attainable_flops)
    assert (slot.bound == "compute") == (slot.intensity >= slot.ridge)
    device = HARDWARE["H100"]
    roof = min(device.peak("bf16"), slot.intensity * device.memory_bandwidth)
    assert slot.attainable_flops == pytest.approx(roof)
    # In two-byte dtypes, the FLOPs per byte of a matmul are fewer than its shortest side.
    assert slot.intensity <= min(m, k, n)


@given(
    x=st.integers(1, 64), y=st.integers(1, 16), mx=st.integers(1, 2), f=st.integers(60_000, 200_000)
)
def test_at_the_least_batch_arithmetic_and_links_take_the_same_time(
    x: int, y: int, mx: int, f: int
) -> None:
    c = 4.6e14
    w = 1.8e11
    d = 1.0
    links = {"flops_per_second": c, "axis_bytes_per_second": w, "fsdp_axes": mx}
    result = compute_bound_batch(fsdp=x, tensor=y, d_ff=f, **links)
    b = result.tokens
    arithmetic = 4 * b * d * f / (x * y * c)
    assert arithmetic == pytest.approx(4 * d * f / (y * w * mx) + 4 * b * d / (x * w))
    overlapped = compute_bound_batch(fsdp=x, tensor=y, d_ff=f, comms="overlapped", **links)
    assert overlapped.tokens < b


def test_utilization_in_percent_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 < utilization <= 1"):
        fermi.training_usd(1e24, utilization=40)
    assert fermi.gpu_hours(1e24, utilization=1) == fermi.gpu_hours(1e24)


def test_devices_with_the_same_arithmetic_units_have_one_chip(tmp_path: Path) -> None:
    chips = {name: device.chip for name, device in HARDWARE.items()}
    assert {name for name, chip in chips.items() if chip == "H100"} == {
        *("H100", "H100 500W", "H200", "H800")
    }
    assert chips["A100 40GB"] == chips["A100"] == "A100"
    assert chips["GB200"] == "GB200"  # Its rates are not those of the B200.
    file = tmp_path / "mine.toml"
    file.write_text('[mine]\nlike = "H100"\nattention_fraction = 0.6\n')
    assert (find(str(file)).chip, find(str(file)).attention_fraction) == ("H100", 0.6)
    file.write_text('[mine]\nlike = "H100"\npublished = { bf16 = 400e12 }\n')
    assert find(str(file)).chip == "mine"
