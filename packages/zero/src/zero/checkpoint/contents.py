"""The contents of any program's checkpoint, mapped to the model's names.

The model's names may have a prefix in the checkpoint, such as `model.`; if several prefixes fit,
loading raises an error. An optimizer's names may have all, part or none of this prefix, even if the
names in the model begin with it. An optimizer's state may be stored under parameter names or
parameter numbers, nested or flat, as torch's `get_optimizer_state_dict` and `Optimizer.state_dict`
return it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zero.checkpoint import checksums
from zero.checkpoint.ownership import Part
from zero.checkpoint.storage import HEADER, Folder
from zero.checkpoint.weights import Weights
from zero.optimizer.state_dict import get_options

#: The version of the format that `save_checkpoint` writes, and the only one that is loaded.
VERSION = 4


@dataclass
class Contents:
    """A checkpoint, and the mapping of its entries to those of a model and an optimizer."""

    source: Folder | Weights
    #: Maps the name of each tensor in the model to its stored name.
    model: dict[str, str]
    #: Maps a parameter's name in the model, or its number in the optimizer, to the (key, stored
    #: name) pairs of its state.
    states: dict[str | int, list[tuple[str, str]]] = field(default_factory=dict)
    #: Maps a parameter's name or number to the options of its group.
    options: dict[str | int, dict[str, Any]] = field(default_factory=dict)
    #: The states of modules that are neither parameters nor buffers, by their names in the model.
    modules: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    #: The prefix of each optimizer: the part of the names before `state` and `param_groups`.
    optimizers: list[str] = field(default_factory=list)
    #: Stored state of parameters that the model does not have.
    foreign_states: list[str] = field(default_factory=list)

    def get_shape_and_dtype(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return the shape and dtype of a stored tensor of the model."""
        return self.source.tensors[self.model[name]]

    def read_whole(self, stored: str) -> torch.Tensor:
        """Return the whole tensor that is stored under this name."""
        shape, dtype = self.source.tensors[stored]
        values = torch.empty(shape.numel(), dtype=dtype)
        self.source.read([Part(stored, shape, 0, shape.numel(), values)])
        return values.view(shape)


def read_contents(source: Folder | Weights, names: Collection[str], prefix: str | None) -> Contents:
    """Return the contents of a checkpoint under the names of a model.

    Raise ValueError if names are ambiguous, or for another format version or missing checksums.

    names: every name of a tensor of the model.
    prefix: the prefix of the model's names in another program's checkpoint; None to find it.
    """
    is_native = isinstance(source, Folder) and HEADER in source.objects
    if is_native:
        prefix = "model."
    elif prefix is None:
        prefix = _find_prefix(source.tensors, names)
    stored = [name for name in source.tensors if name.startswith(prefix)]
    contents = Contents(source, {name.removeprefix(prefix): name for name in stored})
    if isinstance(source, Folder):
        sorter = _EntrySorter(source, contents, set(names), prefix)
        if is_native:
            sorter.read_native()
        else:
            sorter.read_other()
    return contents


class _EntrySorter:
    """The entries of a folder, sorted into model, optimizer and extra values."""

    def __init__(self, folder: Folder, contents: Contents, names: set[str], prefix: str) -> None:
        self.folder = folder
        self.contents = contents
        self.names = names
        self.prefix = prefix
        #: The values of all entries that are not tensors.
        self.objects = folder.read([], sorted(folder.objects))
        #: The options of each parameter group, by group number or parameter name.
        self.groups: dict[str, dict[str, Any]] = {}
        #: Parameter, key and stored name of each entry of the optimizer's state.
        self.states: list[tuple[str, str, str]] = []

    def read_native(self) -> None:
        """Sort the entries of a folder that `save_checkpoint` wrote.

        Raise ValueError if the folder has another format version or no checksums.
        """
        header = self.objects.pop(HEADER)
        if header["version"] != VERSION:
            raise ValueError(
                f"expected format {VERSION}, got {header['version']} in {self.folder.path}: load "
                "it with the version of zero that wrote it"
            )
        if not (self.folder.path / checksums.NAME).exists():
            raise ValueError(f"{self.folder.path} has lost its checksums: use an older checkpoint")
        entries = self.folder.metadata.state_dict_metadata
        self._sort([name for name in entries if name.startswith("optimizer.")], ["optimizer."])
        self._name_parameters("")
        self.contents.modules = header["modules"]
        self.contents.extra = dict(header["extra"])

    def read_other(self) -> None:
        """Sort the entries of another program's folder."""
        entries = [
            name
            for name in self.folder.metadata.state_dict_metadata
            if not (name.startswith(self.prefix) and name.removeprefix(self.prefix) in self.names)
        ]
        self.contents.optimizers = _find_optimizer_prefixes(entries, self.names)
        self._sort(entries, sorted(self.contents.optimizers, key=len, reverse=True))
        if len(self.contents.optimizers) == 1:
            optimizer_names = [parameter for parameter, _, _ in self.states]
            for key, group in self.groups.items():
                members = group.get("param_names", group.get("params", [key]))
                optimizer_names += [str(member) for member in members]
            state_prefix = _find_state_prefix(optimizer_names, self.names, self.prefix)
            self._name_parameters(state_prefix)

    def _sort(self, entries: Sequence[str], roots: Sequence[str]) -> None:
        """Assign each entry to the first optimizer in `roots` with its prefix, or to `extra`."""
        contents = self.contents
        for name in entries:
            root = next((root for root in roots if name.startswith(root)), None)
            if root is not None and self._add_optimizer_entry(name, name.removeprefix(root)):
                contents.model.pop(name.removeprefix(self.prefix), None)
            elif name in self.objects:
                contents.extra[name] = self.objects[name]

    def _add_optimizer_entry(self, name: str, path: str) -> bool:
        """Record an entry of state or options; return False if the entry is neither."""
        kind, _, entry = path.partition(".")
        if kind == "state":
            parameter, _, key = entry.rpartition(".")
            self.states.append((parameter, key, name))
        elif kind == "param_groups" and entry:
            number, _, option = entry.rpartition(".")
            is_object = name in self.objects
            value = self.objects[name] if is_object else self.contents.read_whole(name)
            self.groups.setdefault(number, {})[option] = value
        elif kind == "param_groups":
            self.groups.update((str(i), group) for i, group in enumerate(self.objects[name]))
        else:
            return False
        return True

    def _name_parameters(self, state_prefix: str) -> None:
        """Find the model's name of each parameter in the optimizer's groups and state.

        state_prefix: the prefix of the optimizer's names.
        """
        #: Maps the members of the stored groups to their names, or to themselves.
        name_of: dict[Any, str | int] = {}
        for key, group in self.groups.items():
            # A flattened dictionary has one group per parameter, under the parameter's name.
            members = group.get("params", [key])
            # torch stores names in addition to numbers if the optimizer has them.
            for member, name in zip(members, group.get("param_names", members), strict=True):
                name_of[member] = name.removeprefix(state_prefix) if isinstance(name, str) else name
                self.contents.options[name_of[member]] = get_options(group)
        for parameter, key, stored in self.states:
            model_name = _find_name(parameter, state_prefix, self.names, name_of)
            if model_name is None:
                self.contents.foreign_states.append(stored)
            else:
                self.contents.states.setdefault(model_name, []).append((key, stored))


