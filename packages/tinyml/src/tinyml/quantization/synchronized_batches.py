"""Synchronized forward passes: all batches run to the same layer before that layer is changed.

A method that changes layers one after another, each on the inputs that the changed layers before it
produce, would otherwise run the model from the start for every layer. Here each batch runs once, in
a separate thread that waits inside the layer. Only one thread runs at a time, so the result does
not depend on scheduling, and the model's code is called unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn


class _Stop(BaseException):
    """Ends the other batches after one of them has failed."""


class _Batch:
    """One forward pass, which runs until it reaches a layer that has not been visited."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.waits_at: str | None = None
        self.inputs: Tensor | None = None
        self.error: BaseException | None = None
        self.over = self._stopped = False
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        #: True for tokens that are not padding, of shape (batch, seq).
        self._mask = None if mask is None else cast(Tensor, mask).bool()
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(model, batch), daemon=True)
        self._thread.start()

    def _run(self, model: nn.Module, batch: Any) -> None:
        self._go.acquire()
        try:
            with torch.no_grad():  # grad mode is local to a thread
                if isinstance(batch, Mapping):
                    model(**batch)
                else:
                    model(batch)
        except _Stop:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self._paused.release()

    def pause(self, name: str, inputs: Tensor) -> None:
        """Wait inside the layer; called by the batch's own thread."""
        self.waits_at = name
        if self._mask is not None and inputs.shape[:-1] == self._mask.shape:
            self.inputs = inputs[self._mask]
        else:
            self.inputs = inputs.reshape(-1, inputs.shape[-1])
        self._paused.release()
        self._go.acquire()
        self.waits_at = self.inputs = None
        if self._stopped:
            raise _Stop

    def resume(self) -> None:
        """Run the batch to its next pause or to its end."""
        self._go.release()
        self._paused.acquire()

    def stop(self) -> None:
        """End the batch at the point where it waits."""
        if not self.over:
            self._stopped = True
            self.resume()
        self._thread.join()

    def is_running(self) -> bool:
        """Return True if the calling thread is the batch's thread."""
        return threading.current_thread() is self._thread


def visit_layers(
    model: nn.Module,
    batches: Sequence[Any],
    layers: Mapping[str, nn.Module],
    visit: Callable[[str, list[Tensor]], None],
) -> None:
    """Call `visit(name, inputs)` for each layer that runs, in the order in which batches reach it.

    A batch is the argument of the model, or a mapping of keyword arguments. `inputs` contains one
    tensor (tokens, width) per batch, from the layer's first call, without the tokens that an
    `attention_mask` of shape (batch, seq) marks as padding. The batches continue with the layer as
    `visit` leaves it. An error in the model is raised in the caller.
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
    try:
        for batch in batches:
            running.append(_Batch(model, batch))
        for name, ready in _stops(running):
            inputs = [b.inputs for b in ready if b.inputs is not None]
            visit(name, inputs)
            done.add(name)
    finally:
        for batch in running:
            batch.stop()
        for handle in handles:
            handle.remove()


def _stops(running: Sequence[_Batch]) -> Iterator[tuple[str, list[_Batch]]]:
    """Run the batches from layer to layer; yield each layer and the batches that wait there."""
    order: dict[str, None] = {}
    ready = list(running)
    while ready:
        for batch in ready:
            batch.resume()
            if batch.error is not None:
                raise batch.error
            if batch.waits_at is not None:
                order.setdefault(batch.waits_at)
        waiting = {batch.waits_at for batch in running if not batch.over}
        # Batches may follow different paths; the layer that was reached first is next.
        name = next((name for name in order if name in waiting), None)
        ready = [batch for batch in running if not batch.over and batch.waits_at == name]
        if name is not None:
            yield name, ready


def second_moment(inputs: Sequence[Tensor]) -> Tensor:
    """Return H = sum x x^T over inputs of shape (tokens, width)."""
    width = inputs[0].shape[-1]
    total = torch.zeros(width, width, dtype=torch.float64, device=inputs[0].device)
    for batch_inputs in inputs:
        tokens = batch_inputs.double()
        total.addmm_(tokens.t(), tokens)
    return total
