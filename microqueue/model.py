"""The base of microqueue's own models: frozen, strict about names, and plain in its errors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from microqueue.durations import write_duration
from microqueue.errors import InvalidArgument


class Model(BaseModel):
    """A frozen pydantic model whose bad values surface as :class:`InvalidArgument`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, ser_json_bytes="base64"
    )

    _all_fields: ClassVar[set[str]] = set()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._all_fields = set(cls.model_fields)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as exc:
            name = type(self).__name__.partition("[")[0]
            raise refusal(exc, model=name) from exc

    @classmethod
    def trusted(cls, **fields: Any) -> Self:
        """Make an instance of values that are known to be good, all fields given.

        It is what ``model_construct`` does, without the search for defaults and aliases,
        which would take half of a worker's time.
        """
        instance = cls.__new__(cls)
        object.__setattr__(instance, "__dict__", fields)
        # One set for all: instances are frozen, and a copy gets a copy.
        object.__setattr__(instance, "__pydantic_fields_set__", cls._all_fields)
        object.__setattr__(instance, "__pydantic_extra__", None)
        object.__setattr__(instance, "__pydantic_private__", None)
        return instance


def refusal(
    exc: ValidationError, *, model: str | None = None, subject: str | None = None
) -> InvalidArgument:
    """Turn the first problem that pydantic found into one sentence that names the value.

    ``model`` is the class that refuses. What concerns all of its fields, or the whole of a
    value, is told of the ``subject``; without one, only the reason is.
    """
    first = exc.errors(include_url=False)[0]
    argument = ".".join(str(part) for part in first["loc"]) or subject
    value = first.get("input")
    message = reason_of(exc)
    if first["type"] == "extra_forbidden":
        message = f"{model or subject} has no option {argument!r}"
    elif argument is not None:
        message = f"{argument}={shorten(value)} is not valid: {message}"
    return InvalidArgument(message, argument=argument, value=value)


def reason_of(exc: ValidationError) -> str:
    """Say why pydantic refused the first value that it refused."""
    return exc.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")


def shorten(value: Any, limit: int = 200) -> str:
    """Give a value's repr, or a duration as people write it, cut so that it stays readable."""
    text = write_duration(value) if isinstance(value, timedelta) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
