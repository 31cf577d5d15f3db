"""The one place that knows everything: settings to hull, engine, LocalAPI and proxies, and back down again."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
from collections.abc import Callable
from functools import partial

import tsnative
from tsd.base.addr import AddrPort, parse_number
from tsd.base.clock import Clock, SystemClock
from tsd.base.entropy import system_entropy
from tsd.base.errors import HullError, StateError, TsdError, reason_of
from tsd.base.keys import NodePrivate
from tsd.base.version import LONG_VERSION
from tsd.daemon.cleanup import undo_leftovers
from tsd.daemon.config import load_config
from tsd.daemon.debugserver import DebugServer
from tsd.daemon.flags import Settings
from tsd.daemon.logsetup import LogTap, announce_http_proxy, announce_socks5
from tsd.daemon.statefiles import OpenedState
from tsd.engine.account.states import State
from tsd.engine.engine import Engine, EngineOptions
from tsd.engine.names.ownlookup import OwnLookup
from tsd.engine.path.portmapping import PortMapping
from tsd.engine.path.sockets import host_udp
from tsd.hull import DatagramPort, Hull, Stream
from tsd.localapi.engine_backend import EngineBackend
from tsd.localapi.server import LocalApiServer
from tsd.tailcfg.derpmap import DERPRegion
from tsd.transport.derp import DerpOptions
from tsd.transport.dial import HostDial
from tsd.transport.host import resolve_host
from tsd.transport.netprobe import https_latency
from tsd.transport.proxy_env import ProxySettings
from tsd.transport.tls import quiet_tls_ends
from tsplatform.cache_files import CacheFiles
from tsplatform.choose import choose_hull
from tsplatform.dnsstream import ServicePort, open_service
from tsplatform.links import LinkWatcher
from tsplatform.state_file import FileStore, MemoryStore
from tsplatform.userspace.hull import build_userspace_hull
from tsplatform.userspace.proxy import ProxyServer
from tsplatform.userspace.tun import NetstackTun

log = logging.getLogger(__name__)

STORE_RETRY_S = 30.0
PORT_HINT = "another process may hold the port"


class ProxyDialer:
    """The engine's dialer as the proxies want it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def dial(self, host: str, port: int) -> Stream:
        try:
            return await self._engine.dialer.dial(host, port)
        except TimeoutError as err:
            raise OSError(f"{host}:{port} does not answer") from err

    async def open_datagram(self, host: str, port: int) -> tuple[DatagramPort, AddrPort]:
        ip = (await self._engine.dialer.addresses(host))[0]
        opened = await self._engine.dialer.open_datagram(ip)
        if opened is None:
            raise OSError(f"{host} is not in the tailnet: UDP is relayed to tailnet addresses only")
        return opened, AddrPort(ip, port)


