"""Durations and booleans as Go reads and prints them."""

import pytest

from tsd.localapi.schema import default_prefs, format_duration, parse_bool, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5s", 5), ("1m30s", 90), ("250ms", 0.25), ("0", 0), ("1.5h", 5400), ("2us", 2e-6), ("-3s", -3), (".5s", 0.5)],
)
def test_durations_parse(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "banana", "s", "5x", "1m30", "-", "1..5s", "5 s"])
def test_other_words_are_no_durations(text: str) -> None:
    assert parse_duration(text) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.012, "12ms"),
        (1.5, "1.5s"),
        (60, "1m0s"),
        (3661, "1h1m1s"),
        (0.0002, "200µs"),
        (5e-9, "5ns"),
        (-1, "-1s"),
        (0.0015, "1.5ms"),
    ],
)
def test_durations_print_like_go(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_booleans() -> None:
    assert [parse_bool(word) for word in ("1", "T", "true", "0", "F", "FALSE", "yes", "")] == [
        True,
        True,
        True,
        False,
        False,
        False,
        None,
        None,
    ]


def test_default_prefs_agree_with_the_engine() -> None:
    from tsd.engine.account.prefs import Prefs

    assert Prefs.fresh().to_go() == default_prefs()
