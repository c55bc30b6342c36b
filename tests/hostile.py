"""Hostile values, and the proof that MongoDB got none of them as an operator.

A hostile value carries a mark. :class:`CommandRecorder` records each command that a client sends,
and :func:`check` walks through it as MongoDB interprets it: a mark may be part of a value only.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote
from uuid import UUID

import pytest
from bson import Code, Decimal128, MaxKey, Regex
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent
from pymongo.monitoring import CommandSucceededEvent as Succeeded

EXAMPLES = int(os.environ.get("HOSTILE_EXAMPLES", "0")) or 3
"""How many generated values each argument gets, beside those of ``FIRST``."""

MARK = "hostile7c1e"
"""In each text that is a whole value."""
INNER = "nested7c1e"
"""In each text inside of a dict or list."""


def nested(levels: int) -> dict[str, Any]:
    """Return a dict with so many levels."""
    document: dict[str, Any] = {"$ne": INNER}
    for _ in range(levels):
        document = {"a": document}
    return document


TEXTS = [
    f"${MARK}",
    f"$${MARK}",
    f"{MARK}.b",
    f".{MARK}",
    f"${MARK}.b.$[]",
    f"{MARK}\x00",
    f"\x00{MARK}",
    f"\ud800{MARK}",
    f"../../etc/{MARK}",
    f"..%2f..%2f{MARK}%00",
    f"<script>alert('{MARK}')</script>",
    f"'; db.dropDatabase(); // {MARK}",
    f'{{"$ne": "{INNER}"}}',
    f"(a+)+$|{MARK}",
    f"[{MARK}",
    f"\u202e{MARK}\u0000\uffff\u2028",
    f"{MARK}\r\nSet-Cookie: a=b",
    MARK * 40,
    MARK * 20_000,
]
WORDS = ["$set", "$ne", "$where", "__proto__", "constructor", "system.users", "_id", "", " ", "*"]
WORDS += ["null", "true", "NaN", "Infinity", "-1", "1e400", "9" * 400, "0x10", "-0", "%", "\x00"]
CONTAINERS: list[Any] = [
    {"$ne": INNER},
    {"$gt": INNER},
    {"$in": [INNER]},
    {"$nin": [INNER]},
    {"$exists": INNER},
    {"$regex": INNER},
    {"$not": {"$eq": INNER}},
    {"$where": f"'{INNER}'"},
    {"$expr": {"$ne": ["$_id", INNER]}},
    {"$function": {"body": INNER, "args": [], "lang": "js"}},
    {"$or": [{INNER: 1}]},
    {"$set": {INNER: INNER}},
    {"$literal": INNER},
    {"$concat": ["$queue", INNER]},
    {"$date": INNER},
    {"$oid": INNER},
    {"_id": {"$ne": INNER}},
    {f"${INNER}": 1},
    {f"{INNER}.b": 1},
    {f"{INNER}\x00": 1},
    {f"\ud800{INNER}": 1},
    {"": INNER},
    {"__proto__": {INNER: 1}},
    {"a": {"$ne": INNER}, "b.c": [{"$where": INNER}]},
    {1: INNER},
    {None: INNER},
    {("a",): INNER},
    [MARK],
    [{"$ne": INNER}],
    [[{"$set": INNER}]],
    (MARK,),
    {MARK},
    nested(50),
    nested(300),
]
NUMBERS: list[Any] = [
    *(math.nan, math.inf, -math.inf, -0.0, 1e308, 5e-324, 0, -1, True, False),
    *(2**31, 2**53 + 1, 2**63, 2**70, -(2**70), 10**400),
    *(Decimal("NaN"), Decimal("1e6000"), Decimal128("1.5"), Fraction(1, 3), 1j),
    *(timedelta.max, timedelta.min, timedelta(0)),
    *(datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC), datetime(2026, 1, 1)),  # noqa: DTZ001
]
OBJECTS: list[Any] = [
    *(object(), object, len, b"\x00\xff", bytearray(b"a"), memoryview(b"a"), ...),
    *(
        re.compile(INNER),
        Regex(INNER),
        Code(INNER),
        MaxKey(),
        UUID(int=1),
        Exception(MARK),
        iter(()),
    ),
]
FIRST: list[Any] = [
    *({"$ne": INNER}, {"$where": f"'{INNER}'"}, [{"$ne": INNER}], f"${MARK}", f"{MARK}.b"),
    *(
        f"{MARK}\x00",
        f"\ud800{MARK}",
        "",
        math.nan,
        2**70,
        -1,
        timedelta.max,
        object(),
        nested(300),
    ),
]
"""What each argument gets."""
FIRST_TEXTS = [*TEXTS[:11:2], *TEXTS[5:8], TEXTS[12], "", "-1", "NaN", "9" * 400]
"""The same for an argument that is text."""

_keys = st.sampled_from(
    ["$ne", "$set", f"${INNER}", f"{INNER}.b", "a", "__proto__", f"{INNER}\x00"]
)
_made_text = st.text(st.sampled_from("$.\x00\ud800{}[]\"'/\\%<a"), max_size=6).map(
    f"{MARK}{{}}".format
)
_inner = st.one_of(
    st.just(INNER), st.sampled_from([f"${INNER}", f"\ud800{INNER}", math.nan, 2**70])
)
_made = st.recursive(
    _inner,
    lambda one: st.lists(one, max_size=3) | st.dictionaries(_keys, one, min_size=1, max_size=3),
    max_leaves=6,
)
texts: SearchStrategy[str] = st.sampled_from([*TEXTS, *WORDS]) | _made_text
"""Hostile text."""
values: SearchStrategy[Any] = st.one_of(
    st.sampled_from([*CONTAINERS, *NUMBERS, *OBJECTS]),
    texts,
    _made.filter(lambda one: isinstance(one, dict)),
    st.lists(_made.filter(lambda one: isinstance(one, dict)), max_size=2),
)
"""Hostile values of any type."""
bounded = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))


def is_json(value: Any) -> bool:
    """Return whether JSON can hold a value, as a client of the REST API would send it."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(is_json(item) for item in value)
    if isinstance(value, int):
        return abs(value) < 10**300  # Python refuses to write more digits.
    return value is None or isinstance(value, str | float | bool)