class DaemonService:
    """Implements `lifecycle.Service`."""

    def __init__(self, settings: Settings, state: OpenedState, tap: LogTap) -> None:
        self._settings = settings
        self._state = state
        self._tap = tap
        self._api = LocalApiServer()
        self._engine: Engine | None = None
        self._proxies: list[ProxyServer] = []
        self._debug: DebugServer | None = None
        self._ended = asyncio.Event()
        self._broken: HullError | None = None
        self.on_status: Callable[[str], None] | None = None

    async def start(self) -> None:
        settings = self._settings
        tsnative.load()  # a bad TSD_PUMP or TSD_AEAD is told now, not at the first login
        quiet_tls_ends(asyncio.get_running_loop())
        if self._state.listener is not None:
            await self._api.adopt(self._state.listener.sock)
        else:
            await self._api.listen(settings.socket)
        engine = self._engine = self._build_engine()
        engine.on_state = self._on_state
        engine.options.hull.on_lost = self._break
        engine.dialer.open_service = partial(open_service, engine.resolver.query, engine.spawn)
        engine.dialer.open_service_port = partial(ServicePort, engine.resolver.query, engine.spawn)
        backend = EngineBackend(
            engine,
            proxy_origin=engine.options.hull.proxy_origin,
            log_lines=self._tap.follow,
            stop=self._ended.set,
            pump=tsnative.describe(),
            state_dir=str(settings.state_dir or ""),
            reload=self.reload if settings.config is not None else None,
        )
        self._watch_state(engine)
        self._apply_config(engine)
        await engine.start()
        await _start_hull(engine)
        self._start_proxies(engine)
        if settings.debug:
            await self._start_debug(engine, settings.debug)
        self._api.set_backend(backend)
        self._on_state(engine.account.state)
        log.info("data path: %s", tsnative.describe())

    def _watch_state(self, engine: Engine) -> None:
        """What is wrong with the state file, now and later; a write that failed is tried again."""
        if self._state.notice:
            engine.health.set("state-store-recovered", error=self._state.notice)
        set_aside = [f"{name}: {reason}" for name, reason in engine.profiles.set_aside.items()]
        engine.health.set_if("profile-set-aside", bool(set_aside), error="; ".join(set_aside))
        store = self._state.store
        if isinstance(store, FileStore):
            store.on_trouble = lambda text: engine.health.set_if("state-store-write", bool(text), error=text)
            store.on_trouble(store.trouble)
            engine.spawn(_retry_writes(store))

    def _build_engine(self) -> Engine:
        """A store whose profiles cannot be read gives an engine that says so, and the file is left alone."""
        options = self._options()
        try:
            return Engine(options)
        except StateError as err:
            log.error("%s", err)
            options.store_error = str(err)
            options.hull.store = MemoryStore(f"{options.hull.store.where} (not readable)")
            return Engine(options)

    async def wait(self) -> None:
        await self._ended.wait()
        if self._broken is not None:
            raise self._broken

    def _break(self, err: HullError) -> None:
        self._broken = err
        self._ended.set()

    async def reload(self) -> None:
        settings = self._settings
        if self._engine is None:
            return
        engine = self._engine
        engine.options.hull.verify()
        try:
            fresh = load_config(settings.config_spec) if settings.config_spec else None
            if fresh is not None:
                engine.account.edit_prefs(dict(fresh.masked_prefs))
                engine.account.is_config_locked = fresh.is_locked
        except TsdError as err:
            engine.health.set("apply-disk-config", error=err)
            raise
        engine.health.clear("apply-disk-config")

    async def stop(self) -> None:
        for proxy in self._proxies:
            proxy.close()
        if self._debug is not None:
            self._debug.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()
        await self._api.close()

    def _options(self) -> EngineOptions:
        settings = self._settings
        clock = SystemClock()
        hull = self._hull()
        protect = hull.underlay.protect
        plain_derp = settings.knob_on("TS_DEBUG_USE_DERP_HTTP")
        proxies = ProxySettings.from_environ(settings.env)
        resolve = resolve_host if hull.tun.is_userspace else OwnLookup(protect, hull.dns.base_resolvers)
        dial = HostDial(protect, clock, resolve)

        def derp_options(node_key: NodePrivate) -> DerpOptions:
            return DerpOptions(
                node_key, clock, system_entropy, protect, plain_http=plain_derp, proxies=proxies, resolve=resolve
            )

        async def probe(region: DERPRegion) -> float | None:
            return await https_latency(region, derp_options(NodePrivate.generate(system_entropy)))

        return EngineOptions(
            version=LONG_VERSION,
            hull=hull,
            clock=clock,
            entropy=system_entropy,
            new_core=partial(tsnative.load, settings.mtu_bytes),
            new_pump=tsnative.load_pump,
            open_udp=host_udp(protect),
            derp=derp_options,
            resolve_host=resolve,
            measure_https=probe,
            control_dial=dial,
            port_mapping=_port_mapping(settings, dial, hull, clock),
            environ=settings.env,
            wanted_port=settings.port,
            is_ephemeral=settings.is_ephemeral,
            never_direct_udp=settings.knob_on("TS_DEBUG_NEVER_DIRECT_UDP"),
            always_use_derp=settings.knob_on("TS_DEBUG_ALWAYS_USE_DERP"),
            write_keylog=_keylog(settings.knob("TSD_KEYLOG")),
            store_error=self._state.error,
            netmap_cache=self._netmap_cache(),
        )

    def _netmap_cache(self) -> CacheFiles | None:
        """Beside the state file; what an earlier run left is removed when the cache is off."""
        store = self._state.store
        if not isinstance(store, FileStore):
            return None
        files = CacheFiles(store.path, "netmap")
        if self._settings.knob_on("TS_USE_CACHED_NETMAP", default=True):
            return files
        files.keep_only([])
        return None

    def _hull(self) -> Hull:
        settings = self._settings
        is_up = settings.knob_on("TS_ASSUME_NETWORK_UP_FOR_TEST")

        def kernel(device: str) -> Hull:
            if not sys.platform.startswith("linux"):
                raise HullError(f"create {device}", "network devices are made on Linux only")
            from tsplatform.linux.hull import build_linux_hull  # it takes long, and most daemons have no device

            return build_linux_hull(
                device,
                self._state.store,
                settings.undo_folder,
                links=LinkWatcher(device, assume_up=is_up),
                mtu_bytes=settings.mtu_bytes,
                netfilter_kind=settings.knob("TS_DEBUG_FIREWALL_MODE"),
                loopback_port=parse_number(settings.knob("TS_DEBUG_NETSTACK_LOOPBACK_PORT"), 65535) or 0,
                offload=settings.knob_on("TSD_TUN_OFFLOAD", default=True),
            )

        undo_leftovers(settings.undo_folder, stays_closed=True)
        userspace = partial(
            build_userspace_hull, self._state.store, links=LinkWatcher(assume_up=is_up), mtu_bytes=settings.mtu_bytes
        )
        hull = choose_hull(settings.tun, kernel, userspace)
        if hull.kind != "linux":
            undo_leftovers(settings.undo_folder)
        return hull

    def _apply_config(self, engine: Engine) -> None:
        config = self._settings.config
        if config is None:
            return
        engine.account.is_config_locked = False
        engine.account.configure(dict(config.masked_prefs), config.auth_key)
        engine.account.is_config_locked = config.is_locked

    def _start_proxies(self, engine: Engine) -> None:
        settings = self._settings
        tun = engine.options.hull.tun
        netstack = tun if isinstance(tun, NetstackTun) else None
        wanted: dict[str, set[str]] = {}
        for listen, protocol in ((settings.socks5_server, "socks5"), (settings.http_proxy, "http")):
            if listen:
                wanted.setdefault(listen, set()).add(protocol)
        for listen, protocols in wanted.items():
            proxy = ProxyServer(ProxyDialer(engine), netstack, frozenset(protocols))
            try:
                local = proxy.start(listen)
            except OSError as err:
                raise listen_failure(listen, err) from None
            self._proxies.append(proxy)
            if "socks5" in protocols:
                announce_socks5(str(local))
            if "http" in protocols:
                announce_http_proxy(str(local))

    async def _start_debug(self, engine: Engine, listen: str) -> None:
        looked_at = engine.inspection
        self._debug = DebugServer({"/debug/metrics": looked_at.client_metrics, "/metrics": looked_at.user_metrics})
        try:
            log.info("debug server listening on %s", await self._debug.start(listen))
        except OSError as err:
            raise listen_failure(listen, err) from None

    def _on_state(self, state: State) -> None:
        engine = self._engine
        if self.on_status is None or engine is None:
            return
        self.on_status(_status_line(engine, state))


