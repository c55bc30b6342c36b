"""Transactions that a function of the user takes part in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from microqueue.drivers.collections import Collections
from microqueue.drivers.driver import awaited, is_standalone
from microqueue.errors import TransactionsUnsupported

T = TypeVar("T")


def run_in_transaction(collections: Collections, body: Callable[[Any], T]) -> T:
    """Call a function with a session, in a transaction, and commit what it wrote.

    The driver calls the function again after a transient error. Any other exception aborts the
    transaction.
    """
    check_transactions(collections)
    with collections.client.start_session() as session:
        result: T = session.with_transaction(body, write_concern=collections.tasks.write_concern)
        return result


async def run_in_transaction_async(
    collections: Collections, body: Callable[[Any], Awaitable[T]]
) -> T:
    """Await a coroutine function as :func:`run_in_transaction` calls a function."""
    check_transactions(collections)
    async with await awaited(collections.client.start_session()) as session:
        concern = collections.tasks.write_concern
        result: T = await session.with_transaction(body, write_concern=concern)
        return result


def check_transactions(collections: Collections) -> None:
    """Raise :class:`TransactionsUnsupported` if the server is known to have no transactions."""
    if collections.in_memory:
        raise TransactionsUnsupported(server="a database in memory")
    if is_standalone(collections):
        raise TransactionsUnsupported(server="a standalone server")
