"""Conversion of a model's layers between dense, compressed and replaced forms."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from tinyml.compressed_weight import (
    CompressedWeight,
    compress_layer,
    get_compressed_weight,
    refuse_save_pretrained,
)
from tinyml.layers import (
    QUANTIZABLE,
    check_weights,
    find_layers,
    find_protected,
    get_weight,
    identify_weight,
    is_instance_of,
    match_settings,
)
from tinyml.validation import check_strided, format_names

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def compress_weights(
    model: nn.Module,
    kinds: Sequence[type[nn.Module]] | type[nn.Module],
    bits: int | Mapping[str, int],
    compress: Callable[[nn.Module, int], CompressedWeight],
    protect: Sequence[str],
) -> nn.Module:
    """Return a plain copy whose layers of `kinds` have the weights `compress(layer, bits)`.

    Layers that share a weight share its compressed form. Layers in `protect`, and layers that are
    missing from a mapping `bits`, are unchanged. Warn of other matrices that stay dense.
    """
    model = make_plain_copy(model)
    chosen = find_layers(model, kinds, protect)
    check_weights(chosen)
    for name, width in match_settings(bits, chosen).items():
        install_weight(model, chosen[name], compress(chosen[name], width))
    warn_of_dense_weights(model, find_protected(model, protect))
    return model


def install_weight(model: nn.Module, layer: nn.Module, compressed: CompressedWeight) -> None:
    """Replace the weight of a layer, and of all layers of `model` that share it, in place."""
    sharing: list[Any] = make_dense(model, layer)
    for other in sharing:
        compress_layer(other, compressed)
        other.parametrizations.weight.original = sharing[0].parametrizations.weight.original


def warn_of_dense_weights(
    model: nn.Module, protected: Collection[str], skipped: Collection[nn.Module] = ()
) -> None:
    """Warn of matrices that stay dense because they are not weights of layers of `QUANTIZABLE`.

    Examples are fused experts, `in_proj_weight`, transposed convolutions, embedding bags, and the
    tensors from which `weight_norm` computes a weight. Matrices of the modules in `protected` and
    factors of adapters are not counted, and those of the layers in `skipped` are. There is no
    warning if the counted matrices have at most 1 % of the elements of the state dict.
    """
    dense: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer, is_parametrized, _ = f".{name}".partition(".parametrizations.weight.")
        owner, _, key = name.rpartition(".")
        if is_parametrized:
            owner = layer[1:]
            is_known = get_compressed_weight(model.get_submodule(owner)) is not None
        elif key == "weight":
            module = model.get_submodule(owner)
            is_known = is_instance_of(module, QUANTIZABLE) and module not in skipped
        else:
            is_known = key in ("lora_A", "lora_B")
        if parameter.dim() > 1 and not is_known and owner not in protected:
            dense[name] = parameter.numel()
    # A module may store any object as its extra state.
    stored = [value for value in model.state_dict().values() if isinstance(value, Tensor)]
    total = sum(tensor.numel() for tensor in stored)
    if sum(dense.values()) > total / 100:
        warnings.warn(
            "matrices that are not weights of plain linear layers, convolutions or embeddings stay "
            f"dense, {len(dense)} in total: {format_names(dense)}; protect their modules to "
            "leave them dense without this warning",
            stacklevel=4,
        )


def remove_parametrizations(module: nn.Module) -> None:
    """Remove all parametrizations of a module, and the tensors that they compute, in place."""
    # torch's function changes the generated class, which all copies of the model share.
    module.__class__ = type(module).__bases__[0]
    del module._modules["parametrizations"]


def make_dense(model: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """Make a compressed weight a dense parameter, in place; return all layers that share it.

    Raise `ValueError` if a module of `model` is TorchScript, whose weights cannot be replaced.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"expected modules without TorchScript, got a scripted or traced module at "
                f"{name or 'the root'}; compress the original model, and script or trace the result"
            )
    sharing = [m for m in model.modules() if identify_weight(m) == identify_weight(layer)]
    if get_compressed_weight(layer) is not None:
        stored = cast(Any, layer).parametrizations.weight.original
        weight = nn.Parameter(get_weight(layer).clone(), stored.requires_grad)
        for shared in sharing:
            remove_parametrizations(shared)
            shared.register_parameter("weight", weight)
    return sharing


