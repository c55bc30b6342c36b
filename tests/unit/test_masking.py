"""Secrets are masked wherever they are, and long texts take no longer than they must."""

from __future__ import annotations

import pytest

from microqueue.masking import (
    Masker,
    place_to_cut,
    without_mongodb_user,
    without_password,
    without_user,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mongodb://ada:secret@db.example/shop", "mongodb://***@db.example/shop"),
        ("two mongodb://a:b@c and redis://d:e@f", "two mongodb://***@f"),
        ("mongodb://ada:p@ss/w@rd@db", "mongodb://***@db"),
        ("one\nmongodb://a:b@c\nthree@home", "one\nmongodb://***@c\nthree@home"),
        ("ada@example.org // no address", "ada@example.org // no address"),
        ("mongodb://ada:sec", "mongodb://***"),
        ("two\nmongodb://a:b@c and 'redis://ada:sec…", "two\nmongodb://***@c and 'redis://***"),
        ("mongodb://ada:12345678", "mongodb://***"),
        ("mongodb://a:27017,b:27018/?w=1", "mongodb://a:27017,b:27018/?w=1"),
        ("see http://localhost:8000.", "see http://localhost:8000."),
        ("see http://[::1]:8000/a:b", "see http://[::1]:8000/a:b"),
        ("see https://example.org/a:b", "see https://example.org/a:b"),
        ("mongodb://ada:sec is not at the end", "mongodb://ada:sec is not at the end"),
        ("nothing", "nothing"),
        ("", ""),
    ],
)
def test_user_and_password_of_an_address_are_masked(text: str, shown: str) -> None:
    assert without_user(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mongodb+srv://ada:secret@db/shop of bob@home", "mongodb+srv://***@db/shop of bob@home"),
        ('{"a": "mongodb://db", "to": "bob@home"}', '{"a": "mongodb://db", "to": "bob@home"}'),
        ("http://shop of bob@home", "http://shop of bob@home"),
    ],
)
def test_only_addresses_of_mongodb_are_masked_where_others_speak(text: str, shown: str) -> None:
    assert without_mongodb_user(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("curl --password pw -s http://x", "curl --password ••• -s http://x"),
        ("curl --password p,w;x -s", "curl --password ••• -s"),
        (r"curl --password p\ w -s", "curl --password ••• -s"),
        ("curl --password 'p w' -s", "curl --password '•••' -s"),
        ("['--password', 'p w', '-s']", "['--password', '•••', '-s']"),
        ('["--token",\n "pw", "-s"]', '["--token",\n "•••", "-s"]'),
        (r'"[\"--token\", \"pw\", 5]"', r'"[\"--token\", \"•••\", 5]"'),
        ("('--token', b'pw', 5)", "('--token', b'•••', 5)"),
        ("--pin=17 x", "--pin=••• x"),
        ("--pin 17 x", "--pin ••• x"),
        ("--password --verbose x", "--password --verbose x"),
        ("['--password', '--verbose']", "['--password', '--verbose']"),
        ("--day 1 'x', 'y'", "--day 1 'x', 'y'"),
        ("--password", "--password"),
        ("the password pw", "the password pw"),
        ("curl -u ada:pw", "curl -u ada:pw"),
    ],
)
def test_value_of_a_secret_option_is_masked(text: str, shown: str) -> None:
    assert Masker().text(text) == shown


@pytest.mark.parametrize("text", ["-", "--a ", "--password ", "'--password', ", "--pin \\ ", "\\"])
def test_long_text_of_options_is_read_once(text: str) -> None:
    Masker().text("--password " + text * 100_000)


def test_password_among_options_is_masked() -> None:
    assert without_password("?password=secret&tls=true") == "?password=***&tls=true"


@pytest.mark.parametrize("most", range(35))
def test_a_cut_text_has_no_half_of_a_password(most: int) -> None:
    text = "see mongodb://ada:se@same@db.example/shop or ada@home"
    kept = text[: place_to_cut(text, most)]
    assert len(kept) <= most
    assert "ada" not in without_user(kept)
    assert "same" not in without_user(kept)


@pytest.mark.parametrize("text", ["http://shop/ada of ada@home", "'http://shop/ada', 'ada@home'"])
def test_a_text_without_a_password_is_cut_where_it_was_asked(text: str) -> None:
    assert place_to_cut(text, 14) == 14


def test_long_text_of_slashes_is_read_once() -> None:
    text = "//" * 2_000_000
    assert without_user(text) == text
    assert place_to_cut(text, len(text) - 1) == len(text) - 1


def test_long_text_of_colons_is_read_once() -> None:
    text = "//a:" * 1_000_000
    assert without_user(f"{text}'") == f"{text}'"
    assert without_user(text) == "//***"
