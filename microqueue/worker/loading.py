"""Find a handler, or a model, by the name that a person types."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from microqueue.arguments import refused


def load_handler(reference: str, *, kind: str = "handler", example: str = "send_mail") -> Any:
    """Import ``module:function``; modules of the current directory are found too.

    ``kind`` is the argument that is refused if there is no such thing.
    """
    module_name, colon, path = reference.partition(":")
    if not (module_name and colon and path):
        raise refused(kind, reference, f"give module:name, for example shop.tasks:{example}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as exc:
        reason = f"importing {module_name!r} raised {type(exc).__name__}: {exc}"
        raise refused(kind, reference, reason) from exc
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as exc:
            raise refused(kind, reference, f"{module_name!r} has no {path!r}") from exc
    if not callable(found) and not hasattr(found, "handler_for"):
        raise refused(
            kind, reference, f"{path!r} is {type(found).__name__}, which cannot be called"
        )
    return found


def load_model(reference: str) -> Any:
    """Import ``module:Class``, a model of payloads."""
    return load_handler(reference, kind="model", example="Mail")
