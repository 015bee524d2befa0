"""Pipeline parallelism (GPipe): micro-batches pass through the layers of one rank after another.

    torchrun --nproc-per-node 2 pipeline.py
    python pipeline.py                                  as the only rank

With p stages and m micro-batches, a rank is idle for a fraction (p - 1) / (m + p - 1) of a step,
the bubble. torch.distributed.pipelining sends the activations and gradients. This program only
defines the layers of each stage.
"""

import os
import time

import torch
import torch.distributed as dist
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.text.data import load_corpus
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

STEPS = 10
ROWS = 8
MICROBATCHES = 4


class Stage(nn.Module):
    """The layers of one rank; the first rank also embeds tokens, and the last computes logits."""

    def __init__(self, model: Decoder, rank: int, world: int) -> None:
        super().__init__()
        first, last = rank * len(model.blocks) // world, (rank + 1) * len(model.blocks) // world
        self.embedding = model.embedding if rank == 0 else None
        self.blocks = model.blocks[first:last]
        self.norm, self.head = (model.norm, model.head) if rank == world - 1 else (None, None)
        self.register_buffer("rope", model.rope)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens or the residual stream to the residual stream or logits."""
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x, self.rope[:, : x.shape[1]])
        return x if self.head is None else self.head(self.norm(x))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over the tokens of a micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> float:
    """Train, and return the loss of the last step, which the last rank broadcasts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # all ranks draw the same model, and each keeps its layers
    config = ModelConfig(d_model=64, d_ff=192, num_layers=2, num_heads=2, context=64)
    model, corpus = Stage(Decoder(config), rank, world).to(device), load_corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stage = PipelineStage(model, rank, world, torch.device(device))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=cross_entropy)
    start_time = time.perf_counter()
    for step in range(STEPS):
        tokens, targets = corpus.draw_batch(rows=ROWS, context=64, seed=0, step=step)
        losses: list[torch.Tensor] = []
        inputs = (tokens.to(device),) if rank == 0 else ()
        if rank == world - 1:
            schedule.step(*inputs, target=targets.to(device), losses=losses)
        else:
            schedule.step(*inputs)
        optimizer.step()
        optimizer.zero_grad()
    total = torch.stack(losses).detach().mean() if losses else torch.zeros((), device=device)
    dist.broadcast(total, src=world - 1)
    if rank == 0:
        seconds = (time.perf_counter() - start_time) / STEPS
        print(f"pipeline, {world} stages: {seconds:.3f} s per step, loss {total:.4f}")
    return float(total)


if __name__ == "__main__":
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
