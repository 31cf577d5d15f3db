"""Host names to MagicDNS labels: lower case, [a-z0-9-], at most 63 characters, unique in the tailnet.

The raw host name stays in Hostinfo for display. Labels of one node never change by themselves once given, except
when its host name does (tailscale: util/dnsname, in behaviour).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container

MAX_LABEL = 63
FALLBACK = "node"

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")
_DOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*\Z")


def is_label(text: str) -> bool:
    return _LABEL.match(text) is not None


def is_domain(text: str) -> bool:
    """At least two labels would be usual, one is allowed; no trailing dot."""
    return len(text) <= 190 and _DOMAIN.match(text) is not None


def label_for(hostname: str) -> str:
    """The label a host name asks for: its first label, letters without accents, separators as `-`."""
    first = hostname.strip().partition(".")[0]
    plain = unicodedata.normalize("NFKD", first).encode("ascii", "ignore").decode().lower()
    dashed = re.sub(r"[ _@/]", "-", plain)
    kept = re.sub(r"[^a-z0-9-]", "", dashed).strip("-")[:MAX_LABEL].strip("-")
    return kept if kept not in ("", "localhost") else FALLBACK


def unique_label(wanted: str, taken: Container[str]) -> str:
    """`wanted`, or `wanted-1`, `wanted-2`, … whichever is free first."""
    if wanted not in taken:
        return wanted
    number = 1
    while True:
        suffix = f"-{number}"
        candidate = wanted[: MAX_LABEL - len(suffix)].rstrip("-") + suffix
        if candidate not in taken:
            return candidate
        number += 1
