"""Data parallelism: every rank holds the model, and gradients are averaged while they are made.

Notable:
- a hook a parameter fires when its gradient is final; the bucket that it completes is sent at once
  and travels while autograd computes the layers below;
- buckets follow the order of the backward pass: in the first step a guess (parameters reversed),
  from the second on the order in which gradients became ready on rank 0;
- a gradient is scaled into its bucket in one pass, and `.grad` is that place from then on;
- buckets carry flags, so that ranks which disagree find out at no cost (see `bucket`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ddp.agreement import broadcast_state, check_same_model
from ddp.bucket import Allocate
from ddp.collective import AllReduce, link
from ddp.compression import Cast, Compression, Uncompressed
from ddp.meter import Meter
from ddp.reducer import MOST_EXACT_RANKS, Reducer
from ddp.watch import Watch


class DDP(nn.Module, Joinable):
    """Wrap `module`; after `finish_gradient_synchronization()` gradients are means over the ranks.

        model = DDP(module)
        loss(model(batch)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()

    Construction gives every rank the weights and buffers of rank 0.

    - `bucket_size_mb`: in 2**20 bytes; None sends each parameter by itself as it becomes ready.
    - `all_reduce`: called like `torch.distributed.all_reduce`, which is the default.
    - `allocate`: `allocate(numel, dtype=..., group=...)` makes the memory of each bucket.
    - `gradient_dtype`: what travels, for example bfloat16; sums are made in the gradients' dtype.
    - `compression`: any other way to sum, such as `PowerSGD(rank)`.
    - `find_unused_parameters`: count a gradient that some ranks lack as zero; otherwise an error.
    - `check_nan`: look at each bucket before it is sent.

    Raises ValueError on every rank if modules or options differ across ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 25.0,
        *,
        group: dist.ProcessGroup | None = None,
        all_reduce: AllReduce | None = None,
        allocate: Allocate | None = None,
        gradient_dtype: torch.dtype | None = None,
        compression: Compression | None = None,
        find_unused_parameters: bool = False,
        check_nan: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if bucket_size_mb is not None and not bucket_size_mb > 0:
            raise ValueError(
                f"bucket_size_mb is {bucket_size_mb}; it must be above zero, or None to send each "
                "parameter by itself"
            )
        if gradient_dtype is not None and compression is not None:
            raise ValueError(
                f"gradient_dtype {gradient_dtype} and compression {compression!r} are two ways to "
                "send the same gradients; pass one"
            )
        self.module = module
        self.meter = Meter()
        self._link = link(group, all_reduce)
        self._watch = Watch(self._link.group)
        self._synchronizing = True
        settings = {
            "bucket_size_mb": bucket_size_mb,
            "gradient_dtype": gradient_dtype,
            "compression": compression,
            "find_unused_parameters": find_unused_parameters,
            "check_nan": check_nan,
        }
        with self._watch.naming("the comparison of the models"):
            check_same_model(module, settings, self._link.group)
        with self._watch.naming("the broadcast of the weights"):
            broadcast_state(module, self._link.group)

        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._reducer = Reducer(
            list(trained),
            list(trained.values()),
            bucket_bytes=0.0 if bucket_size_mb is None else bucket_size_mb * 2**20,
            link=self._link,
            watch=self._watch,
            meter=self.meter,
            compression=compression or (Cast(gradient_dtype) if gradient_dtype else Uncompressed()),
            allocate=allocate,
            find_unused_parameters=find_unused_parameters,
            check_nan=check_nan,
        )
        for index, parameter in enumerate(trained.values()):
            hook = _hook(weakref.ref(self), index)
            parameter.register_post_accumulate_grad_hook(hook)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        self._watch.check()
        if self._reducer.begun and torch.is_grad_enabled():
            reason = "a forward pass began before finish_gradient_synchronization()"
            self._watch.fail(reason)
            raise RuntimeError(
                f"rank {self._link.rank}: {reason}, so the optimizer may have used gradients that "
                "were not averaged yet; call it after each backward pass"
            )
        with self.meter.forward():
            return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank: backward passes in here send nothing.

        If the block raises, its gradients are incomplete: the other ranks are told, and this model
        refuses to go on.
        """
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        except BaseException as error:
            self._watch.fail(f"no_sync() was left by {type(error).__name__}: {error}")
            raise
        finally:
            self._synchronizing = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Wait until every `.grad` is the mean over the ranks; call it before the optimizer.

        Gradients that only `no_sync` backward passes made are sent here too; a parameter without a
        gradient on any rank keeps `None`. Raises RuntimeError on every rank if a parameter has a
        gradient on some ranks only, if one holds NaN (with `check_nan`), or if a rank is lost.
        """
        self._watch.check()
        if not self._reducer.begun:
            self._begin()
        self._reducer.finish()

    def join(
        self,
        *,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may take different numbers of steps.

        A rank that leaves it early keeps the others company with zeros until the last one is done,
        and gets that one's weights. With `divide_by_initial_world_size=False` the mean is over the
        ranks that still have inputs. Names and meaning are those of torch's DDP.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **_: Any) -> JoinHook:
        """For `torch.distributed.algorithms.Join`."""
        if not divide_by_initial_world_size and self._link.world > MOST_EXACT_RANKS:
            raise ValueError(
                f"counting the ranks that take part is exact up to {MOST_EXACT_RANKS} ranks, not "
                f"{self._link.world}; pass divide_by_initial_world_size=True"
            )
        self._reducer.divide_by_initial_world_size = divide_by_initial_world_size
        return _Company(self)

    @property
    def join_device(self) -> torch.device:
        """For `torch.distributed.algorithms.Join`."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """For `torch.distributed.algorithms.Join`."""
        return self._link.group

    def _gradient_ready(self, index: int) -> None:
        if self._synchronizing:
            if not self._reducer.begun:
                self._begin()
            self._reducer.collect(index)
            return
        # While a join is on, ranks agree at the start of a step that is sent, and only there.
        if not self._join_config.enable:
            self._reducer.rebuild()
        self._reducer.adopt(index)

    def _begin(self) -> None:
        if self._join_config.enable:
            Join.notify_join_context(self)
        self._reducer.begin()


class _Company(JoinHook):
    """What a rank without inputs does while others still have some."""

    def __init__(self, ddp: DDP) -> None:
        self._ddp = ddp

    @torch.no_grad()
    def main_hook(self) -> None:
        self._ddp._reducer.begin()
        self._ddp._reducer.finish(taking_part=False)

    def post_hook(self, is_last_joiner: bool) -> None:
        rank, group = self._ddp._link.rank, self._ddp._link.group
        source = torch.tensor([rank if is_last_joiner else -1], device=self._ddp.join_device)
        dist.all_reduce(source, op=dist.ReduceOp.MAX, group=group)
        broadcast_state(self._ddp.module, group, int(source))
        # Join leaves this on: steps after the context need nobody's company.
        self._ddp._join_config = self._ddp._join_config._replace(enable=False)


def _hook(owner: weakref.ref[DDP], index: int) -> Callable[[Tensor], None]:
    """A hook that lets its DDP go: a module that is wrapped again is not sent twice."""

    def gradient_ready(_: Tensor) -> None:
        ddp = owner()
        if ddp is not None:
            ddp._gradient_ready(index)

    return gradient_ready