json_values: SearchStrategy[Any] = values.filter(is_json)
"""Hostile values that JSON can hold."""


# What MongoDB got


class CommandRecorder(CommandListener):
    """Records the commands of a client."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Mapping[str, Any]]] = []

    def started(self, event: CommandStartedEvent) -> None:
        """Record a command."""
        self.seen.append((event.command_name, event.command))

    def succeeded(self, event: Succeeded) -> None:
        """Do nothing."""

    def failed(self, event: CommandFailedEvent) -> None:
        """Do nothing."""

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Check all commands of a block."""
        self.seen.clear()
        yield
        for name, command in self.seen:
            check(name, command)

    @property
    def wrote(self) -> bool:
        """Whether any of the commands could change something."""
        return any(name not in READS for name, _ in self.seen)


READS = {"find", "getMore", "aggregate", "count", "distinct", "hello", "ping", "listIndexes"}
READS |= {"listCollections", "killCursors", "serverStatus", "endSessions", "dbStats", "collStats"}
PLAIN = {"hello", "ping", "getMore", "killCursors", "endSessions", "abortTransaction"}
PLAIN |= {"commitTransaction", "serverStatus", "listIndexes", "collStats", "dbStats", "create"}
PLAIN |= {"createIndexes", "drop", "collMod", "buildInfo", "getParameter", "replSetGetStatus"}
ANY_COLLECTION = {"create", "find", "insert", "aggregate", "update", "findAndModify", "count"}
TOPIC = re.compile(r"[\w.]+_topic_[\w.%~-]+|tasks_topic_.+")
OPERANDS = {"$eq", "$gt", "$gte", "$lt", "$lte", "$ne", "$type", "$exists", "$size"}
OPERANDS |= {"$options", "$mod"}
LISTS = {"$in", "$nin", "$all"}
BOOLEAN = {"$and", "$or", "$nor"}
SCRIPTS = {"$where", "$function", "$accumulator", "$jsonSchema", "$text", "$comment"}
UPDATES = {"$set", "$setOnInsert", "$push", "$addToSet", "$inc", "$max", "$min", "$unset"}
UPDATES |= {"$pull", "$pop", "$currentDate", "$rename"}


class Interpreted(AssertionError):
    """MongoDB got a hostile value where it interprets it."""


def check(name: str, command: Mapping[str, Any]) -> None:
    """Raise an error if MongoDB interprets a hostile value of the command."""
    try:
        _command(name, command)
    except Interpreted as exc:
        raise Interpreted(f"{exc} in {name}: {str(command)[:2000]}") from None


def _command(name: str, command: Mapping[str, Any]) -> None:
    where = command.get(name)
    if isinstance(where, str) and _marked(where) and not TOPIC.fullmatch(where):
        raise Interpreted(f"a collection is called {where!r}")
    for key, value in command.items():
        if key == name or key in {"$db", "lsid", "$clusterTime", "comment", "txnNumber"}:
            continue
        _argument(name, key, value)


def _argument(name: str, key: str, value: Any) -> None:
    match name, key:
        case "insert", "documents":
            pass  # Literal, whatever it is.
        case "listCollections", "filter":
            _filter({"name": ""} if set(value) == {"name"} else value)
        case (("find" | "count" | "distinct" | "findAndModify"), ("filter" | "query")):
            _filter(value)
        case "findAndModify", "update":
            _update(value)
        case (("update" | "delete"), ("updates" | "deletes")):
            for statement in value:
                for part, given in statement.items():
                    {"q": _filter, "u": _update}.get(part, _unmarked)(given)
        case "bulkWrite", _:
            raise AssertionError("read the operations of bulkWrite, too")
        case "aggregate", "pipeline":
            for stage in value:
                _stage(stage)
        case _:
            _unmarked(value)


