"""What the dashboard says about requests that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.dashboard_site import API, Site


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("{bad", "the body is not JSON: Expecting property name enclosed in double quotes at"),
        ('{"payload": {}, "priority": 900}', "priority=900 is not valid: Input should be less"),
        ('{"payload": {}, "priority": "high"}', "priority='high' is not valid: Input should be"),
        ('{"payload": {"secret": 1}, "headers": [1]}', "headers is not valid: "),
        ("[]", "the request is not valid: "),
    ],
)
async def test_rejection_of_a_request_names_the_value_or_the_place(
    site: Site, body: str, told: str
) -> None:
    headers = {"content-type": "application/json"}
    reply = await site.client.post(f"{API}/tasks", content=body, headers=headers)
    assert reply.status_code == 422
    assert reply.json()["detail"].startswith(told)


@pytest.mark.parametrize(
    ("path", "body", "begin"),
    [
        ("/schedules/a/put", {"every_sec": 0.5}, "every_sec=0.5 is not valid: "),
        ("/schedules/a/put", {}, "a schedule needs cron or every_sec; "),
        (
            "/schedules/a/put",
            {"cron": "every=5 None", "every_sec": 5},
            "cron='every=5 None' is not valid: every_sec=5",
        ),
        ("/schedules/a/put", {"every_sec": 5, "grace_sec": 0.5}, "grace_sec=0.5 s is not valid: "),
        ("/tasks", {"payload": {}, "dedupe_for_sec": 5}, "dedupe_for_sec needs a dedupe_key"),
    ],
)
async def test_rejection_uses_the_names_and_values_of_the_request(
    site: Site, path: str, body: dict[str, Any], begin: str
) -> None:
    problem = await site.post(path, {"queue": "a", **body}, expect=422)
    texts = [problem["detail"], *(one["message"] for one in problem["errors"])]
    assert [text[: len(begin)] for text in texts] == [begin] * len(texts)
    assert not any("None" in text.replace("5 None", "") for text in texts)


@pytest.mark.parametrize(
    ("path", "body", "field", "closest"),
    [
        ("/tasks", {"payload": {}, "prioritty": 1}, "prioritty", "priority"),
        ("/tasks", {"payload": {}, "on_duplicate": "retrn"}, "on_duplicate", "return"),
        ("/dead-letters/discard", {"queue": "a", "filter": {"cod": "x"}}, "filter.cod", "code"),
        ("/schedules/a/put", {"queue": "b", "cronn": "@daily"}, "cronn", "cron"),
    ],
)
async def test_unknown_name_in_a_body_is_rejected_with_the_closest_one(
    site: Site, path: str, body: dict[str, Any], field: str, closest: str
) -> None:
    problem = await site.post(path, body, expect=422)
    ((found, message),) = [(one["path"], one["message"]) for one in problem["errors"]]
    assert (problem["code"], found) == ("InvalidArgument", field)
    assert repr(closest) in message


@pytest.mark.parametrize(
    ("path", "name", "closest"),
    [
        ("/tasks", "statuss", "status"),
        ("/dead-letters", "quue", "queue"),
        ("/topics", "limmit", "limit"),
        ("/results/5", "wat", "wait"),
    ],
)
async def test_unknown_name_in_a_query_is_rejected_with_the_closest_one(
    site: Site, path: str, name: str, closest: str
) -> None:
    problem = await site.get(path, expect=422, **{name: "x"})
    (note,) = problem["errors"]
    assert (problem["code"], note["path"]) == ("InvalidArgument", name)
    assert repr(closest) in note["message"]


async def test_query_of_an_action_is_rejected_before_it_is_done(site: Site) -> None:
    await site.post("/tasks?prioritty=3", {"payload": {}}, expect=422)
    assert site.queue.stats().pending == 0
