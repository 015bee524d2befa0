"""Tensor parallelism (Megatron): the matrices are split over ranks, which work on the same rows.

    torchrun --nproc-per-node 2 tensor_parallel.py
    python tensor_parallel.py                           as the only rank

The first matrix of each pair is split by columns and the second by rows. The values between them,
which are heads or hidden units, therefore stay on their rank. One all-reduce per pair adds the
results of all ranks: two in the forward pass of a block, and two in its backward pass.
"""

import os
import time

import torch
import torch.distributed as dist
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.text.data import load_corpus
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

STEPS, ROWS = 10, 8


def main() -> float:
    """Train, and return the loss of the last step, which is equal on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if kind == "cuda" else "cpu"
    torch.manual_seed(0)
    config = ModelConfig(d_model=64, d_ff=192, num_layers=2, num_heads=2, context=64)
    if config.num_heads % world or config.d_ff % world:
        raise SystemExit(f"{config.num_heads} heads do not split over {world} ranks; start 1 or 2")
    model, corpus = Decoder(config).to(device), load_corpus()
    plan = {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
    plan |= {f"ffn.{name}": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"attention.out": RowwiseParallel(), "ffn.down": RowwiseParallel()}
    for block in model.list_blocks():
        parallelize_module(block, init_device_mesh(kind, (world,)), plan)
        block.attention.num_heads = config.num_heads // world
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    start_time = time.perf_counter()
    for step in range(STEPS):
        tokens, targets = corpus.draw_batch(rows=ROWS, context=64, seed=0, step=step)
        loss = model.compute_loss(tokens.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        seconds = (time.perf_counter() - start_time) / STEPS
        print(f"tensor parallel, {world} ranks: {seconds:.3f} s per step, loss {loss:.4f}")
    return loss.item()


if __name__ == "__main__":
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
