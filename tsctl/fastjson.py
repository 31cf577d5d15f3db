"""Reading JSON without importing `json`, whose regular expressions cost more start-up time than the rest of tsctl.

CPython's own scanner is used where it is found; elsewhere, and for anything odd, the standard module does the work.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SPACE = " \t\n\r"


class _Settings:
    """What CPython's scanner wants to know."""

    strict = False
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float

    def __init__(self) -> None:
        self.memo: dict[str, str] = {}


def loads(raw: bytes) -> Any:
    """Raises ValueError."""
    text = raw.decode("utf-8").strip(_SPACE)
    try:
        from _json import make_scanner
    except ImportError:
        from json import loads as slow_loads

        return slow_loads(text)
    try:
        value, end = make_scanner(_Settings())(text, 0)  # type: ignore[arg-type]
    except StopIteration:
        raise ValueError("no JSON value") from None
    if end != len(text):
        raise ValueError("something follows the JSON value")
    return value


def dumps(value: object, indent: int | str | None = None) -> str:
    """For requests and for `--json`: worth the import."""
    import json

    return json.dumps(value, indent=indent, ensure_ascii=False)


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 !#$%&'()*+,-./:;<=>?@[]^_`{|}~")


def quoted(text: str) -> str:
    """A text in double quotes, escaped as in JSON."""
    return f'"{text}"' if _PLAIN.issuperset(text) else dumps(text)
