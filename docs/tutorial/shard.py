"""Step 5: shard parameters, gradients and optimizer state over two processes (zero).

Start it with: torchrun --standalone --nproc-per-node 2 docs/tutorial/shard.py
"""

import torch
import torch.distributed as dist
from model import (
    FOLDER,
    compute_held_out_loss,
    compute_loss,
    draw_batch,
    load_trained_model,
    save_lines,
)
from zero import FSDP, load_checkpoint, save_checkpoint, zero_stage_bytes

dist.init_process_group("gloo")
rank = dist.get_rank()
unsharded = load_trained_model()
numel = sum(p.numel() for p in unsharded.parameters())
model = FSDP(unsharded)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(400, 500):
    compute_loss(model, *draw_batch(step, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
stored = sum(p.shape.numel() for p in model.parameters())  # p.numel() is the full number
if rank == 0:
    print(f"each rank stores {stored:,} of {numel:,} parameters")
save_checkpoint(FOLDER / "checkpoint", model, optimizer, extra={"step": 500})

# The checkpoint loads at any number of ranks, here into a new model.
restored = FSDP(load_trained_model())
step = load_checkpoint(FOLDER / "checkpoint", restored)["step"]
loss = compute_held_out_loss(restored)
if rank == 0:
    ranks = [2**k for k in range(7)]
    adam = {"parameter_bytes": 4, "gradient_bytes": 4, "state_bytes": 8}
    save_lines(
        "shard",
        {
            f"stage {stage}": [
                (n, zero_stage_bytes(numel, n, stage, **adam) / 2**20) for n in ranks
            ]
            for stage in range(4)
        },
    )
    print(f"held out after step {step}: {loss:.3f} nats per byte")
dist.destroy_process_group()
