"""Reading Go's encoding/json with Go's habits: keys in any case, null means the zero value, types are strict.

Used for prefs and profiles, whose JSON comes from the state file (written by us or by tailscaled) and from LocalAPI
clients. Every reader takes the name of the field, for the text of `PrefsError`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from ipaddress import ip_interface
from math import isfinite
from typing import Any, Final

from tsd.base.addr import AddrPort, IPAddress, IPPrefix, parse_ip
from tsd.base.errors import ConfigError, DecodeError


class PrefsError(ConfigError):
    """An edit or a stored value that cannot be used; the text names the field and is for the user."""


class _Omit:
    """Marks a field that Go's `omitempty` leaves out."""


OMIT: Final = _Omit()


def _kind(raw: Any) -> str:
    return {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}.get(
        type(raw), "an object" if isinstance(raw, dict) else "null"
    )


def _wrong(name: str, wanted: str, raw: Any) -> PrefsError:
    return PrefsError(f"{name}: want {wanted}, got {_kind(raw)}")


def folded(raw: Any, name: str) -> dict[str, Any]:
    """A JSON object with lower-case keys; null is an empty one."""
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise _wrong(name, "an object", raw)
    return {str(key).lower(): value for key, value in raw.items()}


def boolean(raw: Any, name: str) -> bool:
    if raw is None:
        return False
    if not isinstance(raw, bool):
        raise _wrong(name, "a boolean", raw)
    return raw


def opt_boolean(raw: Any, name: str) -> bool | None:
    """Go's opt.Bool: true, false or null."""
    return None if raw is None else boolean(raw, name)


def integer(raw: Any, name: str) -> int:
    if raw is None:
        return 0
    if isinstance(raw, bool) or not isinstance(raw, int):
        raise _wrong(name, "a whole number", raw)
    return raw


def opt_port(raw: Any, name: str) -> int | None:
    if raw is None:
        return None
    port = integer(raw, name)
    if not 0 <= port <= 65535:
        raise PrefsError(f"{name}: {port} is not a port (0 to 65535)")
    return port


def text(raw: Any, name: str) -> str:
    if raw is None:
        return ""
    if not isinstance(raw, str):
        raise _wrong(name, "a string", raw)
    return mended(raw)


def mended(raw: str) -> str:
    """Half a surrogate pair, which JSON can spell but UTF-8 cannot, becomes U+FFFD."""
    return raw if raw.isascii() else raw.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def carried(raw: Any, name: str) -> Any:
    """A value that we only keep and write again: texts mended, numbers that JSON does not have refused."""
    if isinstance(raw, str):
        return mended(raw)
    if isinstance(raw, float) and not isfinite(raw):
        raise PrefsError(f"{name}: {raw} is not a number of JSON")
    if isinstance(raw, list):
        return [carried(item, name) for item in raw]
    if isinstance(raw, dict):
        return {mended(str(key)): carried(value, name) for key, value in raw.items()}
    return raw


def _items(raw: Any, name: str) -> list[Any]:
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise _wrong(name, "a list", raw)
    return raw


def texts(raw: Any, name: str) -> tuple[str, ...]:
    return tuple(text(item, name) for item in _items(raw, name))


def objects(raw: Any, name: str) -> tuple[Any, ...]:
    """A list of objects that we only carry."""
    return tuple(carried(item, name) for item in _items(raw, name) if folded(item, name) or item == {})


def address(raw: Any, name: str) -> IPAddress | None:
    value = text(raw, name)
    try:
        return parse_ip(value) if value else None
    except DecodeError:
        raise PrefsError(f"{name}: {value!r} is not an IP address") from None


def prefixes(raw: Any, name: str) -> tuple[IPPrefix, ...]:
    return tuple(_prefix(text(item, name), name) for item in _items(raw, name))


def _prefix(value: str, name: str) -> IPPrefix:
    try:
        if "/" not in value:
            raise ValueError
        return ip_interface(value).network
    except ValueError:
        raise PrefsError(f"{name}: {value!r} is not a CIDR prefix such as 192.0.2.0/24") from None


def addr_ports(raw: Any, name: str) -> tuple[AddrPort, ...]:
    try:
        return tuple(AddrPort.parse(text(item, name)) for item in _items(raw, name))
    except DecodeError as err:
        raise PrefsError(f"{name}: {err.reason}") from None


def null_when_empty(values: Sequence[Any]) -> list[Any] | None:
    """A nil Go slice is null."""
    return list(values) or None


def strings_or_null(values: Sequence[Any]) -> list[str] | None:
    return [str(value) for value in values] or None


def dumps(value: Any, indent: str | None = None) -> bytes:
    """Go's output: compact unless indented, characters outside ASCII as they are, `<`, `>` and `&` escaped."""
    separators = (",", ":") if indent is None else (",", ": ")
    out = json.dumps(value, ensure_ascii=False, separators=separators, indent=indent)
    for character in "<>&\u2028\u2029":
        out = out.replace(character, f"\\u{ord(character):04x}")
    return out.encode("utf-8", "replace")


def loads(raw: bytes | str, name: str) -> Any:
    """Any JSON value; `PrefsError` names what it was."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as err:
        raise PrefsError(f"{name}: not JSON: {err}") from None
