"""What the account needs from others: a control client, and the engine around it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tsd.base.keys import MachinePrivate, NodePrivate
from tsd.engine.account.prefs import Prefs
from tsd.engine.account.states import State


class Identity(NamedTuple):
    """One login: another profile, node key or login server is another one."""

    profile_id: str
    node_key: str
    control_url: str


class ControlLink(Protocol):
    """The control client as the account sees it; every call returns at once, results come back as events."""

    def login(self, node_key: NodePrivate, old_node_key: NodePrivate | None, auth_key: str) -> None:
        """Register, then poll. Replaces an attempt that is under way."""

    async def logout(self) -> None:
        """Tell control that this node key is finished; bounded in time, never raises."""

    def set_paused(self, is_paused: bool) -> None: ...

    def close(self) -> None: ...


class AccountHost(Protocol):
    """What the account needs from the engine."""

    def open_control(self, url: str, machine_key: MachinePrivate, prefs: Prefs) -> ControlLink: ...

    def enter_state(self, old: State, new: State) -> None:
        """Configure or tear down the data plane."""

    def prefs_changed(self, old: Prefs, new: Prefs) -> None: ...

    def recall(self) -> None:
        """A login of an earlier run goes on: what that run knew may be used until control speaks."""

    def identity_changed(self) -> None:
        """Node key or profile is another one: forget the netmap and all peers."""

    def live_counts(self) -> tuple[int, int]:
        """(peers with a session, DERP connections or a chosen home)."""
