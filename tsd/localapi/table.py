"""Which handler serves which path below /localapi/v0/: exact names first, then everything under the first slash."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tsd.localapi import (
    handlers_account,
    handlers_debug,
    handlers_dns,
    handlers_files,
    handlers_lock,
    handlers_node,
    handlers_prefs,
    handlers_serve,
    handlers_stubs,
)
from tsd.localapi.call import Endpoint

_ROOMS = (
    handlers_node,
    handlers_prefs,
    handlers_account,
    handlers_serve,
    handlers_dns,
    handlers_files,
    handlers_lock,
    handlers_debug,
    handlers_stubs,
)
_ALL: tuple[Endpoint, ...] = tuple(endpoint for room in _ROOMS for endpoint in room.ENDPOINTS)
ENDPOINTS: Mapping[str, Endpoint] = MappingProxyType({endpoint.name: endpoint for endpoint in _ALL})


def find_endpoint(path: str) -> Endpoint | None:
    """`path` is still percent-encoded: a name under `files/` may hold an encoded slash."""
    exact = ENDPOINTS.get(path)
    if exact is not None:
        return exact
    first, slash, _ = path.partition("/")
    return ENDPOINTS.get(first + "/") if slash else None
