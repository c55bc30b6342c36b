"""Tracebacks of failures as text: bounded, with secrets masked, innermost frames last.

The text looks like that of Python. It is built here because an exception of user code may have
anything: thousands of frames, causes or members, or a text that is huge or cannot be made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import StackSummary, walk_tb
from types import TracebackType

from microqueue.masking import Masker, place_to_cut

FRAME_STEPS = (50, 20, 8, 3, 1)
"""How many innermost frames of each exception are kept: the most with which the text fits."""
MOST_CAUSES = 8
MOST_MEMBERS = 8
"""How many members of an exception group are shown, at each level."""
DEEPEST_GROUP = 3
LONGEST_TEXT = 1500
"""How many characters of the text of one exception are shown."""
CAUSED = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"
HEADER = "Traceback (most recent call last):"
PACKAGE = f"{Path(__file__).parent}{os.sep}"


@dataclass
class _Shown:
    """One exception: its frames and its last lines, masked; before it, what led to it."""

    frames: Sequence[str]
    cut: bool
    """Whether outer frames were left out."""
    last_lines: str
    before: _Shown | None = None
    link: str = ""
    members: list[_Shown] = field(default_factory=list)
    more_members: int = 0


def format_traceback(error: BaseException, limit: int) -> str | None:
    """Return the traceback of an exception, in at most ``limit`` bytes of UTF-8.

    The innermost frames of each exception stay, and so does the last line of ``error``. ``None`` if
    it has no traceback, or if ``limit`` is 0.
    """
    if not limit:
        return None
    try:
        return None if error.__traceback__ is None else _formatted(error, limit)
    except Exception:  # noqa: BLE001 (a class of user code may break anything used here)
        return None


def _formatted(error: BaseException, limit: int) -> str:
    shown = _collect(error, Masker(), set(), depth=0)
    for most in FRAME_STEPS:
        text = "\n".join(_lines(shown, most))
        encoded = text.encode("utf-8", "backslashreplace")
        if len(encoded) <= limit:
            return encoded.decode()
    return _shortest(shown, limit)


def _collect(
    error: BaseException, masker: Masker, seen: set[int], *, depth: int, causes: int = 0
) -> _Shown:
    seen.add(id(error))
    frames, cut = _frames(error.__traceback__, masker)
    shown = _Shown(frames, cut, _last_lines(error, masker))
    earlier, link = _what_led_to(error)
    if earlier is not None and id(earlier) not in seen and causes < MOST_CAUSES:
        shown.before = _collect(earlier, masker, seen, depth=depth, causes=causes + 1)
        shown.link = link
    if isinstance(error, BaseExceptionGroup) and depth < DEEPEST_GROUP:
        members = error.exceptions
        shown.members = [
            _collect(one, masker, seen, depth=depth + 1)
            for one in members[:MOST_MEMBERS]
            if id(one) not in seen
        ]
        shown.more_members = len(members) - len(shown.members)
    return shown


def is_caused(error: BaseException) -> bool:
    """Return whether a traceback shows another exception that led to this one."""
    return _what_led_to(error)[0] is not None


def _what_led_to(error: BaseException) -> tuple[BaseException | None, str]:
    if error.__cause__ is not None:
        return error.__cause__, CAUSED
    return (None if error.__suppress_context__ else error.__context__), DURING


def _frames(found: TracebackType | None, masker: Masker) -> tuple[list[str], bool]:
    """Return the innermost frames as text, without those of the worker, and whether they are cut.

    Each is masked alone: a bracket that its line does not close must not hide the others.
    """
    first = found
    while first is not None and first.tb_frame.f_code.co_filename.startswith(PACKAGE):
        first = first.tb_next
    most = FRAME_STEPS[0]
    # One more than are shown tells whether there are more.
    kept = StackSummary.extract(walk_tb(first or found), limit=-most - 1)
    texts = StackSummary.from_list(kept[-most:]).format()
    return [masker.text(text.rstrip("\n")) for text in texts], len(kept) > most


def _last_lines(error: BaseException, masker: Masker) -> str:
    kind = type(error)
    plain = kind.__module__ in {"builtins", "__main__"}
    name = kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"
    text = text_of(error)
    lines = [f"{name}: {text}" if text else name]
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        lines += [one for one in notes if isinstance(one, str)]
    # Masked before it is cut to its length: half an address would not be masked.
    longest = 2 * LONGEST_TEXT
    text = _cut("\n".join(_cut(one, longest) for one in lines), longest)
    return _cut(masker.text(text), LONGEST_TEXT)


def text_of(value: object) -> str:
    """Return ``str(value)``, or a text that says that it has none."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 (an error whose text fails must still be stored)
        return f"<{type(value).__name__} without a text>"


def _cut(text: str, most: int) -> str:
    # From its beginning: a secret whose name was cut off would not be masked.
    return text if len(text) <= most else f"{text[: place_to_cut(text, most)]}…"


def _lines(shown: _Shown, most: int) -> Iterator[str]:
    if shown.before is not None:
        yield from _lines(shown.before, most)
        yield from ("", shown.link, "")
    if shown.frames:
        yield HEADER
        if shown.cut or len(shown.frames) > most:
            yield "  [outer frames left out]"
        yield from shown.frames[-most:]
    yield shown.last_lines
    for number, member in enumerate(shown.members, 1):
        yield f"  Exception {number} of the group:"
        for line in _lines(member, most):
            yield "\n".join(f"    {part}" for part in line.split("\n"))
    if shown.more_members:
        yield f"  [{shown.more_members:,} more exceptions in the group]"


def _shortest(shown: _Shown, limit: int) -> str:
    """Return the last lines of the exception, and before them as many lines as fit."""
    size, lines = 0, []
    for text in reversed([*_lines(replace(shown, members=[], more_members=0), FRAME_STEPS[-1])]):
        encoded = text.encode("utf-8", "backslashreplace")
        if size + len(encoded) > limit:
            break
        lines.append(encoded.decode())
        size += len(encoded) + 1
    if lines:
        return "\n".join(reversed(lines))
    return encoded[:limit].decode("utf-8", "ignore")
