"""What the dashboard says about requests that it refuses."""

from __future__ import annotations

import pytest

from tests.integration.dashboard_site import API, Site


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("{bad", "the body is not JSON: Expecting property name enclosed in double quotes at"),
        ('{"payload": {}, "priority": 900}', "priority=900 is not valid: Input should be less"),
        ('{"payload": {}, "priority": "high"}', "priority='high' is not valid: Input should be"),
        ('{"payload": {"secret": 1}, "headers": [1]}', "headers is not valid: "),
        ('{"payload": {}, "unknown": 1}', "unknown=1 is not valid: "),
        ("[]", "the request is not valid: "),
    ],
)
async def test_refusal_of_a_request_names_the_value_or_the_place(
    site: Site, body: str, told: str
) -> None:
    headers = {"content-type": "application/json"}
    reply = await site.client.post(f"{API}/tasks", content=body, headers=headers)
    assert reply.status_code == 422
    assert reply.json()["detail"].startswith(told)
