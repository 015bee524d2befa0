"""DiLoCo of torchft, with its lighthouse and managers, gives the same parameters."""

import sys
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))  # processes that `run` starts import it by name

from paramserver import LocalSteps, run
from paramserver_training import build_model, draw_batch, train

pytestmark = pytest.mark.exhaustive
torchft = pytest.importorskip("torchft", reason="the peer torchft is not installed")
coordination = pytest.importorskip("torchft.coordination")
local_sgd = pytest.importorskip("torchft.local_sgd")

INNER = partial(torch.optim.AdamW, lr=0.01)
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
WORKERS = 2
STEPS = 12
LOCAL = 4


def train_with_torchft(number, module, lighthouse, trained):
    wait = timedelta(seconds=60)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    inner, outer = INNER(module.parameters()), OUTER(module.parameters())
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=wait),
        min_replica_size=WORKERS,
        load_state_dict=module.load_state_dict,
        state_dict=module.state_dict,
        use_async_quorum=False,
        init_sync=False,
        replica_id=f"site{number}",
        timeout=wait,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="localhost",
    )
    try:
        with local_sgd.DiLoCo(manager, [module], inner, outer, sync_every=LOCAL, pin_memory=False):
            for step in range(STEPS):
                inputs, targets = draw_batch(step, number)
                inner.zero_grad()
                F.mse_loss(module(inputs), targets).backward()
                inner.step()
        trained[number] = {name: p.detach() for name, p in module.named_parameters()}
    finally:
        manager.shutdown(wait=False)


def test_torchft_diloco_gives_equal_parameters():
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=WORKERS)
    trained = {}
    # Created before the threads, which share a random number generator.
    threads = [
        threading.Thread(target=train_with_torchft, args=(w, module, lighthouse.address(), trained))
        for w, module in enumerate([build_model() for _ in range(WORKERS)])
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        lighthouse.shutdown()
    result = run(
        train, build_model(), INNER, LocalSteps(LOCAL, OUTER), args=(STEPS,), workers=WORKERS
    )
    for name, tensor in result.parameters.items():
        for theirs in trained.values():
            torch.testing.assert_close(theirs[name], tensor, rtol=1e-10, atol=1e-12)
    assert len(trained) == WORKERS
