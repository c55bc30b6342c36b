"""Typed payloads come back as they were given, or are refused before they are stored."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any

import bson
import pytest
from bson.codec_options import CodecOptions
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    NaiveDatetime,
    RootModel,
    Secret,
    SecretBytes,
    SecretStr,
    computed_field,
    field_serializer,
)

from microqueue import InvalidPayload
from microqueue.encoding_errors import explain
from microqueue.payload import PayloadCodec

STORED: CodecOptions[Any] = CodecOptions(tz_aware=True, tzinfo=UTC)


def come_back(payload: Any, model: Any = None) -> Any:
    codec: PayloadCodec[Any] = PayloadCodec(model or type(payload))
    return codec.load(bson.decode(bson.encode(codec.dump(payload)), STORED))


class Aliased(BaseModel):
    to: str = Field(alias="To")


class ReadByAnotherName(BaseModel):
    to: str = Field(validation_alias="To")


class ReadByAnyName(BaseModel):
    to: str = Field(default="", validation_alias=AliasChoices("To", "TO"))


class WrittenByAnotherName(BaseModel):
    model_config = ConfigDict(extra="forbid")
    to: str = Field(serialization_alias="To")


class Swapped(BaseModel):
    a: int = Field(alias="b")
    b: int = Field(alias="a")


class Secretive(BaseModel):
    text: SecretStr
    data: SecretBytes
    day: Secret[date]
    several: list[SecretStr]


class Computing(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int

    @computed_field  # type: ignore[prop-decorator]  # As pydantic documents it.
    @property
    def twice(self) -> int:
        return self.a * 2


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    day: date
    pair: tuple[int, int]
    numbers: set[int]
    letters: frozenset[str]
    span: timedelta
    price: Decimal


class Quiet(BaseModel):
    a: int
    b: str = Field(default="", exclude=True)


ROUND_TRIPS: list[BaseModel] = [
    Aliased(To="a"),
    ReadByAnotherName.model_validate({"To": "a"}),
    ReadByAnyName.model_validate({"To": "a"}),
    WrittenByAnotherName(to="a"),
    Swapped(a=1, b=2),
    Secretive(
        text=SecretStr("hunter2"),
        data=SecretBytes(b"\xff"),
        day=Secret(date(2026, 1, 2)),
        several=[SecretStr("x")],
    ),
    Computing(a=1),
    Strict(
        day=date(2026, 1, 2),
        pair=(1, 2),
        numbers={1, 8, 16},
        letters=frozenset("abc"),
        span=timedelta(days=1),
        price=Decimal("1.10"),
    ),
    Quiet(a=1),
]


@pytest.mark.parametrize("payload", ROUND_TRIPS, ids=lambda payload: type(payload).__name__)
def test_typed_payload_comes_back_as_it_was_given(payload: BaseModel) -> None:
    assert come_back(payload) == payload


def test_not_a_number_and_a_set_of_anything_can_be_stored() -> None:
    class Loose(BaseModel):
        number: float
        anything: Any

    back = come_back(Loose(number=float("nan"), anything={"q", "w", "e"}))
    assert math.isnan(back.number)
    assert back.anything == ["e", "q", "w"]


class Excluding(BaseModel):
    a: int
    b: str = Field(exclude=True)


class Nesting(BaseModel):
    inner: list[Quiet]


class Naive(BaseModel):
    at: NaiveDatetime


class Growing(BaseModel):
    n: Annotated[int, AfterValidator(lambda n: n + 1)]


class Longer(Quiet):
    more: int


class Pair(Enum):
    ONE = (1, 2)


class Paired(BaseModel):
    pair: Pair


class Breaking(BaseModel):
    x: int

    @field_serializer("x")
    def _break(self, x: int) -> int:
        raise KeyError(x)


LOSSES: Iterable[tuple[BaseModel, Any, str]] = [
    (Excluding(a=1, b="x"), Excluding, "b"),
    (Quiet(a=1, b="x"), Quiet, "b"),
    (Nesting(inner=[Quiet(a=1, b="x")]), Nesting, "inner.b"),
    (Longer(a=1, more=2), Quiet, "more"),
    (Naive(at=datetime(2026, 1, 1)), Naive, "at"),  # noqa: DTZ001 (that is the point)
    (Growing(n=1), Growing, "n"),
    (Paired(pair=Pair.ONE), Paired, "pair"),
]


@pytest.mark.parametrize(("payload", "model", "field"), LOSSES)
def test_payload_that_would_not_come_back_is_rejected_and_the_field_named(
    payload: BaseModel, model: Any, field: str
) -> None:
    with pytest.raises(InvalidPayload) as caught:
        come_back(payload, model)
    assert (caught.value.argument, caught.value.value) == ("payload", payload)
    assert (caught.value.code, caught.value.field) == ("lossy", field)
    assert field in str(caught.value)


def test_what_cannot_be_dumped_is_rejected() -> None:
    with pytest.raises(InvalidPayload) as caught:
        come_back(Breaking(x=1))
    assert (caught.value.argument, caught.value.value) == ("payload", Breaking(x=1))
    assert "KeyError" in str(caught.value)


def test_rejection_of_a_loss_tells_no_secret() -> None:
    class Holder(BaseModel):
        password: SecretStr
        lost: str = Field(exclude=True)

    with pytest.raises(InvalidPayload) as caught:
        come_back(Holder(password=SecretStr("hunter2"), lost="x"))
    assert "hunter2" not in str(caught.value)


def test_model_in_a_queue_without_one_is_stored_with_its_secrets() -> None:
    codec: PayloadCodec[Any] = PayloadCodec()
    secretive: Any = ROUND_TRIPS[5]
    assert codec.dump(secretive)["text"] == "hunter2"
    assert codec.dump(Aliased(To="a")) == {"To": "a"}


def test_payload_that_is_dumped_as_a_list_is_rejected() -> None:
    with pytest.raises(InvalidPayload) as caught:
        PayloadCodec[Any](None).dump(RootModel[list[int]]([1]))
    assert caught.value.argument == "payload"


def test_error_of_a_whole_document_names_no_value() -> None:
    reason = explain({"a": 1}, STORED, ValueError("the document is too large"))
    assert reason == "the document is too large"
