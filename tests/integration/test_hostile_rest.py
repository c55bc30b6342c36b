"""Hostile values for each parameter and each field of the REST API, found by its description."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pymongo import MongoClient

from microqueue import Queue, Topic
from microqueue.dashboard import dashboard
from microqueue.dashboard.app import pages
from microqueue.dashboard.security import COOKIE
from microqueue.dashboard.server import DashboardServer
from microqueue.testing import memory_queue
from tests.hostile import (
    EXAMPLES,
    FIRST,
    FIRST_TEXTS,
    PLANTS,
    CommandRecorder,
    is_json,
    json_values,
    planted,
    texts,
)

SPEC: dict[str, Any] = dashboard(memory_queue()).openapi()
OTHER = "other"
USUAL: dict[str, Any] = {"queue": "own", "topic": "own", "name": "nightly", "filter": {}, "n": 1}
USUAL |= {"payload": {"n": 1}, "message": {"n": 1}, "body": {"n": 1}, "cron": "0 3 * * *"}


LONGEST = 2000
"""In an address: servers and clients have their own limits."""


class Place(NamedTuple):
    """A parameter or field of an operation."""

    where: str
    name: str


class Route(NamedTuple):
    """An operation of the API, with all places of a value."""

    method: str
    path: str
    places: tuple[Place, ...]
    required: tuple[str, ...]


def fields_of(schema: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of all fields of a body, and of the required ones."""
    if "$ref" in schema:
        return fields_of(SPEC["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    names, required = list(schema.get("properties", ())), list(schema.get("required", ()))
    for part in (*schema.get("anyOf", ()), *schema.get("allOf", ()), *schema.get("oneOf", ())):
        inside = fields_of(part)
        names += inside[0]
        required += inside[1]
    return names, required


def routes() -> Iterator[Route]:
    for path, methods in SPEC["paths"].items():
        for method, operation in methods.items():
            places = [Place(one["in"], one["name"]) for one in operation.get("parameters", ())]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            names, required = ([], []) if body is None else fields_of(body["schema"])
            if body is not None:
                places += [Place("body", name) for name in dict.fromkeys(names)]
                places.append(Place("whole body", ""))
            if "text/event-stream" not in json.dumps(operation.get("responses", {})):
                yield Route(method, path, tuple(places), tuple(required))


ROUTES = {f"{one.method.upper()} {one.path}": one for one in routes()}
WITH_PLACES = [label for label, one in ROUTES.items() if one.places]


class Site:
    """A dashboard whose commands are recorded, with a queue that no request may change."""

    def __init__(self, uri: str, database: str) -> None:
        self.commands = CommandRecorder()
        self.http: httpx.Client | None = None
        self.client = MongoClient[Any](uri, event_listeners=[self.commands])
        self.database = self.client[database]
        for name in ("own", OTHER):
            queue: Queue[Any] = Queue(self.database, name)
            queue.enqueue_many([{"n": 1}, {"n": 2}, {"n": 3}])
            dead, done = queue.pop_many(2)
            queue.mark_failure(dead, "broken", code="Broken")
            queue.mark_done(done)
            queue.schedules.put("nightly", every=3600)
            Topic(queue, name).bind(name)
        self.server = DashboardServer(Queue[Any](self.database, "own"), port=0, manual_actions=True)
        self.others = self.read_others()

    def read_others(self) -> list[Any]:
        """Return the documents that do not belong to the own queue or topic."""
        names = ("tasks", "microqueue_schedules", "microqueue_bindings", "microqueue_pauses")
        found: list[Any] = []
        for name in names:
            found += self.database[name].find({"$or": [{"queue": OTHER}, {"topic": OTHER}]})
        return found

    def check_others(self, *, wrote: bool) -> None:
        """Check after a write that it changed nothing of others."""
        if wrote:
            assert self.read_others() == self.others

    def ask(self, route: Route, place: Place, value: Any) -> httpx.Response:
        """Send a request with a hostile value in one place."""
        path, query = route.path, {}
        body: Any = None
        for one in route.places:
            given = value if one == place else USUAL.get(one.name, "x")
            given = given[:LONGEST] if isinstance(given, str) else given
            if one.where == "path":
                path = path.replace(f"{{{one.name}}}", quote(str(given), safe="", errors="replace"))
            elif one.where == "query" and one == place:
                query[one.name] = str(given).encode(errors="replace").decode()
        if place.where in {"body", "whole body"} or route.required:
            body = {name: USUAL.get(name, "x") for name in route.required}
            body = value if place.where == "whole body" else body
            if place.where == "body":
                body[place.name] = value
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if content else {}
        assert self.http is not None
        return self.http.request(route.method, path, params=query, content=content, headers=headers)


@pytest.fixture(scope="module")
def site(
    replica_set: None, microqueue_server: Any, new_database: Callable[[], Any]
) -> Iterator[Site]:
    site = Site(microqueue_server.uri, new_database().name)
    with site.server.running(), httpx.Client(base_url=site.server.address, timeout=60) as http:
        site.http = http
        yield site
    site.client.close()


@pytest.mark.parametrize("label", WITH_PLACES)
def test_hostile_value_in_a_request_is_a_value_or_a_problem(site: Site, label: str) -> None:
    route = ROUTES[label]

    def check_request(place: Place, value: Any) -> None:
        with site.commands.checked():
            reply = site.ask(route, place, value)
        wrote = site.commands.wrote
        assert reply.status_code < 500, (place, reply.text)
        if reply.status_code >= 400:
            assert reply.headers["content-type"] == "application/problem+json"
        site.check_others(wrote=wrote)

    for place in route.places:
        in_body = "body" in place.where
        for value in [*filter(is_json, FIRST)][::2] if in_body else FIRST_TEXTS[::3]:
            check_request(place, value)

    @settings(max_examples=EXAMPLES * len(route.places), suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check_generated(data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(route.places))
        check_request(place, data.draw(json_values if "body" in place.where else texts))

    check_generated()


# Routes that the description leaves out, as they are for browsers

PAGES = {"GET /", "GET /login", "POST /login", "POST /logout", "GET /events"}
TOKEN = "the token of this test"
HEADERS = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=90)
"""What HTTP allows in a header."""


def test_each_page_is_requested() -> None:
    app = dashboard(memory_queue())
    known = {
        f"{method} {one.path}"
        for one in [*app.routes, *pages.routes]
        if isinstance(one, APIRoute) and not one.include_in_schema
        for method in one.methods or ()
    }
    assert known == PAGES


@pytest.fixture(scope="module")
def door(site: Site) -> Iterator[httpx.Client]:
    """A dashboard that asks for a token."""
    queue = Queue[Any](site.database, "own")
    server = DashboardServer(queue, port=0, token=TOKEN)
    with server.running(), httpx.Client(base_url=server.address, timeout=60) as http:
        yield http


def is_let_in(door: httpx.Client, token: Any) -> bool:
    """Log in, and return whether the dashboard can be read then."""
    door.cookies.clear()
    form = f"token={quote(str(token), safe='', errors='replace')}" if token is not None else ""
    reply = door.post("/login", content=form)
    assert reply.status_code in {303, 413, 429}, reply.text
    return door.get("/api/v1/overview").status_code == 200


def test_hostile_token_opens_nothing(site: Site, door: httpx.Client) -> None:
    def check_token(value: Any) -> None:
        with site.commands.checked():
            assert not is_let_in(door, value)
        site.check_others(wrote=site.commands.wrote)
        assert is_let_in(door, TOKEN), "and so the next one is not throttled"

    for value in [*FIRST, *FIRST_TEXTS]:
        check_token(value)
    settings(max_examples=4 * EXAMPLES, suppress_health_check=list(HealthCheck))(
        given(value=texts)(check_token)
    )()


def test_hostile_cookie_or_header_opens_nothing(site: Site, door: httpx.Client) -> None:
    door.cookies.clear()

    def check_headers(value: str) -> None:
        sent = value.encode("ascii", "replace").decode().strip() or "x"
        bearer = {"Authorization": f"Bearer {sent}"}
        session = {"Cookie": f"{COOKIE}={sent}"}
        for headers in (bearer, session, {"Authorization": sent}):
            with site.commands.checked():
                reply = door.get("/api/v1/overview", headers=headers)
                assert reply.status_code in {401, 429}, (headers, reply.text)
                assert door.post("/logout", headers=headers).status_code < 500
        assert is_let_in(door, TOKEN)
        door.cookies.clear()

    for value in [*(one for one in FIRST_TEXTS if one.isprintable()), '{"$ne": 1}', "null"]:
        check_headers(value[:LONGEST])
    settings(max_examples=4 * EXAMPLES, suppress_health_check=list(HealthCheck))(
        given(value=HEADERS)(check_headers)
    )()


def test_hostile_id_of_the_last_event_is_unknown(site: Site) -> None:
    assert site.http is not None
    http = site.http

    def greeting(value: str, *, in_header: bool) -> str:
        sent = value.encode("ascii", "replace").decode()
        headers = {"Last-Event-ID": sent} if in_header else {}
        params = {} if in_header else {"last_event_id": value.encode(errors="replace").decode()}
        stream = http.stream("GET", "/events", headers=headers, params=params)
        with site.commands.checked(), stream as reply:
            assert reply.status_code in {200, 422}, reply.status_code
            if reply.status_code == 422:
                return ""
            return next(line for line in reply.iter_lines() if line.startswith("data:"))

    def check_id(value: str, *, in_header: bool) -> None:
        assert 'resumed": true' not in greeting(value[:LONGEST], in_header=in_header)

    for value in FIRST_TEXTS:
        check_id(value, in_header=False)
        if value.isascii() and value.isprintable():
            check_id(value, in_header=True)

    @settings(max_examples=4 * EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(text=texts, header=HEADERS)
    def check_generated(text: str, header: str) -> None:
        check_id(text, in_header=False)
        check_id(header.strip(), in_header=True)

    check_generated()


def test_description_has_places_for_values() -> None:
    assert len(WITH_PLACES) >= 25
    assert Place("body", "payload") in ROUTES["POST /api/v1/tasks"].places


@pytest.mark.parametrize("name", PLANTS)
def test_route_that_interprets_a_value_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    route = ROUTES["GET /api/v1/dead-letters"]
    with planted(name, monkeypatch) as code, site.commands.checked():
        site.ask(route, Place("query", "code"), code)
