"""Every place that adds tasks or schedules takes the same options, but for those named here.

``tests/spark/test_sink_rows.py`` has the test of Spark's.
"""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from pymongo import common

from microqueue.cli import schedules as schedule_commands
from microqueue.cli import tasks as task_commands
from microqueue.dashboard.requests import NewTaskBody
from microqueue.dashboard.routes_schedules import ScheduleBody
from microqueue.drivers.client_options import ClientOptions
from microqueue.new_task import CommonOptions, EnqueueOptions, NewTask
from microqueue.schedules import AsyncSchedules, Schedules

ENQUEUE = set(EnqueueOptions.__annotations__)
CLI_NAMES = {"header": "headers"}
"""Options of commands that may be repeated: they have the singular."""
CLI_ONLY = {"session", "payload", "many", "if_absent", "wait_for_result", "timeout"}
"""What the command ``enqueue`` has beside the options of a task."""
REST_ONLY = {"queue", "payload"}


def parameters(function: Any) -> set[str]:
    return {CLI_NAMES.get(name, name) for name in inspect.signature(function).parameters}


def fields(model: Any) -> set[str]:
    return {name.removesuffix("_sec") for name in model.model_fields}


def default(model: Any, name: str) -> Any:
    return model.model_fields[name].get_default(call_default_factory=True)


def test_enqueue_has_the_same_options_everywhere() -> None:
    assert fields(NewTask) - {"payload"} == ENQUEUE
    assert parameters(task_commands.enqueue) - CLI_ONLY == ENQUEUE
    assert fields(NewTaskBody) - REST_ONLY == ENQUEUE


def test_requests_have_the_defaults_of_new_tasks() -> None:
    names = set(NewTaskBody.model_fields) - REST_ONLY
    found = {name: default(NewTaskBody, name) for name in names}
    assert found == {name: default(NewTask, name.removesuffix("_sec")) for name in names}


def test_schedules_have_the_same_options_everywhere() -> None:
    named = set(inspect.signature(Schedules.put).parameters) - {"self", "options"}
    assert named == set(inspect.signature(AsyncSchedules.put).parameters) - {"self", "options"}
    options = named | set(get_type_hints(CommonOptions))
    assert parameters(schedule_commands.put) - {"session"} == options
    assert fields(ScheduleBody) - {"queue"} == options - {"name"}  # It is in the path.


def test_options_of_the_client_are_typed_as_the_driver_has_them() -> None:
    typed = {name.lower() for name in get_type_hints(ClientOptions)}
    assert typed == set(common.VALIDATORS) | {"port"}
