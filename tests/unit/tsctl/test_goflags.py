"""Flags as Go reads them."""

import pytest

from tsctl.goflags import DURATION, Flag, HelpWanted, Parsed, UsageError, parse

FLAGS = (
    Flag("json", "", False),
    Flag("peers", "", True),
    Flag("hostname", ""),
    Flag("c", "", 10),
    Flag("timeout", "", 5.0, kind=DURATION),
    Flag("auth-key", "", aliases=("authkey",)),
)


def run(*words: str, stops_at_word: bool = False) -> Parsed:
    return parse(FLAGS, words, stops_at_word=stops_at_word)


@pytest.mark.parametrize("word", ["-json", "--json", "--json=true", "-json=1", "--json=T"])
def test_boolean_forms(word: str) -> None:
    assert run(word).flag("json") and run(word).mentioned == ["json"]


def test_booleans_take_no_separate_value() -> None:
    parsed = run("--json", "false")
    assert parsed.flag("json") and parsed.args == ["false"]
    assert not run("--peers=false").flag("peers")


def test_values_and_defaults() -> None:
    parsed = run("-c", "3", "--timeout=1m", "--hostname=", "--authkey", "k")
    assert parsed.number("c") == 3 and parsed.seconds("timeout") == 60 and parsed.text("hostname") == ""
    assert parsed.text("auth-key") == "k" and parsed.mentioned == ["c", "timeout", "hostname", "auth-key"]
    assert run().number("c") == 10 and run().seconds("timeout") == 5.0


def test_words_before_after_and_behind_dashes() -> None:
    assert run("a", "--json", "b").args == ["a", "b"]
    assert run("--json", "--", "--peers=false").args == ["--peers=false"]
    assert run("a", "--json", stops_at_word=True).args == ["a", "--json"]
    assert run("-").args == ["-"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--bogus"], "flag provided but not defined: -bogus"),
        (["--json", "-json"], "flag -json was given more than once"),
        (["--auth-key=a", "--authkey=b"], "flag -auth-key was given more than once"),
        (["--json=maybe"], 'invalid value "maybe" for flag -json'),
        (["-c", "x"], 'invalid value "x" for flag -c'),
        (["-timeout", "banana"], 'invalid value "banana" for flag -timeout'),
        (["--hostname"], "flag needs an argument: -hostname"),
        (["---json"], "bad flag syntax"),
        (["--=x"], "bad flag syntax"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(*words)
    assert caught.value.text.startswith(text) and "\n" not in caught.value.text and caught.value.code == 2


def test_help_and_glued_keys() -> None:
    for word in ("--help", "-h", "-help"):
        with pytest.raises(HelpWanted):
            run(word)
    with pytest.raises(UsageError) as caught:
        run("--tskey-auth-secret")
    assert "secret" not in caught.value.text
