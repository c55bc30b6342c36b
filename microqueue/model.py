"""The base of all models: frozen, strict about names, with errors in one sentence."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from typing_extensions import TypeVar as AnyTypeVar

from microqueue.deprecation import renamed_options
from microqueue.durations import write_duration
from microqueue.errors import InvalidArgument

UNKNOWN_OPTION = "unknown_option"
SHORTEST_PREFIX = 3
"""So many letters of an option are enough to suggest it."""


class Model(BaseModel):
    """A frozen pydantic model whose bad values surface as :class:`InvalidArgument`.

    ``_renamed_fields`` has the new name of each old one that is still accepted. ``_owner`` is what
    errors name instead of the class: what the user wrote.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, ser_json_bytes="base64"
    )

    _renamed_fields: ClassVar[Mapping[str, str]] = {}
    _owner: ClassVar[str | None] = None
    _all_fields: ClassVar[set[str]] = set()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._all_fields = set(cls.model_fields)

    def __init__(self, **values: Any) -> None:
        if self._renamed_fields:
            values = renamed_options(values, self._renamed_fields)
        try:
            super().__init__(**values)
        except ValidationError as exc:
            raise as_invalid_argument(exc, model=type(self)) from exc

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values of some fields, validated as by the constructor.

        Values that are not changed may be malformed, as in a stored document that was edited
        manually. They are kept.
        """
        if not update:
            return super().model_copy(deep=deep)
        try:
            valid: BaseModel = type(self)(**{**self.__dict__, **update})
        except InvalidArgument as exc:
            cause = exc.__cause__
            if not isinstance(cause, ValidationError):
                raise
            names = {name for name in update if not self._is_generic(name)}
            if any(_is_about(error, names) for error in cause.errors(include_url=False)):
                raise as_invalid_argument(cause, model=type(self), fields=names) from cause
            valid = self._alone({name: update[name] for name in names})
        values = {
            name: value if self._is_generic(name) else getattr(valid, name)
            for name, value in update.items()
        }
        return super().model_copy(update=values, deep=deep)

    @classmethod
    def _alone(cls, values: Mapping[str, Any]) -> BaseModel:
        """Return a model of some fields with these values, converted to their types."""
        fields: dict[str, Any] = {
            name: (cls.model_fields[name].annotation, cls.model_fields[name]) for name in values
        }
        made = create_model(cls.__name__, __config__=cls.model_config, **fields)
        return made(**values)

    @classmethod
    def _is_generic(cls, name: Any) -> bool:
        """Return whether a field may have any type: without a parameter, only the caller knows."""
        field = cls.model_fields.get(name)
        annotation: object = None if field is None else field.annotation
        return isinstance(annotation, TypeVar | AnyTypeVar)


ModelT = TypeVar("ModelT", bound=Model)


def trusted(model: type[ModelT], /, **fields: Any) -> ModelT:
    """Make an instance of valid values, one for each field, without validation.

    It is a ``model_construct`` without the search for defaults and aliases, which would take half
    of a worker's time.
    """
    instance = model.__new__(model)
    object.__setattr__(instance, "__dict__", fields)
    # One set for all instances: they are frozen, and a copy gets a copy of the set.
    object.__setattr__(instance, "__pydantic_fields_set__", model._all_fields)  # noqa: SLF001 (of this module)
    object.__setattr__(instance, "__pydantic_extra__", None)
    object.__setattr__(instance, "__pydantic_private__", None)
    return instance


def changed(instance: ModelT, /, **fields: Any) -> ModelT:
    """Return a copy with other values of some fields, without validation.

    For models of stored documents, which may have values of any type.
    """
    return BaseModel.model_copy(instance, update=fields)


def revalidated(instance: ModelT) -> ModelT:
    """Return the same, validated: ``model_construct`` makes instances of any values."""
    return type(instance)(**instance.__dict__)


def as_invalid_argument(
    exc: ValidationError,
    *,
    model: type[BaseModel] | None = None,
    subject: str | None = None,
    fields: Container[Any] | None = None,
) -> InvalidArgument:
    """Turn the first problem that pydantic found into one sentence that names the value.

    Args:
        exc: What pydantic raised.
        model: The model that was to be made; the closest of its fields is suggested for an
            unknown one.
        subject: What an error of the whole value is reported of; without it, only the reason is.
        fields: The fields whose problems count, besides those of the whole model; by default all.
    """
    errors = exc.errors(include_url=False)
    first = next(one for one in errors if fields is None or _is_about(one, fields))
    argument = ".".join(str(part) for part in first["loc"]) or subject
    # The input of a check of the whole model is all its fields; one may be a URI with a password.
    value = None if argument is None else first.get("input")
    if first["type"] == "extra_forbidden":
        owner = subject if model is None else _owner_of(model)
        return unknown_option(str(owner), str(argument), model.model_fields if model else (), value)
    message, closest = explain(first)
    cause = first.get("ctx", {}).get("error")
    code = cause.code if isinstance(cause, InvalidArgument) else None
    if argument is None and isinstance(cause, InvalidArgument):  # Options that do not agree.
        argument, value = cause.argument, cause.value
    elif argument is not None:
        if isinstance(cause, InvalidArgument):  # It names the value already.
            message = message.removeprefix(
                f"{cause.argument}={shorten(cause.value)} is not valid: "
            )
        message = f"{argument}={shorten(value)} is not valid: {message}"
    return InvalidArgument(message, argument=argument, value=value, code=code, closest=closest)


def _is_about(error: Mapping[str, Any], fields: Container[Any]) -> bool:
    """Return whether a problem is one of these fields, or of the whole model."""
    return not error["loc"] or error["loc"][0] in fields


def invalid_argument(
    argument: str, value: Any, instead: str, *, code: str | None = None
) -> InvalidArgument:
    """Return the error for a value that is not valid, with what to pass instead."""
    return InvalidArgument(
        f"{argument}={shorten(value)} is not valid: {instead}",
        argument=argument,
        value=value,
        code=code,
    )


def reject_unknown(
    owner: str,
    given: Mapping[str, Any],
    options: Iterable[str],
    *,
    function: Callable[..., Any] | None = None,
) -> None:
    """Reject options that do not exist.

    Args:
        owner: What they were given to, as the user wrote it.
        given: The options, by name.
        options: Those that exist.
        function: What was called, if it has ``**options`` beside named parameters: errors suggest
            these, too.
    """
    for option, value in given.items():
        if option not in options:
            named = () if function is None else optional_parameters(function)
            raise unknown_option(owner, option, [*named, *options], value)


def optional_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters that a call may leave out."""
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.default is not one.empty]


