"""The options of a dashboard: as the model has them, and a typo names the closest one."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest

from microqueue.dashboard import DashboardOptions, DashboardOptionsDict, dashboard
from microqueue.dashboard.options import DashboardServerOptionsDict
from microqueue.dashboard.server import DashboardServer
from microqueue.testing import memory_queue
from tests.rejection import rejecting


def test_options_are_typed_as_the_model_has_them() -> None:
    assert set(get_type_hints(DashboardOptionsDict)) == set(DashboardOptions.model_fields)


def test_options_of_a_server_are_its_parameters_and_those_of_the_dashboard() -> None:
    parameters = set(inspect.signature(DashboardServer).parameters) - {"queue", "options"}
    assert set(get_type_hints(DashboardServerOptionsDict)) == parameters | set(
        DashboardOptions.model_fields
    )


@pytest.mark.parametrize(("typo", "meant"), [("tokn", "token"), ("page_limits", "page_limit")])
def test_unknown_option_of_a_dashboard_names_the_closest_one(typo: str, meant: str) -> None:
    options: Any = {typo: 4}
    with rejecting(typo, closest=meant):
        dashboard(memory_queue(), **options)


@pytest.mark.parametrize(("typo", "meant"), [("prot", "port"), ("tokn", "token")])
def test_unknown_option_of_a_server_names_the_closest_one(typo: str, meant: str) -> None:
    options: Any = {typo: "secret"}
    with rejecting(typo, closest=meant) as caught:
        DashboardServer(memory_queue(), **options)
    assert "secret" not in str(caught.value)
