"""Perform effects: decisions are made once, for blocking and for asynchronous code.

A generator yields effects, for example operations to run, and receives each one's reply. It
performs none itself: blocking code performs an effect, asynchronous code awaits it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeAlias, TypeVar

E = TypeVar("E")
T = TypeVar("T")

Effects: TypeAlias = Generator[E, Any, T]


def perform(effects: Effects[E, T], do: Callable[[E], Any]) -> T:
    """Perform effects one after the other; return the generator's result.

    An error is thrown into the generator, which may handle it.
    """
    try:
        effect = next(effects)
        while True:
            try:
                reply = do(effect)
            except BaseException as exc:  # noqa: BLE001 (the generator raises what it does not handle)
                effect = effects.throw(exc)
            else:
                effect = effects.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def perform_async(effects: Effects[E, T], do: Callable[[E], Awaitable[Any]]) -> T:
    """Perform effects as :func:`perform` does, awaiting each."""
    try:
        effect = next(effects)
        while True:
            try:
                reply = await do(effect)
            except BaseException as exc:  # noqa: BLE001 (the generator raises what it does not handle)
                effect = effects.throw(exc)
            else:
                effect = effects.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result
