"""`tsd coord` as a running thing: listeners, the coordinator's driver, the store, the policy file.

Everything the coordinator puts out goes through one queue, in order: what must be durable is committed before the
answers behind it leave. The only timer is the coordinator's next deadline.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Any

from aiohttp import web

from tsd.base.addr import AddrPort
from tsd.base.clock import Clock, SystemClock
from tsd.base.entropy import Entropy, system_entropy
from tsd.base.errors import ConfigError, ProtocolError, StateError, reason_of
from tsd.base.keys import MachinePrivate, NodePrivate, NodePublic, PrivateKey
from tsd.base.log import fields
from tsd.coord import webpages
from tsd.coord.control import ControlRequests
from tsd.coord.derp import DerpServer, load_certificate
from tsd.coord.policyfile import PolicySource
from tsd.coord.settings import Settings
from tsd.coord.state.administration import Administration
from tsd.coord.state.config import MIN_CAPABILITY_VERSION, SIZE_LIMIT_NODES, CoordConfig
from tsd.coord.state.coordinator import Coordinator
from tsd.coord.state.events import ApprovalWanted, Event, FrameReady, RegisterAnswered, Save, SessionEnded
from tsd.coord.state.records import Moment
from tsd.coord.storage import Storage
from tsd.coord.stun import StunServer
from tsd.tailcfg.dns import Resolver
from tsd.transport.control_server import accept_control
from tsd.transport.frontdoor import FrontDoor, Upgrade
from tsd.transport.h2 import Http2Server
from tsd.transport.tls import quiet_tls_ends
from tsd.ts2021.constants import UPGRADE_PROTOCOL

log = logging.getLogger("tsd.coord")


class CoordServer:
    """`start`, then read `url`; `close` ends everything. Several may live in one process."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock | None = None,
        entropy: Entropy = system_entropy,
        stun: StunServer | None = None,
    ) -> None:
        self.settings = settings
        self.coordinator: Coordinator
        self.administration: Administration
        self.policy: PolicySource
        self.derp: DerpServer | None = None
        self.stun: StunServer | None = stun
        self.control_address: AddrPort
        self.derp_address: AddrPort | None = None
        self.stun_address: AddrPort | None = None
        self.url = ""
        self.storage = Storage(settings.state, has_thread=not settings.is_simulated)
        self.requests = ControlRequests(self)
        self._clock: Clock = clock or SystemClock()
        self._entropy = entropy
        self._control_key: MachinePrivate
        self._runner: web.AppRunner | None = None
        self._door: FrontDoor | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._outbox: asyncio.Queue[list[Event]] = asyncio.Queue()
        self._is_delivering = False
        self._tasks: list[asyncio.Task[None]] = []

    # Life

    async def start(self) -> None:
        """Raises `ConfigError`, `StateError`; OSErrors of listening become `ConfigError`s."""
        await self.storage.open()
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        self._control_key = await self._private_key("control_key", MachinePrivate)
        relay_key = await self._private_key("relay_key", NodePrivate)
        pin = await self._start_relay(relay_key)
        stored = await self.storage.load()
        policy_text = await self.storage.meta("policy")
        self.policy = PolicySource(self.settings.policy_file, policy_text.decode() if policy_text else None)
        quiet_tls_ends(asyncio.get_running_loop())
        self._runner = web.AppRunner(webpages.routes(self), access_log=None)
        await self._runner.setup()
        self._door = FrontDoor(self._runner.server, {UPGRADE_PROTOCOL: self._serve_control})
        tls = self._control_tls()
        self.control_address = await self._listen(self._door.listen, self.settings.listen, "--listen", tls)
        self.url = self.settings.public_url(self.control_address)
        self.coordinator = Coordinator(self._config(pin), self._entropy, self.policy.load_first())
        self.administration = Administration(self.coordinator)
        self.coordinator.registry.restore_ids(stored.last_ids)
        self.coordinator.load(stored.users, stored.auth_keys, stored.nodes, self.moment())
        self._tasks = [asyncio.create_task(self._deliver_all()), asyncio.create_task(self._watch_policy())]
        self.drain()
        if len(stored.nodes) > SIZE_LIMIT_NODES:
            log.warning(fields("more nodes than this server is made for; use headscale", nodes=len(stored.nodes)))

    async def close(self) -> None:
        """Ends polls with a clean end of stream, then saves what was left for later."""
        if self._timer is not None:
            self._timer.cancel()
        self.requests.end_all()
        await asyncio.sleep(0)
        for part in (self._door, self.derp):
            if part is not None:
                await part.close()
        if self.stun is not None:
            self.stun.close()
        if self._runner is not None:
            await self._runner.cleanup()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "coordinator"):
            self.coordinator.registry.save_later_changes()
            while not self._outbox.empty():
                await self._save(self._outbox.get_nowait())
            await self._save(self.coordinator.take_outputs())
        await self.storage.close()

    async def _private_key(self, name: str, kind: type[Any]) -> Any:
        stored = await self.storage.meta(name)
        if stored is not None:
            return kind.parse(stored.decode())
        made: PrivateKey = kind.generate(self._entropy)
        await self.storage.set_meta(name, made.text().encode())
        return made

    async def _start_relay(self, private: NodePrivate) -> str:
        """Relay and STUN; returns the pin of the relay's certificate."""
        settings, pin = self.settings, ""
        if settings.derp_listen is not None:
            wall_s = self._clock.wall_ns() / 1e9
            certificate = load_certificate(settings.state, [settings.relay_host], private.public(), wall_s)
            self.derp = DerpServer(private, clock=self._clock, entropy=self._entropy, admit=self._admits)
            tls = None if settings.is_simulated else certificate.context
            self.derp_address = await self._listen(self.derp.listen, settings.derp_listen, "--derp-listen", tls)
            pin = "" if settings.is_simulated else certificate.pin
        if settings.stun_listen is not None:
            self.stun = self.stun or StunServer()
            self.stun_address = await self._listen(self.stun.listen, settings.stun_listen, "--stun-listen")
        return pin

    async def _listen(self, listen: Any, address: AddrPort, flag: str, *more: Any) -> AddrPort:
        try:
            bound: AddrPort = await listen(str(address.ip), address.port, *more)
        except OSError as err:
            raise ConfigError(f"{flag}: cannot listen on {address}: {err.strerror or err}") from None
        return bound

    def _control_tls(self) -> ssl.SSLContext | None:
        if self.settings.tls_cert is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.settings.tls_cert, self.settings.tls_key)
        except (OSError, ssl.SSLError) as err:
            raise ConfigError(f"--tls-cert {self.settings.tls_cert}: {reason_of(err)}") from None
        return context

    def _config(self, pin: str) -> CoordConfig:
        settings = self.settings
        derp_port = self.derp_address.port if self.derp_address is not None else 0
        stun_port = self.stun_address.port if self.stun_address is not None else 0
        return CoordConfig(
            public_url=self.url,
            base_domain=settings.base_domain,
            prefix_v4=settings.prefix_v4,
            prefix_v6=settings.prefix_v6,
            derp_map=settings.derp_map(derp_port, stun_port, pin),
            resolvers=_resolvers(settings.resolvers),
            split_dns={zone: _resolvers(addresses) for zone, addresses in settings.split_dns.items()},
            node_expiry_s=settings.node_expiry_s,
            ephemeral_timeout_s=settings.ephemeral_timeout_s,
        )

    # Driving the coordinator

    def moment(self) -> Moment:
        return Moment(self._clock.now(), self._clock.wall_ns())

    def drain(self) -> None:
        """Deliver the coordinator's outputs and set its timer; call after every verb."""
        outputs = self.coordinator.take_outputs()
        if outputs:
            needs_store = any(isinstance(one, Save) for one in outputs)
            if needs_store or self._is_delivering or not self._outbox.empty():
                self._outbox.put_nowait(outputs)
            else:
                self._deliver(outputs)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self.coordinator.next_deadline()
        if deadline is not None:
            self._timer_at = deadline.at
            delay = max(0.0, deadline.at - self._clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        try:
            self.coordinator.on_deadline(Moment(max(self._timer_at, self._clock.now()), self._clock.wall_ns()))
        finally:
            # Whatever goes wrong with one node: the clock of the others goes on.
            self.drain()

    async def _deliver_all(self) -> None:
        while True:
            outputs = await self._outbox.get()
            self._is_delivering = True
            try:
                await self._save(outputs)
                self._deliver(outputs)
            except Exception:
                log.exception("outputs could not be delivered")
            finally:
                self._is_delivering = False

    async def _save(self, outputs: list[Event]) -> None:
        saves = [one for one in outputs if isinstance(one, Save)]
        if not saves:
            return
        try:
            await self.storage.save(saves)
        except StateError as err:
            # The tailnet goes on from memory; the record is written again with its next change.
            log.error(fields("cannot save", reason=err))

    def _deliver(self, outputs: list[Event]) -> None:
        for output in outputs:
            match output:
                case RegisterAnswered(token, response):
                    self.requests.answer_register(token, response)
                case FrameReady(session, message):
                    self.requests.send_frame(session, message)
                case SessionEnded(session):
                    self.requests.end_session(session)
                case ApprovalWanted(auth_id, hostname):
                    log.info(fields("node waits for approval", hostname=hostname, approve=auth_id))
                case Save(table="nodes", document=None):
                    self._revoke_strangers()

    # Connections

    def _admits(self, key: NodePublic) -> bool:
        if not self.settings.verify_clients:
            return True
        return hasattr(self, "coordinator") and self.coordinator.is_admitted(str(key), self._clock.wall_ns())

    def _revoke_strangers(self) -> None:
        """Relay clients whose node was deleted are cut off."""
        if self.derp is None or not self.settings.verify_clients:
            return
        connected = self.derp.router.keys()
        for key in connected:
            if not self._admits(key):
                self.derp.revoke(key)

    async def _serve_control(self, upgrade: Upgrade) -> None:
        if upgrade.target.partition("?")[0] != "/ts2021":
            upgrade.refuse(404, "not found")
            return
        stream = accept_control(
            upgrade, self._control_key, entropy=self._entropy, oldest_version=MIN_CAPABILITY_VERSION
        )
        if stream is None:
            return
        try:
            await Http2Server(stream, self.requests.handler(stream.peer)).serve()
        except ProtocolError as err:
            log.debug(fields("control connection ended", reason=err))

    @property
    def control_key_text(self) -> str:
        """`mkey:…` as /key tells it."""
        return str(self._control_key.public())

    # Policy

    async def _watch_policy(self) -> None:
        while self.settings.policy_file is not None:
            await asyncio.sleep(1.0)
            self.reload_policy(only_if_changed=True)

    def reload_policy(self, *, only_if_changed: bool = False) -> None:
        """Read the policy file again; a broken one leaves the old policy in force and says where it is broken."""
        policy = self.policy.reload(only_if_changed=only_if_changed)
        if policy is not None:
            self.coordinator.registry.set_policy(policy)
            self.coordinator.settle(self.moment())
            self.drain()

    async def set_policy(self, text: str) -> None:
        """Store and apply a policy. Raises `PolicyError`, or `ConfigError` when a file rules."""
        policy = self.policy.replace(text)
        await self.storage.set_meta("policy", text.encode())
        self.coordinator.registry.set_policy(policy)
        self.coordinator.settle(self.moment())
        self.drain()


def _resolvers(addresses: tuple[str, ...]) -> tuple[Resolver, ...]:
    return tuple(Resolver(addr=address) for address in addresses)
