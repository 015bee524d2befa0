"""What only some calls need, and is not installed with the rest."""

import importlib


def need(module: str, extra: str) -> None:
    """Raise, with the remedy, where `module` is absent."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        told = f'this needs {module}, which is not installed: pip install "scaling[{extra}]"'
        raise ModuleNotFoundError(told, name=module) from error
