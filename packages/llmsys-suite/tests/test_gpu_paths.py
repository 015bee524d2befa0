"""Code that only a GPU reaches, run on fake CUDA modules: order of calls, clocks and counts."""

import subprocess
import sys
import types

import pytest
import torch
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.environment import read_available_memory_bytes
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.ranks import worker
from llmsys_suite.resolution import resolve
from llmsys_suite.step import kernels, sweep
from llmsys_suite.step.case import Case
from torch.autograd import DeviceType


class FakeStream:
    """A device whose clock advances by the queued work once the program waits for the device."""

    def __init__(self):
        self.queued_ms = 0.0
        self.waits = 0

    def synchronize(self, device=None):
        self.waits += 1


class FakeEvent:
    stream: FakeStream

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        self.at_ms = self.stream.queued_ms

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


@pytest.fixture
def stream(monkeypatch):
    stream = FakeStream()
    FakeEvent.stream = stream
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", stream.synchronize)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    return stream


def test_phases_on_a_gpu_are_timed_by_events_without_waiting_inside_the_step(stream):
    recorder = Recorder(0, torch.device("cuda"))
    with recorder.step(stage="train", variant="ddp", step=0, warmup=False):
        waits = stream.waits
        for name, milliseconds in (("forward", 3.0), ("backward", 5.0), ("communication", 2.0)):
            with recorder.phase(name):
                stream.queued_ms += milliseconds
        assert stream.waits == waits
    samples = {sample["phase"]: sample for sample in recorder.take()}
    assert samples["backward"]["seconds"] == 5e-3
    assert samples["communication"]["seconds"] == 2e-3
    assert samples["forward"]["variant"] == "ddp"
    assert stream.waits > waits


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_phases_outside_of_a_step_leave_no_sample(stream, device):
    recorder = Recorder(0, torch.device(device))
    with recorder.phase("forward"):
        pass
    with recorder.step(stage="train", variant="ddp", step=0, warmup=False):
        pass
    with recorder.phase("backward"):
        pass
    assert [sample["phase"] for sample in recorder.take()] == ["step"]


def test_each_rank_selects_its_gpu_before_any_other_use_of_cuda(monkeypatch):
    calls = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr(worker, "create_autograd_threads", lambda: calls.append("autograd"))

    def store(rank, world):
        calls.append("store")
        raise RuntimeError("far enough")

    monkeypatch.setattr(worker, "_store", store)
    with pytest.raises(RuntimeError, match="far enough"):
        worker.begin(RunConfig(preset="gpu"), 3, 4, None)
    assert calls == ["cuda:3", "autograd", "store"]


def test_torchrun_ranks_select_their_gpu_before_memory_is_queried(monkeypatch, tmp_path):
    from llmsys_suite import start

    calls = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("llmsys_suite.resolution.count_gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))

    def free(device):
        calls.append("memory")
        return 80 * 2**30

    monkeypatch.setattr(start, "read_available_memory_bytes", free)
    monkeypatch.setattr(worker, "run_rank", lambda config: (0, tmp_path))
    start.execute(resolve(["plan"], preset="gpu", size="mini"))
    assert calls == ["cuda:1", "memory"]


def test_parents_of_gpu_processes_query_memory_in_a_child_and_ranks_query_their_own(monkeypatch):
    queries = []

    def run(command, **options):
        queries.append(command[0])
        return types.SimpleNamespace(stdout=f"{2**30}\n".encode())

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: pytest.fail("a context in the parent"))
    with pytest.raises(sweep.LeftOut, match=r"needs .* GiB; a case may use 0\.8 GiB"):
        sweep.require_fit(Case(size="medium", device="cuda"))
    assert queries == [sys.executable]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**31, 2**36))
    assert read_available_memory_bytes("cuda") == 2**31
    assert len(queries) == 1


@pytest.mark.parametrize("backend", ["auto", "nccl", "gloo"])
def test_nccl_needs_one_gpu_per_rank_also_if_it_was_chosen_automatically(monkeypatch, backend):
    monkeypatch.setattr("llmsys_suite.resolution.count_gpus", lambda: 2)
    expected = "gloo" if backend == "gloo" else "nccl"
    assert resolve([], preset="gpu", backend=backend).backend == expected
    with pytest.raises(UsageError, match="one GPU per rank, got 4 ranks and 2 GPUs; use --world 2"):
        resolve([], preset="gpu", backend=backend, world=4)


def test_the_gpu_preset_trains_in_bfloat16_unless_another_dtype_is_named(monkeypatch):
    monkeypatch.setattr("llmsys_suite.resolution.count_gpus", lambda: 2)
    assert resolve([], preset="gpu").dtype == "bf16"
    assert resolve([], preset="gpu", dtype="tf32").dtype == "tf32"


def test_the_time_of_a_kernel_is_counted_once():
    def event(key, device, self_us, note=False):
        return types.SimpleNamespace(
            key=key,
            device_type=device,
            self_device_time_total=self_us,
            self_cpu_time_total=1.0,
            is_user_annotation=note,
            count=2,
        )

    events = [
        event("aten::mm", DeviceType.CPU, 300.0),
        event("aten::_softmax", DeviceType.CPU, 100.0),
        event("forward", DeviceType.CPU, 400.0, note=True),
        event("sm90_gemm_kernel", DeviceType.CUDA, 300.0),
        event("softmax_kernel", DeviceType.CUDA, 100.0),
        event("forward", DeviceType.CUDA, 400.0, note=True),
    ]
    summary = kernels.summarize(events, "cuda")
    assert summary["total_ms"] == 0.4
    assert summary["product_share"] == 0.75
    assert summary["softmax_share"] == 0.25
    assert [row["operator"] for row in summary["top"]] == ["mm", "_softmax"]
