"""Old arguments and modules of the pipelines, which keep working and warn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from microqueue.deprecation import renamed_options, warn_renamed

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept keyword arguments under their old names: ``renamed_arguments(old="new")``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(*args, **renamed_options(kwargs, names))

        return call

    return decorate


def register_moved_modules(entry: str, moved: Mapping[str, str]) -> None:
    """Keep old submodules of ``entry`` importable; ``moved`` has where each one is now.

    They are registered instead of written as files: importing a file would replace the function
    of the same name in ``entry`` by the file's module.
    """
    for name, now in moved.items():
        sys.modules[f"{entry}.{name}"] = _MovedModule(f"{entry}.{name}", entry, now)


class _MovedModule(ModuleType):
    """An old module, which finds its names where they are now."""

    def __init__(self, name: str, entry: str, now: str) -> None:
        super().__init__(name)
        self._entry, self._now = entry, now

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(import_module(self._now), name)
        warn_renamed(f"{self.__name__}.{name}", f"{self._entry}.{name}")
        return value
