"""An account with a scripted control client and everything around it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import MachinePrivate, NodePrivate
from tsd.engine.account.account import Account
from tsd.engine.account.prefs import Prefs
from tsd.engine.account.profiles import NetworkProfile, Profiles
from tsd.engine.account.states import State
from tsd.engine.report.bus import NotifyBus
from tsd.engine.report.health import Health
from tsd.tailcfg.node import Node
from tsd.tailcfg.register import RegisterResponse
from tsd.tailcfg.user import Login, User
from tsplatform.state_file import MemoryStore

SERVER = "http://192.0.2.1:8080"
URL = f"{SERVER}/register/abc"
NETWORK = NetworkProfile("tn.example", "tn.example", "tn.example")


@dataclass
class Link:
    """What a control client was told."""

    url: str
    logins: list[tuple[NodePrivate, NodePrivate | None, str]] = field(default_factory=list)
    is_paused: bool = False
    is_closed: bool = False
    has_logged_out: bool = False
    logout_gate: asyncio.Event | None = None

    def login(self, node_key: NodePrivate, old_node_key: NodePrivate | None, auth_key: str) -> None:
        self.logins.append((node_key, old_node_key, auth_key))

    async def logout(self) -> None:
        if self.logout_gate is not None:
            await self.logout_gate.wait()
        self.has_logged_out = True

    def set_paused(self, is_paused: bool) -> None:
        self.is_paused = is_paused

    def close(self) -> None:
        self.is_closed = True


class Daemon:
    """An account with everything around it, and one watcher."""

    def __init__(self, store: MemoryStore | None = None, seed: int = 1) -> None:
        self.store = store or MemoryStore()
        self.clock = ManualClock()
        self.links: list[Link] = []
        self.states: list[str] = []
        self.forgotten = 0
        self.relays = 1
        entropy = SeededEntropy(seed)
        self.bus = NotifyBus("1", entropy)
        self.health = Health(self.clock)
        self.profiles = Profiles(self.store, entropy, self.clock)
        self.account = Account(self.profiles, self.bus, self.health, self, self.clock, entropy)
        self.watch = self.bus.watch(0)

    # --- AccountHost

    def open_control(self, url: str, machine_key: MachinePrivate, prefs: Prefs) -> Link:
        self.links.append(Link(url))
        return self.links[-1]

    def enter_state(self, old: State, new: State) -> None:
        self.states.append(new.text)

    def prefs_changed(self, old: Prefs, new: Prefs) -> None: ...

    def recall(self) -> None:
        pass

    def identity_changed(self) -> None:
        self.forgotten += 1

    def live_counts(self) -> tuple[int, int]:
        return 0, self.relays

    # --- the script

    @property
    def link(self) -> Link:
        return self.links[-1]

    def heard(self) -> list[str]:
        """Names of what the watcher was told, states with their number."""
        out = []
        for notify in self.watch.take():
            told = {name: value for name, value in notify.items() if value is not None and name != "Version"}
            out += [f"State {value}" if name == "State" else name for name, value in told.items()]
        return out

    async def up(self, *, auth_key: str = "", force: bool = False, **prefs: Any) -> None:
        """The calls of `tailscale up` with flags."""
        has_key = self.account.has_node_key
        wanted = self.account.prefs.to_go() | {"ControlURL": SERVER, "WantRunning": True, "LoggedOut": False} | prefs
        await self.account.start({"UpdatePrefs": wanted, "AuthKey": auth_key})
        if force or not has_key:
            await self.account.login_interactive()

    def accept(self, user_id: int = 1, user: str = "ann@example") -> NodePrivate:
        """Control accepts the last login."""
        node_key = self.link.logins[-1][0]
        user_part, login = User(id=user_id), Login(id=user_id, login_name=user, display_name=user)
        self.account.on_registered(RegisterResponse(user=user_part, login=login, machine_authorized=True), node_key)
        return node_key

    def map(self, node_key: NodePrivate, **changes: Any) -> None:
        """A netmap with our own node arrives."""
        values: dict[str, Any] = {"machine_authorized": True, "addresses": ("100.64.0.1/32",)} | changes
        node = Node(id=1, stable_id=values.pop("stable_id", "n1"), key=str(node_key.public()), **values)
        self.account.on_self_node(node, None, NETWORK)
        self.account.update_state()

    async def join(self, **up: Any) -> NodePrivate:
        await self.up(**up)
        node_key = self.accept()
        self.map(node_key)
        self.heard()
        return node_key
