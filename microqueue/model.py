"""The base of microqueue's own models: frozen, strict about names, and plain in its errors."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

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
            raise refusal(type(self).__name__, exc) from exc

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


def refusal(subject: str, exc: ValidationError) -> InvalidArgument:
    """Turn the first problem that pydantic found into one sentence that names the value."""
    first = exc.errors(include_url=False)[0]
    argument = ".".join(str(part) for part in first["loc"]) or subject
    value = first.get("input")
    if first["type"] == "extra_forbidden":
        message = f"{subject} has no option {argument!r}"
    else:
        reason = first["msg"].removeprefix("Value error, ")
        message = f"{argument}={shorten(value)} is not valid: {reason}"
    return InvalidArgument(message, argument=argument, value=value)


def shorten(value: Any, limit: int = 200) -> str:
    """Give a value's repr, cut so that a message stays readable."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
