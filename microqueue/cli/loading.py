"""Import handlers and models, and name the line of the app that failed."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from microqueue.errors import InvalidArgument
from microqueue.worker import load_handler

LIBRARY_DIRECTORIES = frozenset({"site-packages", "dist-packages"})


def load(reference: str, *, by: Callable[[str], Any] = load_handler) -> Any:
    """Import ``module:name``; if the app raises, name its line in the error.

    Args:
        reference: As in ``shop.tasks:handle``.
        by: The function that imports it.

    Raises:
        InvalidArgument: It cannot be imported.
    """
    try:
        return by(reference)
    except InvalidArgument as exc:
        place = raised_at(exc.__cause__, package=reference.partition(":")[0].partition(".")[0])
        if place is None:
            raise
        raise InvalidArgument(
            f"{exc}, at {place}; --debug shows the traceback",
            argument=exc.argument,
            value=exc.value,
            code=exc.code,
        ) from exc.__cause__


def raised_at(error: BaseException | None, *, package: str) -> str | None:
    """Return file and line of the innermost frame in the user's code, if there is one."""
    if error is None:
        return None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_user_code(frame, package):
            file, here = Path(frame.f_code.co_filename), Path.cwd()
            return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{line}"
    return None


def _is_user_code(frame: FrameType, package: str) -> bool:
    """Return whether a frame belongs to the app, not to a library, Python or microqueue."""
    owner = str(frame.f_globals.get("__name__")).partition(".")[0]
    if owner in {package, "microqueue"}:
        return owner == package
    file = Path(frame.f_code.co_filename)
    if not file.is_absolute() or LIBRARY_DIRECTORIES & set(
        file.parts
    ):  # For example "<frozen importlib>".
        return False
    return not file.is_relative_to(sysconfig.get_path("stdlib"))
