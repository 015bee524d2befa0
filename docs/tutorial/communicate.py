"""Step 3: sum an array over two processes with three algorithms (collectives).

Start it with: torchrun --standalone --nproc-per-node 2 docs/tutorial/communicate.py
"""

import time

import collectives
import torch
import torch.distributed as dist
from model import save_lines

SIZES = (1_000, 10_000, 100_000, 1_000_000)

dist.init_process_group("gloo")
medians = {}
for algorithm in ("ring", "tree", "shared_memory"):
    for size in SIZES:
        seconds = []
        for _ in range(21):
            gradients = torch.full((size,), float(dist.get_rank()))
            start = time.perf_counter()
            collectives.all_reduce(gradients, algorithm=algorithm)
            seconds.append(time.perf_counter() - start)
            assert (gradients == 1.0).all()  # 0 + 1
        medians.setdefault(algorithm, []).append((4 * size, sorted(seconds)[10] * 1e3))
if dist.get_rank() == 0:
    for algorithm, points in medians.items():
        print(f"{algorithm}: " + ", ".join(f"{ms:.2f} ms" for _, ms in points))
    save_lines("communicate", medians)
dist.destroy_process_group()
