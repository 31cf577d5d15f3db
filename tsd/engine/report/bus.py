"""The notification bus behind `watch-ipn-bus`: one publisher, many watchers, each with a mask and a bounded queue.

tailscale: ipn/backend.go (`Notify`), ipn/ipnlocal/bus.go (rate limit). A watcher that falls behind
loses its queue, is told so once, and ends: it never slows the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tsd.base.entropy import Entropy
from tsd.base.notify import Mask

QUEUE_LENGTH = 128
RATE_LIMIT_S = 3.0
LAGGED_TEXT = "IPN bus consumer fell behind; closing watch"


_WANTS_FIRST_MESSAGE = (
    Mask.INITIAL_STATE
    | Mask.INITIAL_PREFS
    | Mask.INITIAL_NETMAP
    | Mask.INITIAL_DRIVE_SHARES
    | Mask.INITIAL_HEALTH
    | Mask.INITIAL_SUGGESTED_EXIT_NODE
    | Mask.INITIAL_CLIENT_VERSION
    | Mask.INITIAL_STATUS
    | Mask.SYSPOLICY_CHANGES
    | Mask.PEER_WIREGUARD_STATE
)

# Order of the fields in a Notify; those with True are there even when null.
_NOTIFY_FIELDS: tuple[tuple[str, bool], ...] = (
    ("Version", True),
    ("SessionID", False),
    ("ErrMessage", True),
    ("LoginFinished", True),
    ("State", True),
    ("Prefs", True),
    ("SelfChange", False),
    ("InitialStatus", False),
    ("NetMap", True),
    ("PeerChangedPatch", False),
    ("PeersChanged", False),
    ("PeersRemoved", False),
    ("UserProfiles", False),
    ("PeerState", False),
    ("Engine", True),
    ("BrowseToURL", True),
    ("FilesWaiting", False),
    ("IncomingFiles", False),
    ("OutgoingFiles", False),
    ("LocalTCPPort", False),
    ("ClientVersion", False),
    ("DriveShares", True),
    ("Health", False),
    ("SuggestedExitNode", False),
    ("Policy", False),
)
_COALESCED = frozenset({"NetMap", "Engine"})

# Runtime fields that only sessions with one of these bits get; every other field goes to all.
_NEEDS_BIT = {
    "PeersChanged": Mask.PEER_CHANGES | Mask.PEER_PATCHES,
    "PeersRemoved": Mask.PEER_CHANGES | Mask.PEER_PATCHES,
    "UserProfiles": Mask.PEER_CHANGES | Mask.PEER_PATCHES,
    "PeerChangedPatch": Mask.PEER_CHANGES | Mask.PEER_PATCHES,
    "PeerState": Mask.PEER_WIREGUARD_STATE,
    "Policy": Mask.SYSPOLICY_CHANGES,
}

Promote = Callable[[list[Any]], list[Any]]


def wants_first_message(mask: int) -> bool:
    return bool(mask & _WANTS_FIRST_MESSAGE)


class NotifyBus:
    """Publish partial Notify dicts; every watcher gets complete ones, filtered by its mask."""

    def __init__(self, version: str, entropy: Entropy, promote: Promote | None = None) -> None:
        """`promote` turns PeerChangedPatch entries into full nodes for watchers without PEER_PATCHES."""
        self._version = version
        self._entropy = entropy
        self._promote = promote
        self._watches: dict[str, Watch] = {}
        self.on_sessions_changed: Callable[[], None] | None = None

    def watch(self, mask: int, initial: Mapping[str, Any] | None = None) -> Watch:
        """Open a session; `initial` is what the first message carries besides Version and SessionID."""
        watch = Watch(self, self._entropy(8).hex(), Mask(mask))
        self._watches[watch.session_id] = watch
        if wants_first_message(mask):
            first = dict(initial or {})
            if mask & Mask.INITIAL_STATE:
                first["SessionID"] = watch.session_id
            watch.push(self._complete(_health_for(first, watch.mask)))
        self._sessions_changed()
        return watch

    def publish(self, notify: Mapping[str, Any]) -> None:
        """Never blocks. Fields that are None are as good as absent."""
        told = {name: value for name, value in notify.items() if value is not None}
        if not told:
            return
        for watch in list(self._watches.values()):
            filtered = self._filtered(told, watch.mask)
            if filtered:
                watch.push(self._complete(filtered))

    def sessions(self) -> list[str]:
        return list(self._watches)

    def close(self) -> None:
        for watch in list(self._watches.values()):
            watch.close()

    def forget(self, session_id: str) -> None:
        if self._watches.pop(session_id, None) is not None:
            self._sessions_changed()

    def lagged(self) -> dict[str, Any]:
        return self._complete({"ErrMessage": LAGGED_TEXT})

    def _sessions_changed(self) -> None:
        if self.on_sessions_changed is not None:
            self.on_sessions_changed()

    def _complete(self, notify: Mapping[str, Any]) -> dict[str, Any]:
        full = {"Version": self._version, **notify}
        return {name: full.get(name) for name, always in _NOTIFY_FIELDS if always or full.get(name) is not None}

    def _filtered(self, notify: dict[str, Any], mask: Mask) -> dict[str, Any]:
        out = {name: value for name, value in notify.items() if name not in _NEEDS_BIT or mask & _NEEDS_BIT[name]}
        if mask & Mask.NO_NETMAP:
            out.pop("NetMap", None)
        if "PeerChangedPatch" in out and not mask & Mask.PEER_PATCHES:
            self._promote_patches(out)
        return _health_for(out, mask)

    def _promote_patches(self, out: dict[str, Any]) -> None:
        patches = out.pop("PeerChangedPatch")
        nodes = self._promote(patches) if self._promote is not None else []
        if nodes:
            out["PeersChanged"] = [*out.get("PeersChanged", []), *nodes]


def _health_for(notify: dict[str, Any], mask: Mask) -> dict[str, Any]:
    """Without HEALTH_ACTIONS an action becomes the end of the text."""
    health = notify.get("Health")
    if health is None or mask & Mask.HEALTH_ACTIONS or not health.get("Warnings"):
        return notify
    warnings = {code: _action_in_text(warning) for code, warning in health["Warnings"].items()}
    return {**notify, "Health": {**health, "Warnings": warnings}}


def _action_in_text(warning: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(warning)
    action = out.pop("PrimaryAction", None)
    if action:
        out["Text"] = f"{out.get('Text', '')} {action['Label']}: {action['URL']}"
    return out


class Watch:
    """One session: an async iterator of Notify dicts that ends when closed or when it fell behind."""

    def __init__(self, bus: NotifyBus, session_id: str, mask: Mask) -> None:
        self.session_id = session_id
        self.mask = mask
        self._bus = bus
        self._queue: deque[dict[str, Any]] = deque()
        self._ready = asyncio.Event()
        self._is_closed = False
        self._held: dict[str, Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def push(self, notify: dict[str, Any]) -> None:
        """For the bus: queue a complete message, or end the session when the queue is full."""
        if self._is_closed:
            return
        if self.mask & Mask.RATE_LIMIT and _is_coalesced(notify):
            self._hold(notify)
            return
        if self._held is not None:
            notify = {**self._held, **{name: value for name, value in notify.items() if value is not None}}
            self._held = None
        self._enqueue(notify)

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> dict[str, Any]:
        while not self._queue:
            if self._is_closed:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._queue.popleft()

    def take(self) -> list[dict[str, Any]]:
        """Everything queued now, without waiting."""
        out = list(self._queue)
        self._queue.clear()
        return out

    def close(self) -> None:
        """Idempotent; the iterator ends after what is queued."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._ready.set()
        self._bus.forget(self.session_id)

    def _enqueue(self, notify: dict[str, Any]) -> None:
        if len(self._queue) >= QUEUE_LENGTH:
            self._queue.clear()
            self._queue.append(self._bus.lagged())
            self.close()
            return
        self._queue.append(notify)
        self._ready.set()

    def _hold(self, notify: dict[str, Any]) -> None:
        """The first goes at once; more within three seconds become one."""
        if self._timer is None:
            self._enqueue(notify)
            self._timer = asyncio.get_running_loop().call_later(RATE_LIMIT_S, self._release)
            return
        self._held = {**(self._held or {}), **{name: value for name, value in notify.items() if value is not None}}

    def _release(self) -> None:
        self._timer = None
        if self._held is not None and not self._is_closed:
            held, self._held = self._held, None
            self._hold(held)


def _is_coalesced(notify: Mapping[str, Any]) -> bool:
    told: Iterable[str] = (name for name, value in notify.items() if value is not None and name != "Version")
    return all(name in _COALESCED for name in told)