def check_supported(model: nn.Module) -> None:
    """Raise `ValueError` for sparse tensors, and for wrappers of compilation or data parallelism.

    A wrapper prefixes the names of the wrapped module, which readers of files do not expect. A
    compiled module also runs the original layer after its replacement, and
    `DistributedDataParallel` does not average gradients of parameters that are added later.
    """
    wrappers = nn.DataParallel, nn.parallel.DistributedDataParallel
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules or isinstance(module, wrappers):
            raise ValueError(
                f"expected a model before torch.compile and data parallelism, got a "
                f"{type(module).__name__} at {name or 'the root'}; pass the module inside, and "
                "wrap the result"
            )
    check_strided("a model", *model.parameters(), *model.buffers())


class Replacement(nn.Module):
    """A module of this package that replaces a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        cast(Any, self).register_state_dict_pre_hook(refuse_save_pretrained)

    def get_layer_to_compress(self) -> nn.Module:
        """Return the layer to compress instead of this one; the base class raises `ValueError`."""
        raise ValueError(
            f"expected a model whose layers were not replaced, got {type(self).__name__} layers; "
            "start from the model before it was quantized with activations"
        )


def make_plain_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of `model` with merged adapters replaced by the merged layers.

    Adapters that are not merged remain in the copy. `memo` is the argument of `copy.deepcopy`.
    Raise `ValueError` if other layers were replaced, because their original weights are lost, and
    if a module has a computed tensor that cannot be copied.
    """
    check_supported(model)
    try:
        model = copy.deepcopy(model, memo)
    except RuntimeError as error:
        _explain_uncopied_tensor(model, error)
        raise
    replaced = [module for module in model.modules() if isinstance(module, Replacement)]
    replacements: dict[nn.Module, nn.Module] = {m: m.get_layer_to_compress() for m in replaced}
    return replace_modules(model, replacements)


def _explain_uncopied_tensor(model: nn.Module, error: RuntimeError) -> None:
    """Raise `ValueError` if an attribute of a module is a computed tensor with a gradient.

    `copy.deepcopy` does not copy such tensors. An example is a weight that a hook computes.
    """
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise ValueError(
                    f"expected a model that can be copied, got a computed tensor {key!r} in "
                    f"{name or 'the root'}; call torch.nn.utils.prune.remove, "
                    "remove_weight_norm or remove_spectral_norm if their hooks compute it, and "
                    "delete it otherwise"
                ) from error


def make_dense_copy(model: nn.Module) -> nn.Module:
    """Return a plain copy of `model` with dense parameters in place of compressed weights."""
    model = make_plain_copy(model)
    for layer in list(model.modules()):
        if get_compressed_weight(layer) is not None:
            make_dense(model, layer)
    return model


def replace_modules(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules of `model` in place; return the model, or its replacement."""
    check_hooks(model, replacements)
    if model in replacements:
        return replacements[model]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, name, replacements[child])
    return model


def check_hooks(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    """Raise `ValueError` if a replaced module has hooks or a patched `forward`.

    A module may have them if its replacement contains it.
    """
    for name, module in model.named_modules():
        replacement = replacements.get(module)
        if replacement is None or any(inner is module for inner in replacement.modules()):
            continue
        if "forward" in vars(module) or any(vars(module)[hooks] for hooks in _HOOKS):
            raise ValueError(
                f"expected layers without hooks, got a hook or a patched forward on "
                f"{name or 'the model'}, which the layer that replaces it would not run; "
                "remove it, or exclude the layer with protect"
            )


def get_tensor_versions(*tensors: Tensor) -> list[tuple[int, object]]:
    """Return a value that changes when one of these tensors is replaced or modified in place.

    torch does not count modifications through `.data`, which are therefore not detected. The values
    of inference tensors always differ, because torch does not count any of their modifications.
    """
    return [(t.data_ptr(), object() if t.is_inference() else t._version) for t in tensors]


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Disable autocast inside the `with` statement."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            yield
    else:
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the `with` statement, then restore the mode of every module."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
