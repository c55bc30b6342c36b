"""Payloads: to BSON and back, as plain documents or through a pydantic model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Generic, cast
from uuid import UUID

import bson
from bson import Binary, Code, DBRef, Decimal128, Int64, ObjectId, Regex, Timestamp
from bson.codec_options import CodecOptions
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.raw_bson import RawBSONDocument
from pydantic import BaseModel, Secret, SecretBytes, SecretStr, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from microqueue import encoding_errors
from microqueue.clock import Instant, as_utc, whole_milliseconds
from microqueue.errors import InvalidArgument, InvalidPayload
from microqueue.model import as_invalid_argument, shorten
from microqueue.new_task import NewTask
from microqueue.task import PayloadT

LARGEST_DOCUMENT = 15 * 1024 * 1024
"""In bytes. MongoDB's own limit is 16 MB; the rest is for the history, errors and result."""
DEEPEST_DOCUMENT = 170
"""In levels, the task's own included. MongoDB stores 180; some updates need a few more."""
SMALLEST_LEVEL = 7
"""In bytes: the kind, an empty name, the length and the end."""
LOSSY = "lossy"
"""The code of an error about a payload that would not be read back as it was given."""
NOT_A_DOCUMENT, NOT_DUMPABLE, REJECTED_BY_MODEL = (
    "not_a_document",
    "not_dumpable",
    "rejected_by_model",
)
UNENCODABLE, TOO_LARGE, TOO_DEEP = "unencodable", "too_large", "too_deep"
"""The codes of the other errors about payloads."""
_CONTAINERS = (b"\x03", b"\x04", b"\x0f")
"""The type bytes of a document, an array, and code with a scope in BSON."""

_BSON_LEAVES = (
    str, bytes, bool, int, float, datetime, UUID, ObjectId, Binary, Code, DBRef, Decimal128,
    Int64, MaxKey, MinKey, Regex, Timestamp, type(None),
)  # fmt: skip

AS_STORED: dict[str, Any] = {"strict": False}
"""How documents are read: BSON has no dates, tuples or sets, which a strict model insists on."""
if "by_name" in inspect.signature(TypeAdapter.validate_python).parameters:  # pydantic 2.11
    # A field may be validated by another name than it is dumped by.
    AS_STORED |= {"by_alias": True, "by_name": True}


class PayloadCodec(Generic[PayloadT]):
    """Turns payloads into documents and back; with a model, validates both ways."""

    def __init__(self, model: type[PayloadT] | None = None) -> None:
        self._adapter = TypeAdapter(model) if model is not None else None

    def dump(self, payload: PayloadT) -> dict[str, Any]:
        """Return the document to store, or raise :class:`InvalidPayload`."""
        return self.accept(payload)[1]

    def accept(self, payload: Any) -> tuple[PayloadT, dict[str, Any]]:
        """Return the payload as its model, and the document to store.

        Raises:
            InvalidPayload: The payload does not validate, or reading it back would return another
                value. At delivery, that would be noticed too late.
        """
        if self._adapter is None:
            # A plain dict is encoded at once, so it need not be copied.
            return payload, payload if type(payload) is dict else _untyped_document(payload)
        given = _validate(self._adapter, payload)
        problems = []
        for by_alias in (True, False):
            document = _typed_document(self._adapter, given, by_alias=by_alias)
            problem = _find_loss(self._adapter, given, document, by_alias=by_alias)
            if problem is None:
                return given, document
            problems.append(problem)
        field, reason = problems[0]
        raise InvalidPayload(
            f"the payload ({type(given).__name__}) does not survive being stored: {reason}",
            argument="payload",
            value=payload,
            code=LOSSY,
            field=field,
        )

    def load(self, stored: Any) -> PayloadT:
        """Validate a stored payload, or raise :class:`InvalidPayload`."""
        if self._adapter is None:
            return cast("PayloadT", stored)
        return _validate(self._adapter, stored, **AS_STORED)


