"""The contents of any program's checkpoint, mapped to the model's names.

The model's names may have a prefix in the checkpoint, such as `model.`; the prefix that fits most
tensors is used. If another prefix may be meant, the load is refused. An optimizer's names may have
all, part or none of that prefix, even if the model's own names begin with it. An optimizer's state
may be stored under parameter names or parameter numbers, nested or flat, as torch's
`get_optimizer_state_dict` and `Optimizer.state_dict` return it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zero.checkpoint import checksums
from zero.checkpoint.ownership import Part
from zero.checkpoint.storage import HEADER, Folder
from zero.checkpoint.weights import Weights
from zero.optimizer.state_dict import options_of

#: The version of the format that `save_checkpoint` writes, and the only one that is loaded.
VERSION = 4
USUAL_PREFIXES = ("", "model.", "module.")

#: Maps a parameter's name in the model, or its number in the optimizer, to the (key, stored name)
#: pairs of its state.
States = dict[str | int, list[tuple[str, str]]]


@dataclass
class Contents:
    """A checkpoint, and the mapping of its entries to those of a model and an optimizer."""

    source: Folder | Weights
    #: Maps the name of each tensor in the model to its stored name.
    model: dict[str, str]
    states: States = field(default_factory=dict)
    #: The optimizer's groups: names of parameters, and options.
    groups: list[dict[str, Any]] | None = None
    modules: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    #: True if `save_checkpoint` wrote the checkpoint.
    is_native: bool = False
    #: The prefix of each optimizer: the part of the names before `state` and `param_groups`.
    optimizers: list[str] = field(default_factory=list)
    #: Stored state of parameters that the model does not have.
    foreign_states: list[str] = field(default_factory=list)

    def shape_and_dtype(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return the shape and dtype of a stored tensor of the model."""
        stored: Any = self.source.tensors[self.model[name]]
        return stored if isinstance(stored, tuple) else (stored.shape, stored.dtype)


def read_contents(
    source: Folder | Weights, names: Mapping[str, str], prefix: str | None
) -> Contents:
    """Find the stored tensors of a model, and their optimizer state.

    names: maps every name of a tensor of the model to the tensor's first name.
    """
    if isinstance(source, Folder) and HEADER in source.objects:
        return _read_native(source)
    stored = list(source.tensors)
    prefix = _find_prefix(stored, names) if prefix is None else prefix
    model = {n.removeprefix(prefix): n for n in stored if n.startswith(prefix)}
    contents = Contents(source, model)
    if isinstance(source, Folder):
        _OtherFolder(source, contents, set(names), prefix).sort_entries()
    return contents


class _OtherFolder:
    """The entries of another program's folder, sorted into model, optimizer and extra values."""

    def __init__(self, folder: Folder, contents: Contents, names: set[str], prefix: str) -> None:
        self.folder = folder
        self.contents = contents
        self.names = names
        self.prefix = prefix
        #: The options of each parameter group, by group number or parameter name.
        self.groups: dict[str, dict[str, Any]] = {}
        #: Parameter, key and stored name of each entry of the optimizer's state.
        self.states: list[tuple[str, str, str]] = []

    def sort_entries(self) -> None:
        """Assign each entry of the folder to the model, an optimizer or the extra values."""
        contents = self.contents
        others = [
            name
            for name in self.folder.metadata.state_dict_metadata
            if not (name.startswith(self.prefix) and name.removeprefix(self.prefix) in self.names)
        ]
        contents.optimizers = _optimizer_prefixes(others, self.names, self.prefix)
        innermost_first = sorted(contents.optimizers, key=len, reverse=True)
        for name in others:
            root = next((root for root in innermost_first if name.startswith(root)), None)
            if root is not None and self._add_optimizer_entry(name, name.removeprefix(root)):
                contents.model.pop(name.removeprefix(self.prefix), None)
            elif name in self.folder.objects:
                contents.extra[name] = _read_entry(self.folder, name)
        if len(contents.optimizers) <= 1:
            self._name_parameters()

    def _add_optimizer_entry(self, name: str, path: str) -> bool:
        """Record an entry of state or options; return False if the entry is neither."""
        kind, _, entry = path.partition(".")
        if kind == "state":
            parameter, _, key = entry.rpartition(".")
            self.states.append((parameter, key, name))
        elif kind == "param_groups" and entry:
            number, _, option = entry.rpartition(".")
            self.groups.setdefault(number, {})[option] = _read_entry(self.folder, name)
        elif kind == "param_groups":
            groups = _read_entry(self.folder, name)
            self.groups.update((str(index), group) for index, group in enumerate(groups))
        else:
            return False
        return True

    def _name_parameters(self) -> None:
        """Find the model's name of each parameter in the optimizer's groups and state."""
        contents = self.contents
        members: list[Any] = []
        member_names: list[str] = []
        for group in self.groups.values():
            members += group.get("params", ())
            member_names += group.get("param_names", ())
        spelled = [parameter for parameter, _, _ in self.states]
        spelled += [member for member in members if isinstance(member, str)]
        strip = _state_prefix(spelled or list(self.groups), self.names, self.prefix)
        # torch stores names in addition to numbers if the optimizer has them.
        has_names = len(member_names) == len(members)
        name_of = dict(zip(members, member_names if has_names else members, strict=True))
        if self.groups:
            keys = sorted(self.groups, key=_numbers_by_value)
            contents.groups = [_make_group(self.groups[key], key, strip) for key in keys]
        for parameter, key, name in self.states:
            model_name = _find_name(parameter, strip, self.names, name_of)
            if model_name is None:
                contents.foreign_states.append(name)
            else:
                contents.states.setdefault(model_name, []).append((key, name))


