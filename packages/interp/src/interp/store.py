"""Activations on disk: written during the run, read as memory maps.

    last = lambda z: z[:, -1].unflatten(-1, (12, 64))            # one position, by head
    with record_to("activations", model, "blocks.*.attention.o:input", select=last):
        for tokens in batches:
            model(tokens)
    open_records("activations")["blocks.3.attention.o:input"]    # all calls, concatenated

The index is written last, so that an interrupted run is not mistaken for a complete one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from interp.tap import expand_sites, tapped

_INDEX = "index.json"


class Records(Mapping[str, Tensor]):
    """Recorded activations by site, with all calls along the first dimension, read on access."""

    def __init__(self, folder: Path, index: Mapping[str, list[str]]) -> None:
        self.folder, self.index = folder, index

    def __getitem__(self, site: str) -> Tensor:
        calls = list(self.calls(site))
        if shapes := {tuple(x.shape[1:]) for x in calls[1:]} - {tuple(calls[0].shape[1:])}:
            raise ValueError(
                f"calls of {site!r} have other shapes too: {shapes}; read them with calls()"
            )
        return torch.cat(calls)

    def calls(self, site: str) -> Iterator[Tensor]:
        """Yield one tensor per call of the module, in order."""
        if site not in self.index:
            raise KeyError(f"{site!r} was not recorded; recorded: {', '.join(self) or 'nothing'}")
        for number, name in enumerate(self.index[site]):
            with safe_open(self.folder / name, framework="pt") as file:
                yield file.get_tensor(f"{number} {site}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)


@contextmanager
def record_to(
    folder: str | Path,
    model: nn.Module,
    *sites: str,
    select: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    chunk_mib: float = 64.0,
) -> Iterator[None]:
    """Record every call of the modules at `sites`, named as in `record`, into an empty folder.

    `select` maps an activation to the part to store, such as some positions or heads, and `dtype`
    is the stored dtype. Raises FileExistsError if the folder is not empty.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty; pass a new folder")
    names = expand_sites(model, sites)
    index: dict[str, list[str]] = {site: [] for site in names}
    waiting: dict[str, Tensor] = {}
    files = 0

    def write() -> None:
        nonlocal files
        if waiting:
            part = path / f"{files:06d}.part"
            save_file(waiting, part)
            part.rename(part.with_suffix(".safetensors"))
            files += 1
            waiting.clear()

    def keep(site: str, tensor: Tensor) -> None:
        selected = tensor.detach() if select is None else select(tensor.detach())
        stored = torch.empty_like(selected, device="cpu", dtype=dtype or selected.dtype)
        stored.copy_(selected)
        waiting[f"{len(index[site])} {site}"] = stored.contiguous()
        index[site].append(f"{files:06d}.safetensors")
        if sum(x.nbytes for x in waiting.values()) >= chunk_mib * 2**20:
            write()

    try:
        with tapped(model, {site: partial(keep, site) for site in names}):
            yield
        write()
    finally:
        for part in path.glob("*.part"):
            part.unlink()
    if silent := [site for site, calls in index.items() if not calls]:
        raise RuntimeError(
            f"nothing was recorded at {', '.join(silent)}: the module was not called, or was "
            "compiled before"
        )
    part = path / f"{_INDEX}.part"
    part.write_text(json.dumps(index))
    part.rename(path / _INDEX)


def open_records(folder: str | Path) -> Records:
    """Open the records of `record_to`. Raises FileNotFoundError if that run did not end."""
    path = Path(folder)
    if not (path / _INDEX).is_file():
        raise FileNotFoundError(
            f"{path / _INDEX} does not exist: nothing was recorded there, or the run did not end"
        )
    return Records(path, json.loads((path / _INDEX).read_text()))
