"""Filters, sort orders and updates of MongoDB, as documented, on documents as dicts.

This knows what the operations of a queue use. Anything else raises ``NotImplementedError``, so that
the model never guesses. Documents are never changed in place: an update returns a new one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bson import Int64, ObjectId
from pymongo.errors import OperationFailure

from microqueue.clock import Instant

Document = dict[str, Any]
Test = Callable[[Any], bool]
Filter = list[tuple[str | None, Test]]
"""Tests of a field by its name, or of the whole document if there is no name."""


class Missing:
    """The value of a field that a document does not have."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = Missing()
BAD_VALUE = 2
TYPE_MISMATCH = 14
TYPES: dict[str, tuple[type, ...]] = {
    "date": (datetime,),
    "string": (str,),
    "object": (dict,),
    "objectId": (ObjectId,),
    "array": (list,),
    "number": (int, float),
}


def stored(value: Any) -> Any:
    """Return a value as MongoDB would return it: an instant without its uncertainty."""
    kind = type(value)
    if kind is Instant:
        return value.plain
    if kind is dict:
        return {name: stored(one) for name, one in value.items()}
    if kind is list:
        return [stored(one) for one in value]
    return value


def key_of(value: Any) -> Any:
    """Return an id as a key of a dict."""
    return value if type(value) is not dict else ("document", *value.items())


# Filters


def compiled(selection: Mapping[str, Any]) -> Filter:
    """Return the tests of a filter."""
    tests: Filter = []
    for name, condition in selection.items():
        if name[0] == "$":
            tests.append((None, _combined(name, condition)))
        elif "." in name:
            tests.append((None, _at_path(name.split("."), condition)))
        elif type(condition) is dict and next(iter(condition), "")[:1] == "$":
            tests += [(name, _operator(one, operand)) for one, operand in condition.items()]
        else:
            tests.append((name, _equal(condition)))
    return tests


def passes(document: Mapping[str, Any], tests: Filter) -> bool:
    """Return whether a document passes all tests."""
    for name, test in tests:
        if not test(document if name is None else document.get(name, MISSING)):
            return False
    return True


def matches(document: Mapping[str, Any], selection: Mapping[str, Any]) -> bool:
    """Return whether a filter matches a document."""
    return passes(document, compiled(selection))


def _combined(name: str, conditions: Any) -> Test:
    if name == "$expr":
        return _expression(conditions)
    parts = [compiled(one) for one in conditions]
    if name == "$and":
        return lambda document: all(passes(document, one) for one in parts)
    if name == "$or":
        return lambda document: any(passes(document, one) for one in parts)
    if name == "$nor":
        return lambda document: not any(passes(document, one) for one in parts)
    raise NotImplementedError(name)


def _expression(expression: Document) -> Test:
    ((operator, operands),) = expression.items()
    if operator != "$gte":
        raise NotImplementedError(operator)
    left, right = (one[1:] for one in operands)
    return lambda document: order_of(document.get(left)) >= order_of(document.get(right))


def _at_path(path: Sequence[str], condition: Any) -> Test:
    """Test the values at a path; in an array of documents, each of them has one."""
    ((_, test),) = compiled({"field": condition})
    negated = type(condition) is dict and not {"$ne", "$nin", "$not"}.isdisjoint(condition)

    def tested(document: Any) -> bool:
        values = _values(document, path)
        return all(map(test, values)) if negated else any(map(test, values))

    return tested


def _values(value: Any, path: Sequence[str]) -> list[Any]:
    if not path:
        return [value]
    first, *rest = path
    if isinstance(value, dict):
        return _values(value.get(first, MISSING), rest)
    if isinstance(value, list):
        if first.isdecimal():
            place = int(first)
            return _values(value[place] if place < len(value) else MISSING, rest)
        return [one for element in value for one in _values(element, path)] or [MISSING]
    return [MISSING]


def _equal(wanted: Any) -> Test:
    if wanted is None:
        return lambda value: value is None or value is MISSING
    if isinstance(wanted, bool):
        return lambda value: value is wanted

    def equal(value: Any) -> bool:
        if value == wanted:
            return value is not True and value is not False
        return type(value) is list and wanted in value

    return equal


def _operator(operator: str, operand: Any) -> Test:  # noqa: PLR0911 (a table)
    match operator:
        case "$eq":
            return _equal(operand)
        case "$ne":
            equal = _equal(operand)
            return lambda value: not equal(value)
        case "$in":
            return _any_of(operand)
        case "$nin":
            among = _any_of(operand)
            return lambda value: not among(value)
        case "$type":
            types = TYPES[operand]
            numbers = operand == "number"
            return lambda value: (
                isinstance(value, types) and not (numbers and isinstance(value, bool))
            )
        case "$exists":
            return lambda value: (value is not MISSING) is bool(operand)
        case "$not":
            tests = [_operator(one, value) for one, value in operand.items()]
            return lambda value: not all(test(value) for test in tests)
        case "$elemMatch":
            inner = compiled(operand)
            return lambda value: type(value) is list and any(passes(one, inner) for one in value)
        case "$regex":
            pattern = re.compile(operand)
            return lambda value: isinstance(value, str) and bool(pattern.search(value))
        case "$lte" | "$lt" | "$gte" | "$gt":
            return _compared(operator, operand)
    raise NotImplementedError(operator)


