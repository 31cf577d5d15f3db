"""Fields of a decoded CBOR map, by number and type; a wrong type is a `DecodeError`."""

from __future__ import annotations

from typing import Any

from tsd.base.errors import DecodeError

Fields = dict[Any, Any]


def mapping(value: Any) -> Fields:
    found: Fields = _typed(value, dict)
    return found


def number(fields: Fields, at: int, limit: int = (1 << 64) - 1) -> int:
    """0 when it is absent."""
    found: int = _typed(fields.get(at, 0), int)
    if found > limit:
        raise DecodeError("tka", f"{found} is too large for field {at}")
    return found


def optional_number(fields: Fields, at: int) -> int | None:
    return number(fields, at) if fields.get(at) is not None else None


def octets(value: Any) -> bytes:
    found: bytes = _typed(value, bytes)
    return found


def optional_octets(fields: Fields, at: int) -> bytes | None:
    return octets(fields[at]) if fields.get(at) is not None else None


def items(value: Any) -> list[Any] | None:
    found: list[Any] | None = _typed(value, list) if value is not None else None
    return found


def texts(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    found = mapping(value)
    if not all(isinstance(part, str) for pair in found.items() for part in pair):
        raise DecodeError("tka", "metadata that is not text")
    return found


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise DecodeError("tka", f"{type(value).__name__} where {kind.__name__} belongs")
    return value
