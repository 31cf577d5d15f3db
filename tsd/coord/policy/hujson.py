"""HuJSON (JSON with comments and trailing commas) that remembers where every value stood.

Spec: RFC 8259 plus `//` and `/* */` comments and one trailing comma per array or object, nothing else of JSON5.
Duplicate keys, NaN, unpaired quotes and control characters in strings are refused. Errors carry line and column
(both from 1, columns in characters). It does not write HuJSON back: a policy is stored as the text it came in.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tsd.base.errors import ConfigError

MAX_DEPTH = 64

_BLANK = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS: dict[str, object] = {"true": True, "false": False, "null": None}
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class PolicyError(ConfigError):
    """A fault in a policy text; `line` and `column` count from 1."""

    def __init__(self, text: str, offset: int, message: str) -> None:
        self.line = text.count("\n", 0, offset) + 1
        self.column = offset - text.rfind("\n", 0, offset)
        self.reason = message
        super().__init__(f"{self.line}:{self.column}: {message}")


@dataclass(frozen=True, slots=True)
class Element:
    """A value, where it starts, and (for a member of an object) where its key starts."""

    value: Any
    offset: int
    key_offset: int = -1

    def plain(self) -> Any:
        """The value without positions."""
        if isinstance(self.value, dict):
            return {key: member.plain() for key, member in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, message: str, offset: int | None = None) -> PolicyError:
        return PolicyError(self.text, self.at if offset is None else offset, message)

    def skip(self) -> str:
        """Moves to the next significant character and returns it, "" at the end."""
        match = _BLANK.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        if self.text.startswith("/*", self.at):
            raise self.fail("comment is never closed")
        return self.text[self.at : self.at + 1]

    def value(self, depth: int, key_offset: int = -1) -> Element:
        if depth > MAX_DEPTH:
            raise self.fail(f"nested deeper than {MAX_DEPTH} levels")
        char, start = self.skip(), self.at
        if char == "{":
            return Element(self.members(depth), start, key_offset)
        if char == "[":
            return Element(self.items(depth), start, key_offset)
        if char == '"':
            return Element(self.string(), start, key_offset)
        if char and char in "-0123456789":
            return Element(self.number(), start, key_offset)
        return Element(self.word(char), start, key_offset)

    def word(self, char: str) -> object:
        if not char:
            raise self.fail("text ends where a value is expected")
        match = _WORD.match(self.text, self.at)
        if match is None:
            raise self.fail(f"unexpected {char!r}")
        if match.group() not in _WORDS:
            raise self.fail(f"unexpected {match.group()!r}; strings need double quotes")
        self.at = match.end()
        return _WORDS[match.group()]

    def string(self) -> str:
        match = _STRING.match(self.text, self.at)
        if match is None:
            raise self.fail("string is not closed on its line or has a bad escape")
        self.at = match.end()
        decoded: str = json.loads(match.group())
        if any("\ud800" <= char <= "\udfff" for char in decoded):
            raise self.fail("string has an unpaired surrogate", match.start())
        return decoded

    def number(self) -> int | float:
        match = _NUMBER.match(self.text, self.at)
        if match is None or self.text[match.end() : match.end() + 1].isalnum():
            raise self.fail("not a number")
        if len(match.group()) > 40:
            raise self.fail("number has too many digits")
        self.at = match.end()
        number: int | float = json.loads(match.group())
        return number

    def items(self, depth: int) -> list[Element]:
        self.at += 1
        items: list[Element] = []
        while self.skip() != "]":
            items.append(self.value(depth + 1))
            self.separator("]")
        self.at += 1
        return items

    def members(self, depth: int) -> dict[str, Element]:
        self.at += 1
        members: dict[str, Element] = {}
        while (char := self.skip()) != "}":
            if char != '"':
                raise self.fail("want a key in double quotes" if char else "object is never closed")
            start = self.at
            key = self.string()
            if key in members:
                raise self.fail(f"key {key!r} occurs twice", start)
            if self.skip() != ":":
                raise self.fail(f"want ':' after key {key!r}")
            self.at += 1
            members[key] = self.value(depth + 1, start)
            self.separator("}")
        self.at += 1
        return members

    def separator(self, closing: str) -> None:
        char = self.skip()
        if char == ",":
            self.at += 1
        elif char != closing:
            what = "array" if closing == "]" else "object"
            raise self.fail(f"want ',' or '{closing}'" if char else f"{what} is never closed")


def parse(text: str) -> Element:
    """The one value in `text`. Raises `PolicyError`."""
    parser = _Parser(text)
    if text.startswith("\ufeff"):
        parser.at = 1
    element = parser.value(0)
    if parser.skip():
        raise parser.fail("text after the end of the value")
    return element
