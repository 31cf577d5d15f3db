"""The node's account: prefs, profile, login, and the state that follows from them.

Holds no sockets: it drives a `ControlLink` (the control client's loops), keeps what control says about us in the
profile, and publishes every change on the bus in the order that clients of the field rely on
(tailscale: ipn/ipnlocal/local.go). What a state means for packets is decided by `AccountHost`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tsd.base.authkey import check_auth_key
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy
from tsd.base.errors import ConfigError, TsdError
from tsd.base.keys import LockPrivate, NodePrivate
from tsd.base.log import fields
from tsd.engine.account.edits import EditContext, check, edit
from tsd.engine.account.prefs import Persist, Prefs, UserProfile
from tsd.engine.account.profiles import NetworkProfile, Profiles
from tsd.engine.account.seams import AccountHost, ControlLink, Identity
from tsd.engine.account.states import State, StateInputs, next_state
from tsd.engine.peers import node_addresses
from tsd.engine.report.bus import NotifyBus
from tsd.engine.report.health import Health
from tsd.tailcfg.node import Node
from tsd.tailcfg.register import RegisterResponse

log = logging.getLogger(__name__)

STORE_UNHEALTHY = "cannot start backend when state store is unhealthy"
LOGIN_URL_LIFE_S = (7 * 24 - 1) * 3600.0
"""Servers forget a login URL after seven days; it is not shown again in the last hour before that."""


class Account:
    """One login at a time. All methods run on the engine's loop."""

    def __init__(
        self,
        profiles: Profiles,
        bus: NotifyBus,
        health: Health,
        host: AccountHost,
        clock: Clock,
        entropy: Entropy,
        *,
        is_ephemeral: bool = False,
    ) -> None:
        self._profiles = profiles
        self._bus = bus
        self._health = health
        self._host = host
        self._clock = clock
        self._entropy = entropy
        self.is_ephemeral = is_ephemeral
        self.state = State.NO_STATE
        self.auth_url = ""
        self.self_node: Node | None = None
        self.is_store_healthy = True
        self.is_config_locked = False
        self._control: ControlLink | None = None
        self._auth_key = ""
        self._held_auth_key = ("", "")
        """Server and auth key of a first login that was stopped before its end: `up` goes on with it."""
        self._config_auth_key = ""
        self._auth_url_at = 0.0
        self._is_logged_in = False
        self._has_login_goal = False
        self._wants_url_again = False
        self._trial_key: NodePrivate | None = None
        self._last_error = ""
        self._turn = asyncio.Lock()
        """Starting, logging in and logging out wait for each other: a logout takes as long as the server does."""
        self.now_ns: Callable[[], int] = clock.wall_ns
        """The wall time by which keys expire."""

    # --- reading

    @property
    def prefs(self) -> Prefs:
        return self._profiles.prefs

    @property
    def profiles(self) -> Profiles:
        return self._profiles

    @property
    def lock_key(self) -> LockPrivate | None:
        return self.prefs.persist.network_lock_key if self.prefs.persist is not None else None

    @property
    def node_key(self) -> NodePrivate | None:
        """The key in force; during a first login the one on trial."""
        return self.prefs.node_key or self._trial_key

    @property
    def has_node_key(self) -> bool:
        return self.prefs.node_key is not None

    @property
    def control_url(self) -> str:
        return self.prefs.control_url_or_default

    def identity(self) -> Identity | None:
        """The login in force, when it is one that another run may go on with."""
        node_key, profile_id = self.prefs.node_key, self._profiles.current.id
        if node_key is None or self.prefs.logged_out or not profile_id or self.is_ephemeral:
            return None
        return Identity(profile_id, str(node_key.public()), self.control_url)

    # --- what users ask for

    def begin(self) -> None:
        """At daemon start: go on where the stored profile left off. Raises `StateError` for a broken machine key.

        A stored login server that cannot be used is no reason not to start: how else should it be changed?
        """
        try:
            self._reopen()
        except ConfigError as err:
            log.error(fields("not logging in", reason=err))
            self._health.set("login-state", error=err)
        self.update_state()

    def configure(self, masked: Any, auth_key: str) -> None:
        """The configuration file's wishes, before `begin`; with an auth key the login starts by itself."""
        self._auth_key = self._config_auth_key = auth_key
        wanted = edit(self.prefs, masked)
        if auth_key and not self.has_node_key:
            wanted = replace(wanted, logged_out=False)
            self._has_login_goal = wanted.want_running
        self._profiles.save(wanted)

    async def start(self, options: Mapping[str, Any]) -> None:
        """LocalAPI start: replace prefs (all but the identity), take the auth key, connect anew.

        The state is told again even when it stays: whoever asked waits for it.
        """
        async with self._turn:
            self._start(options)

    def _start(self, options: Mapping[str, Any]) -> None:
        if not self.is_store_healthy:
            reason = self._health.argument("state-store-health", "error")
            raise TsdError(f"{STORE_UNHEALTHY}: {reason}" if reason else STORE_UNHEALTHY)
        update = options.get("UpdatePrefs")
        was = self.state
        key_of_config = "" if was is State.RUNNING else self._config_auth_key
        auth_key = check_auth_key(str(options["AuthKey"])) if options.get("AuthKey") else key_of_config
        if update is not None:
            wanted = replace(Prefs.from_go(update), persist=self.prefs.persist)
            check(wanted, EditContext())
            self._store_prefs(wanted)
        held_for, held_key = self._held_auth_key
        self._auth_key = auth_key or (held_key if held_for == self.control_url else "")
        self._held_auth_key = ("", "")
        self._tell_prefs()
        self._reopen()
        if was is State.RUNNING:
            self._set_state(State.STARTING)
            self.update_state()
        elif self.update_state() is was:
            self._bus.publish({"State": was.value})

    def edit_prefs(self, masked: Any, context: EditContext | None = None) -> Prefs:
        """Raises `PrefsError`; nothing is changed then."""
        edited = edit(self.prefs, masked, context)
        self.apply_prefs(edited)
        return self.prefs

    def apply_prefs(self, wanted: Prefs) -> None:
        old = self.prefs
        if wanted == old:
            return
        turned_on = wanted.want_running and not old.want_running
        if turned_on:
            wanted = replace(wanted, logged_out=False if self.has_node_key else wanted.logged_out)
        self._store_prefs(wanted)
        if old.want_running and not wanted.want_running and not self.has_node_key:
            self._stop_first_login()
        self._step()
        self._tell_prefs()
        self.update_state()

    def _stop_first_login(self) -> None:
        """Nothing of it is left to be paused but its auth key."""
        self._held_auth_key = (self.control_url, self._auth_key)
        self._drop_control()
        self._forget_login()

    async def login_interactive(self) -> None:
        """Show the URL again when one is valid, else log in with a new node key."""
        async with self._turn:
            self._login_interactive()

    def _login_interactive(self) -> None:
        if self.auth_url and self._clock.now() - self._auth_url_at < LOGIN_URL_LIFE_S:
            self.tell_url(self.auth_url)
            return
        self._has_login_goal = True
        if self._control is None:
            self._reopen(begin_login=False)
        self._login(rotate=True)
        self.update_state()

    async def logout(self) -> None:
        """Forget this login here and at control; idempotent."""
        async with self._turn:
            await self._logout()

    async def _logout(self) -> None:
        if self.prefs.want_running or not self.prefs.logged_out:
            self._store_prefs(replace(self.prefs, want_running=False, logged_out=True))
            self.update_state()
            self._tell_prefs()
        leaving = self._profiles.current.id
        control, self._control = self._control, None
        if control is not None:
            if self.has_node_key or self._is_logged_in:
                await control.logout()
            control.close()
        if self._profiles.current.id != leaving:  # switched meanwhile
            self._profiles.delete(leaving)
            return
        self._leave_profile()
        self._profiles.delete(leaving)
        self._tell_prefs()
        self.update_state()

    def new_profile(self) -> None:
        self._leave_profile()
        self._profiles.new()
        self._enter_profile()

    def switch_profile(self, profile_id: str) -> None:
        """Raises `ProfileNotFound`."""
        if profile_id == self._profiles.current.id:
            return
        self._profiles.by_id(profile_id)
        self._leave_profile()
        self._profiles.switch(profile_id)
        self._enter_profile()

    def delete_profile(self, profile_id: str) -> None:
        is_current = profile_id == self._profiles.current.id
        if is_current:
            self._leave_profile()
        self._profiles.delete(profile_id)
        if is_current:
            self._enter_profile()

    def reset_auth(self) -> None:
        self._leave_profile()
        self._profiles.delete(self._profiles.current.id)
        self._enter_profile()

    def close(self) -> None:
        self._drop_control()

    # --- what control says

    def on_auth_url(self, url: str) -> None:
        """Somebody has to visit `url`."""
        if not url.startswith(("https://", "http://")):
            self.on_refused("the server sent a login URL that is neither https nor http; it is not shown")
            return
        if url == self.auth_url and not self._wants_url_again:
            return
        self._wants_url_again = False
        if not self._has_login_goal and not self._is_key_expired():
            # Nobody asked for a login: the server knows this node no more, and what it told us about it is void.
            self._is_logged_in = False
            self.self_node = None
        self.auth_url, self._auth_url_at = url, self._clock.now()
        self.update_state()
        self._health.clear("no-control")
        self.tell_url(url)

    def tell_url(self, url: str) -> None:
        """Whatever opens URLs must not be handed just anything by a server."""
        if url.startswith("https://") or (url.startswith("http://") and self.control_url.startswith("http://")):
            self._bus.publish({"BrowseToURL": url})
        else:
            log.warning(fields("URL of the server not shown: neither https nor the server's own scheme"))

    def on_registered(self, response: RegisterResponse, node_key: NodePrivate) -> None:
        """Control accepted `node_key`. Whoever visited a URL for it wants the node to run."""
        login, user = response.login, response.user
        profile = UserProfile(
            id=user.id or login.id,
            login_name=login.login_name,
            display_name=login.display_name or user.display_name,
            profile_pic_url=login.profile_pic_url,
        )
        was_visited = bool(self.auth_url)
        self.auth_url = ""
        self._last_error = ""
        self._is_logged_in = True
        self._has_login_goal = False
        self._trial_key = None
        self._auth_key = ""
        self._health.clear("login-state", "no-control")
        old = self.prefs
        persist = old.persist or Persist()
        if persist.private_node_key != node_key:
            persist = replace(persist, old_private_node_key=persist.private_node_key, private_node_key=node_key)
        wanted = replace(old, logged_out=False, want_running=old.want_running or was_visited)
        wanted = replace(wanted, persist=replace(persist, user_profile=profile))
        self._bus.publish({"LoginFinished": {}})
        self._store_prefs(wanted)
        self._tell_prefs()
        self.update_state()

    def forget_node(self) -> None:
        """What we know of our own node is void, and we are where a start without it would be."""
        self.self_node = None
        self._set_state(State.NO_STATE)

    def on_self_node(self, node: Node, profile: UserProfile | None, network: NetworkProfile) -> None:
        """The netmap told who we are."""
        is_first = self.self_node is None
        self.self_node = node
        persist = self.prefs.persist or Persist()
        known = profile if profile is not None and profile.login_name else persist.user_profile
        updated = replace(persist, node_id=node.stable_id, user_profile=known)
        if updated != persist or network != self._profiles.current.network:
            self._profiles.save(replace(self.prefs, persist=updated), network)
            self._tell_prefs()
        elif is_first:
            self._profiles.save(self.prefs, network)
        addresses = tuple(str(ip) for ip in node_addresses(node))
        if addresses != self._profiles.addresses():
            self._profiles.remember_addresses(addresses)

    def on_refused(self, text: str) -> None:
        """Control refused the login for a reason that the user must read; shown once."""
        self._health.clear("no-control")
        self._health.set("login-state", error=text)
        self.update_state()
        if text != self._last_error:
            self._last_error = text
            log.warning(fields("login refused", reason=text))
            self._bus.publish({"ErrMessage": text})

    # --- state

    def update_state(self) -> State:
        """Compute the state anew and enter it when it changed; loops until it is stable."""
        for _ in range(4):
            if not self._step():
                break
        self._health.set_if("key-expired", self.prefs.want_running and self._is_key_expired())
        idle = self.prefs.without_effect
        self._health.set_if("no-effect", bool(idle), settings=", ".join(idle))
        return self.state

    def _step(self) -> bool:
        """One transition, when there is one to make."""
        new = next_state(self._inputs())
        if new is self.state:
            return False
        self._set_state(new)
        return True

    def _is_key_expired(self) -> bool:
        return self.self_node is not None and self.self_node.is_expired(self.now_ns())

    def _inputs(self) -> StateInputs:
        node = self.self_node
        peers, relays = self._host.live_counts()
        return StateInputs(
            current=self.state,
            is_store_healthy=self.is_store_healthy,
            want_running=self.prefs.want_running,
            logged_out=self.prefs.logged_out,
            is_blocked=False,
            has_node_key=self.has_node_key,
            has_netmap=node is not None,
            is_auth_stuck=not self._is_logged_in and (not self._has_login_goal or bool(self.auth_url)),
            is_key_expired=self._is_key_expired(),
            is_machine_authorized=node is None or node.machine_authorized,
            live_peer_count=peers,
            derp_connection_count=relays,
        )

    def _set_state(self, new: State) -> None:
        old, self.state = self.state, new
        if old is new:
            return
        log.info(fields("state changed", old=old.text, new=new.text))
        if self._control is not None:
            self._control.set_paused(new is State.STOPPED)
        self._host.enter_state(old, new)
        self._bus.publish({"State": new.value})

    # --- inside

    def _tell_prefs(self) -> None:
        self._bus.publish({"Prefs": self.prefs.to_go()})

    def _store_prefs(self, wanted: Prefs) -> None:
        old = self.prefs
        self._profiles.save(wanted)
        if old != wanted:
            self._host.prefs_changed(old, wanted)

    def _drop_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _reopen(self, begin_login: bool = True) -> None:
        """A new control client for the current profile; logs in when there is something to log in with."""
        self._drop_control()
        self.auth_url = ""
        self._last_error = ""
        self._is_logged_in = False
        self._health.clear("login-state", "no-control")
        if not self.is_store_healthy or (self.prefs.logged_out and not self._auth_key and not self._has_login_goal):
            return
        machine_key = self._profiles.machine_key()
        self._control = self._host.open_control(self.control_url, machine_key, self.prefs)
        is_stopped = not self.prefs.want_running
        self._control.set_paused(is_stopped and self.has_node_key)
        is_wanted = self.has_node_key or (self._has_login_goal and bool(self._auth_key))
        if begin_login and is_wanted and not self.prefs.logged_out:
            self._has_login_goal = True
            self._login(rotate=False)
        if self.has_node_key and not self.prefs.logged_out:
            self._host.recall()

    def _login(self, rotate: bool) -> None:
        if self._control is None:
            return
        self._health.set("no-control", error=f"no answer from {self.control_url} so far")
        current = self.prefs.node_key
        if current is not None and not rotate:
            self._control.login(current, None, self._auth_key)
            return
        self._trial_key = NodePrivate.generate(self._entropy)
        self._ensure_lock_key()
        self._wants_url_again = True
        self._control.login(self._trial_key, current, self._auth_key)

    def disallow_lock(self, state_id: str) -> None:
        """Tailnet lock with this ID is not to be obeyed by this login."""
        persist = self.prefs.persist or Persist()
        ids = tuple(dict.fromkeys((*persist.disallowed_tka_state_ids, state_id)))
        self._profiles.save(replace(self.prefs, persist=replace(persist, disallowed_tka_state_ids=ids)))

    def _ensure_lock_key(self) -> None:
        persist = self.prefs.persist or Persist()
        if persist.network_lock_key is None:
            lock_key = LockPrivate.generate(self._entropy)
            self._profiles.save(replace(self.prefs, persist=replace(persist, network_lock_key=lock_key)))

    def _forget_login(self) -> None:
        self.auth_url = ""
        self.self_node = None
        self._trial_key = None
        self._is_logged_in = False
        self._has_login_goal = False
        self._last_error = ""
        self._health.clear("login-state", "no-control", "key-unused")

    def _leave_profile(self) -> None:
        self._drop_control()
        self._auth_key, self._held_auth_key = "", ("", "")
        self._forget_login()
        self._host.identity_changed()
        self._set_state(State.NO_STATE)

    def _enter_profile(self) -> None:
        self._tell_prefs()
        self._reopen()
        self.update_state()
