"""The training loops of Accelerate and of transformers' Trainer on sharded models."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, StepLR
from torch.utils.data import DataLoader
from worker_pool import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from zero import FSDP, ShardedOptimizer, fully_shard
from zero_training import make

KINDS = ["FSDP", "fully_shard", "stage 1", "stage 2"]
DATA = torch.randn(32, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TOKENS = [torch.arange(start, start + 8) % 40 for start in range(16)]


def shard_model(model, kind, lr):
    """Return the model, which may be wrapped, and AdamW."""
    if kind == "FSDP":
        model = FSDP(model)
    elif kind == "fully_shard":
        fully_shard(model)
    else:
        options = {"shard_gradients": kind == "stage 2", "lr": lr}
        return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def assert_equal(model, twin, **tolerance):
    state = (model.module if isinstance(model, FSDP) else model).state_dict()
    for name, value in twin.named_parameters():
        whole = state[name]
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        torch.testing.assert_close(whole, value.detach(), **tolerance)


def train_with_accelerate(kind):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    world = accelerator.num_processes
    twin = make()
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
    their_schedule = StepLR(theirs, 1, 0.9)
    model, ours = shard_model(make(), kind, 0.1)
    # The model is distributed already, so it is not passed to `prepare`.
    ours, loader, schedule = accelerator.prepare(
        ours, DataLoader(DATA, batch_size=4), StepLR(ours, 1, 0.9)
    )
    for number, inputs in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            ours.step()
            schedule.step()
            ours.zero_grad()
        whole = DATA[4 * world * number :][: 4 * world]
        (twin(whole).square().mean() / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
            theirs.step()
            theirs.zero_grad()
            for _ in range(world):
                their_schedule.step()
    assert_equal(model, twin, rtol=1e-9, atol=1e-12)
    return True


def build_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def train_with_trainer(kind, folder):
    import transformers
    from transformers import Trainer, TrainingArguments

    class ShardedTrainer(Trainer):
        """A Trainer of a model that is distributed already, and is not wrapped in DDP."""

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.prepare_model = lambda model, **options: model

        def _get_train_sampler(self, *args, **options):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    transformers.logging.set_verbosity_error()
    twin = build_gpt2()
    model, optimizer = shard_model(build_gpt2(), kind, 1e-2)
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        num_train_epochs=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    ShardedTrainer(
        model,
        arguments,
        train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in TOKENS],
        optimizers=(optimizer, ConstantLR(optimizer, 1.0, 1)),
    ).train()
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    size = 4 * dist.get_world_size()
    for _ in range(2):
        for start in range(0, len(TOKENS), size):
            tokens = torch.stack(TOKENS[start : start + size])
            twin(tokens, labels=tokens).loss.backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            theirs.step()
            theirs.zero_grad()
    assert_equal(model, twin, rtol=1e-3, atol=1e-4)
    return True


def call_as_torchrun(train, *args):
    """Call `train` with the environment that torchrun sets, which Accelerate reads."""
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return train(*args)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_accelerates_loop_trains_as_one_process(kind):
    pytest.importorskip("accelerate", reason="the loop of Accelerate")
    assert all(run_ranks(call_as_torchrun, 2, train_with_accelerate, kind))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.filterwarnings("ignore")
def test_trainers_loop_trains_as_one_process(kind, tmp_path):
    for module in ("accelerate", "transformers"):
        pytest.importorskip(module, reason="the loop of transformers' Trainer")
    assert all(run_ranks(call_as_torchrun, 2, train_with_trainer, kind, str(tmp_path)))
