"""What a checkpoint holds of a model and an optimizer, whoever wrote it, by the model's own names.

Notable:
- names may stand under a prefix (`model.`), which is found by looking which fits the most of them;
- an optimizer's names may lack all or part of that prefix, even where the model's begin with it;
- an optimizer's state may be under parameters' names or numbers, nested or flat, as torch's
  `get_optimizer_state_dict` and `Optimizer.state_dict` give it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zero.checkpoint.holding import Part
from zero.checkpoint.storage import Folder
from zero.checkpoint.weights import Weights
from zero.optimizer.state import options_of

# 2: checksums, and second names of tied tensors. 3: optimizers' state under torch's names.
VERSION = 3
HEADER = "zero"
USUAL = ("", "model.", "module.")

# Of each parameter, by its name in the model or its number in the optimizer: (key, stored name).
States = dict[str | int, list[tuple[str, str]]]


@dataclass
class Contents:
    """A source, and which of its tensors and objects are which of ours."""

    source: Folder | Weights
    # Each stored tensor of the model: our name -> the source's.
    model: dict[str, str]
    states: States = field(default_factory=dict)
    # The optimizer's groups: names of parameters, and options.
    groups: list[dict[str, Any]] | None = None
    modules: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    # Whether `save_checkpoint` wrote it.
    own: bool = False
    # Where the optimizers are: one prefix each, of all names of its state and groups.
    optimizers: list[str] = field(default_factory=list)
    # Stored state of parameters that the model does not have.
    foreign_states: list[str] = field(default_factory=list)

    def about(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """The shape and dtype of a stored tensor of the model."""
        found: Any = self.source.tensors[self.model[name]]
        return found if isinstance(found, tuple) else (found.shape, found.dtype)


def read_contents(source: Folder | Weights, names: Sequence[str], prefix: str | None) -> Contents:
    """Find the model's tensors, `names`, and all that belongs to them."""
    if isinstance(source, Folder) and HEADER in source.objects:
        return _own(source)
    stored = list(source.tensors)
    prefix = _prefix(stored, names) if prefix is None else prefix
    model = {n.removeprefix(prefix): n for n in stored if n.startswith(prefix)}
    if isinstance(source, Weights):
        return Contents(source, model)
    return _of_torch(source, Contents(source, model), set(names), prefix)


def _of_torch(folder: Folder, contents: Contents, names: set[str], prefix: str) -> Contents:
    """Sort the entries of another program's folder into model, optimizer and extra."""
    every = [
        name
        for name in folder.metadata.state_dict_metadata
        if not (name.startswith(prefix) and name.removeprefix(prefix) in names)
    ]
    contents.optimizers = _optimizers(every, names, prefix)
    innermost = sorted(contents.optimizers, key=len, reverse=True)
    groups: dict[str, dict[str, Any]] = {}
    stored: list[tuple[str, str, str]] = []
    for name in every:
        root = next((root for root in innermost if name.startswith(root)), None)
        what, _, entry = name.removeprefix(root or "").partition(".")
        if root is not None and what == "state":
            parameter, _, key = entry.rpartition(".")
            stored.append((parameter, key, name))
        elif root is not None and what == "param_groups" and entry:
            number, _, option = entry.rpartition(".")
            groups.setdefault(number, {})[option] = _read_one(folder, name)
        elif root is not None and what == "param_groups":
            groups.update((str(i), group) for i, group in enumerate(_read_one(folder, name)))
        elif name in folder.objects:
            contents.extra[name] = _read_one(folder, name)
            continue
        else:
            continue
        contents.model.pop(name.removeprefix(prefix), None)
    if len(contents.optimizers) > 1:
        return contents
    spelled = [parameter for parameter, _, _ in stored]
    spelled += [m for g in groups.values() for m in g.get("params", ()) if isinstance(m, str)]
    strip = _state_prefix(spelled or list(groups), names, prefix)
    if groups:
        ordered = sorted(groups, key=lambda k: (len(k), k) if k.isdigit() else (0, k))
        contents.groups = [_group(groups[key], key, strip) for key in ordered]
    for parameter, key, name in stored:
        ours = _name_of(parameter, strip, names, groups)
        if ours is None:
            contents.foreign_states.append(name)
        else:
            contents.states.setdefault(ours, []).append((key, name))
    return contents


def _optimizers(every: Sequence[str], names: set[str], prefix: str) -> list[str]:
    """Return the prefix of each optimizer: the part of its names before `param_groups`."""
    roots = {_before(name, "param_groups") for name in every} - {None}
    if not roots:
        # State alone, of parameters that are known.
        strips = _suffixes(prefix)
        for name in every:
            root = _before(name, "state")
            if root is not None:
                parameter = name.removeprefix(f"{root}state.").rpartition(".")[0]
                if any(parameter.removeprefix(strip) in names for strip in strips):
                    roots.add(root)
    return sorted(root for root in roots if root is not None)


