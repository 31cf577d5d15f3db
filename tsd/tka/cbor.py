"""The part of CBOR that tailnet lock uses, in CTAP2's canonical form (RFC 8949 and FIDO CTAP2, section 8).

Unsigned numbers, byte and text strings, arrays, maps and null. What the decoder takes is bounded as in
tailscale: tka/tka.go; anything else, and any second way to write the same value, is a `DecodeError`.
"""

from __future__ import annotations

from typing import Any

from tsd.base.errors import DecodeError

MAX_DEPTH = 16
MAX_ELEMENTS = 4096
MAX_PAIRS = 1024
MAX_BYTES = 1 << 20
MAX_UINT = (1 << 64) - 1

_UINT, _BYTES, _TEXT, _ARRAY, _MAP = 0, 2, 3, 4, 5
_NULL = 0xF6


def encode(value: Any) -> bytes:
    if value is None:
        return bytes((_NULL,))
    if isinstance(value, int):
        return _head(_UINT, value)
    if isinstance(value, bytes):
        return _head(_BYTES, len(value)) + value
    if isinstance(value, str):
        raw = value.encode()
        return _head(_TEXT, len(raw)) + raw
    if isinstance(value, dict):
        pairs = sorted(((encode(key), encode(item)) for key, item in value.items()), key=lambda pair: _order(pair[0]))
        return _head(_MAP, len(pairs)) + b"".join(key + item for key, item in pairs)
    return _head(_ARRAY, len(value)) + b"".join(map(encode, value))


def _order(key: bytes) -> tuple[int, int, bytes]:
    """CTAP2: by type, then the shorter one first, then byte by byte."""
    return key[0] >> 5, len(key), key


def _head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes((major << 5 | number,))
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes((major << 5 | code,)) + number.to_bytes(size, "big")
    raise ValueError(f"{number} does not fit into 64 bits")


def decode(raw: bytes) -> Any:
    """The one value that `raw` holds. Raises `DecodeError`."""
    if len(raw) > MAX_BYTES:
        raise _refusal(f"{len(raw)} bytes are too many")
    reader = _Reader(raw)
    value = reader.value(0)
    if reader.at != len(raw):
        raise _refusal("bytes after the end")
    return value


def _refusal(reason: str) -> DecodeError:
    return DecodeError("tka", reason)


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.at = 0

    def value(self, depth: int) -> Any:
        major, number = self._head()
        if major == _UINT:
            return number
        if major == _BYTES:
            return self._take(number)
        if major == _TEXT:
            return self._text(number)
        if major == _NULL:
            return None
        if depth >= MAX_DEPTH:
            raise _refusal("nested too deeply")
        if major == _ARRAY:
            if number > MAX_ELEMENTS:
                raise _refusal("an array is too long")
            return [self.value(depth + 1) for _ in range(number)]
        return self._map(number, depth + 1)

    def _head(self) -> tuple[int, int]:
        first = self._take(1)[0]
        if first == _NULL:
            return _NULL, 0
        major, number = first >> 5, first & 31
        if major not in (_UINT, _BYTES, _TEXT, _ARRAY, _MAP) or number > 27:
            raise _refusal(f"a value that begins with {first:#04x}")
        if number < 24:
            return major, number
        size = 1 << number - 24
        number = int.from_bytes(self._take(size), "big")
        if number < 24 or (size > 1 and number < 1 << 4 * size):
            raise _refusal("a number is not in its shortest form")
        return major, number

    def _take(self, count: int) -> bytes:
        found = self._raw[self.at : self.at + count]
        if len(found) != count:
            raise _refusal("cut short")
        self.at += count
        return found

    def _text(self, count: int) -> str:
        try:
            return self._take(count).decode()
        except UnicodeDecodeError:
            raise _refusal("text is not UTF-8") from None

    def _map(self, count: int, depth: int) -> dict[Any, Any]:
        if count > MAX_PAIRS:
            raise _refusal("a map is too large")
        found: dict[Any, Any] = {}
        last: tuple[int, int, bytes] | None = None
        for _ in range(count):
            start = self.at
            key = self.value(MAX_DEPTH)
            order = _order(self._raw[start : self.at])
            if last is not None and order <= last:
                raise _refusal("the keys of a map are not in order, or not unique")
            last = order
            found[key] = self.value(depth)
        return found
