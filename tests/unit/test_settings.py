from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import BaseModel

from microqueue import BackoffPolicy, InvalidArgument, NewTask, QueueSettings
from microqueue.model import Model
from microqueue.new_task import EnqueueOptions
from microqueue.schedule import Timetable
from microqueue.settings import JSON_EXAMPLE, SettingsOptions
from microqueue.worker.options import WorkerOptions
from tests.rejection import rejecting


def test_every_setting_can_come_from_the_environment() -> None:
    environment = {
        "MICROQUEUE_MAX_ATTEMPTS": "3",
        "MICROQUEUE_VISIBILITY_TIMEOUT": "90",
        "MICROQUEUE_BACKOFF": '{"base_sec": 1, "jitter": "none"}',
        "MICROQUEUE_HISTORY_LIMIT": "5",
        "MICROQUEUE_TRACEBACK_LIMIT": "0",
        "MICROQUEUE_MAX_CRASHES": "7",
        "MICROQUEUE_RETENTION": "none",
        "MICROQUEUE_DEAD_LETTERS": "collection",
        "MICROQUEUE_POLL_INTERVAL": "0.5",
        "MICROQUEUE_RETRY_DEADLINE": "2",
        "MICROQUEUE_CALL_TIMEOUT": "3",
        "MICROQUEUE_LONG_CALL_TIMEOUT": "2m",
        "MICROQUEUE_SERVER_TIMEOUT": "1.5",
        "MICROQUEUE_BATCH_SIZE": "10",
        "MICROQUEUE_PROMOTE_LIMIT": "20",
        "MICROQUEUE_COUNT_LIMIT": "500",
        "MICROQUEUE_LOCK_TTL": "7s",
        "MICROQUEUE_ENSURE_INDEXES": "false",
    }
    assert {f"MICROQUEUE_{name.upper()}" for name in QueueSettings.model_fields} == set(environment)
    settings = QueueSettings.from_environment(environment)
    default = QueueSettings()
    for name in QueueSettings.model_fields:
        assert getattr(settings, name) != getattr(default, name), name
    assert settings.visibility_timeout == timedelta(seconds=90)
    assert settings.backoff.jitter == "none"
    assert settings.ensure_indexes is False


def test_values_from_code_win_over_the_environment() -> None:
    environment = {"MICROQUEUE_MAX_ATTEMPTS": "3", "OTHER": "x"}
    assert QueueSettings.from_environment(environment, max_attempts=7).max_attempts == 7


def test_unknown_variables_are_named_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        QueueSettings.from_environment({"MICROQUEUE_PORT": "tcp://10.0.0.1", "MICROQUEUE_URI": "x"})
    assert [vars(record)["variable"] for record in caplog.records] == ["MICROQUEUE_PORT"]
    assert [vars(record)["closest"] for record in caplog.records] == [[]]
    assert "MICROQUEUE_PORT" in caplog.text


def test_variable_that_is_almost_a_setting_names_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        QueueSettings.from_environment({"MICROQUEUE_MAX_ATTEMTS": "3"})
    (record,) = caplog.records
    assert vars(record)["closest"] == ["MICROQUEUE_MAX_ATTEMPTS"]
    assert "MICROQUEUE_MAX_ATTEMPTS" in record.getMessage()


@pytest.mark.parametrize(
    "options",
    [
        {"max_attemts": 3},
        {"max_attempts": 0},
        {"visibility_timeout": 0},
        {"visibility_timeout": -5},
        {"retention": "a week"},
        {"dead_letters": "elsewhere"},
        {"backoff": {"factor": 0}},
        {"batch_size": 0},
        {"count_limit": 0},
        {"max_attempts": True},
        {"max_attempts": "3"},
        {"visibility_timeout": "90"},
    ],
)
def test_bad_settings_are_rejected_by_name(options: dict[str, Any]) -> None:
    ((argument, value),) = options.items()
    with rejecting(argument, value):
        QueueSettings(**options)


