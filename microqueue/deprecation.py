"""Old public names that keep working and warn: properties, options and names of modules.

An attribute, which completion no longer shows::

    if not TYPE_CHECKING:
        __getattr__ = renamed_attributes({"letters_apart": "separate_dlq"})

A field of a model, so that ``WorkerOptions(brisk_period=1)`` still works::

    _renamed_fields: ClassVar[Mapping[str, str]] = {"brisk_period": "hot_poll_period"}

A name of a module::

    __getattr__ = renamed_names(__name__, {"Teller": "HookDispatcher"})

An argument of a function::

    @renamed_arguments(tell="progress")
    def archive(*, progress): ...

A module that was renamed, or whose names are elsewhere::

    __getattr__ = moved_names(__name__, {"Teller": "microqueue.worker.dispatcher.HookDispatcher"})

Modules that are now one: :func:`register_moved_modules`.

Each use raises a ``DeprecationWarning`` with the new name.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

from microqueue.errors import InvalidArgument

P = ParamSpec("P")
R = TypeVar("R")


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn the caller of the calling function that ``old`` is now ``new``."""
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=stacklevel)


def renamed_options(
    options: dict[str, Any], names: Mapping[str, str], *, stacklevel: int = 3
) -> dict[str, Any]:
    """Return options with the old ones among them renamed; each old one warns.

    Args:
        options: The options that were given.
        names: The new name of each old one.
        stacklevel: Where the warning points: 3 is the caller of the calling function.

    Raises:
        InvalidArgument: An option was given by its old and by its new name.
    """
    if names.keys().isdisjoint(options):
        return options
    renamed = {}
    for name, value in options.items():
        new = names.get(name, name)
        if new != name:
            if new in options:
                raise InvalidArgument(
                    f"{name} and {new} are the same option: give {new} alone",
                    argument=name,
                    value=value,
                )
            warn_renamed(name, new, stacklevel=stacklevel + 1)
        renamed[new] = value
    return renamed


def renamed_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module with renamed names.

    Args:
        module: The module's ``__name__``.
        names: The new name of each old one.
    """
    return moved_names(module, {old: f"{module}.{new}" for old, new in names.items()})


def moved_names(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module whose names are elsewhere.

    Args:
        module: The module's ``__name__``.
        places: The new place of each name, as in ``microqueue.QueueSettings``.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 (it is the module's)
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", places[name])
        home, _, new = places[name].rpartition(".")
        return getattr(import_module(home), new)

    return __getattr__


def renamed_attributes(names: Mapping[str, str]) -> Callable[[Any, str], Any]:
    """Return a ``__getattr__`` for a class with renamed methods or attributes.

    Completion does not show the old names. Hide it from type checkers with ``if not
    TYPE_CHECKING``, or they accept any name.

    Args:
        names: The new name of each old one.
    """

    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807 (it is the class's)
        owner = type(self).__name__
        if name not in names:
            raise AttributeError(f"{owner!r} object has no attribute {name!r}")
        warn_renamed(f"{owner}.{name}", f"{owner}.{names[name]}")
        return getattr(self, names[name])

    return __getattr__


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept keyword arguments under their old names: ``renamed_arguments(old="new")``.

    A coroutine function stays one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                return await function(*args, **renamed_options(kwargs, names))

            return cast("Callable[P, R]", call_async)

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
