"""Step 4: train on two processes and average gradients while the backward pass runs (ddp).

Start it with: torchrun --standalone --nproc-per-node 2 docs/tutorial/train.py
"""

import collectives
import torch
import torch.distributed as dist
from ddp import DDP
from model import FOLDER, Decoder, compute_held_out_loss, compute_loss, draw_batch, save_lines

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)  # DDP sends the weights of rank 0 to every rank
model = DDP(Decoder(), all_reduce=collectives.all_reduce, allocate=collectives.shared_empty)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 400)
losses = []
for step in range(400):
    loss = compute_loss(model, *draw_batch(step, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    losses.append((step, loss.item()))
if rank == 0:
    print("loss every 100 steps: " + ", ".join(f"{loss:.2f}" for _, loss in losses[::100]))
    save_lines("train", {"loss of rank 0": losses[::10]})
    torch.save(model.module.state_dict(), FOLDER / "model.pt")
    print(f"held out: {compute_held_out_loss(model.module):.3f} nats per byte")
dist.destroy_process_group()
