"""The commands about topics: publish, subscribe, topics, bind, unbind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from microqueue import Queue, Topic
from microqueue.cli import formats
from tests.acceptance.command_line import PROGRAM, Cli


@pytest.fixture
def topic(queue: Queue[Any]) -> Topic:
    return Topic(queue, "prices")


def test_publish_stores_the_message_with_its_options(cli: Cli, topic: Topic) -> None:
    arguments = ("publish", "prices", '{"n": "ü"}', "--key", "shop.eu", "--header", "trace=abc")
    assert cli(*arguments, "--id", "m1") == "Published m1 to topic 'prices'.\n"
    (message,) = topic.peek()
    assert (message.position, message.body, message.key) == ("m1", {"n": "ü"}, "shop.eu")
    assert message.headers == {"trace": "abc"}
    cli(*arguments, "--id", "m1")
    assert len(topic.peek()) == 1


def test_publish_reads_stdin_and_gives_the_position_as_json(cli: Cli, topic: Topic) -> None:
    said = cli.json("publish", "prices", stdin='{"n": 1}')
    assert said == {"topic": "prices", "position": topic.peek()[0].position}


@pytest.mark.parametrize(
    "arguments",
    [
        ["publish", "prices", "[1]"],
        ["publish", "prices", "{}", "--header", "topic=x"],
        ["publish", "", "{}"],
        ["publish", "prices", "{}", "-q", "mail"],
        ["subscribe", "prices", "--from", ""],
        ["bind", "prices", "mail", "--key", "shop*"],
        ["bind", "prices", "mail", "--where", "country"],
        ["bind", "prices", "mail", "--where", "$where=1"],
        ["bind", "prices", ""],
        ["topics", "--limit", "0"],
    ],
)
def test_value_that_is_not_valid_is_one_line_and_status_1(
    cli: Cli, microqueue_database: Any, arguments: list[str]
) -> None:
    cli(*arguments, status=1)
    assert re.fullmatch(r"Error: .*\n", cli.stderr)
    assert microqueue_database.list_collection_names() == []


def test_key_and_conditions_exclude_each_other(absent: str) -> None:
    arguments = ("bind", "prices", "mail", "--key", "a", "--where", "b=1")
    cli = Cli()
    cli(*arguments, "--uri", absent, status=2)
    assert "--key" in cli.stderr
    assert "--where" in cli.stderr


def test_bound_queue_gets_messages_until_it_is_unbound(cli: Cli, queue: Queue[Any]) -> None:
    said = cli("bind", "prices", "default", "--key", "shop.*")
    assert said == "Bound queue 'default' to topic 'prices' (shop.*).\n"
    cli("publish", "prices", '{"n": 1}', "--key", "shop.eu")
    cli("publish", "prices", '{"n": 2}', "--key", "other")
    assert cli("unbind", "prices", "default") == "Queue 'default' unbound from topic 'prices'.\n"
    assert cli.json("unbind", "prices", "default") == {
        "topic": "prices",
        "queue": "default",
        "was_bound": False,
    }
    cli("publish", "prices", '{"n": 3}', "--key", "shop.eu")
    assert [task.payload for task in queue.pop_many(10)] == [{"n": 1}]


def test_bind_takes_conditions_and_options(cli: Cli, topic: Topic) -> None:
    conditions = ["country=FR", "order.n=5", "paid=true", "gone=null", 'code="5"', "text=a=b"]
    where = [argument for one in conditions for argument in ("--where", one)]
    options = ["--priority", "9", "--delay", "1m", "--max-attempts", "3", "--expires-in", "1h"]
    said = cli.json("bind", "prices", "mail", *where, *options)
    (binding,) = topic.bindings()
    assert binding.filter == {
        "country": "FR",
        "order.n": 5,
        "paid": True,
        "gone": None,
        "code": "5",
        "text": "a=b",
    }
    assert said["filter"] == binding.filter
    assert (said["priority"], said["max_attempts"], said["delay"]) == (9, 3, 60)
    assert (binding.priority, binding.max_attempts) == (9, 3)
    assert binding.delay is not None
    assert binding.expires_in is not None
    assert (binding.delay.total_seconds(), binding.expires_in.total_seconds()) == (60, 3600)


def test_topics_are_listed(cli: Cli, topic: Topic, queue: Queue[Any]) -> None:
    assert cli("topics") == "No topics.\n"
    topic.bind("mail", "shop.*")
    topic.bind("stock", {"country": "FR"})
    topic.publish({"n": 1})
    Topic(queue, "other").publish({})
    rows = [re.split(r"  +", line.strip()) for line in cli("topics").splitlines()]
    assert rows[0] == ["topic", "messages", "size", "newest", "bindings"]
    assert [(row[0], row[1], row[4]) for row in rows[1:]] == [
        ("other", "1", "-"),
        ("prices", "1", "mail (shop.*), stock (country=FR)"),
    ]
    _, prices = cli.json("topics")
    assert (prices["topic"], prices["messages"], prices["max_messages"]) == ("prices", 1, 10_000)
    assert [one["queue"] for one in prices["bindings"]] == ["mail", "stock"]
    assert [one["topic"] for one in cli.json("topics", "--limit", "1")] == ["other"]
    assert "1 of 2" in cli.stderr


def test_subscribe_prints_what_the_topic_has(cli: Cli, topic: Topic) -> None:
    positions = [topic.publish({"n": n, "password": "x"}, key="k") for n in range(4)]
    options = ("--from", "start", "--max", "3")
    lines = cli("subscribe", "prices", *options).splitlines()
    assert [line.split()[0] for line in lines] == positions[:3]
    assert re.fullmatch(r'\S+ \d{4}-\S+Z k {"n": 0, "password": "•••"}', lines[0])
    assert positions[2] in cli.stderr
    said = cli("subscribe", "prices", *options, "--json", "--reveal")
    first, *_ = [json.loads(line) for line in said.splitlines()]
    assert (first["position"], first["body"]) == (positions[0], {"n": 0, "password": "x"})
    rest = cli("subscribe", "prices", "--from", positions[2], "--timeout", "50ms", "--json")
    assert [json.loads(line)["position"] for line in rest.splitlines()] == positions[3:]


def test_subscribe_reports_a_gap(cli: Cli, queue: Queue[Any]) -> None:
    topic = Topic(queue, "prices", max_messages=2)
    positions = [topic.publish({"n": n}) for n in range(5)]
    lines = cli("subscribe", "prices", "--from", positions[0], "--max", "2").splitlines()
    assert [line.split()[0] for line in lines] == positions[3:]
    assert f"Gap: the messages between {positions[0]} and {positions[3]} are lost" in cli.stderr


@pytest.fixture
def subscriber(database_uri: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command, and wait until it has subscribed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*PROGRAM, "subscribe", "prices", *arguments, "--uri", database_uri],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Subscribed")
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_subscribe_prints_new_messages_until_a_signal(
    subscriber: Callable[..., subprocess.Popen[str]], topic: Topic, stop: signal.Signals
) -> None:
    topic.publish({"n": 0})
    process = subscriber("--json")
    assert process.stdout is not None
    for n in (1, 2):
        topic.publish({"n": n})
        assert json.loads(process.stdout.readline())["body"] == {"n": n}
    process.send_signal(stop)
    said, errors = process.communicate(timeout=90)
    assert (process.returncode, said) == (0, "")
    assert errors.startswith("2 messages.")


@pytest.mark.parametrize("limit", [("--max", "5"), ("--timeout", "1h")])
def test_interrupted_subscribe_that_would_have_ended_has_status_130(
    subscriber: Callable[..., subprocess.Popen[str]], topic: Topic, limit: tuple[str, str]
) -> None:
    process = subscriber(*limit)
    topic.publish({"n": 1})
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.2 kB"),
        (64_000_000, "64.0 MB"),
        (5 * 10**12, "5000.0 GB"),
    ],
)
def test_sizes_are_written_for_people(number: int, text: str) -> None:
    assert formats.size(number) == text
