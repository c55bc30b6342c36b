"""The model of a row, where executors can import it."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

from pydantic import BaseModel, Field


class Order(BaseModel):
    sku: str
    count: int = Field(gt=0)
    due: date | None = None


class Priced(BaseModel):
    price: Decimal
    names: dict[int, str]
    day: date | None = Field(strict=True)