def _filter(given: Any) -> None:
    for key, value in given.items():
        _unmarked(key)
        if key in BOOLEAN:
            for one in value:
                _filter(one)
        elif key == "$expr":
            _expression(value)
        elif key.startswith("$"):
            raise Interpreted(f"{key} is an operator")
        else:
            _condition(value)


def _condition(value: Any) -> None:
    if not (isinstance(value, Mapping) and any(key.startswith("$") for key in value)):
        _operand(value)
        return
    for operator, operand in value.items():
        if operator in SCRIPTS:
            raise Interpreted(f"{operator} is an operator")
        if operator in {"$not", "$elemMatch"}:
            (_condition if operator == "$not" else _filter)(operand)
        elif operator in LISTS:
            for one in operand:
                _operand(one)
        elif operator == "$regex":
            _pattern(operand)
        elif operator in OPERANDS:
            _operand(operand)
        else:
            raise Interpreted(f"{operator} is an operator")


def _operand(value: Any) -> None:
    """Allow another text, and containers that are compared whole."""
    # Ids of scheduled tasks contain the name of the schedule, quoted.
    if isinstance(value, str) and INNER in value and "{" not in unquote(value):
        raise Interpreted(f"{value!r} lost its dict")
    if isinstance(value, Regex | re.Pattern) and INNER in str(value.pattern):
        raise Interpreted("a pattern is matched")


def _pattern(pattern: Any) -> None:
    """Allow text only that is escaped, after a ``^`` at most."""
    text = str(pattern).removeprefix("^")
    escaped = re.escape(re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL))
    if _marked(text) and (not isinstance(pattern, str) or text != escaped):
        raise Interpreted(f"{text[:200]!r} is a pattern")


def _update(given: Any) -> None:
    if isinstance(given, list):
        for stage in given:
            _stage(stage)
        return
    for operator, fields in given.items():
        if not operator.startswith("$"):
            return  # A whole document: literal.
        if operator not in UPDATES:
            raise Interpreted(f"{operator} is an operator")
        for path, value in fields.items():
            _unmarked(path)
            if operator == "$pull":
                _filter(value) if isinstance(value, Mapping) else _operand(value)
            elif operator in {"$push", "$addToSet"} and "$each" in _as_mapping(value):
                for part, pushed in value.items():
                    if part != "$each":
                        _unmarked(pushed)


def _stage(stage: Mapping[str, Any]) -> None:
    for operator, given in stage.items():
        if operator == "$match":
            _filter(given)
        elif operator in {"$unionWith", "$lookup"}:
            inside = _as_mapping(given)
            for one in inside.get("pipeline", ()):
                _stage(one)
            _expression({key: value for key, value in inside.items() if key != "pipeline"})
        elif operator == "$facet":
            for pipeline in given.values():
                for one in pipeline:
                    _stage(one)
        else:
            _unmarked(operator)
            _expression(given)


def _expression(given: Any) -> None:
    """Allow no mark but in ``$literal``: a text may be the path of a field."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            _unmarked(key)
            if key in SCRIPTS:
                raise Interpreted(f"{key} is an operator")
            if key != "$literal":
                _expression(value)
    elif isinstance(given, list | tuple):
        for value in given:
            _expression(value)
    else:
        _unmarked(given)


PLANTS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "key": (f"{MARK}.b", lambda code: {code: {"$exists": False}}),
    "dict": (f'{{"$ne": "{INNER}"}}', lambda code: {"error.code": json.loads(code)}),
    "script": (f"' || '{MARK}", lambda code: {"$where": f"this.error.code == '{code}'"}),
    "expression": (f"${MARK}", lambda code: {"$expr": {"$eq": ["$error.code", code]}}),
    "pattern": (f".*|{MARK}", lambda code: {"error.code": {"$regex": f"^{code}"}}),
    "compiled": (f"{INNER}.*", lambda code: {"error.code": re.compile(code)}),
}
"""Filters by an error code that are wrong, each with a code that MongoDB would interpret."""


@contextmanager
def planted(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let all operations use a wrong filter, and expect that it is noticed; yield the code."""
    code, wrong = PLANTS[name]

    def with_code(given: str | None) -> dict[str, Any]:
        return {} if given is None else wrong(given)

    monkeypatch.setattr("microqueue.operations.filters.with_code", with_code)
    with pytest.raises(Interpreted):
        yield code


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _marked(value: Any) -> bool:
    text = str(value)
    return MARK in text or INNER in text


def _unmarked(value: Any) -> None:
    if _marked(value):
        raise Interpreted(f"{str(value)[:200]!r} is interpreted")