def _numbers_by_value(key: str) -> tuple[int, str]:
    """Return a sort key that puts "2" before "10", and names in alphabetical order."""
    return (len(key), key) if key.isdigit() else (0, key)


def _optimizer_prefixes(entries: Sequence[str], names: set[str], prefix: str) -> list[str]:
    """Return the prefix of each optimizer: the part of its names before `param_groups`.

    A module may be called `param_groups`, so copies of the model's tensors and entries of an
    optimizer's state do not count.
    """
    prefixes = {_before(n, "param_groups") for n in entries if not _ends_with_name(n, names)}
    candidates = {root for root in prefixes if root is not None}
    state_prefixes = tuple(f"{root}state." for root in candidates)
    roots = {root for root in candidates if not root.startswith(state_prefixes)}
    if not roots:
        # Without groups, a `state` entry counts only if the model has its parameter.
        suffixes = _suffixes(prefix)
        for name in entries:
            root = _before(name, "state")
            if root is not None:
                parameter = name.removeprefix(f"{root}state.").rpartition(".")[0]
                if any(parameter.removeprefix(suffix) in names for suffix in suffixes):
                    roots.add(root)
    return sorted(roots)


def _ends_with_name(entry: str, names: set[str]) -> bool:
    """Return True if the last components of an entry are a name of the model."""
    return any(entry[match.end() :] in names for match in re.finditer(r"\.", entry))


def _before(name: str, word: str) -> str | None:
    """Return the part of a dotted name before the component `word`, or None without `word`."""
    components = name.split(".")
    if word not in components:
        return None
    return "".join(f"{component}." for component in components[: components.index(word)])


def _suffixes(prefix: str) -> list[str]:
    """Return all suffixes of a prefix, shortest first, including the empty string."""
    components = prefix.split(".")[:-1]
    suffixes = [""]
    for component in reversed(components):
        suffixes.append(f"{component}.{suffixes[-1]}")
    return suffixes


def _state_prefix(spelled: Sequence[str], names: set[str], prefix: str) -> str:
    """Return the suffix of the model's prefix that the optimizer's names also have.

    In `{"model": ..., "optimizer": ...}` the model's tensors are stored under `model.`. The
    optimizer's state names them without this prefix, even if the model's own names begin with
    `model.`. Raise ValueError if two suffixes fit equally well.
    """
    count = {}
    for suffix in _suffixes(prefix):
        fitting = {s for s in spelled if s.startswith(suffix) and s.removeprefix(suffix) in names}
        count[suffix] = len(fitting)
    best = [suffix for suffix, number in count.items() if number == max(count.values())]
    if len(best) > 1 and count[best[0]]:
        raise ValueError(
            f"the optimizer's state may name parameters with or without {best[-1]!r}: rename the "
            "model's modules so that one reading fits"
        )
    return best[0]