def _any_of(operand: Sequence[Any]) -> Test:
    if all(type(one) in {str, ObjectId} for one in operand):
        plain = frozenset(operand)
        return lambda value: type(value) in {str, ObjectId} and value in plain
    tests = [_equal(one) for one in operand]
    return lambda value: any(test(value) for test in tests)


def _compared(operator: str, operand: Any) -> Test:
    """Compare values of one type; a comparison of different types does not match."""
    rank = order_of(operand)[0]
    if rank not in COMPARABLE:
        raise NotImplementedError(f"{operator}: {operand!r}")
    match operator:
        case "$lte":
            return lambda value: order_of(value)[0] == rank and value <= operand
        case "$lt":
            return lambda value: order_of(value)[0] == rank and value < operand
        case "$gte":
            return lambda value: order_of(value)[0] == rank and value >= operand
    return lambda value: order_of(value)[0] == rank and value > operand


RANKS: dict[type, int] = {
    type(None): 0, Missing: 0, int: 1, Int64: 1, float: 1, str: 2, dict: 3, list: 4, ObjectId: 6,
    bool: 7, datetime: 8, Instant: 8,
}  # fmt: skip
COMPARABLE = frozenset({1, 2, 6, 8})


def order_of(value: Any) -> tuple[int, Any]:
    """Return what a value is sorted by: its type first."""
    rank = RANKS[type(value)]
    return (rank, 0 if rank == 0 else value)


def in_order(documents: list[Document], sort: Sequence[tuple[str, int]]) -> list[Document]:
    """Sort documents."""
    for name, direction in reversed(sort):
        documents.sort(key=lambda one: order_of(one.get(name)), reverse=direction < 0)
    return documents


def project(document: Document, fields: Mapping[str, int] | None) -> Document:
    """Return a copy with the fields of a projection."""
    if fields is None:
        return document.copy()
    if not all(wanted for name, wanted in fields.items() if name != "_id"):
        return {name: value for name, value in document.items() if name not in fields}
    kept: Document = {} if fields.get("_id") == 0 else {"_id": document["_id"]}
    for name in fields:
        head, _, rest = name.partition(".")
        if head not in document or head == "_id":
            continue
        if not rest:
            kept[head] = document[head]
        elif isinstance(document[head], dict):
            inner = kept.setdefault(head, {})
            if rest in document[head]:
                inner[rest] = document[head][rest]
    return kept


# Updates


def updated(  # noqa: PLR0912 (an operator each)
    document: Document,
    update: Document,
    now: datetime,
    *,
    selection: Mapping[str, Any],
    inserting: bool = False,
) -> Document | None:
    """Return the document after an update, or None if it changes nothing. The old one stays."""
    after = document.copy()
    for operator, changes in update.items():
        match operator:
            case "$set":
                for name, value in changes.items():
                    if "." in name:
                        _set_matched(after, name, stored(value), selection)
                    else:
                        after[name] = stored(value)
            case "$setOnInsert":
                if inserting:
                    after.update(stored(changes))
            case "$unset":
                for name in changes:
                    after.pop(name, None)
            case "$inc":
                for name, step in changes.items():
                    after[name] = _number(after.get(name, 0), name) + step
            case "$max":
                for name, value in changes.items():
                    if name not in after or order_of(value) > order_of(after[name]):
                        after[name] = stored(value)
            case "$push":
                for name, how in changes.items():
                    after[name] = _pushed(after.get(name, []), how)
            case "$pull":
                for name, condition in changes.items():
                    if name in after:
                        after[name] = [one for one in after[name] if not matches(one, condition)]
            case "$currentDate":
                after.update(dict.fromkeys(changes, now))
            case _:
                raise NotImplementedError(operator)
    return None if after == document else after


def _set_matched(after: Document, name: str, value: Any, selection: Mapping[str, Any]) -> None:
    """Set a field of the first element of an array that the filter matches: ``array.$.field``."""
    array, place, field = name.split(".")
    if place != "$":
        raise NotImplementedError(name)
    wanted = {
        path.split(".")[1]: condition
        for path, condition in selection.items()
        if path.startswith(f"{array}.")
    }
    elements = list(after[array])
    first = next(at for at, one in enumerate(elements) if matches(one, wanted))
    elements[first] = {**elements[first], field: value}
    after[array] = elements


def _number(value: Any, name: str) -> Any:
    if type(value) not in {int, Int64, float}:
        raise OperationFailure(f"Cannot apply $inc to {name}: not a number", TYPE_MISMATCH)
    return value


def _pushed(given: Any, how: Any) -> list[Any]:
    if not isinstance(given, list):
        raise OperationFailure("The field must be an array", BAD_VALUE)
    if not isinstance(how, dict) or "$each" not in how:
        return [*given, stored(how)]
    if set(how) != {"$each", "$slice"} or how["$slice"] >= 0:
        raise NotImplementedError(str(how))
    return [*given, *stored(how["$each"])][how["$slice"] :]