def unknown_option(
    owner: str, option: str, options: Iterable[str], value: Any = None
) -> InvalidArgument:
    """Return the error for an option that does not exist.

    It names the closest one that does; if none is like it, all of them.
    """
    known = list(dict.fromkeys(options))
    close = closest_option(option, known)
    hint = f"; give one of {', '.join(known)}" if known else ""
    return InvalidArgument(
        f"{owner} has no option {option!r}{_did_you_mean(close) or hint}",
        argument=option,
        value=value,
        code=UNKNOWN_OPTION,
        closest=close,
    )


def closest_option(option: str, known: Sequence[str]) -> list[str]:
    """Return the option that is most like this one, or the first that begins like it."""
    close = get_close_matches(option, known, n=1)
    if close or len(option) < SHORTEST_PREFIX:
        return close
    return [one for one in known if one.startswith(option) or option.startswith(f"{one}_")][:1]


def _owner_of(model: type[BaseModel]) -> str:
    owner = model._owner if issubclass(model, Model) else None  # noqa: SLF001 (of this module)
    return owner or model.__name__.partition("[")[0]


def explain(found: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return why pydantic rejected a value, and the allowed value that is most like it.

    Args:
        found: One of ``ValidationError.errors()``.
    """
    context = found.get("ctx", {})
    if found["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        close = get_close_matches(str(found.get("input")), choices, n=1)
        return f"give one of {', '.join(choices)}{_did_you_mean(close)}", close
    cause = context.get("error")
    closest = cause.closest if isinstance(cause, InvalidArgument) else []
    return str(found.get("msg", "")).removeprefix("Value error, "), closest


def _did_you_mean(close: Sequence[str]) -> str:
    return f"; did you mean {close[0]!r}?" if close else ""


def reason_of(exc: ValidationError) -> str:
    """Return the reason for rejecting the first value."""
    return explain(exc.errors(include_url=False)[0])[0]


def shorten(value: Any, limit: int = 200) -> str:
    """Return a value's repr, or a duration as people write it, cut to ``limit`` characters."""
    text = write_duration(value) if isinstance(value, timedelta) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
