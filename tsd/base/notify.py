"""What a watcher of the notification bus may ask for (tailscale: ipn/backend.go, `NotifyWatchOpt`)."""

from __future__ import annotations

from enum import IntFlag

from tsd.base.errors import ConfigError

MAX_DIGITS = 19


class Mask(IntFlag):
    ENGINE_UPDATES = 1 << 0
    INITIAL_STATE = 1 << 1
    INITIAL_PREFS = 1 << 2
    INITIAL_NETMAP = 1 << 3
    NO_PRIVATE_KEYS = 1 << 4
    INITIAL_DRIVE_SHARES = 1 << 5
    INITIAL_OUTGOING_FILES = 1 << 6
    INITIAL_HEALTH = 1 << 7
    RATE_LIMIT = 1 << 8
    HEALTH_ACTIONS = 1 << 9
    INITIAL_SUGGESTED_EXIT_NODE = 1 << 10
    INITIAL_CLIENT_VERSION = 1 << 11
    PEER_CHANGES = 1 << 12
    NO_NETMAP = 1 << 13
    INITIAL_STATUS = 1 << 14
    PEER_PATCHES = 1 << 15
    IN_PROCESS_NO_DISCONNECT = 1 << 16
    SYSPOLICY_CHANGES = 1 << 17
    PEER_WIREGUARD_STATE = 1 << 18


_NOT_WITH_RATE_LIMIT = (
    (Mask.PEER_CHANGES, "NotifyPeerChanges"),
    (Mask.NO_NETMAP, "NotifyNoNetMap"),
    (Mask.INITIAL_STATUS, "NotifyInitialStatus"),
    (Mask.PEER_PATCHES, "NotifyPeerPatches"),
)


def parse_mask(text: str) -> Mask:
    """The `mask` of a request (decimal, empty = 0). Raises `ConfigError` with the text for the 400 answer."""
    if text and not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ConfigError("bad mask")
    mask = Mask(int(text or "0"))
    if mask & Mask.IN_PROCESS_NO_DISCONNECT:
        raise ConfigError("NotifyInProcessNoDisconnect is for watchers inside the daemon only")
    clashing = [name for bit, name in _NOT_WITH_RATE_LIMIT if mask & bit]
    if mask & Mask.RATE_LIMIT and clashing:
        raise ConfigError(f"NotifyRateLimit cannot be combined with {', '.join(clashing)}")
    return mask
