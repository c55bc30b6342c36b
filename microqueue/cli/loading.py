"""Import what a worker runs or a row is checked by, and say where it broke if it did."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from microqueue.errors import InvalidArgument
from microqueue.worker import load_handler

LIBRARIES = frozenset({"site-packages", "dist-packages"})


def load(reference: str, *, by: Callable[[str], Any] = load_handler) -> Any:
    """Import ``module:name`` as :func:`load_handler` does; name the line of an app that raises."""
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
        ) from exc.__cause__


def raised_at(error: BaseException | None, *, package: str) -> str | None:
    """Give file and line of the innermost call that is in the user's code, if there is one."""
    if error is None:
        return None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_of_user(frame, package):
            file, here = Path(frame.f_code.co_filename), Path.cwd()
            return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{line}"
    return None


def _is_of_user(frame: FrameType, package: str) -> bool:
    """Tell the app, wherever it is installed, from libraries, the interpreter, and us."""
    owner = str(frame.f_globals.get("__name__")).partition(".")[0]
    if owner in {package, "microqueue"}:
        return owner == package
    file = Path(frame.f_code.co_filename)
    if not file.is_absolute() or LIBRARIES & set(file.parts):  # "<frozen importlib>", for one.
        return False
    return not file.is_relative_to(sysconfig.get_path("stdlib"))
