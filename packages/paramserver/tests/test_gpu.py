"""Workers on a GPU copy gradients and parameters through the memory of the host."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))  # processes that `run` starts import it by name

from paramserver import Asynchronous, BulkSynchronous, Integers, LocalSteps, Server, Worker, run
from paramserver.local_steps.checkpoint import get_random_states, set_random_states
from paramserver.parameters import get_trainable_parameters
from paramserver.partition import partition
from paramserver_training import SGD, assert_equal_parameters, build_model, draw_batch, train_alone

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_a_checkpoint_contains_the_random_numbers_of_each_gpu(monkeypatch):
    states = {f"cuda:{i}": torch.tensor([i], dtype=torch.uint8) for i in range(2)}
    restored = {}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: restored.update({device: state})
    )
    devices = [torch.device(name) for name in ("cuda:0", "cpu", "cuda:1", "cuda:0")]
    set_random_states(get_random_states(devices))
    assert restored == states


def train_there(worker, steps):
    """Train `steps` steps on the module's device."""
    device = next(worker.module.parameters()).device
    for step in range(steps):
        worker.pull()
        inputs, targets = (tensor.to(device) for tensor in draw_batch(step, worker.rank))
        F.mse_loss(worker.module(inputs), targets).backward()
        worker.push()
    return str(device)


@no_gpu
@pytest.mark.gpu
def test_run_equals_one_process():
    result = run(train_there, build_model().cuda(), SGD, args=(5,), workers=2, servers=2)
    assert all(value.startswith("cuda") for value in result.values)
    assert_equal_parameters(
        {name: p.cpu() for name, p in result.parameters.items()}, train_alone(5, 2, SGD)
    )


@no_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    "policy",
    [
        BulkSynchronous(),
        Asynchronous(),
        LocalSteps(4, SGD),
        LocalSteps(4, SGD, Integers(8), fragments=2, overlap=1),
    ],
    ids=["bulk", "asynchronous", "local", "streaming"],
)
def test_every_policy_trains_as_on_the_cpu(policy):
    def trained(where):
        module = build_model(torch.float32).to(where)
        server = Server(get_trainable_parameters(module), SGD, policy, workers=1)
        inner = partial(torch.optim.SGD, lr=0.1) if isinstance(policy, LocalSteps) else None
        with Worker(module, server, optimizer=inner) as worker:
            for step in range(8):
                worker.pull()
                inputs, targets = (tensor.float().to(where) for tensor in draw_batch(step, 0))
                F.mse_loss(module(inputs), targets).backward()
                worker.push()
        return {name: p.detach().cpu() for name, p in module.named_parameters()}

    actual, expected = trained("cuda"), trained("cpu")
    # Rounding to 8 bits may differ between devices.
    close = {"rtol": 1e-3, "atol": 3e-3} if getattr(policy, "compression", None) else {}
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], **close)


@no_gpu
@pytest.mark.gpu
def test_a_checkpoint_restores_the_random_numbers_of_the_gpu(tmp_path):
    policy = LocalSteps(2, SGD)
    module = build_model(torch.float32).cuda()
    server = Server(get_trainable_parameters(module), SGD, policy, workers=1, elastic=True)

    def resumed():
        return Worker(module, server, optimizer=SGD, checkpoint=tmp_path / "worker")

    worker = resumed()
    for _ in range(2):
        worker.pull()
        module(torch.rand(4, 5, device="cuda")).sum().backward()
        worker.push()
    expected = torch.rand(3, device="cuda")
    resumed()
    assert torch.equal(torch.rand(3, device="cuda"), expected)


@no_gpu
@pytest.mark.gpu
def test_gradients_of_another_stream_are_complete_when_they_are_sent():
    module = build_model(torch.float32).cuda()
    parameters = get_trainable_parameters(module)
    servers = [
        Server(parameters, partial(torch.optim.SGD, lr=1.0), workers=1, shard=shard)
        for shard in partition(parameters, 2)
    ]
    expected = {name: p.detach() - 1 for name, p in parameters.items()}
    with torch.cuda.stream(torch.cuda.Stream()), Worker(module, servers) as worker:
        worker.pull()
        torch.cuda._sleep(10**9)  # delays the next kernels of this stream
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        worker.push()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name])
