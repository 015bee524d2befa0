"""The training loops of Accelerate and Lightning, with `DDP` instead of torch's class.

Two ranks with half of each batch train to the weights of one process with the whole batch.
"""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worker_pool import run_ranks

ROWS = 32
EPOCHS = 2
ACCUMULATED = 2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 5, generator=draw, dtype=torch.float64)
    return x, torch.randn(ROWS, 2, generator=draw, dtype=torch.float64)


def set_torchrun_environment() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    torch.nn.parallel.DistributedDataParallel = DDP
    torch.nn.parallel.distributed.DistributedDataParallel = DDP


def train_in_one_process() -> nn.Sequential:
    """Train in one process on the batches of both ranks: 2 rows each, accumulated twice."""
    module, (x, y) = net(), rows()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for batch in range(0, ROWS, 4 * ACCUMULATED):
            optimizer.zero_grad()
            selected = slice(batch, batch + 4 * ACCUMULATED)
            nn.functional.mse_loss(module(x[selected]), y[selected]).backward()
            optimizer.step()
    return module


def compare(module: nn.Module, steps: int) -> int:
    for ours, theirs in zip(module.parameters(), train_in_one_process().parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    return steps


def train_with_accelerate() -> int:
    set_torchrun_environment()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*rows()), batch_size=2)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    assert isinstance(model, DDP)
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
                optimizer.zero_grad()
    assert accelerator.unwrap_model(model) is module
    return compare(module, len(model.meter.steps))


def train_with_lightning() -> int:
    set_torchrun_environment()
    import lightning as lightning_
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Learner(lightning_.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.seen = set()

        def training_step(self, batch, _):
            self.seen.add(type(self.trainer.strategy.model))
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    learner = Learner()
    trainer = lightning_.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATED,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    rank = dist.get_rank()
    x, y = (t.view(-1, 2, 2, t.shape[1])[:, rank].flatten(0, 1) for t in rows())
    # Lightning destroys the existing process group, which the worker pool still needs.
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda *_: None
    trainer.fit(learner, DataLoader(TensorDataset(x, y), batch_size=2))
    dist.destroy_process_group = destroy
    assert learner.seen == {DDP}
    return compare(copy.deepcopy(learner.net), EPOCHS * ROWS // (4 * ACCUMULATED))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
def test_accelerate_loop_trains_like_one_process() -> None:
    pytest.importorskip("accelerate", reason="an independent reference")
    steps = EPOCHS * ROWS // (4 * ACCUMULATED)
    assert run_ranks(train_with_accelerate, 2, timeout=300) == [steps, steps]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
def test_lightning_loop_trains_like_one_process() -> None:
    pytest.importorskip("lightning", reason="an independent reference")
    steps = EPOCHS * ROWS // (4 * ACCUMULATED)
    assert run_ranks(train_with_lightning, 2, timeout=300) == [steps, steps]
