"""The loops of Accelerate, Lightning and transformers' Trainer train as with torch's DDP.

Each loop runs once with torch's class and once with `DDP` in its place: with accumulation and
clipping, in float32 or with autocast to bfloat16, and with a restart from a checkpoint. The loops
also read the members of `ddp.compat`, which the tests record.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worker_pool import run_ranks

ROWS = 32
ACCUMULATED = 2
MAX_NORM = 0.1
#: Private members of torch's DDP that a trainer read, recorded by `RecordedDDP`.
READ: set[str] = set()
MEMBERS = (
    "reducer",
    "require_forward_param_sync",
    "_rebuild_buckets",
    "_delay_all_reduce",
    "prepare_for_backward",
    "_get_ddp_logging_data",
)


class RecordedDDP(DDP):
    """`DDP` that records the private members that are read from outside of ddp and torch."""

    def __getattribute__(self, name: str):
        reader = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        if name in MEMBERS and reader in ("accelerate", "lightning", "transformers"):
            READ.add(name)
        value = super().__getattribute__(name)
        return RecordedReducer(value) if name == "reducer" else value


class RecordedReducer:
    """The reducer of `DDP`, which records the methods that are read."""

    def __init__(self, reducer) -> None:
        self.reducer = reducer

    def __getattr__(self, name: str):
        READ.add(name)
        return getattr(self.reducer, name)


def set_class(use_torch: bool) -> None:
    """Select the class that trainers, which are not imported yet, use as torch's DDP."""
    if not use_torch:
        torch.nn.parallel.DistributedDataParallel = RecordedDDP
        torch.nn.parallel.distributed.DistributedDataParallel = RecordedDDP


def set_torchrun_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "GROUP_RANK": 0}
    variables |= {"TORCHELASTIC_RUN_ID": "test", "ACCELERATE_USE_CPU": "true"}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    # Trainers destroy the existing process group, which the worker pool still needs.
    monkeypatch.setattr(dist, "destroy_process_group", lambda *_: None)


def build_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2))


def build_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 5, generator=generator)
    return TensorDataset(x, torch.randn(ROWS, 2, generator=generator))


def list_weights(module: nn.Module) -> list[list[float]]:
    # After a step, other ranks of torch's DDP have different buffers than rank 0.
    tensors = module.parameters() if dist.get_rank() else module.state_dict().values()
    return [tensor.tolist() for tensor in tensors]


def train_with_accelerate(use_torch: bool, precision: str, folder: str) -> list:
    set_class(use_torch)
    from accelerate import Accelerator

    with pytest.MonkeyPatch.context() as patch:
        set_torchrun_environment(patch)
        for epoch in range(2):
            # Each epoch starts anew from the checkpoint of the last one.
            accelerator = Accelerator(
                cpu=True, gradient_accumulation_steps=ACCUMULATED, mixed_precision=precision
            )
            module = build_net()
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
            loader = DataLoader(build_dataset(), batch_size=2)
            model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
            assert isinstance(model, nn.parallel.DistributedDataParallel)
            if epoch:
                accelerator.load_state(folder)
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(x), y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                    optimizer.step()
                    optimizer.zero_grad()
            # Forward passes without synchronization, of which one backward pass is synchronized.
            x, y = next(iter(loader))
            with accelerator.no_sync(model):
                losses = [nn.functional.mse_loss(model(x), y) for _ in range(2)]
            accelerator.backward(losses[0])
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(losses[1])
            optimizer.step()
            assert accelerator.unwrap_model(model) is module
            accelerator.save_state(folder)
    gradients = [p.grad.tolist() for p in module.parameters()]
    return [list_weights(module), gradients, sorted(READ)]


