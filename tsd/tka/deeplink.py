"""Links that ask to sign a device, sealed with the lock's ID (tailscale: tka/deeplink.go)."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tsd.tka.authority import Authority

_FIELDS = {"nk": "NodeKey", "tp": "TLPub", "dn": "DeviceName", "os": "OSName", "em": "EmailAddress"}


def check_deeplink(authority: Authority, url: str) -> dict[str, Any]:
    """What it asks for; `IsValid` false with `Error` when it is not of this lock."""
    empty = {"IsValid": False, "Error": "", "Version": 0, **dict.fromkeys(_FIELDS.values(), "")}
    try:
        parts = urlsplit(url)
    except ValueError as err:
        return empty | {"Error": str(err)}
    if (parts.scheme, parts.netloc) != ("tailscale", "sign-device") or parts.path != "/v1/":
        return empty | {"Error": "not a link of the form tailscale://sign-device/v1/?..."}
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    missing = [name for name in (*_FIELDS, "hm") if not query.get(name) and name != "os"]
    if missing:
        return empty | {"Error": f"missing {missing[0]} query parameter"}
    told = [query.get(name, "") for name in _FIELDS]
    key = authority.state_id[0].to_bytes(8, "little")
    wanted = hmac.new(key, "".join(told).encode(), hashlib.sha256).hexdigest()
    if not hmac.compare_digest(wanted.encode(), query["hm"].lower().encode()):
        return empty | {"Error": "hmac authentication failed"}
    return empty | {"IsValid": True} | dict(zip(_FIELDS.values(), told, strict=True))