def _before(name: str, word: str) -> str | None:
    """Return the part of a dotted name before the component `word`; None if it has none."""
    components = name.split(".")
    if word not in components:
        return None
    return "".join(f"{each}." for each in components[: components.index(word)])


def _suffixes(prefix: str) -> list[str]:
    """Return the empty string and all endings of a prefix, shortest first."""
    components = prefix.split(".")[:-1]
    return [
        "".join(f"{each}." for each in components[at:]) for at in range(len(components), -1, -1)
    ]


def _state_prefix(spelled: Sequence[str], names: set[str], prefix: str) -> str:
    """Return the ending of the model's prefix that the optimizer's names have too.

    In `{"model": ..., "optimizer": ...}` the model's tensors are stored under `model.`, and the
    optimizer's state names them without it, even if the model's own names begin with `model.`.
    """
    count = {
        strip: len({s for s in spelled if s.startswith(strip) and s.removeprefix(strip) in names})
        for strip in _suffixes(prefix)
    }
    best = [strip for strip, number in count.items() if number == max(count.values())]
    if len(best) > 1 and count[best[0]]:
        raise ValueError(
            f"the optimizer's state may name parameters with or without {best[-1]!r}: rename the "
            "model's modules so that one reading fits"
        )
    return best[0]


def _name_of(
    parameter: str, strip: str, names: set[str], groups: dict[str, dict[str, Any]]
) -> str | int | None:
    """Return the model's name of a stored parameter, or its number; None if it has neither."""
    members = [member for group in groups.values() for member in group.get("params", ())]
    given = [name for group in groups.values() for name in group.get("param_names", ())]
    if parameter.isdigit() and int(parameter) in members:
        number = int(parameter)
        named = len(given) == len(members)
        return str(given[members.index(number)]).removeprefix(strip) if named else number
    ours = parameter.removeprefix(strip)
    if ours in names:
        return ours
    return int(parameter) if parameter.isdigit() and not members else None


def _read_one(folder: Folder, name: str) -> Any:
    """One object, or one whole tensor."""
    if name in folder.objects:
        return folder.read([], [name])[name]
    shape, dtype = folder.tensors[name]
    values = torch.empty(shape.numel(), dtype=dtype)
    folder.read([Part(name, shape, 0, shape.numel(), values)])
    return values.view(shape)


def _own(folder: Folder) -> Contents:
    header: dict[str, Any] = folder.read([], [HEADER])[HEADER]
    if header["version"] > VERSION:
        raise ValueError(
            f"{folder.path} has format {header['version']}, newer than {VERSION}, the newest that "
            "this version of zero reads: upgrade it"
        )
    if header["version"] >= 2 and not folder.verifier.present:
        raise ValueError(f"{folder.path} has lost its checksums: use an older checkpoint")
    model: dict[str, str] = {}
    states: States = {}
    for name in folder.metadata.state_dict_metadata:
        whose, _, rest = name.partition(".")
        if whose == "model":
            model[rest] = name
        elif whose == "optimizer" and not rest.startswith("param_groups."):
            parameter, _, key = rest.partition(".")[2].rpartition(".")
            states.setdefault(parameter, []).append((key, name))
    named = header["groups"] if header["version"] < 3 else _own_groups(folder, header["groups"])
    return Contents(folder, model, states, named, header["modules"], dict(header["extra"]), True)


def _own_groups(folder: Folder, count: int) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [{} for _ in range(count)]
    options = [name for name in folder.objects if name.startswith("optimizer.param_groups.")]
    for name, value in folder.read([], options).items():
        number, _, key = name.removeprefix("optimizer.param_groups.").partition(".")
        groups[int(number)][key] = value
    return [{"names": group.pop("params"), "options": group} for group in groups]


def _prefix(stored: Iterable[str], names: Sequence[str]) -> str:
    """What stands before most of the names."""
    wanted, count = set(names), Counter[str]()
    for name in stored:
        starts = [0, *(match.end() for match in re.finditer(r"\.", name))]
        count.update(name[:at] for at in starts if name[at:] in wanted)
    most = max(count.values(), default=0)
    best = [prefix for prefix, number in count.items() if number == most]
    usual = [prefix for prefix in USUAL if prefix in best]
    if len(best) > 1 and not usual:
        raise ValueError(
            f"the model may be what is under {', '.join(map(repr, sorted(best)))}: pass prefix=..."
        )
    return (usual or best or [""])[0]


def _group(group: dict[str, Any], key: str, strip: str) -> dict[str, Any]:
    """One group; flat dictionaries have the options of each parameter under its name, `key`."""
    members = [m.removeprefix(strip) if isinstance(m, str) else m for m in group.get("params", [])]
    members = members or [key.removeprefix(strip)]
    options = options_of(group)
    given = group.get("param_names")
    if given:
        # Numbers, with the names that torch keeps beside them.
        members = [m.removeprefix(strip) for m in given]
    return {"names": members, "options": options}