def _find_optimizer_prefixes(entries: Sequence[str], names: set[str]) -> list[str]:
    """Return the prefix of each optimizer: the part of its names before `param_groups`.

    A module may be called `param_groups`, so copies of the model's tensors and entries of an
    optimizer's state do not count.
    """
    roots = set()
    for entry in entries:
        components = entry.split(".")
        ends = [match.end() for match in re.finditer(r"\.", entry)]
        if "param_groups" in components and not any(entry[end:] in names for end in ends):
            before = components[: components.index("param_groups")]
            roots.add("".join(f"{component}." for component in before))
    state_prefixes = tuple(f"{root}state." for root in roots)
    return sorted(root for root in roots if not root.startswith(state_prefixes))


def _find_state_prefix(optimizer_names: Sequence[str], names: set[str], prefix: str) -> str:
    """Return the suffix of the model's prefix that the optimizer's names also have.

    In `{"model": ..., "optimizer": ...}` the model's tensors are stored under `model.`. The
    optimizer's state names them without this prefix, even if the model's own names begin with
    `model.`. Raise ValueError if two suffixes fit equally well.
    """
    num_fitting = {}
    starts = [len(prefix), *(match.start() for match in re.finditer(r"[^.]+\.", prefix))]
    for suffix in (prefix[start:] for start in starts):
        suffixed = {name for name in optimizer_names if name.startswith(suffix)}
        num_fitting[suffix] = sum(name.removeprefix(suffix) in names for name in suffixed)
    largest = max(num_fitting.values())
    best = [suffix for suffix, number in num_fitting.items() if number == largest]
    if len(best) > 1 and largest:
        raise ValueError(
            f"the optimizer's state may name parameters with or without {best[-1]!r}: rename the "
            "model's modules so that one reading fits"
        )
    return best[0]


def _find_name(
    parameter: str, state_prefix: str, names: set[str], name_of: Mapping[Any, str | int]
) -> str | int | None:
    """Return the model's name of a stored parameter, or its number; None if it is unknown."""
    if parameter.isdigit() and int(parameter) in name_of:
        return name_of[int(parameter)]
    name = parameter.removeprefix(state_prefix)
    return name if name in names else None


def _find_prefix(stored: Collection[str], names: Collection[str]) -> str:
    """Return the prefix that fits most names, "" if none fits; raise ValueError if several fit."""
    # Maps each prefix to the stored names that become names of the model when it is removed.
    fitting: dict[str, list[str]] = {}
    for name in stored:
        for start in [0, *(match.end() for match in re.finditer(r"\.", name))]:
            if name[start:] in names:
                fitting.setdefault(name[:start], []).append(name)
    if not fitting:
        return ""
    chosen = max(fitting, key=lambda prefix: len(fitting[prefix]))
    for prefix, fits in fitting.items():
        # Names that begin with the chosen prefix are part of the chosen model.
        is_within = len(fits) < len(fitting[chosen]) and all(n.startswith(chosen) for n in fits)
        if prefix != chosen and not is_within:
            raise ValueError(
                f"expected one prefix of the model's names, got {min(chosen, prefix)!r} and "
                f"{max(chosen, prefix)!r}: pass prefix=..."
            )
    return chosen
