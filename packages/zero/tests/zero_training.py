"""Helpers of several tests: a small model, trained sharded and in one process."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from zero import FSDP, ShardedOptimizer


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def draw_batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def build_pair(stage=3, name="AdamW", *, build=make, group=None, lr=0.1, **options):
    """Return a sharded model and its optimizer, and those of one process."""
    model, twin = build(), build()
    fsdp_options = ("reshard_after_forward", "prefetch", "shard")
    fsdp = {k: options.pop(k) for k in fsdp_options if k in options}
    cls = getattr(torch.optim, name)
    theirs = cls(twin.parameters(), lr=lr, **options)
    if stage == 3:
        model = FSDP(model, group=group, **fsdp)
        return model, cls(model.parameters(), lr=lr, **options), twin, theirs
    ours = ShardedOptimizer(
        model.parameters(),
        cls,
        group=group,
        shard_gradients=stage == 2,
        lr=lr,
        **options,
    )
    return model, ours, twin, theirs


def train(model, ours, twin, theirs, loss, steps=2, clip=None):
    """Train both on the same batches, and compare them."""
    world = dist.get_world_size()
    for number in range(steps):
        loss(model, draw_batch(number, dist.get_rank())).backward()
        for rank in range(world):
            (loss(twin, draw_batch(number, rank)) / world).backward()
        for module, optimizer in ((model, ours), (twin, theirs)):
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return assert_alike(model, twin)


def compute_mean_square(model, inputs):
    return model(inputs).square().mean()


def assert_alike(model, twin, rtol=1e-9, atol=1e-12, case=""):
    """Assert that a sharded model has the same parameters as another model.

    A failure names the parameter, and the case if one is passed.
    """
    whole = (
        model.gather_full_params() if isinstance(model, FSDP) else dict(model.named_parameters())
    )
    for name, value in twin.named_parameters():
        both = [whole[name].data, value.data]
        if value.dtype not in (torch.float32, torch.float64):
            # torch cannot compare all other dtypes.
            both = [value.to(torch.complex128) for value in both]
        label = f"{case}: {name}" if case else name
        message = partial("{}: {}".format, label)
        torch.testing.assert_close(*both, rtol=rtol, atol=atol, msg=message)
    return True


def flip_bits(path, every, load):
    """Flip a bit in one of `every` bytes of each file; count loads, and loads that passed."""
    passed = tried = 0
    for file in sorted(Path(path).iterdir()):
        good = file.read_bytes()
        for at in range(0, len(good), every):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            file.write_bytes(bad)
            tried += 1
            try:
                load()
                passed += 1
            except RuntimeError as error:
                passed += "damaged" not in str(error)
        file.write_bytes(good)
    return tried, passed