@pytest.mark.parametrize(
    ("variable", "text", "reason"),
    [
        ("MICROQUEUE_MAX_ATTEMPTS", "abc", "Input should be a valid integer"),
        ("MICROQUEUE_MAX_ATTEMPTS", "0", "Input should be greater than or equal to 1"),
        ("MICROQUEUE_MAX_ATTEMPTS", "5m", "Input should be a valid integer"),
        ("MICROQUEUE_MAX_ATTEMPTS", "none", "Input should be a valid integer"),
        ("MICROQUEUE_VISIBILITY_TIMEOUT", "5x", "give seconds, or 30s, 5m, 2h, 1d"),
        ("MICROQUEUE_VISIBILITY_TIMEOUT", "99999d", "give a duration of at most 36500 days"),
        ("MICROQUEUE_VISIBILITY_TIMEOUT", "0", "give a duration of at least a millisecond"),
        ("MICROQUEUE_BACKOFF", "{broken", f"give JSON, as in {JSON_EXAMPLE}"),
        ("MICROQUEUE_BACKOFF", "base=5,jitter=none", f"give JSON, as in {JSON_EXAMPLE}"),
        ("MICROQUEUE_BACKOFF", '{"factor": 0}', "factor=0 is not valid"),
        ("MICROQUEUE_BACKOFF", '{"base_sec": 9, "max_sec": 1}', "base_sec 9.0 is greater than"),
    ],
)
def test_bad_value_in_the_environment_is_rejected_by_the_name_of_its_variable(
    variable: str, text: str, reason: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        QueueSettings.from_environment({variable: text})
    assert str(caught.value).startswith(f"{variable}={text!r} is not valid: {reason}")


def test_example_that_a_rejection_shows_can_be_used() -> None:
    settings = QueueSettings.from_environment({"MICROQUEUE_BACKOFF": JSON_EXAMPLE})
    assert settings.backoff == BackoffPolicy(base_sec=5, jitter="none")


def test_bad_value_from_code_is_not_blamed_on_the_environment() -> None:
    with rejecting("max_attempts", 0):
        QueueSettings.from_environment({"MICROQUEUE_MAX_ATTEMPTS": "3"}, max_attempts=0)


def test_durations_in_the_environment_may_have_units() -> None:
    environment = {"MICROQUEUE_VISIBILITY_TIMEOUT": "5m", "MICROQUEUE_RETENTION": "1d 12h"}
    settings = QueueSettings.from_environment(environment)
    assert settings.visibility_timeout == timedelta(minutes=5)
    assert settings.retention == timedelta(hours=36)


def test_empty_variable_is_as_good_as_none() -> None:
    environment = {"MICROQUEUE_MAX_ATTEMPTS": "", "MICROQUEUE_RETENTION": " "}
    assert QueueSettings.from_environment(environment) == QueueSettings()


def test_settings_cannot_be_changed_under_the_queue() -> None:
    settings: Any = QueueSettings()
    with pytest.raises(ValueError, match="frozen"):
        settings.max_attempts = 2


# Typing: mypy reads this file, and an ignore that is not needed is an error to it.


def test_type_checkers_take_seconds_for_durations() -> None:
    settings = QueueSettings(visibility_timeout=60, retention=timedelta(days=1))
    lease: timedelta = settings.visibility_timeout
    task = NewTask(payload={"n": 1}, delay=0.5, expires_in=timedelta(hours=1))
    assert (lease, task.delay) == (timedelta(minutes=1), timedelta(seconds=0.5))
    with pytest.raises(InvalidArgument):
        QueueSettings(max_attempts="3")  # type: ignore[arg-type]  # The point.


@pytest.mark.parametrize(
    ("model", "options"), [(QueueSettings, SettingsOptions), (NewTask, EnqueueOptions)]
)
def test_type_checkers_know_every_field(model: type[BaseModel], options: Any) -> None:
    fields = dict(model.model_fields)
    fields.pop("payload", None)
    accepted = get_type_hints(options)
    assert list(accepted) == list(fields)
    for name, field in fields.items():  # What is stored is accepted, and None only where it is.
        assert (field.default is None) <= accepts_none(accepted[name]), name


def accepts_none(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


@pytest.mark.parametrize(
    ("model", "option", "closest"),
    [
        (QueueSettings, "max_attempt", "max_attempts"),
        (QueueSettings, "visability_timeout", "visibility_timeout"),
        (WorkerOptions, "concurency", "concurrency"),
        (BackoffPolicy, "base", "base_sec"),
        (BackoffPolicy, "bas", "base_sec"),
        (WorkerOptions, "poll", "poll_interval"),
    ],
)
def test_unknown_option_is_rejected_with_the_closest_one(
    model: type[Model], option: str, closest: str
) -> None:
    with rejecting(option, 1, code="unknown_option", closest=closest) as caught:
        model(**{option: 1})
    assert model.__name__ in str(caught.value)


def test_unknown_option_like_no_other_is_rejected_with_all_that_exist() -> None:
    with rejecting("colour", 1, code="unknown_option") as caught:
        BackoffPolicy(colour=1)  # type: ignore[call-arg]
    assert caught.value.closest == []
    assert all(name in str(caught.value) for name in BackoffPolicy.model_fields)


@pytest.mark.parametrize(
    ("model", "argument", "value", "closest"),
    [
        (QueueSettings, "dead_letters", "colection", "collection"),
        (BackoffPolicy, "jitter", "ful", "full"),
        (Timetable, "overlap", "alow", "allow"),
    ],
)
def test_value_that_is_almost_an_allowed_one_is_rejected_with_it(
    model: type[Model], argument: str, value: str, closest: str
) -> None:
    with rejecting(argument, value, closest=closest):
        model(**{argument: value})
