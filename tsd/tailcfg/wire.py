"""What all control JSON types share: Go field names, Go's zero values, and when a field is left out.

`Wire` is the base of every struct here. Attributes are snake_case; the JSON names follow from `go_name`. A field whose
default is a plain value is left out when it has that value (Go's omitempty); `always(...)` marks the fields that Go
sends in every case. Decoding ignores unknown fields. `null` is accepted wherever Go has a slice, map or pointer.
It does not match names without regard to case, as Go does: no known server needs it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from tsd.base.errors import DecodeError
from tsd.tailcfg import lenient

T = TypeVar("T")

ZERO_TIME = "0001-01-01T00:00:00Z"
CAPABILITY_VERSION = 145

_YEAR_1_NS = -62_135_596_800 * 10**9
_YEAR_9999_NS = 253_402_300_799 * 10**9

_ACRONYMS = {
    "id": "ID", "ids": "IDs", "ip": "IP", "ips": "IPs", "ipv4": "IPv4", "ipv6": "IPv6", "url": "URL", "derp": "DERP",
    "dns": "DNS", "api": "API", "os": "OS", "udp": "UDP", "tka": "TKA", "tpm": "TPM", "stun": "STUN", "ssh": "SSH",
    "pmp": "PMP", "pcp": "PCP", "upnp": "UPnP", "nl": "NL", "ipn": "IPN", "icmpv4": "ICMPv4", "mac": "MAC",
    "macs": "MACs", "ace": "ACE", "wireguard": "WireGuard", "stunport": "STUNPort", "peerapi": "PeerAPI",
    "wol": "WoL", "hostname": "Hostname", "v4": "V4", "v6": "V6",
}  # fmt: skip


def go_name(attribute: str) -> str:
    """`home_derp` -> `HomeDERP`."""
    return "".join(_ACRONYMS.get(word, word.capitalize()) for word in attribute.split("_"))


class Wire(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename=go_name):
    """A value of the control protocol. Immutable; change with `msgspec.structs.replace`."""


def always(value: T) -> T:
    """A default that is encoded all the same (a factory is never compared with the value)."""
    made: T = msgspec.field(default_factory=lambda: value)
    return made


_encoder = msgspec.json.Encoder()


def encode_json(value: Any) -> bytes:
    """Compact JSON with Go's names and omissions."""
    return _encoder.encode(value)


def to_go(value: Any) -> Any:
    """Plain dicts and lists with Go's names and omissions, as `json.loads` of the wire form would give."""
    return msgspec.json.decode(_encoder.encode(value))


def decode_json(raw: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Raises `DecodeError` that names the type and the field."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except REFUSALS as err:
        found = second_look(raw, kind, err)
        if found is not None:
            return found
        name = getattr(kind, "__name__", str(kind))
        raise DecodeError("tailcfg", f"{name}: {err}") from None


REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def second_look(raw: bytes | memoryview | msgspec.Raw, kind: type[T], err: Exception) -> T | None:
    """As Go would read it; None when that does not help."""
    if isinstance(err, RecursionError):
        return None
    try:
        return lenient.decode(raw, kind)
    except REFUSALS:
        return None


def is_zero_time(text: str | None) -> bool:
    """Absent, empty and year 1 all mean "no time"."""
    return not text or text.startswith("0001-")


def time_ns(text: str | None) -> int | None:
    """Nanoseconds since the Unix epoch of an RFC 3339 text; None for "no time" or for garbage."""
    if text is None or is_zero_time(text):
        return None
    head, fraction, zone = _split_time(text)
    try:
        whole = datetime.fromisoformat(head + zone)
        return int(whole.timestamp()) * 1_000_000_000 + int(fraction.ljust(9, "0")[:9] or "0")
    except (ValueError, OverflowError):
        return None


def _split_time(text: str) -> tuple[str, str, str]:
    """(seconds part, digits of the fraction, offset): datetime keeps only microseconds."""
    body, zone = (text[:-1], "+00:00") if text[-1] in "Zz" else (text[:-6], text[-6:])
    head, _, fraction = body.partition(".")
    return head, fraction, zone


def time_text(wall_ns: int) -> str:
    """RFC 3339 in UTC with as many digits as needed, as Go prints it; years end at 1 and 9999."""
    seconds, rest = divmod(min(max(wall_ns, _YEAR_1_NS), _YEAR_9999_NS), 1_000_000_000)
    head = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S").rjust(19, "0")
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    return f"{head}{fraction}Z"
