"""What a checkpoint holds of a model and an optimizer, whoever wrote it, by the model's own names.

Notable:
- names may stand under a prefix (`model.`), which is found by looking which fits the most of them;
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

States = dict[str, list[tuple[str, str]]]


@dataclass
class Contents:
    """A source, and which of its tensors and objects are which of ours."""

    source: Folder | Weights
    # Each stored tensor of the model: our name -> the source's.
    model: dict[str, str]
    # Each parameter's state: our name -> (key, the source's name).
    states: States = field(default_factory=dict)
    # The optimizer's groups: names of parameters, and options.
    groups: list[dict[str, Any]] | None = None
    modules: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    # Whether `save_checkpoint` wrote it.
    own: bool = False

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
    states, rest = _states(source, prefix, set(names))
    used = {name for entries in states.values() for _, name in entries}
    model = {ours: name for ours, name in model.items() if name not in used and ours not in rest}
    contents = Contents(source, model, states)
    groups: dict[str, dict[str, Any]] = {}
    for name in (n for n in source.metadata.state_dict_metadata if n not in used):
        option = re.match(r"(?:.*\.)?param_groups\.(.+)\.([^.]+)$", name)
        if option is not None:
            groups.setdefault(option[1], {})[option[2]] = _read_one(source, name)
            contents.model.pop(name.removeprefix(prefix), None)
        elif name in source.objects:
            value = _read_one(source, name)
            if name.rpartition(".")[2] == "param_groups" and isinstance(value, list):
                groups.update((str(i), group) for i, group in enumerate(value))
            else:
                contents.extra[name] = value
    if groups:
        contents.groups = [
            _group(groups[key], key, prefix)
            for key in sorted(
                groups, key=lambda key: (len(key), key) if key.isdigit() else (0, key)
            )
        ]
    return contents


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


def _states(folder: Folder, prefix: str, names: set[str]) -> tuple[States, set[str]]:
    """The state of each parameter in names or numbers; and what is none of the model's."""
    states: States = {}
    rest = set()
    for name in folder.metadata.state_dict_metadata:
        match = re.match(r"(?:.*\.)?state\.(.+)\.([^.]+)$", name)
        if match is None:
            continue
        parameter, key = match.groups()
        ours = parameter.removeprefix(prefix)
        if ours in names or parameter.isdigit():
            known = ours if ours in names else parameter
            states.setdefault(known, []).append((key, name))
            rest.add(name.removeprefix(prefix))
    return states, rest


def _group(group: dict[str, Any], key: str, prefix: str) -> dict[str, Any]:
    """One group; flat dictionaries have the options of each parameter under its name, `key`."""
    members = [m.removeprefix(prefix) if isinstance(m, str) else m for m in group.get("params", [])]
    members = members or [key.removeprefix(prefix)]
    options = options_of(group)
    given = group.get("param_names")
    if given:
        # Numbers, with the names that torch keeps beside them.
        members = [m.removeprefix(prefix) for m in given]
    return {"names": members, "options": options}
