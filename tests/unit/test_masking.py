"""Secrets are masked wherever they are, and long texts take no longer than they must."""

from __future__ import annotations

import pytest

from microqueue.masking import without_mongodb_user, without_password, without_user


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mongodb://ada:secret@db.example/shop", "mongodb://***@db.example/shop"),
        ("two mongodb://a:b@c and redis://d:e@f", "two mongodb://***@f"),
        ("mongodb://ada:p@ss/w@rd@db", "mongodb://***@db"),
        ("one\nmongodb://a:b@c\nthree@home", "one\nmongodb://***@c\nthree@home"),
        ("ada@example.org // no address", "ada@example.org // no address"),
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


def test_password_among_options_is_masked() -> None:
    assert without_password("?password=secret&tls=true") == "?password=***&tls=true"


def test_long_text_of_slashes_is_read_once() -> None:
    text = "//" * 2_000_000
    assert without_user(text) == text
