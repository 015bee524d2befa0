"""Recording and patching of activations of any `nn.Module`, by the names of its modules.

    with record(model, "blocks.*", "norm:input") as recorded:
        model(tokens)
    with patch(model, {"blocks.3.mlp": torch.zeros_like}):
        model(tokens)

Hooks are removed when the `with` statement exits, even after an exception. A name that matches no
module and a patch that never ran raise errors.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from interp.hook_points import Activation, bind_hook, find_hook_points

#: A new value, or a function from the old value to the new value. With `names="transformer_lens"`,
#: the function may have a second argument `hook`.
Replacement = Tensor | Callable[..., Tensor | None]


@contextmanager
def record(
    model: nn.Module, *sites: str, detach: bool = True, names: str | None = None
) -> Iterator[dict[str, Tensor]]:
    """Record copies of the activations of the latest call of each module at `sites`.

    Entering the context returns a dictionary from sites to activations, in the order of the forward
    pass. Sites whose modules are not called, or were compiled earlier, are missing from it.

    A site is a module's name (its output) or `name:input` (its input). `*` matches one part of a
    dotted name and `**` one or more parts. If a module has several inputs or outputs, the first
    tensor is recorded. Outputs may be tuples, lists, mappings or dataclasses. `detach=False`
    records the tensors themselves, attached to the graph; in inference mode, it has no effect. With
    `names="transformer_lens"`, the sites of a `Decoder` have TransformerLens's names, and queries,
    keys, values and z are split into heads.

    Raises ValueError for a site that matches no module, or matches a second name of a shared module
    but not the first. Raises TypeError if a site has no tensor. With `detach=False`, raises
    RuntimeError on exit if the model changed a recorded tensor in place.
    """
    recorded: dict[str, Tensor] = {}
    versions: dict[str, int] = {}

    def record_activation(site: str, point: Activation, tensor: Tensor) -> None:
        tensor = point.read(tensor)
        recorded.pop(site, None)
        # Inference tensors have no graph, and no version that would show a change in place.
        is_copied = detach or tensor.is_inference()
        recorded[site] = tensor.detach().clone() if is_copied else tensor
        if not is_copied:
            versions[site] = tensor._version

    actions = {
        point.site: partial(record_activation, name, point)
        for name, point in _find_points(model, sites, names).items()
    }
    with install_hooks(model, actions):
        yield recorded
    changed = [
        site for site in versions if site in recorded and recorded[site]._version != versions[site]
    ]
    if changed:
        raise RuntimeError(
            f"tensors of {', '.join(changed)} were changed in place; record copies (detach=True), "
            "or record the output of an earlier module"
        )


@contextmanager
def patch(
    model: nn.Module, replacements: Mapping[str, Replacement], *, names: str | None = None
) -> Iterator[None]:
    """Replace activations inside the `with` statement by tensors, or by functions of old values.

    Sites and `names` are the same as in `record`. A function receives a copy of the old value,
    which it may change in place, and returns the new value. The new value must broadcast to the
    shape of the old value, and is converted to the old dtype and device. Nested contexts act in the
    order of entry: a `record` inside a `patch` records the patched value.

    With `names="transformer_lens"`, hook functions of TransformerLens are accepted too. A function
    with an argument `hook` receives an object with `name` and `layer()`. It may return None to keep
    the old value, including the changes that it made in place.

    Raises ValueError for a wrong shape, a wrong site (see `record`), and two replacements of one
    site. Raises TypeError if a function does not return a tensor, and for an output that is a
    mapping other than a dict or `UserDict`. Raises RuntimeError on exit if a patch never ran.
    """
    reached: set[str] = set()

    def replace(point: Activation, replacement: Replacement, tensor: Tensor) -> Tensor:
        reached.add(point.site)
        old = point.read(tensor)
        # Functions may change their argument in place, which must not change the model's tensors.
        value = replacement(old.clone()) if callable(replacement) else replacement
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the patch of {point.site!r} returned a {type(value).__name__}; return a tensor"
            )
        try:
            # Clone the value, because the model may change the activation in place.
            value = value.to(old).expand_as(old).clone()
        except RuntimeError as error:
            raise ValueError(
                f"the patch of {point.site!r} must broadcast to the activation's shape "
                f"{tuple(old.shape)}, got {tuple(value.shape)}"
            ) from error
        return point.write(value, tensor)

    hooks: dict[str, Callable[[Tensor], Tensor]] = {}
    for pattern, replacement in replacements.items():
        for name, point in _find_points(model, (pattern,), names).items():
            if point.site in hooks:
                raise ValueError(
                    f"{pattern!r} and an earlier pattern both replace {point.site!r}; pass one "
                    "replacement per site, or nest two patches"
                )
            bound = replacement
            if names is not None and callable(replacement):
                bound = bind_hook(replacement, name)
            hooks[point.site] = partial(replace, point, bound)
    with install_hooks(model, hooks):
        yield
    if missed := sorted(hooks.keys() - reached):
        missed_sites = ", ".join(missed)
        raise RuntimeError(
            f"the patch of {missed_sites} never ran: the module was not called, or was compiled "
            "before the patch was installed"
        )


def _find_points(
    model: nn.Module, patterns: tuple[str, ...], names: str | None
) -> dict[str, Activation]:
    """Return the matching activations by site, or by hook name if `names` is set."""
    if names is None:
        return {site: Activation(site) for site in expand_sites(model, patterns)}
    return find_hook_points(model, patterns, names)


def expand_sites(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Return the sites that match the patterns: pattern by pattern, then in the model's order.

    Raises ValueError for a pattern without a match, for a second name of a shared module, and for a
    suffix other than ":input".
    """
    name_of = {module: name for name, module in model.named_modules()}
    sites = []
    for pattern in patterns:
        name, colon, side = pattern.partition(":")
        expected_side = "input" if colon else ""
        if side != expected_side:
            raise ValueError(f"site {pattern!r} ends in {side!r}; only 'input' may follow a colon")
        regex = re.escape(name).replace(r"\*\*", ".+").replace(r"\*", "[^.]+")
        matches = [known for known in name_of.values() if re.fullmatch(regex, known)]
        for alias, module in model.named_modules(remove_duplicate=False):
            if re.fullmatch(regex, alias) and name_of[module] not in matches:
                raise ValueError(
                    f"{alias!r} is the same module as {name_of[module]!r}, and its hook runs for "
                    f"calls under both names; pass {name_of[module]!r}"
                )
        if not matches:
            all_names = list(name_of.values())
            near = difflib.get_close_matches(name, all_names, n=3, cutoff=0.3) or all_names[1:6]
            raise ValueError(
                f"no module of the model is named {name!r}; similar names: {', '.join(near)}"
            )
        sites += [match + colon + side for match in matches]
    return sites


