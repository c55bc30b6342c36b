"""The rules of a repair for tasks, dead letters and dedupe keys, in the order of their application.

``docs/repair.md`` lists them. A rule must match no document that a healthy run makes, also not
for a moment: between the writes of a move to ``tasks_dlq``, of a replay, or of ``dedupe_for``. The
fields of a claimed task are changed only where its worker cannot have written them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from microqueue.clock import later
from microqueue.durations import LONGEST
from microqueue.error_codes import INVALID_TASK, MAX_ATTEMPTS
from microqueue.operations import filters
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.dedupe_keys import RESERVED
from microqueue.operations.repair import Moment, Rule, burial
from microqueue.operations.workers import DEFAULT_MAX_ATTEMPTS
from microqueue.task import DEFAULT_QUEUE, LARGEST_COUNT, LONGEST_NAME, is_name, is_text

FIRST_DATE = datetime(1, 1, 1, tzinfo=UTC)
LAST_DATE = datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC)
"""What a datetime can hold; a date of MongoDB may be earlier or later."""
HELD_TOO_LONG = timedelta(days=1)
LONGEST_SHOWN = 100
REPAIRED_TOKEN = "repaired"  # noqa: S105 (no worker has it)
"""The lease token of a task that had none: no worker has it."""
UNKNOWN_WORKER = "unknown"

PENDING = (filters.PENDING,)
PROCESSING = (filters.PROCESSING,)
LIVE = (filters.PENDING, filters.PROCESSING)
DONE = (filters.DONE,)
FAILED = (filters.FAILED,)
STATUSES = (*LIVE, *DONE, *FAILED)
NOT_FAILED = (*LIVE, *DONE)
FINISHED = (*DONE, *FAILED)

DLQ = (Target.DEAD_LETTERS,)
BOTH = (Target.TASKS, Target.DEAD_LETTERS)
KEYS = (Target.DEDUPE_KEYS,)

REMOVED = "$$REMOVE"


# Expressions


def _type(name: str) -> Document:
    return {"$type": f"${name}"}


def _is(name: str, *types: str) -> Document:
    return {"$in": [_type(name), list(types)]}


def _no(condition: Document) -> Document:
    return {"$not": [condition]}


def _all(*conditions: Document) -> Document:
    return {"$and": list(conditions)}


def _any(*conditions: Document) -> Document:
    return {"$or": list(conditions)}


def _absent(name: str) -> Document:
    return _is(name, "missing", "null")


def _date(name: str) -> Document:
    value = f"${name}"
    return _all(_is(name, "date"), {"$gte": [value, FIRST_DATE]}, {"$lte": [value, LAST_DATE]})


def _converted(name: str) -> Document:
    return {"$convert": {"input": f"${name}", "to": "date", "onError": None, "onNull": None}}


def _text_date(name: str) -> Document:
    return _all(_is(name, "string"), {"$ne": [_converted(name), None]})


def _bad_date(name: str) -> Document:
    """Match what is no date, and no text that means one."""
    return _no(_any(_absent(name), _date(name), _text_date(name)))


def _no_date(name: str) -> Document:
    return _any(_absent(name), _bad_date(name))


def _if(condition: Document, then: Any, otherwise: Any) -> Document:
    return {"$cond": [condition, then, otherwise]}


def _first_date(*names: str, otherwise: datetime) -> Any:
    value: Any = otherwise
    for name in reversed(names):
        value = _if(_date(name), f"${name}", value)
    return value


def _plain_number(name: str) -> Document:
    return _is(name, "int", "long", "double")


def _number(name: str) -> Document:
    return {"$isNumber": f"${name}"}


def _named(name: str, instead: str) -> Document:
    """Return a message with the value of a field if it is a text or a number, or with its type."""
    text = _if(_any(_is(name, "string"), _number(name)), {"$toString": f"${name}"}, _type(name))
    return {"$concat": [f"{name}=", {"$substrCP": [text, 0, LONGEST_SHOWN]}, f" {instead}"]}


# Changes that several rules share


def _buries(
    name: str,
    wrong: str,
    broken: Document,
    *,
    field: str,
    instead: str,
    code: str = INVALID_TASK,
    statuses: tuple[str, ...] | None = PENDING,
    **more: Any,
) -> Rule:
    """Return the rule for a waiting task that cannot be mended."""
    return Rule(
        name,
        wrong,
        f"it becomes a dead letter with code `{code}`",
        broken,
        lambda moment: {**burial(_named(field, instead), moment, code), **more},
        statuses=statuses,
        buried_as=code,
    )


def _waiting_deadline() -> Document:
    """Return when a waiting task is due or expires, whichever is first, or null."""
    dates = [_if(_date(name), f"${name}", None) for name in ("next_retry_at", "expires_at")]
    return {"$min": dates}


def _wrong_deadline() -> Document:
    """Match a waiting task that no sweep would find in time. An early deadline mends itself."""
    due = _waiting_deadline()
    late = _any(_absent("deadline_at"), _all(_date("deadline_at"), {"$gt": ["$deadline_at", due]}))
    return _any(_bad_date("deadline_at"), _all({"$ne": [due, None]}, late))


def _as_dates(*names: str) -> dict[str, Document]:
    return {name: _if(_text_date(name), _converted(name), f"${name}") for name in names}


DATES = ("updated_at", "next_retry_at", "expires_at", "deadline_at", "started_at", "finished_at")


def _dates_mended(moment: Moment) -> Document:
    """Return the dates, and the stamp of this change; that of a dead letter is when it failed."""
    dates = _as_dates(*DATES)
    failed = {"$eq": ["$status", filters.FAILED]}
    return {**dates, "updated_at": _if(failed, dates["updated_at"], moment.now)}


def _repaired_error(moment: Moment) -> Document:
    text = _if(
        _is("error.message", "string"),
        "$error.message",
        _if(_is("error", "string"), "$error", "the dead letter had no error"),
    )
    code = _if(_is("error.code", "string"), "$error.code", INVALID_TASK)
    at = _first_date("error.at", "finished_at", "updated_at", otherwise=moment.now)
    stored = _if(_is("error", "object"), "$error", {})
    return {"$mergeObjects": [stored, {"message": text, "code": code, "at": at}]}


def _done_at(moment: Moment) -> Document:
    ended = _first_date("finished_at", "deadline_at", "updated_at", otherwise=moment.now)
    return {"finished_at": ended, "deadline_at": ended}


def _created(moment: Moment) -> Any:
    known = _first_date("updated_at", otherwise=moment.now)
    return _if(_is("_id", "objectId"), {"$toDate": "$_id"}, known)


def _bad_counter(name: str) -> Document:
    """Match what cannot be counted up: also NaN, infinity, and what is no integer in Python."""
    value = f"${name}"
    limits = {"$gte": [value, -LARGEST_COUNT]}, {"$lte": [value, LARGEST_COUNT]}
    return _no(_any(_is(name, "missing"), _all(_plain_number(name), *limits)))


COUNTERS = ("replays", "crashes", "moves")


def _copy_version() -> Document:
    return {"$multiply": [2, _if(_number("moves"), "$moves", 0)]}


def _is_even_number() -> Document:
    return _all(
        _is("version", "int", "long"),
        {"$gte": ["$version", 0]},
        {"$lte": ["$version", 2 * LARGEST_COUNT]},
        {"$eq": [{"$mod": [_if(_is("version", "int", "long"), "$version", 1), 2]}, 0]},
    )


def _was_tombstone() -> Document:
    """Match a tombstone without ``retired_at``: its version is not even, and it has no queue."""
    version = _if(_is("version", "int", "long"), "$version", 0)
    return _all(
        _is("status", "missing"), _is("queue", "missing"), {"$eq": [{"$mod": [version, 2]}, 1]}
    )


NOT_PRINTABLE = r"[\p{Cc}\p{Cf}\p{Co}\p{Zl}\p{Zp}]|[^ \P{Zs}]"
"""Characters that a name cannot have: control characters, and separators other than a space.

