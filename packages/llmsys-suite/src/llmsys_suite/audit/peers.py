"""Peers that the audit builds and times itself, so that a slowed peer is detected.

Every ratio of a run divides by torch's DDP or SDPA. If the run slowed its peer, every other variant
would look fast. The audit's peer is written out here and timed in the same rounds as the run's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from flashattn2 import flash_attention
from torch import Tensor, nn

from llmsys_suite.audit.check import Check, within
from llmsys_suite.audit.training import PEER_BAND
from llmsys_suite.measure.samples import PEER
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import attention as attention_stage
from llmsys_suite.variants import VARIANTS

ROUNDS = 15


def data_parallel_ratio(run: Run) -> float:
    """Return the time of the run's torch DDP over that of the audit's, on all ranks."""
    tokens, targets = run.batch(0, shared=True)
    torch.manual_seed(run.config.seed)
    decoder = Decoder(run.model, attention=flash_attention).to(run.device)
    model = nn.parallel.DistributedDataParallel(decoder, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.config.learning_rate)

    def step() -> None:
        with run.autocast():
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()

    variant = VARIANTS[PEER](run, run.model)
    ratio = _ratio(run, lambda: variant.step(tokens, targets), step)
    variant.close()
    # Discard the phases that the recorder timed outside of any step.
    run.recorder.take()
    return float(statistics.median(run.gather(ratio)))


def attention_check(run: Run) -> Check:
    """Check the time of the run's SDPA with a direct call."""
    q, k, v = attention_stage.inputs(run)

    def direct() -> list[Tensor]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]

    kernel = attention_stage.KERNELS[attention_stage.PEER]
    ratio = _ratio(run, lambda: attention_stage.forward_backward(kernel, q, k, v), direct)
    return within("time of SDPA", "the stage's kernel", "a direct call", 1.0, ratio, PEER_BAND)


def _ratio(run: Run, ours: Callable[[], object], audits: Callable[[], object]) -> float:
    """Return the median ratio of the times of two calls in the same round."""
    ratios = []
    for number in range(ROUNDS + 1):
        clock = [_monotonic(run)]
        for call in (ours, audits):
            call()
            clock.append(_monotonic(run))
        if number:  # The first round is a warm-up.
            ratios.append((clock[1] - clock[0]) / (clock[2] - clock[1]))
    return statistics.median(ratios)


def _monotonic(run: Run) -> float:
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    return time.monotonic()