@contextmanager
def install_hooks(
    model: nn.Module, actions: Mapping[str, Callable[[Tensor], Tensor | None]]
) -> Iterator[None]:
    """Until exit, call each action with the tensor at its site; a returned tensor replaces it."""
    handles = []
    try:
        for site, action in actions.items():
            name, _, side = site.partition(":")
            module = model.get_submodule(name)
            if side:
                hook = partial(_act_on_input, site, action)
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            else:
                handle = module.register_forward_hook(partial(_act_on_output, site, action))
            handles.append(handle)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _act_on_output(
    site: str,
    action: Callable[[Tensor], Tensor | None],
    module: nn.Module,
    inputs: Any,
    output: Any,
) -> Any:
    if isinstance(output, Tensor):
        return action(output)
    entries = _find_entries(output)
    if entries is None:
        raise TypeError(
            f"the output of {site!r} is a {type(output).__name__} without a tensor; choose a site "
            "whose module returns tensors"
        )
    key = _find_first_tensor(site, entries.items())
    new = action(entries[key])
    return None if new is None else _replace_entry(output, entries, key, new)


def _find_entries(output: Any) -> dict[Any, Any] | None:
    """Return the entries of a mapping, tuple, list or dataclass by key; None for other objects."""
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, tuple | list):
        return dict(enumerate(output))
    if is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return None


def _replace_entry(output: Any, entries: Mapping[Any, Any], key: Any, new: Tensor) -> Any:
    """Return a container like `output` whose entry `key` is `new`."""
    if isinstance(output, tuple | list):
        rebuild: Callable[..., Any] = type(output)
        items = list({**entries, key: new}.values())
        return rebuild(*items) if hasattr(output, "_fields") else rebuild(items)
    if isinstance(output, Mapping) and not isinstance(output, dict | UserDict):
        # A shallow copy of another mapping may share its entries with the model's object.
        raise TypeError(
            f"expected a dict as the output to patch, got a {type(output).__name__}; return a dict "
            "from the module, or patch its input"
        )
    # A copy preserves all other state, such as the default of a defaultdict.
    copied = copy.copy(output)
    if isinstance(copied, dict | UserDict):
        copied[key] = new
    else:
        object.__setattr__(copied, key, new)  # The dataclass may be frozen.
    return copied


def _act_on_input(
    site: str,
    action: Callable[[Tensor], Tensor | None],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            new = action(value)
            return None if new is None else ((*args[:index], new, *args[index + 1 :]), kwargs)
    name = _find_first_tensor(site, kwargs.items())
    new = action(kwargs[name])
    return None if new is None else (args, {**kwargs, name: new})


def _find_first_tensor(site: str, items: Any) -> Any:
    """Return the key of the first tensor in `items`; raise TypeError if there is none."""
    for key, value in items:
        if isinstance(value, Tensor):
            return key
    raise TypeError(f"expected a tensor in {site!r}, got none; choose another site")
