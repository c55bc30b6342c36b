"""Who may see and do what: each route of the app, with and without a token, and read-only."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from microqueue import InvalidArgument, Queue
from microqueue.dashboard import dashboard, routes_act, routes_topics
from microqueue.dashboard.payloads import Redactor, from_extended_json, to_browser_json
from microqueue.dashboard.security import COOKIE
from microqueue.masking import MASK, REDACTED_KEYS
from microqueue.testing import memory_queue
from tests.integration.dashboard_site import API, SETTINGS, TOKEN, opened

pytestmark = pytest.mark.usefixtures("unhurried_searches")

BEARER = {"Authorization": f"Bearer {TOKEN}"}
ANONYMOUS = {
    "none": {},
    "wrong": {"Authorization": "Bearer wrong-horse-battery"},
    "empty": {"Authorization": "Bearer "},
    "basic": {"Authorization": f"Basic {TOKEN}"},
    "forged cookie": {"Cookie": f"{COOKIE}=99999999999.{'0' * 64}"},
    "malformed cookie": {"Cookie": f"{COOKIE}={'9' * 5000}.x"},
}


def every_route(app: FastAPI) -> Iterator[Any]:
    for route in app.routes:
        # Newer versions of FastAPI keep the routes of a router together.
        inside = getattr(route, "effective_route_contexts", None)
        yield from inside() if inside is not None else [route]


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    """List every route of an app, however it was added, as method and path."""
    for route in every_route(app):
        methods = getattr(route, "methods", None) or {"GET"}
        path = route.path
        if path == "/static":
            continue  # Scripts and styles, which hold no secrets.
        for method in sorted(methods):
            yield method, re.sub(r"{[^}]*}", "x", path)


EVERY_ROUTE = sorted(set(routes_of(dashboard(memory_queue(), token=TOKEN))))
READING = {"GET", "HEAD"}
WITHOUT_EFFECT = {"/login", "/logout"}
OPEN = {"/healthz", "/readyz", "/login"}
"""All that may be asked without a token; said here, so that the code cannot widen it."""


def test_the_matrix_holds_the_routes_that_matter() -> None:
    paths = {path for _, path in EVERY_ROUTE}
    assert {"/", "/events", "/metrics", f"{API}/tasks/x/cancel", f"{API}/overview"} <= paths
    assert len(EVERY_ROUTE) > 30


@pytest.mark.parametrize("credentials", ANONYMOUS)
@pytest.mark.parametrize("read_only", [False, True])
async def test_no_route_answers_without_the_right_token(
    microqueue_database: Any, credentials: str, read_only: bool
) -> None:
    async with opened(
        microqueue_database, token=TOKEN, read_only=read_only, headers=ANONYMOUS[credentials]
    ) as site:
        for method, path in EVERY_ROUTE:
            if path in OPEN:
                continue
            reply = await site.client.request(method, path)
            if path == "/" and method in READING:
                assert (reply.status_code, reply.headers["location"]) == (303, "login"), path
            else:
                assert reply.status_code == 401, (method, path, reply.text)
                assert reply.headers["www-authenticate"] == "Bearer"
    assert microqueue_database.list_collection_names() == []


async def test_every_route_answers_with_the_right_token(microqueue_database: Any) -> None:
    options: dict[str, Any] = {"token": TOKEN, "headers": BEARER, "manual_actions": True}
    async with opened(microqueue_database, **options) as site:
        for method, path in EVERY_ROUTE:
            if path == "/events":
                continue  # An endless stream.
            reply = await site.client.request(method, path)
            assert reply.status_code not in {401, 403, 405, 500}, (method, path, reply.text)


async def test_read_only_has_no_acting_routes_at_all(microqueue_database: Any) -> None:
    async with opened(microqueue_database, token=TOKEN, headers=BEARER, read_only=True) as site:
        left = {one for one in routes_of(site.app) if one[0] not in READING}
        assert {path for _, path in left} == WITHOUT_EFFECT
        for method, path in EVERY_ROUTE:
            if method not in READING and path not in WITHOUT_EFFECT:
                reply = await site.client.request(method, path, json={})
                assert reply.status_code in {404, 405}, (method, path)
        assert (await site.get("/config"))["read_only"]
        site.queue.enqueue({}, task_id="x")
        assert (await site.get("/tasks/x"))["actions"] == []
        documented = site.app.openapi()["paths"]
        assert {verb for path in documented.values() for verb in path} == {"get"}


def test_routes_that_act_take_no_get() -> None:
    """A route that acts on GET would slip through the checks of origin."""
    routers = (routes_act.router, routes_act.dead_letter_router, routes_topics.acting_router)
    endpoints = {getattr(route, "endpoint", None) for one in routers for route in one.routes}
    acting = [
        route
        for route in every_route(dashboard(memory_queue()))
        if getattr(route, "endpoint", None) in endpoints - {None}
    ]
    assert len(acting) == len(endpoints) > 15
    assert {method for route in acting for method in route.methods} == {"POST"}


async def test_login_gives_a_cookie_that_scripts_and_other_sites_cannot_use(
    microqueue_database: Any,
) -> None:
    async with opened(microqueue_database, token=TOKEN) as site:
        wrong = await site.client.post("/login", data={"token": "wrong"})
        assert (wrong.status_code, wrong.headers["location"]) == (303, "login?failed=1")
        assert COOKIE not in site.client.cookies
        right = await site.client.post("/login", data={"token": TOKEN})
        assert (right.status_code, right.headers["location"]) == (303, "./")
        given = right.headers["set-cookie"]
        assert "HttpOnly" in given
        assert "SameSite=strict" in given
        assert TOKEN not in given
        assert (await site.get("/config"))["auth"]
        await site.post("/sweeper/run")
        assert (await site.get("/audit"))["items"][0]["who"].startswith("login at ")
        await site.client.post("/logout")
        await site.get("/config", expect=401)


async def test_cookie_ends(microqueue_database: Any) -> None:
    async with opened(microqueue_database, token=TOKEN) as site:
        for until, expected in ((time.time() + 60, 200), (time.time() - 1, 401)):
            text = str(int(until))
            seal = hmac.new(TOKEN.encode(), text.encode(), hashlib.sha256).hexdigest()
            cookie = {"Cookie": f"{COOKIE}={text}.{seal}"}
            reply = await site.client.get(f"{API}/config", headers=cookie)
            assert reply.status_code == expected


async def test_cookie_over_https_stays_there(microqueue_database: Any) -> None:
    async with opened(microqueue_database, token=TOKEN) as site:
        reply = await site.client.post("https://localhost/login", data={"token": TOKEN})
        assert "Secure" in reply.headers["set-cookie"]
        # Behind a proxy that ends TLS; and by plain HTTP.
        for sent, secure in (({"X-Forwarded-Proto": "https"}, True), ({}, False)):
            reply = await site.client.post("/login", data={"token": TOKEN}, headers=sent)
            assert ("Secure" in reply.headers["set-cookie"]) is secure


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 200),
        ({"Origin": "http://localhost"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://proxy.example"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://localhost:8000"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
async def test_action_that_another_site_asks_for_is_rejected(
    microqueue_database: Any, headers: dict[str, str], expected: int
) -> None:
    async with opened(microqueue_database) as site:
        reply = await site.client.post(f"{API}/sweeper/run", headers=headers)
        assert reply.status_code == expected
        assert (await site.client.get(f"{API}/config", headers=headers)).status_code == 200


async def test_name_that_is_not_ours_is_rejected(microqueue_database: Any) -> None:
    async with opened(microqueue_database, hosts=("localhost", "::1")) as site:
        for host, expected in [
            ("localhost", 200), ("localhost:8765", 200), ("[::1]:80", 200),
            ("evil.example", 421), ("", 421), ("localhost.evil.example", 421), ("[", 421),
        ]:  # fmt: skip
            reply = await site.client.get("/healthz", headers={"Host": host})
            assert reply.status_code == expected, host


async def test_name_that_is_none_is_no_server_error(microqueue_database: Any) -> None:
    async with opened(microqueue_database, token=TOKEN) as site:
        headers = {"Host": "["}
        for path in ("/", "/healthz", "/login", f"{API}/config", f"{API}/nowhere/"):
            assert (await site.client.get(path, headers=headers)).status_code < 500, path
        reply = await site.client.post("/login", data={"token": TOKEN}, headers=headers)
        assert reply.status_code == 303


async def test_page_may_run_its_own_scripts_only(microqueue_database: Any) -> None:
    async with opened(microqueue_database, token=TOKEN) as site:
        for path in ("/healthz", f"{API}/config", "/login", "/nowhere"):
            policy = (await site.client.get(path)).headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy


async def test_request_that_is_too_large_is_rejected(microqueue_database: Any) -> None:
    async with opened(microqueue_database, request_bytes=1000) as site:
        body = {"payload": {"text": "x" * 1000}}
        assert (await site.post("/tasks", body, expect=413))["code"]

        async def chunks() -> Any:
            for _ in range(100):
                yield b"x" * 100

        reply = await site.client.post(f"{API}/tasks", content=chunks())
        assert reply.status_code == 413
        assert site.queue.stats().pending == 0


async def test_markup_in_a_payload_is_data(microqueue_database: Any) -> None:
    async with opened(microqueue_database) as site:
        task = site.bury("<script>alert(1)</script>", html="<script>alert(2)</script>")
        reply = await site.client.get(f"{API}/tasks/{task.id}")
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.json()["payload"]["html"] == "<script>alert(2)</script>"


# Secrets


SECRETS = {  # Without digits, which a group leaves out anyway.
    "password": "letmein", "db_passwd": "letmein", "API-Key": "letmein", "accessToken": "letmein",
    "Authorization": "letmein", "clientSecret": "letmein", "Cookie": "letmein",
    "nested": [{"private_key": {"pem": "letmein"}}], "url": "postgres://ada:letmein@db/shop",
    "note": "the password=letmein",
}  # fmt: skip


async def test_secrets_are_shown_nowhere(microqueue_database: Any) -> None:
    async with opened(microqueue_database) as site:
        message = "cannot reach mongodb://ada:letmein@db with password='letmein'"
        message += ", token: letmein, Authorization: Bearer letmein"
        task = site.bury(message, "Code", **SECRETS)
        for path in (
            f"/tasks/{task.id}", "/tasks", "/dead-letters", "/dead-letters/groups",
            "/dead-letters/export", "/tasks?status=failed",
        ):  # fmt: skip
            reply = await site.client.get(f"{API}{path}")
            assert "letmein" not in reply.text, path
            assert "Code" in reply.text, path


async def test_group_with_secrets_is_chosen_by_what_is_shown_of_it(
    microqueue_database: Any,
) -> None:
    async with opened(microqueue_database) as site:
        for secret in ("letmein", "sesame"):
            for name in (f"token={secret}", f"token='{secret} {secret}", f"token: Bearer {secret}"):
                site.bury(f"no way for {name} to mongodb://ada:{secret}@db/x", "Denied")
        site.bury("no way for token=letmein to mongodb://ada:letmein@db/y", "Denied")
        site.bury("no way for token=letmein and more to mongodb://ada:letmein@db/x", "Denied")
        groups = (await site.get("/dead-letters/groups"))["groups"]
        assert sorted((one["message"], one["count"]) for one in groups) == [
            (f"no way for token: {MASK} to mongodb://{MASK}@db/x", 2),
            (f"no way for token='{MASK}", 2),
            (f"no way for token={MASK} and more to mongodb://{MASK}@db/x", 1),
            (f"no way for token={MASK} to mongodb://{MASK}@db/x", 2),
            (f"no way for token={MASK} to mongodb://{MASK}@db/y", 1),
        ]
        for one in groups:
            chosen = {"code": one["code"], "group": one["message"]}
            found = (await site.get("/dead-letters", **chosen))["items"]
            assert len(found) == one["count"], one["message"]
            body = {"queue": "default", "filter": chosen}
            assert (await site.post("/dead-letters/discard", body))["matched"] == one["count"]
        audit = json.dumps(await site.get("/audit"))
        assert "letmein" not in audit
        assert "sesame" not in audit


async def test_text_does_not_find_what_is_masked(microqueue_database: Any) -> None:
    async with opened(microqueue_database) as site:
        site.queue.enqueue({"password": "hunter2", "name": "ada", "note": "token: hunter2"})
        site.bury("no way for password=hunter2 to mongodb://u:hunter2@db")
        assert (await site.get("/tasks", text="hunter2"))["items"] == []
        assert (await site.get("/tasks", text="hunter2", status="failed"))["items"] == []
        assert (await site.get("/dead-letters", text="hunter2"))["items"] == []
        assert len((await site.get("/tasks", text="no way for password"))["items"]) == 1
        assert len((await site.get("/tasks", text="ada"))["items"]) == 1
    async with opened(microqueue_database, redact=None) as site:
        dead, waiting = (await site.get("/tasks", text="hunter2"))["items"]
        assert "hunter2" in dead["error"]["message"]
        assert "hunter2" in waiting["preview"]


@pytest.mark.parametrize("dead_letters", ["status", "collection"])
async def test_masked_message_cannot_be_guessed_letter_by_letter(
    microqueue_database: Any, dead_letters: Any
) -> None:
    settings = SETTINGS.model_copy(update={"dead_letters": dead_letters})
    async with opened(microqueue_database, settings=settings) as site:
        site.bury("login failed: password=hunter2 at db", "Denied")
        site.bury("no way for token='hunter2'", "Denied")
        visible: list[dict[str, Any]] = [
            {"text": "LOGIN failed: password="},
            {"text": f"password={MASK} at"},
        ]
        visible += [{"group": f"login failed: password={MASK} at db"}]
        starts = ["password=", "login failed: password=", "token='", "no way for token='"]
        hidden: list[dict[str, Any]] = [
            {name: f"{start}{guess}"}
            for name in ("text", "group")
            for start in starts
            for guess in ("h", "x")
        ]
        answers = set()
        here = {"all_queues": True}
        for which in hidden:
            page = await site.get("/dead-letters", limit=1, **which)
            groups = await site.get("/dead-letters/groups", **which)
            lines = await site.get("/dead-letters/export", **which)
            dry = await site.post(
                "/dead-letters/replay", {**here, "filter": which, "dry_run": True}
            )
            told = (page["items"], page["next_cursor"], page["complete"], groups["groups"], lines)
            answers.add(repr((*told, groups["total"], groups["truncated"], dry["matched"])))
            gone = await site.post("/dead-letters/discard", {**here, "filter": which})
            assert gone["discarded"] == 0
        assert answers == {repr(([], None, True, [], "", 0, False, 0))}
        for which in visible:
            (row,) = (await site.get("/dead-letters", **which))["items"]
            assert row["error"]["message"] == f"login failed: password={MASK} at db"
            (group,) = (await site.get("/dead-letters/groups", **which))["groups"]
            assert group["count"] == 1
            dry = await site.post(
                "/dead-letters/replay", {**here, "filter": which, "dry_run": True}
            )
            assert dry["matched"] == 1
        done = await site.post("/dead-letters/discard", {**here, "filter": visible[1]})
        assert done["discarded"] == 1
        assert site.queue.stats().failed == 1


async def test_pattern_of_ones_own_is_taken(microqueue_database: Any) -> None:
    async with opened(microqueue_database, redact="^name$|customer") as site:
        task = site.bury("customer_no=K77X bad, token=x", password="hunter2", name="ada")
        shown = await site.get(f"/tasks/{task.id}")
        assert shown["payload"] == {"password": "hunter2", "name": MASK}
        assert shown["error"]["message"] == f"customer_no={MASK} bad, token=x"


async def test_progress_is_masked(microqueue_database: Any) -> None:
    async with opened(microqueue_database) as site:
        site.queue.enqueue({})
        task = site.popped()
        said = {"fraction": 0.5, "message": "logged in with token=letmein", "at": site.clock.now()}
        microqueue_database.tasks.update_one({"_id": task.id}, {"$set": {"progress": said}})
        (row,) = (await site.get("/running"))["items"]
        for shown in (row, await site.get(f"/tasks/{task.id}")):
            assert shown["progress"]["message"] == f"logged in with token={MASK}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("password=a", f"password={MASK}"), ("at: db.password=a b", f"at: db.password={MASK} b"),
        ("password='a b' c", f"password='{MASK}' c"), ("password='a b", f"password='{MASK}"),
        ('{"token": "a,b", "n": 1}', f'{{"token": "{MASK}", "n": 1}}'),
        ('{\\"token\\": \\"a b\\"}', f'{{\\"token\\": \\"{MASK}\\"}}'),
        ('{\\"token\\": \\"a\\\\\\"b\\", n', f'{{\\"token\\": \\"{MASK}\\", n'),
        ('{"password": "a\\"b", n', f'{{"password": "{MASK}", n'),
        ('{"password": "a\\\\", n', f'{{"password": "{MASK}", n'),
        ("Authorization: Bearer a.b", f"Authorization: {MASK}"),
        ("Authorization: Token a.b, c\nd", f"Authorization: {MASK}\nd"),
        ("Cookie: a=b; session=c", f"Cookie: {MASK}"),
        ("set-cookie: f(a) b", f"set-cookie: {MASK}"),
        ("{'Cookie': 'a=b; c', 'n': 1}", f"{{'Cookie': '{MASK}', 'n': 1}}"),
        ("cookies={'a':\n 'b'} c", f"cookies={MASK} c"),
        ("connect(password=b'a')", f"connect(password=b'{MASK}')"),
        ("password=SecretStr('a') b", f"password={MASK} b"),
        ("password=a(b)c d", f"password={MASK} d"), ("password=''a'' b", f"password=''{MASK}'' b"),
        ("{'tokens': ['a', 'b]'], 'n': 1}", f"{{'tokens': {MASK}, 'n': 1}}"),
        ("{'credentials': {'a': {'b': 'c'}}}", f"{{'credentials': {MASK}}}"),
        ("token=[a, b", f"token={MASK}"), ("password='a\nb' c", f"password='{MASK}' c"),
        ("private_key=-----BEGIN RSA PRIVATE KEY-----\na\n-----END RSA PRIVATE KEY----- b",
         f"private_key={MASK} b"),
        ("read -----BEGIN PRIVATE KEY-----\na\nb", f"read {MASK}"),
        ("userPwd=a dbPass: b", f"userPwd={MASK} dbPass: {MASK}"),
        ("password=>a password==b", f"password=>{MASK} password=={MASK}"),
        ("password: !!str a", f"password: {MASK}"),
        ("password='' user='x'", "password='' user='x'"),
        ("GET 'x?token=a' not in 'y'", f"GET 'x?token={MASK}' not in 'y'"),
        ('{"name": "DB_PASSWORD", "value": "a"}', f'{{"name": "DB_PASSWORD", "value": "{MASK}"}}'),
        ("name=x, value=5, key: jwt, value: a", f"name=x, value=5, key: jwt, value: {MASK}"),
        ("s3://u:p@h?token=a&x=1", f"s3://{MASK}@h?token={MASK}&x=1"),
        ("unexpected token at 5: x=1", "unexpected token at 5: x=1"), ("", ""),
    ],
)  # fmt: skip
def test_text_is_masked_after_telling_names(text: str, shown: str) -> None:
    assert Redactor(REDACTED_KEYS).text(text) == shown


def test_long_text_is_masked_quickly() -> None:
    text = f"{'a' * 500_000} {'a=' * 100_000}token=x"
    assert Redactor(REDACTED_KEYS).text(text) == f"{text[:-1]}{MASK}"


@pytest.mark.parametrize(
    "text",
    [
        "token='" + "\\'" * 100_000, "token=[" + "'\\'" * 100_000, "token=[" * 100_000,
        "token='\n" * 100_000, "token" + " " * 300_000, "-----BEGIN PRIVATE KEY-----" * 20_000,
        "name='" * 50_000, "name='token', " * 50_000, "token=" + "\\" * 300_000,
        "token=" + "a." * 200_000, "-----BEGIN " + "A " * 200_000, "cookie: x\n" * 50_000,
        "".join("token=" + "\\" * n + "'" for n in range(600)),
    ],
    ids=range(13),
)  # fmt: skip
def test_odd_text_is_masked_in_a_time_that_its_length_bounds(text: str) -> None:
    started = time.process_time()
    Redactor(REDACTED_KEYS).text(text)
    assert time.process_time() - started < 10  # Seconds; a square of the length takes hours.


@pytest.mark.parametrize(
    "name",
    [
        "passenger", "compass", "bypass", "keyboard", "spin", "monkey", "tokenizer_count",
        "tokenised", "secretary", "passed", "pass_count", "key", "primary_key", "name", "author",
        "pinned", "accessed", "description",
    ],
)  # fmt: skip
def test_harmless_names_are_shown(name: str) -> None:
    redactor = Redactor(REDACTED_KEYS)
    assert redactor.mask({name: 1}) == {name: 1}
    assert redactor.mask({"name": name, "value": 1}) == {"name": name, "value": 1}
    assert redactor.text(f"{name}=1 {name}: x") == f"{name}=1 {name}: x"


@pytest.mark.parametrize(
    "name",
    [
        "userPwd", "dbPass", "DB_PASS", "pwd", "jwt", "userJwt", "id_jwt", "access_key",
        "accessKey", "AWS_SECRET_ACCESS_KEY", "tokens", "refreshTokens", "bearer", "apikey",
        "X-Api-Key", "Proxy-Authorization", "Set-Cookie", "secret_name", "passkey",
    ],
)  # fmt: skip
def test_telling_names_are_masked(name: str) -> None:
    redactor = Redactor(REDACTED_KEYS)
    assert redactor.mask({name: 1}) == {name: MASK}
    assert redactor.text(f"{name}=x") == f"{name}={MASK}"
    for pair in ({"name": name, "value": [1]}, {"Key": name, "Value": "x"}):
        shown = redactor.mask([pair])
        assert MASK in shown[0].values()
        assert redactor.restore(shown, [pair]) == [pair]


def test_mask_is_put_back_by_place() -> None:
    redactor = Redactor(REDACTED_KEYS)
    stored = {"a": [{"token": "x"}, {"token": "y"}], "password": "z", "n": 1, "url": "a://b:c@d"}
    edited = {**redactor.mask(stored), "a": [{"token": MASK}, {"token": "new"}], "n": 2}
    assert edited["url"] == f"a://{MASK}@d"
    expected = {**stored, "a": [{"token": "x"}, {"token": "new"}], "n": 2}
    assert redactor.restore(edited, stored) == expected
    for wrong in ({"other": MASK}, {"a": [MASK, MASK, MASK]}, {"url": f"a://{MASK}@other"}):
        with pytest.raises(InvalidArgument, match=MASK):
            redactor.restore(wrong, stored)
    assert Redactor(None).restore({"other": MASK}, stored) == {"other": MASK}
    assert redactor.restore({"password": MASK}, {"password": None}) == {"password": None}


PEOPLE: dict[str, Any] = {
    "people": [
        {"name": "a", "password": "A", "at": datetime(2026, 5, 1, tzinfo=UTC), "n": 10.0},
        {"name": "b", "password": "B", "pin": "P", "number": float("nan")},
    ]
}
SHOWN_A, SHOWN_B = Redactor(REDACTED_KEYS).mask(PEOPLE)["people"]
STORED_A, STORED_B = PEOPLE["people"]


@pytest.mark.parametrize(
    ("edited", "restored"),
    [
        ([SHOWN_A, SHOWN_B], [STORED_A, STORED_B]),
        ([SHOWN_A, {**SHOWN_B, "pin": "new"}], [STORED_A, {**STORED_B, "pin": "new"}]),
        ([SHOWN_A, {"other": 1}], [STORED_A, {"other": 1}]),
        ([{"name": "c", "password": "C"}], [{"name": "c", "password": "C"}]),
        ([], []),
        ([SHOWN_B], None), ([SHOWN_B, SHOWN_A], None), ([SHOWN_A], None),
        ([SHOWN_A, SHOWN_B, {"name": "c", "password": "C"}], None),
        ([{**SHOWN_A, "name": "c"}, SHOWN_B], None), ([{**SHOWN_A, "n": 11.0}, SHOWN_B], None),
        ([{"password": MASK}, SHOWN_B], None), ([SHOWN_A, {**SHOWN_B, "token": MASK}], None),
    ],
)  # fmt: skip
def test_mask_in_a_list_is_put_back_where_nothing_moved(edited: Any, restored: Any) -> None:
    redactor = Redactor(REDACTED_KEYS)
    given = from_extended_json({"people": to_browser_json(edited)})
    if restored is None:
        with pytest.raises(InvalidArgument) as caught:
            redactor.restore(given, PEOPLE)
        assert str(caught.value.argument).startswith("payload.people")
        assert MASK in str(caught.value)
    else:
        assert repr(to_browser_json(redactor.restore(given, PEOPLE))) == repr(
            to_browser_json({"people": restored})
        )


PAIRS: dict[str, Any] = {"pairs": [[{"password": "A"}, 1], [{"password": "B"}, 2]]}


@pytest.mark.parametrize(
    ("pairs", "restored"),
    [
        ([[{"password": MASK}, 1], [{"password": MASK}, 2]], PAIRS["pairs"]),
        (
            [[{"password": MASK}, 1], [{"password": "new"}, 3]],
            [[{"password": "A"}, 1], [{"password": "new"}, 3]],
        ),
        ([[{"password": MASK}, 3], [{"password": MASK}, 2]], None),
        ([[{"password": MASK}, 2], [{"password": MASK}, 1]], None),
        ([[{"password": MASK}], [{"password": MASK}, 2]], None),
    ],
)
def test_mask_in_a_list_of_lists_is_put_back_where_nothing_moved(pairs: Any, restored: Any) -> None:
    redactor = Redactor(REDACTED_KEYS)
    if restored is not None:
        assert redactor.restore({"pairs": pairs}, PAIRS) == {"pairs": restored}
        return
    with pytest.raises(InvalidArgument) as caught:
        redactor.restore({"pairs": pairs}, PAIRS)
    assert str(caught.value.argument).startswith("payload.pairs.0")


def test_secret_is_not_put_back_under_a_name_that_would_show_it() -> None:
    redactor = Redactor(REDACTED_KEYS)
    stored = {"header": {"name": "Authorization", "value": "hunter2"}}
    assert redactor.restore(redactor.mask(stored), stored) == stored
    for header in ({"name": "Plain", "value": MASK}, {"value": MASK}):
        with pytest.raises(InvalidArgument, match=MASK):
            redactor.restore({"header": header}, stored)


async def test_unexpected_error_tells_nothing_but_that_it_was_one(
    microqueue_database: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(microqueue_database) as site:

        async def broken(**_: Any) -> None:
            raise RuntimeError("mongodb://ada:hunter2@db broke")

        monkeypatch.setattr(site.app.state.context, "overview", broken)
        with caplog.at_level(logging.ERROR, "microqueue"):
            problem = await site.get("/overview", expect=500)
        assert "hunter2" not in json.dumps(problem)
        assert "RuntimeError" in caplog.text
        assert "hunter2" not in caplog.text


async def test_server_that_is_away_is_told_without_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MICROQUEUE_SERVER_TIMEOUT", "0.2")
    with Queue.from_uri("mongodb://ada:hunter2@127.0.0.1:1/") as queue:
        app = dashboard(queue)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in (f"{API}/overview", f"{API}/config", f"{API}/tasks/x", "/readyz"):
                reply = await client.get(path)
                assert reply.status_code == 503, (path, reply.text)
                assert "hunter2" not in reply.text
                assert "ada" not in reply.text
            assert (await client.get("/healthz")).status_code == 200