def listen_failure(listen: str, err: OSError) -> HullError:
    """In one line; asyncio and the resolver put more into their errors than a person wants to read."""
    reason = os.strerror(err.errno) if err.errno and err.errno > 0 else reason_of(err)
    return HullError(f"listen on {listen}", reason, PORT_HINT if err.errno == errno.EADDRINUSE else "")


async def _start_hull(engine: Engine) -> None:
    await engine.options.hull.start(
        engine.resolver.query,
        lambda code, text: engine.health.set_if(code, bool(text), error=text),
        lambda text: engine.health.set_if("dns-set-os-config-failed", bool(text), error=text),
    )


async def _retry_writes(store: FileStore) -> None:
    while True:
        await asyncio.sleep(STORE_RETRY_S)
        if store.trouble:
            store.retry()


def _status_line(engine: Engine, state: State) -> str:
    persist = engine.account.prefs.persist
    match state:
        case State.RUNNING | State.STARTING:
            login = persist.user_profile.login_name if persist is not None else ""
            addresses = " ".join(str(ip) for ip in engine.tailnet.own_addresses)
            return f"Connected; {login}; {addresses}" if state is State.RUNNING else "Starting"
        case State.NEEDS_LOGIN:
            return (
                f"Needs login: {engine.account.auth_url}" if engine.account.auth_url else "Needs login: run 'tsctl up'"
            )
        case State.STOPPED:
            return "Stopped; run 'tsctl up' to start"
        case State.NEEDS_MACHINE_AUTH:
            return "Waits for the approval of an admin of the tailnet"
        case State.NO_STATE if engine.options.store_error:
            return f"Does not work: {engine.options.store_error}"
    return state.text


def _port_mapping(settings: Settings, dial: HostDial, hull: Hull, clock: Clock) -> PortMapping | None:
    if settings.knob_on("TS_DISABLE_PORTMAPPER"):
        return None
    return PortMapping(
        open_udp=host_udp(hull.underlay.protect),
        dial=dial,
        clock=clock,
        entropy=system_entropy,
        upnp=not settings.knob_on("TS_DISABLE_UPNP"),
    )


def _keylog(path: str) -> Callable[[str], None] | None:
    """TSD_KEYLOG=FILE: session keys for Wireshark. For tests: it gives away the traffic."""
    if not path:
        return None
    log.warning("TSD_KEYLOG is set: session keys are written to %s", path)

    def write(line: str) -> None:
        with open(path, "a", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(line if line.endswith("\n") else line + "\n")

    return write


async def build(settings: Settings, state: OpenedState, tap: LogTap) -> DaemonService:
    """What `lifecycle.run` starts and stops."""
    return DaemonService(settings, state, tap)
