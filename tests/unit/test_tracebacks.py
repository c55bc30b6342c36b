"""Tracebacks are bounded, keep what matters most, and hide secrets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from microqueue.masking import MASK, Masker
from microqueue.tracebacks import FRAME_STEPS, format_traceback

LIMIT = 8192
SECRET = "sesame"


def raised(function: Callable[..., Any], *arguments: Any) -> BaseException:
    try:
        function(*arguments)
    except BaseException as exc:  # noqa: BLE001 (whatever it is)
        return exc
    raise AssertionError("nothing was raised")


def text(error: BaseException, limit: int = LIMIT) -> str:
    found = format_traceback(error, limit)
    assert found is not None
    assert len(found.encode()) <= limit
    return found


def fail(message: str = "boom") -> None:
    raise ValueError(message)


def fail_deep(depth: int, message: str = "boom") -> None:
    if depth:
        fail_again(depth - 1, message)
    fail(message)


def fail_again(depth: int, message: str) -> None:
    fail_deep(depth, message)


def test_it_shows_frames_source_and_exception() -> None:
    lines = text(raised(fail)).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-3].startswith('  File "')
    assert lines[-3].endswith("in fail")
    assert lines[-2:] == ["    raise ValueError(message)", "ValueError: boom"]


def test_without_a_traceback_there_is_none() -> None:
    assert format_traceback(ValueError("never raised"), LIMIT) is None
    assert format_traceback(raised(fail), 0) is None


@pytest.mark.parametrize("depth", [1, 30, 300])
@pytest.mark.parametrize("limit", [LIMIT, 1000, 200])
def test_innermost_frame_and_exception_always_stay(depth: int, limit: int) -> None:
    lines = text(raised(fail_deep, depth), limit).splitlines()
    assert lines[-2:] == ["    raise ValueError(message)", "ValueError: boom"]
    assert sum("File" in line for line in lines) <= FRAME_STEPS[0]


def test_what_was_left_out_is_said() -> None:
    assert "[outer frames left out]" in text(raised(fail_deep, 300))
    assert "[outer frames left out]" in text(raised(fail_deep, 30), 1000)
    assert "left out" not in text(raised(fail_deep, 3))


@pytest.mark.parametrize("limit", [1, 9, 15, 40])
def test_the_type_comes_first_where_little_fits(limit: int) -> None:
    assert "ValueError: boom ä".startswith(text(raised(fail, "boom ä" + "x" * 9999), limit)[:18])


def test_a_huge_message_is_cut_at_its_end() -> None:
    found = text(raised(fail, "begin " + "x" * 10_000_000))
    assert "ValueError: begin xxx" in found
    assert found.endswith("x…")


def chain(count: int) -> None:
    try:
        if count:
            chain(count - 1)
        fail(f"first, token={SECRET}")
    except Exception as exc:
        raise RuntimeError(f"number {count}, password={SECRET!r}") from exc


def test_causes_are_shown_before_what_they_caused_and_masked() -> None:
    found = text(raised(chain, 0))
    cause, effect = found.split("The above exception was the direct cause")
    assert f"token={MASK}" in cause
    assert effect.splitlines()[-1] == f"RuntimeError: number 0, password='{MASK}'"
    assert "password" in found


def in_handler() -> None:
    try:
        fail()
    except ValueError:
        raise KeyError("other")  # noqa: B904 (the context is the point)


def suppressed() -> None:
    try:
        fail()
    except ValueError:
        raise KeyError("other") from None


def test_context_is_shown_unless_it_is_suppressed() -> None:
    assert "During handling" in text(raised(in_handler))
    assert "ValueError: boom" in text(raised(in_handler))
    assert "ValueError: boom" not in text(raised(suppressed))


def test_many_and_circular_causes_end() -> None:
    assert text(raised(chain, 200)).endswith(f"RuntimeError: number 200, password='{MASK}'")
    one, other = raised(fail, "one"), raised(fail, "other")
    one.__context__, other.__context__ = other, one
    assert text(one).count("ValueError:") == 2


def test_members_of_groups_are_shown_and_bounded() -> None:
    members = [raised(fail, f"member {number}") for number in range(5000)]
    error = raised(lambda: (_ for _ in ()).throw(ExceptionGroup("many", members)))  # type: ignore[type-var]
    found = text(error)
    assert "ExceptionGroup: many (5000 sub-exceptions)" in found
    assert "ValueError: member 0" in found
    assert "[4,992 more exceptions in the group]" in found
    assert text(error, 400).splitlines()[-1] == "ExceptionGroup: many (5000 sub-exceptions)"


def nested_group(depth: int) -> None:
    try:
        nested_group(depth - 1) if depth else fail()
    except (ValueError, ExceptionGroup) as exc:
        raise ExceptionGroup(f"level {depth}", [exc]) from None


def test_deep_groups_end() -> None:
    assert "level 100" in text(raised(nested_group, 100))


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Hostile(Exception):
    @property
    def __notes__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no notes")


def test_an_exception_without_a_text_is_named() -> None:
    error = raised(lambda: (_ for _ in ()).throw(Mute()))
    assert text(error).endswith("Mute: <Mute without a text>")


def test_what_cannot_be_shown_is_left_out() -> None:
    assert format_traceback(raised(lambda: (_ for _ in ()).throw(Hostile())), LIMIT) is None


def test_surrogates_are_escaped_and_null_is_kept() -> None:
    assert text(raised(fail, "a\udcffb\0c")).endswith("ValueError: a\\udcffb\0c")


def test_notes_are_shown() -> None:
    error = raised(fail)
    error.add_note(f"see the manual, api_key={SECRET}")
    assert text(error).splitlines()[-2:] == ["ValueError: boom", f"see the manual, api_key={MASK}"]


def with_secret_source() -> None:
    raise ValueError("boom, token=sesame, uri=mongodb://ada:sesame@db/")


def test_secrets_in_messages_and_source_lines_are_masked() -> None:
    found = text(raised(with_secret_source))
    assert SECRET not in found.replace("with_secret_source", "")
    assert found.count(f"token={MASK}") == 2
    assert found.endswith(f"ValueError: boom, token={MASK}, uri=mongodb://{MASK}@db/")


@pytest.mark.parametrize("length", range(1440, 1520, 5))
@pytest.mark.parametrize("where", ["message", "note"])
def test_no_half_of_an_address_is_left_where_a_text_is_cut(length: int, where: str) -> None:
    given = f"{'x' * length} mongodb://ada:{SECRET}-{SECRET}@db.example/ {'y' * 2000}"
    error = raised(fail, given if where == "message" else "boom")
    if where == "note":
        error.add_note(given)
    found = text(error)
    assert "ada" not in found
    assert SECRET[:3] not in found


def unclosed(**_: Any) -> None:
    fail("told")


def calls_over_many_lines() -> None:
    unclosed(
        token=(  # The frame shows the call, whose bracket is closed elsewhere.
            "a"
        )
    )


FRAMES = """Traceback (most recent call last):
  File "/shop.py", line 7, in call
    connect(token=(
  File "/shop.py", line 9, in connect
    fail("told")
ValueError: told, password="a
second line" end"""


def test_an_open_bracket_hides_the_rest_of_its_frame_only() -> None:
    lines = Masker().traceback(FRAMES).splitlines()
    assert lines[2] == f"    connect(token={MASK}"
    assert lines[3:5] == ['  File "/shop.py", line 9, in connect', '    fail("told")']
    assert lines[5:] == [f'ValueError: told, password="{MASK}" end']
    assert "ValueError: told" in text(raised(calls_over_many_lines))


@pytest.mark.parametrize(
    "command",
    [
        ["--password", SECRET],
        ["--api-key", f"{SECRET} with words"],
        ["--verbose", "--token", f"{SECRET}'s"],
        [f"--password={SECRET}", "x"],
        ["--cookie", f"a={SECRET}; b={SECRET}"],
        f"exit 3 --password {SECRET}",
        f"exit 3 --password '{SECRET} with words'",
        f'exit 3 --client-secret "{SECRET}" --day 1',
    ],
    ids=str,
)
def test_secret_options_of_a_command_that_failed_are_masked(command: Any) -> None:
    shell = isinstance(command, str)
    program = command if shell else [sys.executable, "-c", "raise SystemExit(3)", *command]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        subprocess.run(program, shell=shell, check=True)
    found = text(caught.value)
    assert SECRET not in found
    assert MASK in found
    assert "returned non-zero exit status 3." in found
    assert Masker().traceback(found) == found


def test_a_masked_traceback_stays_as_it_is() -> None:
    for error in (raised(chain, 3), raised(nested_group, 2), raised(with_secret_source)):
        assert Masker().traceback(text(error)) == text(error)
