"""Run a model on many batches in step, pausing all of them at each layer.

Notable: a method that changes one layer after another, each on the inputs that the changed ones
before it make, would have to run the model from the start for every layer. Here each batch runs
once, in a thread of its own that waits inside the layer; one thread runs at a time, so nothing
depends on their timing, and the model's code is called as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _Stop(BaseException):
    """Ends the other batches after one has failed."""


class _Batch:
    """One forward pass, which runs until it comes to a layer that is not done yet."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.waits_at: str | None = None
        self.inputs: Tensor | None = None
        self.error: BaseException | None = None
        self.over = self._stopped = False
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(model, batch), daemon=True)
        self._thread.start()

    def _run(self, model: nn.Module, batch: Any) -> None:
        self._go.acquire()
        try:
            with torch.no_grad():  # a thread has a mode of its own
                model(batch)
        except _Stop:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self._paused.release()

    def pause(self, name: str, inputs: Tensor) -> None:
        """Called by the batch's own thread, inside the layer."""
        self.waits_at, self.inputs = name, inputs
        self._paused.release()
        self._go.acquire()
        self.waits_at = self.inputs = None
        if self._stopped:
            raise _Stop

    def resume(self) -> None:
        """Let it run to its next pause or its end."""
        self._go.release()
        self._paused.acquire()

    def stop(self) -> None:
        """End it where it waits."""
        if not self.over:
            self._stopped = True
            self.resume()
        self._thread.join()

    def is_running(self) -> bool:
        """Whether the code that is running now is this batch's."""
        return threading.current_thread() is self._thread


def visit_in_step(
    model: nn.Module,
    batches: Sequence[Any],
    layers: Mapping[str, nn.Module],
    visit: Callable[[str, list[Tensor]], None],
) -> None:
    """Call `visit(name, inputs)` for each layer that runs, in the order in which they come to it.

    `inputs` are those of all batches, (tokens, width) each, at the layer's first use. What `visit`
    does to the layer is what the batches go on with. An error in the model is raised here.
    """
    done: set[str] = set()
    running: list[_Batch] = []

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
            if name not in done:
                first = (*inputs, *options.values())[0]
                next(batch for batch in running if batch.is_running()).pause(name, first)

        return hook

    handles = [
        layer.register_forward_pre_hook(watch(name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    order: dict[str, None] = {}
    try:
        for batch in batches:
            running.append(_Batch(model, batch))
        ready = list(running)
        while True:
            for batch in ready:
                batch.resume()
                if batch.error is not None:
                    raise batch.error
                if batch.waits_at is not None:
                    order.setdefault(batch.waits_at)
            waiting = [batch for batch in running if not batch.over]
            if not waiting:
                return
            # Batches may take different ways: the layer that was met first is next.
            name = next(n for n in order if any(batch.waits_at == n for batch in waiting))
            ready = [batch for batch in waiting if batch.waits_at == name]
            inputs = [b.inputs for b in ready if b.inputs is not None]
            visit(name, [x.reshape(-1, x.shape[-1]) for x in inputs])
            done.add(name)
    finally:
        for batch in running:
            batch.stop()
        for handle in handles:
            handle.remove()


def second_moment(inputs: Sequence[Tensor]) -> Tensor:
    """H = sum x x^T over inputs (tokens, width) each."""
    width = inputs[0].shape[-1]
    total = torch.zeros(width, width, dtype=torch.float64, device=inputs[0].device)
    for each in inputs:
        tokens = each.double()
        total.addmm_(tokens.t(), tokens)
    return total