Characters without a category are left out: those of MongoDB and of Python may differ.
"""


def _bad_queue() -> Document:
    text = _if(_is("queue", "string"), "$queue", "")
    length = {"$strLenCP": text}
    return _any(
        {"$eq": [length, 0]},
        {"$gt": [length, LONGEST_NAME]},
        {"$regexMatch": {"input": text, "regex": NOT_PRINTABLE}},
    )


EXPIRES = "is not valid: give a date up to the year 9999"

RULES: tuple[Rule, ...] = (
    Rule(
        "date-as-text",
        f"{', '.join(f'`{name}`' for name in DATES)}: a date is stored as text",
        "the text becomes the date it means",
        _any(*map(_text_date, DATES)),
        _dates_mended,
        statuses=STATUSES,
        places=BOTH,
    ),
    Rule(
        "created-at-as-text",
        "`created_at` is stored as text",
        "the text becomes the date it means",
        _text_date("created_at"),
        lambda _: _as_dates("created_at"),
        statuses=NOT_FAILED,  # It tells dead letters with the same id apart.
    ),
    # What has no safe repair.
    _buries(
        "status",
        "`status` is unknown",
        _no({"$in": ["$status", list(STATUSES)]}),
        field="status",
        instead="is unknown",
        statuses=None,
    ),
    _buries(
        "queue",
        "`queue` of a waiting task is no name, so no worker claims it",
        _bad_queue(),
        field="queue",
        instead="is not a name of a queue",
        queue=DEFAULT_QUEUE,
    ),
    _buries(
        "id",
        "`_id` of a waiting task is a document",
        _is("_id", "object"),
        field="_id",
        instead="is not valid: give an ObjectId, a string, an integer or a UUID",
    ),
    _buries(
        "next-retry-at",
        "`next_retry_at` of a waiting task is no date, so it is never due",
        _bad_date("next_retry_at"),
        field="next_retry_at",
        instead=EXPIRES,
    ),
    _buries(
        "expires-at",
        "`expires_at` of a waiting task is no date",
        _bad_date("expires_at"),
        field="expires_at",
        instead=EXPIRES,
    ),
    _buries(
        "visibility-timeout",
        "`visibility_timeout_sec` of a waiting task is no duration",
        _no(
            _any(
                _absent("visibility_timeout_sec"),
                _all(
                    _plain_number("visibility_timeout_sec"),
                    {"$gte": ["$visibility_timeout_sec", 0.001]},
                    {"$lte": ["$visibility_timeout_sec", LONGEST.total_seconds()]},
                ),
            )
        ),
        field="visibility_timeout_sec",
        instead="is not valid: give a positive number of seconds",
    ),
    _buries(
        "attempts-unknown",
        "`attempts` of a waiting task is no number",
        _any(
            _no(_any(_is("attempts", "missing"), _number("attempts"))),
            {"$in": ["$attempts", [math.nan, math.inf]]},
        ),
        field="attempts",
        instead="is not valid: give a number",
        attempts=0,
    ),
    # The order of the queue, and the counts.
    Rule(
        "attempts",
        "`attempts` of a waiting task is missing, negative, or a decimal",
        "it becomes a whole number, 0 if it was missing or negative",
        _any(
            _is("attempts", "missing"),
            _all(
                _number("attempts"),
                _no({"$in": ["$attempts", [math.nan, math.inf]]}),
                _any({"$lt": ["$attempts", 0]}, _is("attempts", "decimal")),
            ),
        ),
        lambda _: {
            "attempts": {
                "$max": [
                    0,
                    {"$convert": {"input": "$attempts", "to": "int", "onError": 0, "onNull": 0}},
                ]
            }
        },
        statuses=PENDING,
    ),
    Rule(
        "max-attempts",
        "`max_attempts` of a waiting task is no number, or less than 1",
        f"it becomes {DEFAULT_MAX_ATTEMPTS}, or 1 if it was less",
        _any(_no(_number("max_attempts")), {"$lt": ["$max_attempts", 1]}),
        lambda _: {"max_attempts": _if(_number("max_attempts"), 1, DEFAULT_MAX_ATTEMPTS)},
        statuses=PENDING,
    ),
    _buries(
        "attempts-used-up",
        "a waiting task has no attempt left",
        _all(
            _number("attempts"),
            {"$gte": ["$max_attempts", 1]},
            _number("max_attempts"),
            _no({"$in": ["$attempts", [math.nan, math.inf]]}),
            {"$gte": ["$attempts", "$max_attempts"]},
        ),
        field="attempts",
        instead="are as many as it may have",
        code=MAX_ATTEMPTS,
    ),
    Rule(
        "created-at",
        "`created_at` is no date",
        "it becomes the time in the ObjectId, or `updated_at`, or now",
        _no_date("created_at"),
        lambda moment: {"created_at": _created(moment)},
        statuses=NOT_FAILED,
    ),
    Rule(
        "updated-at",
        "`updated_at` is no date",
        "it becomes now",
        _no_date("updated_at"),
        lambda moment: {"updated_at": moment.now},
        statuses=STATUSES,
        places=BOTH,
    ),
    Rule(
        "priority",
        "`priority` of a waiting task is no number, so it is delivered out of order",
        "it becomes 0",
        _no(_number("priority")),
        lambda _: {"priority": 0},
        statuses=PENDING,
    ),
    Rule(
        "position",
        "`position` of a waiting task is no number, so it is delivered out of order",
        "it becomes the position of its `created_at`",
        _no(_number("position")),
        lambda moment: {
            "position": {
                "$multiply": [
                    {"$toLong": _first_date("created_at", otherwise=moment.now)},
                    1000,
                ]
            }
        },
        statuses=PENDING,
    ),
    Rule(
        "history",
        "`history` is no list",
        "it becomes empty",
        _no(_is("history", "missing", "array")),
        lambda _: {"history": []},
        statuses=STATUSES,
        places=BOTH,
    ),
    Rule(
        "counters",
        "`replays`, `crashes` or `moves` is no count, so it cannot be counted up",
        "it is removed",
        _any(*map(_bad_counter, COUNTERS)),
        lambda _: {name: _if(_bad_counter(name), REMOVED, f"${name}") for name in COUNTERS},
        statuses=STATUSES,
        places=BOTH,
    ),
    # Leases.
    Rule(
        "lease-token",
        "a claimed task has no `lease_token`, so no worker can settle it",
        "it gets one that no worker has; the sweeper reclaims it when its lease ends",
        _no(_all(_is("lease_token", "string"), {"$ne": ["$lease_token", ""]})),
        lambda _: {"lease_token": REPAIRED_TOKEN},
        statuses=PROCESSING,
    ),
    Rule(
        "lease-end",
        "a claimed task has no `deadline_at`, so it is never reclaimed",
        "its lease ends after the visibility timeout, unless its worker renews it",
        _no_date("deadline_at"),
        lambda moment: {"deadline_at": later(moment.now, moment.settings.visibility_timeout)},
        statuses=PROCESSING,
    ),
    Rule(
        "lease-start",
        "a claimed task has no `started_at`",
        "it becomes `updated_at`, or now",
        _no_date("started_at"),
        lambda moment: {"started_at": _first_date("updated_at", otherwise=moment.now)},
        statuses=PROCESSING,
    ),
    Rule(
        "lease-worker",
        "a claimed task has no `worker_id`",
        f"it becomes `{UNKNOWN_WORKER}`; the sweeper reclaims it when its lease ends",
        _no(_is("worker_id", "string")),
        lambda _: {"worker_id": UNKNOWN_WORKER},
        statuses=PROCESSING,
    ),
    Rule(
        "lease-queue",
        "`queue` of a claimed task is no name",
        "it is only reported: once the sweeper has reclaimed it, a repair makes it a dead letter",
        _bad_queue(),
        None,
        statuses=PROCESSING,
    ),
    Rule(
        "lease-left",
        "a waiting task or a dead letter has a `lease_token`",
        "the token is removed",
        _no(_absent("lease_token")),
        lambda _: {"lease_token": None},
        statuses=(*PENDING, *FAILED),
        places=BOTH,
    ),
    # Waiting tasks that no sweep would find.
    Rule(
        "reservation",
        "a reserved task has no `expires_at`, so it never expires",
        "it expires in five minutes, unless a producer completes it",
        _all(
            _no(_is("reserving", "missing")),
            {"$eq": ["$next_retry_at", filters.FAR]},
            _absent("expires_at"),
        ),
        lambda moment: {
            "expires_at": later(moment.now, RESERVED),
            "deadline_at": later(moment.now, RESERVED),
        },
        statuses=PENDING,
    ),
    Rule(
        "deadline",
        "`deadline_at` of a waiting task is missing, too late or no date, so no sweep finds it",
        "it becomes when the task is due or expires",
        _wrong_deadline(),
        lambda _: {"deadline_at": _waiting_deadline()},
        statuses=PENDING,
    ),
    Rule(
        "held",
        "a task has been held for more than a day, or by no load: it is never delivered",
        "it is only reported: load the same rows again, which releases it, or cancel it",
        _all(
            {"$eq": ["$next_retry_at", filters.FAR]},
            _is("reserving", "missing"),
            _any(
                _no(_is("held.by", "array")),
                {"$eq": ["$held.by", []]},
                {
                    "$lt": [
                        "$updated_at",
                        {"$subtract": ["$$NOW", int(HELD_TOO_LONG.total_seconds() * 1000)]},
                    ]
                },
            ),
        ),
        None,
        statuses=PENDING,
    ),
    Rule(
        "finished-early",
        "a waiting or claimed task has a `finished_at`",
        "it is removed; if a live task has the dedupe key, the task becomes a dead letter",
        _no(_absent("finished_at")),
        lambda _: {"finished_at": None},
        statuses=LIVE,
    ),
    # Finished tasks.
    Rule(
        "done-end",
        "a done task has no `finished_at`, or another `deadline_at`, so it is not purged in time",
        "both become when it was done, or last changed",
        _any(
            _no_date("finished_at"),
            _all(
                _date("finished_at"),
                _no(_text_date("deadline_at")),
                {"$ne": ["$deadline_at", "$finished_at"]},
            ),
        ),
        _done_at,
        statuses=DONE,
    ),
    Rule(
        "failed-end",
        "a dead letter has no `finished_at`, so its dedupe key stays taken",
        "it becomes `updated_at`, or now",
        _no_date("finished_at"),
        lambda moment: {"finished_at": _first_date("updated_at", otherwise=moment.now)},
        statuses=FAILED,
        places=BOTH,
    ),
    Rule(
        "failed-deadline",
        "a dead letter has a `deadline_at`",
        "it is removed",
        _no(_absent("deadline_at")),
        lambda _: {"deadline_at": None},
        statuses=FAILED,
        places=BOTH,
    ),
    Rule(
        "failed-error",
        "a dead letter has no `error`, or one without a message or time",
        f"it gets one, with code `{INVALID_TASK}` if it has none",
        _no(_all(_is("error.message", "string"), _date("error.at"))),
        lambda moment: {"error": _repaired_error(moment)},
        statuses=FAILED,
        places=BOTH,
    ),
    Rule(
        "finished-queue",
        "`queue` of a finished task is no name, so it is not listed",
        f"it becomes `{DEFAULT_QUEUE}`",
        _bad_queue(),
        lambda _: {"queue": DEFAULT_QUEUE},
        statuses=FINISHED,
        places=BOTH,
    ),
    # Moves between the two collections.
    Rule(
        "replaying",
        "`replaying` is malformed or left behind, so the dead letter is neither moved nor replayed",
        "it is removed",
        _all(
            _no(_absent("replaying")),
            _no(
                _all(
                    {"$eq": ["$status", filters.FAILED]},
                    _date("replaying.at"),
                    _is("replaying.changes", "object"),
                )
            ),
        ),
        lambda _: {"replaying": REMOVED},
        statuses=STATUSES,
        places=BOTH,
    ),
    Rule(
        "task-version",
        "a task has a `version`, which only its copy in `tasks_dlq` has",
        "it is removed",
        _no(_is("version", "missing")),
        lambda _: {"version": REMOVED},
        statuses=STATUSES,
    ),
    Rule(
        "dlq-status",
        "a document of `tasks_dlq` is neither a dead letter nor a tombstone",
        "it becomes a dead letter",
        _all(
            _is("retired_at", "missing"),
            {"$ne": ["$status", filters.FAILED]},
            _no(_was_tombstone()),
        ),
        lambda moment: {"status": filters.FAILED, "error": _repaired_error(moment)},
        places=DLQ,
    ),
    Rule(
        "dlq-retired",
        "a dead letter of `tasks_dlq` has a `retired_at`, by which MongoDB would delete it",
        "it is removed",
        _no(_is("retired_at", "missing")),
        lambda _: {"retired_at": REMOVED},
        statuses=FAILED,
        places=DLQ,
    ),
    Rule(
        "dlq-tombstone",
        "a tombstone of `tasks_dlq` has no date in `retired_at`, so it is never deleted",
        "it becomes now",
        _all(
            {"$ne": ["$status", filters.FAILED]},
            _no(_date("retired_at")),
            _any(_no(_is("retired_at", "missing")), _was_tombstone()),
        ),
        lambda moment: {"retired_at": moment.now},
        places=DLQ,
    ),
    Rule(
        "dlq-version",
        "`version` of a dead letter does not fit its `moves`: it can be neither replayed nor "
        "discarded",
        "`moves` becomes half the version; if that is no even number, the version becomes twice "
        "`moves`",
        {"$ne": ["$version", _copy_version()]},
        lambda _: {
            "moves": _if(
                _is_even_number(),
                {"$toLong": {"$divide": [_if(_is_even_number(), "$version", 0), 2]}},
                "$moves",
            ),
            "version": _if(_is_even_number(), "$version", _copy_version()),
        },
        statuses=FAILED,
        places=DLQ,
    ),
    # Dedupe keys that last for a period.
    Rule(
        "dedupe-key-as-text",
        "`until` of a dedupe key is stored as text",
        "the text becomes the date it means",
        _text_date("until"),
        lambda _: _as_dates("until"),
        places=KEYS,
    ),
    Rule(
        "dedupe-key",
        "a dedupe key has no end, no task or no token, so tasks with the key cannot be added",
        "it ends now, and the key is free",
        _any(
            _no_date("until"),
            _is("task_id", "missing"),
            _no(_is("token", "string")),
        ),
        lambda moment: {
            "until": moment.now,
            "task_id": {"$ifNull": ["$task_id", None]},
            "token": _if(_is("token", "string"), "$token", ""),
        },
        places=KEYS,
    ),
)


def unknown_characters(queues: Sequence[str]) -> Rule:
    """Return the rule for live tasks of queues that this Python cannot open."""
    return Rule(
        "queue-characters",
        "`queue` of a waiting or claimed task has a character that the Unicode tables of this "
        "Python do not have, so it cannot open the queue",
        "it is only reported: use a Python that has the character, or change `queue`",
        _all({"$in": ["$queue", {"$literal": list(queues)}]}, _no(_bad_queue())),
        None,
        statuses=LIVE,
    )


def find_unnameable() -> Operation[list[str]]:
    """Return the queues with tasks that this Python cannot open, by one key of an index each."""
    names = yield Call("distinct", "queue")
    short = [name for name in names if is_text(name) and 0 < len(name) <= LONGEST_NAME]
    return [name for name in short if not is_name(name)]


def rules_for(target: Target, unnameable: Sequence[str] = ()) -> list[Rule]:
    """Return the rules of a collection, given the queues that this Python cannot open."""
    rules = [rule for rule in RULES if target in rule.places]
    if target is Target.TASKS and unnameable:
        rules.append(unknown_characters(unnameable))
    return rules
