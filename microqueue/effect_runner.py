"""Perform effects: decisions are made once, for blocking and for asynchronous code.

A generator yields effects, for example operations to run, and receives each one's reply. It
performs none itself: blocking code performs an effect, asynchronous code awaits it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeAlias, TypeVar

E = TypeVar("E")
T = TypeVar("T")

EffectGenerator: TypeAlias = Generator[E, Any, T]


def perform(effects: EffectGenerator[E, T], perform_one: Callable[[E], Any]) -> T:
    """Perform effects until the generator returns; return its value.

    An error is thrown into the generator, which may handle it. So is an interrupt that arrives
    between two effects: the generator's clean-up must run.
    """
    reply: Any = None
    error: BaseException | None = None
    while True:
        try:
            effect = effects.send(reply) if error is None else effects.throw(error)
            reply, error = perform_one(effect), None
        except BaseException as exc:
            if inspect.getgeneratorstate(effects) == inspect.GEN_CLOSED:  # The generator ended.
                if isinstance(exc, StopIteration):
                    return exc.value  # type: ignore[no-any-return]
                raise
            reply, error = None, exc


async def perform_async(
    effects: EffectGenerator[E, T], perform_one: Callable[[E], Awaitable[Any]]
) -> T:
    """Perform effects as :func:`perform` does, awaited."""
    reply: Any = None
    error: BaseException | None = None
    while True:
        try:
            effect = effects.send(reply) if error is None else effects.throw(error)
            reply, error = await perform_one(effect), None
        except BaseException as exc:
            if inspect.getgeneratorstate(effects) == inspect.GEN_CLOSED:
                if isinstance(exc, StopIteration):
                    return exc.value  # type: ignore[no-any-return]
                raise
            reply, error = None, exc
