"""Optional dependencies that only some functions need."""

import importlib


def require_module(module: str, extra: str) -> None:
    """Raise `ModuleNotFoundError` with the `pip install` command if a module is missing."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        message = f'this needs {module}, which is missing: pip install "scaling[{extra}]"'
        raise ModuleNotFoundError(message, name=module) from error
