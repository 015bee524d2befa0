"""A check of the options that a method passes on to other functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def require_options(method: str, options: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError, with the name of `method`, if an option is not in `known`."""
    for option in options:
        if option not in known:
            expected = f"{', '.join(known)} or a named parameter"
            raise TypeError(f"{method}() has no option {option!r}; expected {expected}")
