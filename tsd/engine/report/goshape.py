"""What a typed decoder in Go takes: one odd prefix or time fails its whole answer, so those are left out here.

Go's netip and time packages parse while they decode, and a status with thousands of good peers is lost to the one bad.
Values that are good pass unchanged.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Iterable
from typing import Any

from tsd.base.addr import AddrPort, packed_single, parse_ip, parse_number
from tsd.base.errors import DecodeError
from tsd.netmap.netmap import Netmap
from tsd.tailcfg.wire import is_zero_time, time_ns

Json = dict[str, Any]

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_MACHINE_KEY = re.compile(r"mkey:[0-9a-f]{64}", re.ASCII)


def good_time(text: str | None) -> str | None:
    """The time as it is; None when it is none."""
    if not text or not _TIME.fullmatch(text):
        return None
    return text if is_zero_time(text) or time_ns(text) is not None else None


def good_prefixes(texts: Iterable[str] | None) -> list[str]:
    return [text for text in texts or () if packed_single(text) is not None or _is_prefix(text)]


def _is_prefix(text: str) -> bool:
    host, _, digits = text.partition("/")
    try:
        limit = 128 if ":" in host else 32
        parse_ip(host)
    except DecodeError:
        return False
    bits = parse_number(digits, limit)
    return bits is not None and str(bits) == digits


def _good_endpoints(texts: Iterable[str] | None) -> list[str]:
    return [text for text in texts or () if _parses(text, AddrPort.parse)]


def _parses(text: object, parse: Any) -> bool:
    try:
        return isinstance(text, str) and parse(text) is not None
    except DecodeError:
        return False


def clean_node(out: Json, has_hostinfo: bool) -> Json:
    """A node in Go's names, in place: what Go could not decode is gone."""
    for name in ("Addresses", "AllowedIPs", "PrimaryRoutes"):
        if out.get(name):
            out[name] = good_prefixes(out[name])
    if out.get("Endpoints"):
        out["Endpoints"] = _good_endpoints(out["Endpoints"])
    for name in ("Created", "KeyExpiry", "LastSeen"):
        if out.get(name) and good_time(out[name]) is None:
            del out[name]
    for name in ("SelfNodeV4MasqAddrForThisPeer", "SelfNodeV6MasqAddrForThisPeer"):
        if out.get(name) and not _parses(out[name], parse_ip):
            del out[name]
    if out.get("Machine") and not _MACHINE_KEY.fullmatch(out["Machine"]):
        del out["Machine"]
    if out.get("KeySignature") and not _is_base64(out["KeySignature"]):
        del out["KeySignature"]
    _clean_hostinfo(out, has_hostinfo)
    return out


def _clean_hostinfo(out: Json, has_hostinfo: bool) -> None:
    hostinfo = out.get("Hostinfo")
    if not has_hostinfo or not isinstance(hostinfo, dict):
        out.pop("Hostinfo", None)
        return
    # As the node itself wrote it: nulls may be anywhere.
    if hostinfo.get("RoutableIPs"):
        hostinfo["RoutableIPs"] = good_prefixes(text for text in hostinfo["RoutableIPs"] if text is not None)
    if hostinfo.get("Services"):
        hostinfo["Services"] = [one for one in hostinfo["Services"] if one and 0 <= (one.get("Port") or 0) <= 65535]


def _is_base64(text: str) -> bool:
    try:
        return b64decode(text, validate=True) is not None
    except (binascii.Error, ValueError):
        return False


def display_messages(netmap: Netmap) -> dict[str, Json]:
    """What control wants shown, by ID; a server that knows only plain texts gets a title for each."""
    messages: dict[str, Json] = {}
    for message_id, message in netmap.display_messages.items():
        shown: dict[str, Any] = {"Title": message.title, "Text": message.text, "Severity": message.severity}
        if message.impacts_connectivity:
            shown["ImpactsConnectivity"] = True
        if message.primary_action is not None:
            shown["PrimaryAction"] = {"URL": message.primary_action.url, "Label": message.primary_action.label}
        messages[message_id] = shown
    if messages:
        return messages
    title = "The coordination server reports an issue"
    return {
        f"health-{index}": {"Title": title, "Text": text, "Severity": "medium"}
        for index, text in enumerate(netmap.health)
    }
