"""Expect an error by what programs read of it: its class, code and fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from microqueue import InvalidArgument, MicroqueueError

ANY = object()
ErrorT = TypeVar("ErrorT", bound=MicroqueueError)


@contextmanager
def rejecting(
    argument: str,
    value: Any = ANY,
    *,
    code: str | None = None,
    closest: str | None = None,
    naming: Iterable[str] = (),
    kind: type[InvalidArgument] = InvalidArgument,
    **fields: Any,
) -> Iterator[pytest.ExceptionInfo[InvalidArgument]]:
    """Expect an InvalidArgument that has the name of the argument, and what else is given.

    The message names the argument, the closest one and what is in ``naming``, so that people read
    the same.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.argument == argument
    assert argument in str(caught.value)
    if value is not ANY:
        assert caught.value.value == value
    if code is not None:
        assert caught.value.code == code
    if closest is not None:
        assert caught.value.closest[:1] == [closest]
        assert closest in str(caught.value)
    _check(caught.value, fields, naming)


@contextmanager
def raising(
    kind: type[ErrorT], code: str, *, naming: Iterable[str] = (), **fields: Any
) -> Iterator[pytest.ExceptionInfo[ErrorT]]:
    """Expect an error with this code and these fields. The message names fields that are text."""
    with pytest.raises(kind) as caught:
        yield caught
    assert vars(caught.value)["code"] == code
    _check(caught.value, fields, naming)


def _check(error: Exception, fields: dict[str, Any], naming: Iterable[str]) -> None:
    assert {name: getattr(error, name) for name in fields} == fields
    texts = [value for value in fields.values() if isinstance(value, str)]
    for name in [*texts, *naming]:
        assert name in str(error)
