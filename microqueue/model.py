"""The base of all models: frozen, strict about names, with errors in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from microqueue.deprecation import renamed_options
from microqueue.durations import write_duration
from microqueue.errors import InvalidArgument


class Model(BaseModel):
    """A frozen pydantic model whose bad values surface as :class:`InvalidArgument`.

    ``renamed_fields`` has the new name of each old one that is still accepted.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, ser_json_bytes="base64"
    )

    renamed_fields: ClassVar[Mapping[str, str]] = {}
    _all_fields: ClassVar[set[str]] = set()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._all_fields = set(cls.model_fields)

    def __init__(self, **values: Any) -> None:
        if self.renamed_fields:
            values = renamed_options(values, self.renamed_fields)
        try:
            super().__init__(**values)
        except ValidationError as exc:
            raise refusal(exc, model=type(self)) from exc

    @classmethod
    def trusted(cls, **fields: Any) -> Self:
        """Make an instance of valid values, one for each field, without validation.

        It is a ``model_construct`` without the search for defaults and aliases, which would take
        half of a worker's time.
        """
        instance = cls.__new__(cls)
        object.__setattr__(instance, "__dict__", fields)
        # One set for all instances: they are frozen, and a copy gets a copy of the set.
        object.__setattr__(instance, "__pydantic_fields_set__", cls._all_fields)
        object.__setattr__(instance, "__pydantic_extra__", None)
        object.__setattr__(instance, "__pydantic_private__", None)
        return instance


def refusal(
    exc: ValidationError, *, model: type[BaseModel] | None = None, subject: str | None = None
) -> InvalidArgument:
    """Turn the first problem that pydantic found into one sentence that names the value.

    Args:
        exc: What pydantic raised.
        model: The model that was to be made; the closest of its fields is suggested for an
            unknown one.
        subject: What an error of the whole value is reported of; without it, only the reason is.
    """
    first = exc.errors(include_url=False)[0]
    argument = ".".join(str(part) for part in first["loc"]) or subject
    # The input of a check of the whole model is all its fields; one may be a URI with a password.
    value = None if argument is None else first.get("input")
    message = reason_of(exc)
    if first["type"] == "extra_forbidden":
        owner = subject if model is None else model.__name__.partition("[")[0]
        return unknown_option(str(owner), str(argument), model.model_fields if model else (), value)
    if argument is not None:
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, InvalidArgument):  # It names the value already.
            message = message.removeprefix(
                f"{cause.argument}={shorten(cause.value)} is not valid: "
            )
        message = f"{argument}={shorten(value)} is not valid: {message}"
    return InvalidArgument(message, argument=argument, value=value)


def unknown_option(
    owner: str, option: str, options: Iterable[str], value: Any = None
) -> InvalidArgument:
    """Return the error for an option that does not exist; it names the closest one that does."""
    close = get_close_matches(option, list(options), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return InvalidArgument(f"{owner} has no option {option!r}{hint}", argument=option, value=value)


def reason_of(exc: ValidationError) -> str:
    """Return pydantic's reason for rejecting the first value."""
    return exc.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")


def shorten(value: Any, limit: int = 200) -> str:
    """Return a value's repr, or a duration as people write it, cut to ``limit`` characters."""
    text = write_duration(value) if isinstance(value, timedelta) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