def train_with_lightning(use_torch: bool, precision: str, folder: str, is_manual: bool) -> list:
    set_class(use_torch)
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Learner(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build_net()
            self.automatic_optimization = not is_manual

        def training_step(self, batch, index):
            assert isinstance(self.trainer.strategy.model, nn.parallel.DistributedDataParallel)
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            if not is_manual:
                return loss
            optimizer = self.optimizers()
            is_accumulating = index % ACCUMULATED == 0
            no_sync = self.trainer.strategy.block_backward_sync()
            with no_sync if is_accumulating and not is_static else nullcontext():
                self.manual_backward(loss / ACCUMULATED)
            if not is_accumulating:
                self.clip_gradients(
                    optimizer, gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm"
                )
                optimizer.step()
                optimizer.zero_grad()
            return None

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    # The first backward pass of a static graph is synchronized in torch's DDP.
    is_static = is_manual
    rank = dist.get_rank()
    x, y = (t.view(-1, 2, 2, t.shape[1])[:, rank].flatten(0, 1) for t in build_dataset().tensors)
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    path = f"{folder}/lightning.ckpt"
    automatic = {"accumulate_grad_batches": ACCUMULATED, "gradient_clip_val": MAX_NORM}
    with pytest.MonkeyPatch.context() as patch:
        set_torchrun_environment(patch)
        for epoch in range(2):
            strategy = DDPStrategy(
                cluster_environment=TorchElasticEnvironment(), static_graph=is_static
            )
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=dist.get_world_size(),
                strategy=strategy,
                precision="bf16-mixed" if precision == "bf16" else "32-true",
                max_epochs=epoch + 1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                **({} if is_manual else automatic),
            )
            learner = Learner()
            trainer.fit(learner, loader, ckpt_path=path if epoch else None)
            trainer.save_checkpoint(path)
    return [list_weights(learner.net), [], sorted(READ)]


def train_with_transformers(use_torch: bool, precision: str, folder: str) -> list:
    set_class(use_torch)
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    generator = torch.Generator().manual_seed(1)
    rows = []
    for tokens in torch.randint(16, (ROWS, 8), generator=generator):
        rows.append({"input_ids": tokens, "labels": tokens})
    with pytest.MonkeyPatch.context() as patch:
        set_torchrun_environment(patch)
        for epoch in range(2):
            torch.manual_seed(0)
            arguments = TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=ACCUMULATED,
                max_grad_norm=MAX_NORM,
                bf16=precision == "bf16",
                num_train_epochs=epoch + 1,
                lr_scheduler_type="constant",
                learning_rate=0.01,
                save_strategy="epoch",
                report_to=[],
                disable_tqdm=True,
                seed=0,
            )
            trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
            trainer.train(resume_from_checkpoint=epoch > 0)
            assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
            dist.barrier()
    return [list_weights(trainer.model), [], sorted(READ)]


LOOPS = {
    "accelerate": train_with_accelerate,
    "lightning": train_with_lightning,
    "transformers": train_with_transformers,
}
#: Members that each loop reads. Together they are all that `ddp.compat` has.
EXPECTED_MEMBERS = {
    "accelerate": ["prepare_for_backward", "reducer", "require_forward_param_sync"],
    "lightning": ["_get_ddp_logging_data"],
    "lightning manual": [
        "_delay_all_reduce",
        "_rebuild_buckets",
        "prepare_for_backward",
        "reducer",
    ],
    "transformers": [],
}


def compare_loops(library: str, precision: str, folder: Path, *arguments: bool) -> list[str]:
    """Return the members that a loop with `DDP` reads, after a comparison of its weights."""
    results = {}
    for use_torch in (True, False):
        checkpoints = folder / str(use_torch)
        checkpoints.mkdir()
        loop = LOOPS[library]
        results[use_torch] = run_ranks(
            loop, 2, use_torch, precision, str(checkpoints), *arguments, timeout=500
        )
    members = results[False][0][2]
    for ours, theirs in zip(results[False], results[True], strict=True):
        torch.testing.assert_close(ours[:2], theirs[:2])
        assert theirs[2] == []
        assert ours[2] == members
    return members


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("library", LOOPS)
def test_loop_of_trainer_trains_as_with_torch_ddp(library, precision, tmp_path) -> None:
    pytest.importorskip("accelerate", reason="an independent reference")
    pytest.importorskip(library, reason="an independent reference")
    pytest.importorskip("transformers", reason="an independent reference")
    arguments = [False] if library == "lightning" else []
    members = compare_loops(library, precision, tmp_path, *arguments)
    assert members == EXPECTED_MEMBERS[library]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
def test_manual_loop_of_lightning_trains_as_with_torch_ddp(tmp_path) -> None:
    pytest.importorskip("lightning", reason="an independent reference")
    members = compare_loops("lightning", "no", tmp_path, True)
    assert members == sorted([*EXPECTED_MEMBERS["lightning manual"]])
