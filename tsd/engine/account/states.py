"""The login state of the node: which state follows, as a pure function.

tailscale: ipn/backend.go (numbers), ipn/ipnlocal/local.go `nextStateLocked` (order of the rules). Entering a state
(deconfiguring the data plane, pausing the control client) is the engine's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """The value is the integer that Notify carries; `text` is Status' BackendState."""

    NO_STATE = 0
    IN_USE_OTHER_USER = 1
    NEEDS_LOGIN = 2
    NEEDS_MACHINE_AUTH = 3
    STOPPED = 4
    STARTING = 5
    RUNNING = 6

    @property
    def text(self) -> str:
        return _TEXTS[self]

    @property
    def is_configured(self) -> bool:
        """Whether WireGuard, router and DNS are set up in this state."""
        return self not in (State.NO_STATE, State.NEEDS_LOGIN, State.STOPPED, State.IN_USE_OTHER_USER)

    def __str__(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    State.NO_STATE: "NoState",
    State.IN_USE_OTHER_USER: "InUseOtherUser",
    State.NEEDS_LOGIN: "NeedsLogin",
    State.NEEDS_MACHINE_AUTH: "NeedsMachineAuth",
    State.STOPPED: "Stopped",
    State.STARTING: "Starting",
    State.RUNNING: "Running",
}


@dataclass(frozen=True, slots=True)
class StateInputs:
    """Everything that the next state depends on."""

    current: State = State.NO_STATE
    is_store_healthy: bool = True
    want_running: bool = False
    logged_out: bool = False
    is_blocked: bool = False
    """Engine updates are held back until somebody logs in."""
    has_node_key: bool = False
    has_netmap: bool = False
    is_auth_stuck: bool = False
    """Not logged in, and either nobody asked for a login or it waits for a visit to the URL."""
    is_key_expired: bool = False
    is_machine_authorized: bool = True
    live_peer_count: int = 0
    derp_connection_count: int = 0


def next_state(inputs: StateInputs) -> State:
    """First rule that matches."""
    if not inputs.is_store_healthy:
        return State.NO_STATE
    if not (inputs.want_running or inputs.logged_out or inputs.is_blocked) and inputs.has_node_key:
        return State.STOPPED
    if not inputs.has_netmap:
        return _without_netmap(inputs)
    if not inputs.want_running:
        return State.STOPPED
    if inputs.is_key_expired:
        return State.NEEDS_LOGIN
    if not inputs.is_machine_authorized:
        return State.NEEDS_MACHINE_AUTH
    return _with_netmap(inputs)


def _without_netmap(inputs: StateInputs) -> State:
    if inputs.is_auth_stuck or inputs.logged_out:
        return State.NEEDS_LOGIN
    return State.STARTING if inputs.current is State.STOPPED else inputs.current


def _with_netmap(inputs: StateInputs) -> State:
    match inputs.current:
        case State.RUNNING:
            return State.RUNNING
        case State.STARTING if inputs.live_peer_count > 0 or inputs.derp_connection_count > 0:
            return State.RUNNING
        case _:
            return State.STARTING
