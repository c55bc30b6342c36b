"""Failed logins: how many are answered, from where, what is logged, and who is not held up."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from microqueue import InvalidArgument
from microqueue.dashboard import dashboard
from microqueue.dashboard.security import COOKIE, LoginThrottle
from microqueue.testing import memory_queue
from tests.integration.dashboard_site import API, TOKEN
from tests.rejection import rejecting

LIMITS = {"login_failures": 3, "login_failures_in_all": 6, "login_period": 40}


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


class Door:
    """A dashboard behind a token, asked from any address."""

    def __init__(self, **options: Any) -> None:
        self.app = dashboard(memory_queue(), token=TOKEN, **{**LIMITS, **options})
        self.clock = Clock()
        self.app.state.context.guard.throttle.now = self.clock

    @asynccontextmanager
    async def at(self, address: str, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app, client=(address, 5))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers
        ) as client:
            yield client

    async def log_in(self, address: str, token: str, **headers: str) -> httpx.Response:
        async with self.at(address, **headers) as client:
            return await client.post("/login", data={"token": token})

    async def bearer(self, address: str, token: str) -> int:
        async with self.at(address, Authorization=f"Bearer {token}") as client:
            return (await client.get(f"{API}/config")).status_code

    async def cookie(self, address: str, value: str) -> int:
        async with self.at(address, Cookie=f"{COOKIE}={value}") as client:
            return (await client.get(f"{API}/config")).status_code


@pytest.fixture
def door() -> Door:
    return Door()


def sealed(token: str, until: float) -> str:
    text = str(int(until))
    return f"{text}.{hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()}"


def failed(reply: httpx.Response) -> bool:
    return (reply.status_code, reply.headers.get("location")) == (303, "login?failed=1")


async def test_failed_logins_of_an_address_are_throttled(door: Door) -> None:
    for n in range(3):
        assert failed(await door.log_in("192.0.2.1", f"guess {n}"))
        door.clock.at += 10
    reply = await door.log_in("192.0.2.1", "guess 3")
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "10"  # The first of the three is 30 s old, of 40.
    assert reply.json()["code"] == "TooManyRequests"
    # Not even the right token: otherwise guessing could continue.
    assert (await door.log_in("192.0.2.1", TOKEN)).status_code == 429
    assert await door.bearer("192.0.2.1", TOKEN) == 429
    assert (await door.log_in("192.0.2.2", TOKEN)).headers["location"] == "./"
    door.clock.at += 10
    assert (await door.log_in("192.0.2.1", TOKEN)).headers["location"] == "./"


async def test_every_way_to_give_a_token_counts(door: Door) -> None:
    assert failed(await door.log_in("192.0.2.1", "by form"))
    assert await door.bearer("192.0.2.1", "by header") == 401
    # A seal is made of the token: to guess one is to guess the other.
    assert await door.cookie("192.0.2.1", sealed("by cookie", time.time() + 60)) == 401
    assert await door.cookie("192.0.2.1", sealed("another", time.time() + 60)) == 429
    assert await door.bearer("192.0.2.1", "another") == 429
    assert (await door.log_in("192.0.2.1", "another")).status_code == 429


async def test_one_wrong_token_counts_once_however_often_it_comes(door: Door) -> None:
    """A scraper with an old token, or a page with an old cookie, does not lock its address."""
    forged, over = sealed("the same", time.time() + 60), sealed(TOKEN, time.time() - 60)
    for _ in range(10):
        assert await door.bearer("192.0.2.1", "the token of last year") == 401
        assert await door.cookie("192.0.2.1", forged) == 401
        assert await door.cookie("192.0.2.1", over) == 401
        assert await door.cookie("192.0.2.1", "not a session") == 401
    assert (await door.log_in("192.0.2.1", TOKEN)).headers["location"] == "./"


async def test_successful_login_resets_its_address(door: Door) -> None:
    for _ in range(3):
        for n in range(2):
            assert failed(await door.log_in("192.0.2.1", f"guess {n}"))
        assert (await door.log_in("192.0.2.1", TOKEN)).headers["location"] == "./"


async def test_failures_in_all_are_throttled_but_not_for_known_addresses(door: Door) -> None:
    assert await door.bearer("198.51.100.1", TOKEN) == 200
    assert (await door.log_in("198.51.100.2", TOKEN)).headers["location"] == "./"
    for n in range(6):
        assert failed(await door.log_in(f"192.0.2.{n}", "guess"))
    reply = await door.log_in("192.0.2.77", "guess")
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "40")
    # An address from which the token never came is not believed either: it may be the next guess.
    assert (await door.log_in("192.0.2.78", TOKEN)).status_code == 429
    assert await door.bearer("198.51.100.1", TOKEN) == 200
    assert (await door.log_in("198.51.100.2", TOKEN)).headers["location"] == "./"
    # Its own failures count against it as any other's.
    for n in range(3):
        assert await door.bearer("198.51.100.1", f"guess {n}") == 401
    assert await door.bearer("198.51.100.1", TOKEN) == 429
    door.clock.at += 40
    assert (await door.log_in("192.0.2.78", TOKEN)).headers["location"] == "./"


async def test_session_goes_on_while_its_address_is_throttled(door: Door) -> None:
    async with door.at("192.0.2.1") as client:
        assert (await client.post("/login", data={"token": TOKEN})).status_code == 303
        for n in range(4):
            await door.log_in("192.0.2.1", f"guess {n}")
        assert await door.bearer("192.0.2.1", TOKEN) == 429
        assert (await client.get(f"{API}/config")).status_code == 200
        # It does not forgive what others at this address did.
        assert await door.bearer("192.0.2.1", TOKEN) == 429


async def test_forwarded_address_is_not_believed(door: Door) -> None:
    replies = [
        await door.log_in("192.0.2.1", f"guess {n}", **{"X-Forwarded-For": f"203.0.113.{n}"})
        for n in range(4)
    ]
    assert [reply.status_code for reply in replies] == [303, 303, 303, 429]


async def test_addresses_of_one_ipv6_network_count_as_one(door: Door) -> None:
    for n in range(3):
        assert failed(await door.log_in(f"2001:db8::{n}", f"guess {n}"))
    assert (await door.log_in("2001:db8::ffff:1", "guess")).status_code == 429
    assert failed(await door.log_in("2001:db8:0:1::1", "guess"))
    for n in range(2):
        assert failed(await door.log_in("192.0.2.1", f"guess {n}"))
    reply = await door.log_in("::ffff:192.0.2.1", "guess 2")
    assert reply.status_code == 429  # In all: six by now.


async def test_browser_gets_the_form_back_with_the_reason(door: Door) -> None:
    for n in range(3):
        await door.log_in("192.0.2.1", f"guess {n}")
    reply = await door.log_in("192.0.2.1", "guess", Accept="text/html,*/*;q=0.8")
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "40")
    assert reply.headers["content-type"].startswith("text/html")
    assert 'id="throttled" hidden' not in reply.text
    assert "40 s" in reply.text
    async with door.at("192.0.2.1", Cookie=f"{COOKIE}={sealed('x', time.time() + 60)}") as client:
        page = await client.get("/")
        assert (page.status_code, page.headers["location"]) == (303, "login")


async def test_failed_logins_are_logged_without_the_token(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="microqueue.dashboard")
    for n in range(20):
        await door.log_in("192.0.2.1", f"guess-{n}")
    found = [(vars(one)["address"], vars(one)["failures"]) for one in caplog.records]
    # Those that are not looked at are not logged either.
    assert found == [("192.0.2.1", n) for n in (1, 2, 3)]
    assert all("192.0.2.1" in record.getMessage() for record in caplog.records)
    assert "guess" not in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_throttle_remembers_a_bounded_number_of_addresses() -> None:
    clock = Clock()
    throttle = LoginThrottle(per_address=2, in_all=1_000_000, period_sec=60, max_addresses=50)
    throttle.now = clock
    for n in range(500):
        clock.at += 0.001
        throttle.failed(f"10.0.{n // 250}.{n % 250}", "guess")
        throttle.succeeded(f"10.1.{n // 250}.{n % 250}")
    assert throttle.size <= 2 * 50
    clock.at += 60
    throttle.failed("192.0.2.1", "guess")
    assert throttle.size <= 1 + 50


@pytest.mark.parametrize("token", ["", "hunter2", "fifteen letters"])
def test_token_has_at_least_16_characters(token: str) -> None:
    with rejecting("token") as caught:
        dashboard(memory_queue(), token=token)
    assert "--new-token" in str(caught.value)  # The option that makes a good one.
    assert not token or token not in str(caught.value)
    dashboard(memory_queue(), token="sixteen letters.")


@pytest.mark.parametrize(
    "options", [{"login_failures": 0}, {"login_failures_in_all": 0}, {"login_period": 0}]
)
def test_limits_that_are_none_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        dashboard(memory_queue(), token=TOKEN, **options)
