"""Search dead letters by their messages, where the server cannot tell which ones match.

Which group a message belongs to, and what is shown of it, only a look at the message says. So
what a viewer is shown, counts, replays and discards by a filter are always the same letters.
"""

from __future__ import annotations

from microqueue.operations import browse, dead_letters, filters
from microqueue.operations.call import Document, Operation
from microqueue.operations.dead_letters import DeadLetterFilter
from microqueue.operations.matching import LetterMatcher
from microqueue.settings import QueueSettings

IDS_AT_ONCE = 5000


def page(
    queue: filters.Queues,
    which: DeadLetterFilter,
    *,
    limit: int,
    cursor: str | None,
    settings: QueueSettings,
) -> Operation[tuple[list[Document], str | None]]:
    """Read one page, newest first, and the cursor of the next; search until there is one."""
    if not _must_look(which):
        query = dead_letters.selection(queue, which)
        return (yield from dead_letters.page(query, limit=limit, cursor=cursor, settings=settings))
    found: list[Document] = []
    while True:
        part = yield from browse.letters(
            queue,
            which,
            limit=limit + 1 - len(found),
            cursor=cursor,
            settings=settings,
            shown=which.shown or str,
        )
        found += part.documents
        cursor = part.next_cursor
        if len(found) > limit:
            return found[:limit], dead_letters.write_cursor(found[limit - 1])
        if cursor is None:
            return found, None


def queries(
    queue: filters.Queues, which: DeadLetterFilter, settings: QueueSettings
) -> Operation[list[Document]]:
    """Write the filters of the letters that match and of no others, the oldest letters first."""
    query = dead_letters.selection(queue, which)
    if not _must_look(which):
        return [query]
    matcher = LetterMatcher(which, which.shown or str)
    found = yield from browse.every_letter(query, matcher, settings)
    found.reverse()
    return [
        {"$and": [query, _those(found[start : start + IDS_AT_ONCE])]}
        for start in range(0, len(found), IDS_AT_ONCE)
    ]


def _must_look(which: DeadLetterFilter) -> bool:
    return which.group is not None or (which.shown is not None and bool(which.text))


def _those(letters: list[Document]) -> Document:
    """Match these letters, but none that was replayed and failed again since it was looked at."""
    first, last = letters[0].get("updated_at"), letters[-1].get("updated_at")
    # A letter of another hand may lack the instant; such ones are the oldest.
    since = {} if first is None else {"$gte": first}
    until = {} if last is None else {"$lte": last}
    seen = {"updated_at": {**since, **until}} if since or until else {}
    return {**filters.any_of(letter["_id"] for letter in letters), **seen}
