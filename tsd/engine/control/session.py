"""The control session: registration, the map poll and updates about ourselves, kept going for as long as wanted.

One main task registers, then runs the poll and the update loop side by side. Failures are told once per text, in
words, and retried with growing pauses. What a login or a map means for the node is decided by `ControlEvents`.
tailscale: control/controlclient/auto.go and direct.go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from tsd.base.addr import IPAddress
from tsd.base.entropy import Entropy
from tsd.base.errors import ControlError, TsdError
from tsd.base.keys import LockPrivate, NodePrivate
from tsd.base.log import fields
from tsd.base.tasks import until_one_ends
from tsd.engine.control.backoff import Backoff
from tsd.engine.control.c2n import C2nHandler
from tsd.engine.control.locksigning import SigningError, first_signature, rotated_signature
from tsd.engine.control.pings import ControlPings, Pinger
from tsd.engine.control.refusals import explain_refusal
from tsd.engine.control.requests import SelfReport, as_logout, map_request, register_request
from tsd.tailcfg.mapping import MapRequest
from tsd.tailcfg.mapresponse import MapResponse
from tsd.tailcfg.register import RegisterRequest, RegisterResponse
from tsd.tailcfg.wire import decode_json, encode_json
from tsd.transport.control import ControlClient

log = logging.getLogger("tsd.engine.control")

MAX_SERVER_SLEEP_S = 300.0
COALESCE_S = 0.02
LOGOUT_TIMEOUT_S = 5.0
REFUSED_PAUSE_S = 2.0
NOT_FOUND = 404
MAX_LOCK_BYTES = 10 << 20


class ControlEvents(Protocol):
    """What the session tells the engine, always on the running loop."""

    def on_auth_url(self, url: str) -> None:
        """Somebody has to visit it; the session waits for that."""

    def on_login_done(self, response: RegisterResponse, node_key: NodePrivate) -> None:
        """The server accepted `node_key`, which may be one that the session had to make (the old one had expired)."""

    def on_map(self, message: MapResponse, is_first: bool) -> Awaitable[None] | None:
        """`is_first` on the first message of a stream. A `TsdError` ends the stream; it is opened anew.

        What is returned is awaited before the next message: applying a large map may pause between slices.
        """

    def on_error(self, text: str, is_refusal: bool) -> None:
        """Something failed and is being retried. `is_refusal`: the server refused the login. "" = well again."""

    def on_connected(self, is_connected: bool) -> None:
        """Whether the map stream is up, counted from its first message."""

    def on_pop_browser(self, url: str) -> None:
        """The server wants a page shown."""


@dataclass(frozen=True, slots=True)
class _Goal:
    """A login that is wanted."""

    node_key: NodePrivate
    old_node_key: NodePrivate | None
    auth_key: str
    signature: str = ""
    """What admits `node_key` to a locked tailnet, when control had us make it from the signature of the old key."""


class _NodeUnknown(Exception):
    """The server does not know this node key (any more): register again."""


class ControlSession:
    """The control client of one profile. Nothing happens before `login`; all but the async methods return at once."""

    def __init__(
        self,
        client: ControlClient,
        events: ControlEvents,
        *,
        report: SelfReport,
        entropy: Entropy,
        lock_key: Callable[[], LockPrivate | None] = lambda: None,
        known_node_key: NodePrivate | None = None,
        is_ephemeral: bool = False,
        c2n_handlers: Mapping[str, C2nHandler] | None = None,
        pinger: Pinger | None = None,
    ) -> None:
        """`known_node_key` was accepted before (from the state): an auth key is kept back while it is valid."""
        self._client = client
        self._events = events
        self._report = report
        self._entropy = entropy
        self._lock_key = lock_key
        self._known_key = known_node_key
        self._is_ephemeral = is_ephemeral
        self._pings = ControlPings(client, c2n_handlers or {}, pinger)
        self._goal: _Goal | None = None
        self._in_force: _Goal | None = None
        self.is_auth_key_unused = False
        """Whether the last login that worked did not need the auth key that was given for it."""
        self._is_registered = False
        self._is_paused = False
        self._is_closed = False
        self._main: asyncio.Task[None] | None = None
        self._last_main: asyncio.Task[None] | None = None
        self._check: asyncio.Task[None] | None = None
        self._report_changed = asyncio.Event()
        self._kick = asyncio.Event()
        self._last_error = ""
        self._is_connected = False
        self._popped_url = ""

    # -- orders -------------------------------------------------------------------------------------------------

    def login(self, node_key: NodePrivate, old_node_key: NodePrivate | None, auth_key: str) -> None:
        """Register this key, then poll; replaces whatever was under way."""
        self._goal = _Goal(node_key, old_node_key, auth_key)
        self._is_registered = False
        self._restart()

    def update(self, report: SelfReport) -> None:
        """What the server should know changed; many changes in a row become one request."""
        if report != self._report:
            self._report = report
            self._report_changed.set()

    @property
    def report(self) -> SelfReport:
        return self._report

    def set_paused(self, is_paused: bool) -> None:
        """No requests at all while paused; afterwards the poll goes on without a new registration."""
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            self._restart()

    def retry_now(self) -> None:
        """End the current pause: the network came back, or the machine woke up."""
        self._kick.set()

    def link_changed(self, local: Collection[IPAddress]) -> None:
        """The network changed or the machine woke up: make sure within seconds that the server still hears us."""
        self.retry_now()
        if self._main is not None:
            self._stop_check()
            self._check = asyncio.create_task(self._client.check(local))

    async def ask_about_lock(self, path: str, request: Mapping[str, object]) -> object:
        """Tailnet lock's requests, `path` below /machine/tka/. Raises `ControlError`."""
        body = encode_json({"Version": self._client.capability_version, **request})
        answer = await self._client.post(f"/machine/tka/{path}", body, method="GET", limit_bytes=MAX_LOCK_BYTES)
        if answer.status != 200:
            reason = f": {answer.text}" if answer.text else ""
            raise ControlError(
                f"the server refused tka/{path} with status {answer.status}{reason}", status=answer.status
            )
        found: object = decode_json(answer.body, dict)
        return found

    def reconnect(self) -> None:
        """Drop the connection and start over at once."""
        if self._main is not None:
            self._restart()

    async def logout(self) -> None:
        """Tell the server that the node key in force is finished; bounded in time, never raises.

        In force is the key that was accepted last: one that a login has only on trial means nothing to the server.
        """
        goal, self._goal = self._goal, None
        self._in_force = None
        self._is_registered = False
        self._stop_main()
        if goal is None:
            return
        if self._known_key is not None and goal.node_key != self._known_key:
            goal = replace(goal, node_key=self._known_key, old_node_key=None)
        request = as_logout(self._register_request(goal, with_auth=False, followup=""))
        try:
            async with asyncio.timeout(LOGOUT_TIMEOUT_S):
                if self._last_main is not None:
                    await asyncio.gather(self._last_main, return_exceptions=True)
                await self._client.register(request)
                await self._client.disconnect()
        except (TsdError, TimeoutError) as err:
            log.warning(fields("logout did not reach the server", reason=err or "timeout"))

    def close(self) -> None:
        """End everything; `wait_closed` waits for it."""
        self._is_closed = True
        self._goal = None
        self._stop_main()

    async def wait_closed(self) -> None:
        if self._last_main is not None:
            await asyncio.gather(self._last_main, return_exceptions=True)
        await self._client.close()

    # -- the main task ------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        self._stop_main()
        if self._goal is not None and not self._is_paused and not self._is_closed:
            self._main = self._last_main = asyncio.create_task(self._run(self._goal, self._last_main))

    def _stop_main(self) -> None:
        self._pings.cancel()
        self._stop_check()
        if self._main is not None:
            self._main.cancel()
            self._main = None
        self._set_connected(False)

    def _stop_check(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check = None

    async def _run(self, goal: _Goal, before: asyncio.Task[None] | None) -> None:
        backoff = Backoff(self._entropy, first_s=1.0)
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        try:
            while True:
                try:
                    if not self._is_registered:
                        goal = await self._register_beside_poll(goal)
                    await self._poll_and_update(goal)
                except _NodeUnknown:
                    self._is_registered = False
                except Exception:
                    log.exception("control session failed; starting over")
                    self._events.on_error("internal error in the control session; see the log", is_refusal=False)
                self._set_connected(False)
                await self._pause(backoff.next_s())
        finally:
            self._set_connected(False)
            with contextlib.suppress(TsdError):
                await asyncio.shield(self._client.disconnect())

    async def _pause(self, seconds: float) -> None:
        self._kick.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._kick.wait()

    def _fail(self, err: TsdError, *, is_refusal: bool = False) -> None:
        text = str(err)
        if text != self._last_error:
            self._last_error = text
            log.warning(fields("control", reason=text))
        self._events.on_error(text, is_refusal)

    def _recovered(self) -> None:
        if self._last_error:
            self._last_error = ""
            self._events.on_error("", is_refusal=False)

    def _set_connected(self, is_connected: bool) -> None:
        if is_connected != self._is_connected:
            self._is_connected = is_connected
            self._events.on_connected(is_connected)

    # -- registration -------------------------------------------------------------------------------------------

    async def _register_beside_poll(self, goal: _Goal) -> _Goal:
        """While a new key is on trial, the key in force keeps the node on the server: the trial may take for ever."""
        in_force = self._in_force
        if in_force is None or in_force.node_key == goal.node_key:
            return await self._register(goal)
        poll = asyncio.create_task(self._poll_and_update(in_force))
        try:
            return await self._register(goal)
        finally:
            poll.cancel()
            await asyncio.gather(poll, return_exceptions=True)

    async def _register(self, goal: _Goal) -> _Goal:
        """Returns the goal with the key that was accepted; goes on until then."""
        backoff = Backoff(self._entropy)
        followup = ""
        with_auth = goal.node_key != self._known_key
        has_new_key = False
        while True:
            request = self._register_request(goal, with_auth=with_auth, followup=followup)
            try:
                response = await self._client.register(request, timeout_s=None if followup else 60.0)
            except ControlError as err:
                self._fail(err)
                await self._pause(max(backoff.next_s(), err.retry_after_s))
                continue
            is_refused = response.error or response.node_key_expired or response.auth_url
            if is_refused and not with_auth and goal.auth_key:
                with_auth = True
            elif response.error:
                self._fail(ControlError(explain_refusal(response.error)), is_refusal=True)
                followup = ""
                await self._pause(max(backoff.next_s(), REFUSED_PAUSE_S))
            elif response.node_key_signature:
                goal = self._goal = self._signed_anew(goal, response.node_key_signature)
                await self._pause(backoff.next_s())
            elif response.node_key_expired:
                if has_new_key:
                    self._fail(ControlError("the server says that a brand-new node key has expired"))
                    await self._pause(backoff.next_s())
                else:
                    has_new_key = True
                    new_key = NodePrivate.generate(self._entropy)
                    goal = self._goal = replace(goal, node_key=new_key, old_node_key=goal.node_key, signature="")
            elif response.auth_url:
                if response.auth_url == followup:
                    await self._pause(backoff.next_s())
                else:
                    backoff.reset()
                    self._recovered()
                    self._events.on_auth_url(response.auth_url)
                followup = response.auth_url
            else:
                self.is_auth_key_unused = bool(goal.auth_key) and not with_auth
                if self.is_auth_key_unused:
                    log.warning("auth key not used: this node is logged in (--force-reauth uses it)")
                return self._accepted(goal, response)

    def _signed_anew(self, goal: _Goal, old_signature: str) -> _Goal:
        """The tailnet is locked, and control gave the old key's signature: a new key, for which we sign ourselves."""
        if goal.old_node_key is None:
            goal = replace(goal, node_key=NodePrivate.generate(self._entropy), old_node_key=goal.node_key)
        try:
            return replace(goal, signature=rotated_signature(old_signature, goal.node_key.public(), self._lock_key()))
        except SigningError as err:
            self._fail(ControlError(str(err)))
            return goal

    def _accepted(self, goal: _Goal, response: RegisterResponse) -> _Goal:
        if not self._is_ephemeral:
            # A node that the administrator deletes must not come back by itself. Ephemeral ones are deleted by time.
            goal = self._goal = replace(goal, auth_key="", signature="")
        self._is_registered = True
        self._in_force = goal
        self._known_key = goal.node_key
        self._recovered()
        log.info(fields("registered", node_key=goal.node_key.public().short()))
        self._events.on_login_done(response, goal.node_key)
        return goal

    def _register_request(self, goal: _Goal, *, with_auth: bool, followup: str) -> RegisterRequest:
        auth_key, signature = first_signature(goal.auth_key, goal.node_key.public()) if with_auth else ("", "")
        lock_key = self._lock_key()
        return register_request(
            self._report,
            self._client.capability_version,
            goal.node_key,
            old_node_key=goal.old_node_key,
            auth_key=auth_key,
            followup=followup,
            is_ephemeral=self._is_ephemeral,
            lock_key=lock_key.public() if lock_key is not None else None,
            signature=goal.signature or signature,
        )

    # -- map poll and updates -----------------------------------------------------------------------------------

    async def _poll_and_update(self, goal: _Goal) -> None:
        """Until the poll fails for good."""
        self._report_changed.set()
        await until_one_ends(self._update_loop(goal), self._map_loop(goal))

    async def _update_loop(self, goal: _Goal) -> None:
        backoff = Backoff(self._entropy)
        sent: SelfReport | None = None
        while True:
            await self._report_changed.wait()
            await asyncio.sleep(COALESCE_S)
            self._report_changed.clear()
            report = self._report
            if report == sent:
                continue
            try:
                await self._client.update(self._map_request(goal, report, is_poll=False))
                sent = report
                backoff.reset()
            except ControlError as err:
                log.info(fields("update about ourselves failed", reason=err))
                self._report_changed.set()
                await self._pause(max(backoff.next_s(), err.retry_after_s))

    async def _map_loop(self, goal: _Goal) -> None:
        backoff = Backoff(self._entropy)
        while True:
            wait_s = 0.0
            try:
                await self._read_map(goal, backoff)
                raise ControlError("the server ended the map stream")
            except ControlError as err:
                self._set_connected(False)
                self._fail(err)
                wait_s = err.retry_after_s
                if err.status == NOT_FOUND:
                    raise _NodeUnknown from None
            except TsdError as err:
                self._set_connected(False)
                self._fail(err)
            await self._pause(max(backoff.next_s(), wait_s))

    async def _read_map(self, goal: _Goal, backoff: Backoff) -> None:
        stream = await self._client.poll(self._map_request(goal, self._report, is_poll=True))
        try:
            is_first = True
            async for message in stream:
                self._one_shots(message)
                if is_first and message.control_time:
                    told = {"controltime": message.control_time}
                    log.info(fields("map stream opened", server_time=message.control_time), extra={"upload": told})
                if not message.keep_alive:
                    applying = self._events.on_map(message, is_first)
                    if applying is not None:
                        await applying
                    is_first = False
                    self._set_connected(True)
                backoff.reset()
                self._recovered()
                if message.debug is not None and message.debug.sleep_seconds > 0:
                    await asyncio.sleep(min(message.debug.sleep_seconds, MAX_SERVER_SLEEP_S))
        finally:
            await stream.close()

    def _one_shots(self, message: MapResponse) -> None:
        if message.ping_request is not None:
            self._pings.handle(message.ping_request)
        if message.pop_browser_url and message.pop_browser_url != self._popped_url:
            self._popped_url = message.pop_browser_url
            self._events.on_pop_browser(message.pop_browser_url)

    def _map_request(self, goal: _Goal, report: SelfReport, *, is_poll: bool) -> MapRequest:
        return map_request(report, self._client.capability_version, goal.node_key, is_poll=is_poll)
