"""Naive data parallelism: after the backward pass, average the gradients one by one.

    torchrun --nproc-per-node 2 naive_data_parallel.py
    python naive_data_parallel.py                       as the only rank

Every rank stores the whole model and trains on its rows of the batch. The mean of the ranks'
gradients is the gradient of the whole batch, so all ranks take the same step and stay equal. This
is slow, because nothing is computed during the communication, and because each of the many
all-reduces has the full latency.
"""

import os
import time

import torch
import torch.distributed as dist
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.text.data import load_corpus

STEPS, ROWS = 10, 8


def main() -> float:
    """Train, and return the mean loss of the last step over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # the same weights on every rank
    config = ModelConfig(d_model=64, d_ff=192, num_layers=2, num_heads=2, context=64)
    model, corpus = Decoder(config).to(device), load_corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start_time = time.perf_counter()
    for step in range(STEPS):
        where = {"rows": ROWS, "context": 64, "seed": 0, "step": step}
        tokens, targets = corpus.draw_batch(**where, rank=rank, world=world)
        loss = model.compute_loss(tokens.to(device), targets.to(device))
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        seconds = (time.perf_counter() - start_time) / STEPS
        print(f"naive, {world} ranks: {seconds:.3f} s per step, loss {total / world:.4f}")
    return float(total / world)


if __name__ == "__main__":
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