def _find_name(
    parameter: str, strip: str, names: set[str], name_of: Mapping[Any, str | int]
) -> str | int | None:
    """Return the model's name of a stored parameter, or its number; None if it is unknown.

    name_of: maps the members of the stored groups to their names, or to themselves.
    """
    if parameter.isdigit() and int(parameter) in name_of:
        member = name_of[int(parameter)]
        return member.removeprefix(strip) if isinstance(member, str) else member
    name = parameter.removeprefix(strip)
    if name in names:
        return name
    return int(parameter) if parameter.isdigit() and not name_of else None


def _read_entry(folder: Folder, name: str) -> Any:
    """Read and return an object or a whole tensor."""
    if name in folder.objects:
        return folder.read([], [name])[name]
    shape, dtype = folder.tensors[name]
    values = torch.empty(shape.numel(), dtype=dtype)
    folder.read([Part(name, shape, 0, shape.numel(), values)])
    return values.view(shape)


def _read_native(folder: Folder) -> Contents:
    """Return the contents of a folder that `save_checkpoint` wrote.

    Raise ValueError if the folder has another format version or no checksums.
    """
    header: dict[str, Any] = folder.read([], [HEADER])[HEADER]
    if header["version"] != VERSION:
        raise ValueError(
            f"expected format {VERSION}, got {header['version']} in {folder.path}: load it with "
            "the version of zero that wrote it"
        )
    if not (folder.path / checksums.NAME).exists():
        raise ValueError(f"{folder.path} has lost its checksums: use an older checkpoint")
    model: dict[str, str] = {}
    states: States = {}
    for name in folder.metadata.state_dict_metadata:
        kind, _, path = name.partition(".")
        if kind == "model":
            model[path] = name
        elif kind == "optimizer" and not path.startswith("param_groups."):
            parameter, _, key = path.partition(".")[2].rpartition(".")
            states.setdefault(parameter, []).append((key, name))
    groups = _read_native_groups(folder, header["groups"])
    return Contents(
        folder,
        model,
        states,
        groups,
        modules=header["modules"],
        extra=dict(header["extra"]),
        is_native=True,
    )


def _read_native_groups(folder: Folder, count: int) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [{} for _ in range(count)]
    options = [name for name in folder.objects if name.startswith("optimizer.param_groups.")]
    for name, value in folder.read([], options).items():
        number, _, key = name.removeprefix("optimizer.param_groups.").partition(".")
        groups[int(number)][key] = value
    return [{"names": group.pop("params"), "options": group} for group in groups]


def _find_prefix(stored: Sequence[str], names: Mapping[str, str]) -> str:
    """Return the prefix that fits most tensors; raise ValueError if another may be meant.

    A usual prefix is preferred to other prefixes that fit as many tensors.
    """
    # Maps each prefix to the stored names that are names of the model if it is removed.
    fitting: dict[str, list[str]] = {}
    for name in stored:
        for start in [0, *(match.end() for match in re.finditer(r"\.", name))]:
            if name[start:] in names:
                fitting.setdefault(name[:start], []).append(name)
    # Tied tensors count once, because other programs store them under one or all of their names.
    count = {
        prefix: len({names[name.removeprefix(prefix)] for name in fits})
        for prefix, fits in fitting.items()
    }
    most = max(count.values(), default=0)
    best = [prefix for prefix, number in count.items() if number == most]
    usual = [prefix for prefix in USUAL_PREFIXES if prefix in best]
    chosen = (usual or best or [""])[0]
    rivals = usual
    if not usual:
        # A usual prefix that fits in part may be meant, although another one fits better.
        is_whole = most == len(set(names.values()))
        rivals = [p for p in fitting if p in best or p in USUAL_PREFIXES or not is_whole]
    # Names that begin with the chosen prefix are part of the chosen model.
    others = [p for p in rivals if any(not name.startswith(chosen) for name in fitting[p])]
    if others:
        candidates = ", ".join(repr(prefix) for prefix in sorted({chosen, *others}))
        raise ValueError(
            f"expected one prefix of the model's names, got {candidates}: pass prefix=..."
        )
    return chosen


def _make_group(group: dict[str, Any], key: str, strip: str) -> dict[str, Any]:
    """Return a group's parameters and options.

    A flattened dictionary has one group per parameter, under the parameter's name, `key`.
    """
    members = group.get("param_names") or group.get("params") or [key]
    names = [m.removeprefix(strip) if isinstance(m, str) else m for m in members]
    return {"names": names, "options": options_of(group)}
