"""Fully sharded data parallelism: each of n ranks stores 1/n of the model states.

    torchrun --nproc-per-node 2 fully_sharded.py
    python fully_sharded.py                             as the only rank

The model states are weights, gradients and optimizer state. Before a layer runs, its weights are
gathered, and afterwards they are freed. In the backward pass, a reduce-scatter sums the gradients
and leaves each rank its part. A rank sends at most 1.5 times the bytes of an all-reduce, and the
model states need to fit in all devices together only.
"""

import os
import time

import torch
import torch.distributed as dist
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.text.data import load_corpus
from zero import FSDP

STEPS, ROWS = 10, 8


def main() -> float:
    """Train, and return the mean loss of the last step over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = ModelConfig(d_model=64, d_ff=192, num_layers=2, num_heads=2, context=64)
    model, corpus = FSDP(Decoder(config).to(device)), load_corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # updates this rank's shards
    start_time = time.perf_counter()
    for step in range(STEPS):
        where = {"rows": ROWS, "context": 64, "seed": 0, "step": step}
        tokens, targets = corpus.draw_batch(**where, rank=rank, world=world)
        logits = model(tokens.to(device))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        seconds = (time.perf_counter() - start_time) / STEPS
        print(f"fully sharded, {world} ranks: {seconds:.3f} s per step, loss {total / world:.4f}")
    return float(total / world)


if __name__ == "__main__":
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
