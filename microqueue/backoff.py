"""Backoff: how long a task waits before its next attempt."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeAlias, TypeGuard, get_args

from pydantic import Field, GetCoreSchemaHandler, model_validator
from pydantic_core import core_schema

from microqueue.errors import InvalidArgument
from microqueue.model import Model, invalid_argument

Jitter: TypeAlias = Literal["none", "full", "equal", "decorrelated", "additive"]
JITTERS: tuple[str, ...] = get_args(Jitter)

LONGEST_DELAY_SEC = 10 * 365 * 24 * 3600
_SHARED_RANDOM = random.Random()  # noqa: S311 (jitter needs spread, not secrecy)


def _with_text_names(given: Any) -> Any:
    if isinstance(given, Mapping) and not all(isinstance(name, str) for name in given):
        raise ValueError("the names of options are strings")
    return given


class BackoffPolicy(Model):
    """How delays grow from attempt to attempt, and how they are spread.

    ``base_sec`` is the delay after the first attempt, multiplied by ``factor`` after each
    further one, never above ``max_sec``. ``jitter`` spreads tasks that failed together:

    - ``none``: the delay as it is;
    - ``full``: anywhere between zero and the delay;
    - ``equal``: anywhere between half of the delay and all of it;
    - ``decorrelated``: between the base and three times the previous delay;
    - ``additive``: the delay plus up to one base.
    """

    base_sec: float = Field(default=5.0, ge=0, allow_inf_nan=False, strict=True)
    factor: float = Field(default=2.0, ge=1, allow_inf_nan=False, strict=True)
    max_sec: float = Field(
        default=1800.0, ge=0, le=LONGEST_DELAY_SEC, allow_inf_nan=False, strict=True
    )
    jitter: Jitter = "full"

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        # As a field of another model, it is called with the names in a dict as keyword arguments.
        return core_schema.no_info_before_validator_function(_with_text_names, handler(source))

    @model_validator(mode="after")
    def _base_fits_below_max(self) -> Self:
        if self.base_sec > self.max_sec:
            reason = f"base_sec {self.base_sec} is greater than max_sec {self.max_sec}"
            raise InvalidArgument(reason, argument="base_sec", value=self.base_sec)
        return self

    def delay_seconds(
        self,
        attempts: int,
        *,
        previous: float | None = None,
        rng: random.Random | None = None,
    ) -> float:
        """Draw the delay after ``attempts`` deliveries.

        Args:
            attempts: How often the task was delivered.
            previous: The delay before that; only ``decorrelated`` uses it. It is read from a
                document, so an invalid one counts as none.
            rng: The random numbers of the jitter, for tests.

        Returns:
            The delay in seconds.

        Raises:
            InvalidArgument: ``attempts`` is no integer of 0 or more, or ``rng`` no generator.
        """
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 0:
            raise invalid_argument("attempts", attempts, "give an integer of 0 or more")
        if rng is not None and not isinstance(rng, random.Random):
            raise invalid_argument("rng", rng, "give a random.Random")
        rng = rng or _SHARED_RANDOM
        ceiling = self._exponential(attempts)
        match self.jitter:
            case "none":
                delay = ceiling
            case "full":
                delay = rng.uniform(0, ceiling)
            case "equal":
                delay = rng.uniform(ceiling / 2, ceiling)
            case "decorrelated":
                last = max(previous, self.base_sec) if _is_delay(previous) else self.base_sec
                delay = rng.uniform(self.base_sec, min(last, self.max_sec) * 3)
            case "additive":
                delay = ceiling + rng.uniform(0, self.base_sec)
        return min(max(delay, 0.0), self.max_sec)

    def _exponential(self, attempts: int) -> float:
        steps = max(attempts - 1, 0)
        if self.base_sec == 0 or self.factor == 1:
            return self.base_sec
        # Compared as logarithms: 2.0 ** 1100 overflows, steps * log(2) does not.
        if steps * math.log(self.factor) >= math.log(self.max_sec) - math.log(self.base_sec):
            return self.max_sec
        try:
            return min(self.base_sec * self.factor**steps, self.max_sec)
        except OverflowError:  # The power of a tiny base may overflow where the product does not.
            exponent = math.log(self.base_sec) + steps * math.log(self.factor)
            return min(math.exp(exponent), self.max_sec)


def _is_delay(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0


def compute_backoff_seconds(  # noqa: PLR0917 (the order of a well-known formula)
    attempts: int,
    base_sec: float = 5,
    factor: float = 2.0,
    max_sec: float = 1800,
    jitter: Jitter = "full",
    previous: float | None = None,
    rng: random.Random | None = None,
) -> float:
    """Return the delay in seconds after ``attempts`` deliveries, without a policy.

    Before the jitter, the delay after the first attempt (``attempts=1``, or 0) is ``base_sec``. The
    result is never negative and never above ``max_sec``, however many attempts there were.

    Args:
        attempts: How often the task was delivered.
        base_sec: The delay after the first attempt, before the jitter.
        factor: By what the delay is multiplied after each further attempt.
        max_sec: The longest delay.
        jitter: How delays are spread, see :class:`BackoffPolicy`.
        previous: The delay before that; only ``decorrelated`` uses it.
        rng: The random numbers of the jitter, for tests.

    Returns:
        The delay in seconds.

    Raises:
        InvalidArgument: An argument is out of its range.

    Examples:
        >>> [compute_backoff_seconds(n, jitter="none") for n in (1, 2, 3, 10**9)]
        [5.0, 10.0, 20.0, 1800.0]
    """
    if previous is not None and not _is_delay(previous):
        raise invalid_argument("previous", previous, "give a finite number of seconds, 0 or more")
    policy = BackoffPolicy(base_sec=base_sec, factor=factor, max_sec=max_sec, jitter=jitter)
    return policy.delay_seconds(attempts, previous=previous, rng=rng)
