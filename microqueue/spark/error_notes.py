"""Notes that carry the code and the fields of an error through Spark.

Spark raises its own error in place of that of a Python process, and has only its traceback as text.
A note is the last line of a traceback, as in ``SchemaDrift [wrong_type] column='attempts'``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from microqueue.errors import MicroqueueError

FIELDS = ("argument", "column", "field", "key")


@contextmanager
def noting() -> Iterator[None]:
    """Add a note to an error of microqueue; as a decorator too, but not of a generator."""
    try:
        yield
    except MicroqueueError as exc:
        note = note_of(exc)
        if note not in getattr(exc, "__notes__", ()):
            exc.add_note(note)
        raise


def note_of(error: MicroqueueError) -> str:
    """Return the class, the code and the fields of an error in one line."""
    code = getattr(error, "code", None)
    fields = {name: getattr(error, name, None) for name in FIELDS}
    return " ".join(
        [
            type(error).__name__,
            *([] if code is None else [f"[{code}]"]),
            *(f"{name}={value!r}" for name, value in fields.items() if value is not None),
        ]
    )
