"""Find a handler by the name that a person types."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from microqueue.arguments import refused


def load_handler(reference: str) -> Any:
    """Import ``module:function``; modules of the current directory are found too."""
    module_name, colon, path = reference.partition(":")
    if not (module_name and colon and path):
        raise refused(
            "handler", reference, "give module:function, for example shop.tasks:send_mail"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as exc:
        reason = f"importing {module_name!r} raised {type(exc).__name__}: {exc}"
        raise refused("handler", reference, reason) from exc
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as exc:
            raise refused("handler", reference, f"{module_name!r} has no {path!r}") from exc
    if not callable(found) and not hasattr(found, "handler_for"):
        raise refused(
            "handler", reference, f"{path!r} is {type(found).__name__}, which cannot be called"
        )
    return found