def codec_of(payload_model: Any) -> PayloadCodec[Any]:
    """Return the codec of a queue; reject a model that pydantic cannot use."""
    try:
        if isinstance(payload_model, str):
            raise TypeError("give the class itself, not its name")  # noqa: TRY301 (reported as pydantic's own errors are)
        return PayloadCodec(payload_model)
    except Exception as exc:
        # For what is no type, pydantic raises anything.
        reason = str(exc).partition("\n")[0]
        raise InvalidArgument(
            f"payload_model={shorten(payload_model)} is not valid: give a pydantic model; {reason}",
            argument="payload_model",
            value=payload_model,
        ) from exc


def finite_number(text: str) -> float:
    """Return a number of JSON, for ``parse_float``; reject one that would become infinite."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.40} is too large a number")
    return number


def check_encodable(document: Mapping[str, Any], codec_options: CodecOptions[Any]) -> None:
    """Raise :class:`InvalidPayload` for a document that BSON cannot hold."""
    encode_all([document], codec_options)


def encode_all(
    documents: Sequence[Mapping[str, Any]],
    codec_options: CodecOptions[Any],
    *,
    noun: str = "task",
    field: str = "payload",
) -> list[RawBSONDocument]:
    """Return documents encoded as they will be stored.

    Errors call a document by ``noun``, and its content by ``field``.

    Raises:
        InvalidPayload: A document cannot be encoded, is too large, or is nested too deep.
    """
    encoded: list[RawBSONDocument] = []
    try:
        for document in documents:
            encoded.append(RawBSONDocument(bson.encode(document, codec_options=codec_options)))  # noqa: PERF401 (its length shows which one failed)
    except encoding_errors.ENCODER_ERRORS as exc:
        document = documents[len(encoded)]
        reason = encoding_errors.explain(document, codec_options, exc)
        raise InvalidPayload(
            f"MongoDB cannot store this {noun}: {reason}",
            argument=field,
            value=document.get(field),
            code=UNENCODABLE,
        ) from exc
    for document, raw in zip(documents, encoded, strict=True):
        if len(raw.raw) > LARGEST_DOCUMENT:
            raise InvalidPayload(
                f"the {noun} takes {len(raw.raw):,} bytes, and at most {LARGEST_DOCUMENT:,} fit; "
                f"store large data elsewhere and put a reference into the {field}",
                argument=field,
                value=document.get(field),
                code=TOO_LARGE,
            )
        if _may_be_too_deep(bytes(raw.raw)):
            _check_depth(document, noun, field)
    return encoded


def _may_be_too_deep(raw: bytes) -> bool:
    """Return whether a document may have too many levels, by a cheap upper bound."""
    if len(raw) < DEEPEST_DOCUMENT * SMALLEST_LEVEL:
        return False
    return sum(raw.count(byte) for byte in _CONTAINERS) >= DEEPEST_DOCUMENT


def _check_depth(document: Mapping[str, Any], noun: str, field: str) -> None:
    depth = 0
    level: list[Any] = [document]
    while level:
        depth += 1
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, Mapping) else one)
            if isinstance(item, Mapping | list | tuple)
        ]
    if depth > DEEPEST_DOCUMENT:
        raise InvalidPayload(
            f"the {noun} is nested {depth:,} levels deep, and at most {DEEPEST_DOCUMENT} can be "
            "stored; flatten it",
            argument=field,
            value=document.get(field),
            code=TOO_DEEP,
        )


def _validate(adapter: TypeAdapter[PayloadT], value: Any, **options: Any) -> PayloadT:
    try:
        return adapter.validate_python(value, **options)
    except ValidationError as exc:
        message = str(as_invalid_argument(exc, subject="payload"))
        raise InvalidPayload(
            message,
            argument="payload",
            value=value,
            code=REJECTED_BY_MODEL,
            field=_field_of(exc),
        ) from exc
    except Exception as exc:
        # The caller's validator may raise anything.
        message = f"payload={shorten(value)} is not valid: {_describe(exc)}"
        raise InvalidPayload(
            message, argument="payload", value=value, code=REJECTED_BY_MODEL
        ) from exc


def _untyped_document(payload: Any) -> dict[str, Any]:
    if isinstance(payload, BaseModel) and not isinstance(payload, NewTask):
        return _dumped(payload, payload.model_dump, by_alias=True)
    return dict(_mapping(payload, payload))


def _typed_document(
    adapter: TypeAdapter[Any], payload: Any, *, by_alias: bool = True
) -> dict[str, Any]:
    return _dumped(payload, partial(adapter.dump_python, payload), by_alias=by_alias)


def _dumped(payload: Any, dump: Callable[..., Any], *, by_alias: bool) -> dict[str, Any]:
    try:
        document = dump(by_alias=by_alias, round_trip=True, warnings=False)
        return dict(_to_bson_types(_mapping(document, payload)))
    except InvalidPayload:
        raise
    except Exception as exc:
        # The caller's serializer may raise anything.
        raise InvalidPayload(
            f"the payload ({type(payload).__name__}) cannot be dumped: {_describe(exc)}",
            argument="payload",
            value=payload,
            code=NOT_DUMPABLE,
        ) from exc


def _mapping(document: Any, payload: Any) -> Mapping[str, Any]:
    if not isinstance(document, Mapping):
        raise InvalidPayload(
            f"a payload is a dict or a pydantic model, not {shorten(payload)}",
            argument="payload",
            value=payload,
            code=NOT_A_DOCUMENT,
        )
    return document


def _find_loss(
    adapter: TypeAdapter[Any], given: Any, document: dict[str, Any], *, by_alias: bool
) -> tuple[str | None, str] | None:
    """Return the field that is lost when the document is read back, and how.

    The reason has no values: some are secret.
    """
    try:
        # A copy, for validators that remove what they have read.
        restored = adapter.validate_python(dict(document), **AS_STORED)
    except Exception as exc:  # noqa: BLE001 (the caller's validator may raise anything)
        return _field_of(exc), _describe(exc)
    again = _typed_document(adapter, restored, by_alias=by_alias)
    for key in [*document, *again]:
        one, other = document.get(key), again.get(key)
        if one != other and repr(one) != repr(other):  # NaN equals nothing, not even itself.
            return key, f"{key} comes back as something else"
    lost = _find_lost_field(given, restored)
    return (lost, f"{lost} is left out of what the model dumps") if lost else None


def _find_lost_field(given: Any, restored: Any) -> str | None:
    """Return a field that was not dumped, and is missing or has its default afterwards."""
    if isinstance(given, BaseModel) and isinstance(restored, BaseModel):
        for name, field in type(given).model_fields.items():
            if name not in type(restored).model_fields:
                return name  # A subclass of what the model names.
            one, other = getattr(given, name), getattr(restored, name)
            if (field.exclude or getattr(field, "exclude_if", None)) and one != other:
                return name
            if lost := _find_lost_field(one, other):
                return f"{name}.{lost}"
        return None
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(given, Mapping) and isinstance(restored, Mapping):
        pairs = ((item, restored.get(key)) for key, item in given.items())
    elif isinstance(given, list | tuple) and isinstance(restored, list | tuple):
        pairs = zip(given, restored, strict=False)
    return next((lost for pair in pairs if (lost := _find_lost_field(*pair))), None)


def _field_of(exc: Exception) -> str | None:
    """Return the first field that pydantic rejected; ``None`` if it is the whole value."""
    if not isinstance(exc, ValidationError):
        return None
    first = exc.errors(include_url=False, include_input=False)[0]
    return ".".join(str(part) for part in first["loc"]) or None


def _describe(exc: Exception) -> str:
    if isinstance(exc, ValidationError):
        first = exc.errors(include_url=False, include_input=False)[0]
        return f"{_field_of(exc) or ''}: {first['msg']}"
    return f"{type(exc).__name__}: {exc}"


def _to_bson_types(value: Any) -> Any:
    """Return what a model dumped with types that BSON has, as they are read back.

    Enums, dates, decimals and sets become their JSON form; secrets are stored in plain text.
    """
    if isinstance(value, Secret | SecretStr | SecretBytes):
        value = value.get_secret_value()
    if isinstance(value, Mapping):
        return {_to_key(key): _to_bson_types(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)  # Equal sets are the same document.
    if isinstance(value, list | tuple):
        return [_to_bson_types(item) for item in value]
    if type(value) in {datetime, Instant}:
        return whole_milliseconds(as_utc(value))
    if type(value) in _BSON_LEAVES:
        return value
    try:
        return to_jsonable_python(value)
    except PydanticSerializationError:
        return value  # The caller's type registry may have it.


def _to_key(key: Any) -> Any:
    return key if isinstance(key, str) else str(to_jsonable_python(key))
