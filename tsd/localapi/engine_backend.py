"""`LocalBackend` over a real engine: each LocalAPI call as one call of the engine, answers in Go's JSON.

Nothing is decided here; what a call means stands in `tsd.engine`. Parts that this daemon does not have come from
`OptionalBackend`.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable

from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.base.errors import DecodeError, TsdError, reason_of
from tsd.base.keys import NodePublic
from tsd.engine.account.edits import EditContext, check
from tsd.engine.account.prefs import Prefs
from tsd.engine.account.prefs import PrefsError as EnginePrefsError
from tsd.engine.account.profiles import ProfileNotFound
from tsd.engine.account.states import State
from tsd.engine.engine import Engine
from tsd.engine.lock.orders import LockOrders
from tsd.engine.peers import Peer
from tsd.engine.report import status as shapes
from tsd.hull import Stream
from tsd.localapi.backend import ApiError, EtagMismatch, Json, OptionalBackend, PrefsError, Watch
from tsd.localapi.engine_debug import DebugActions
from tsd.routes.rules import DEFAULT_V4, DEFAULT_V6
from tsd.tailcfg.node import Node
from tsd.tailcfg.wire import to_go


class EngineBackend(OptionalBackend):
    """One engine behind one socket."""

    def __init__(
        self,
        engine: Engine,
        *,
        proxy_origin: Callable[[str, AddrPort], AddrPort | None] = lambda proto, host: None,
        log_lines: Callable[[], AsyncIterator[Json]] | None = None,
        stop: Callable[[], None] = lambda: None,
        pump: str = "",
        state_dir: str = "",
        reload: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._engine = engine
        self._proxy_origin = proxy_origin
        self._log_lines = log_lines
        self._stop = stop
        self._pump = pump
        self._reload = reload
        self._debug = DebugActions(engine, state_dir)

    # --- status

    def status(self, with_peers: bool = True) -> Json:
        engine, account, tailnet = self._engine, self._engine.account, self._engine.tailnet
        netmap = tailnet.netmap if account.self_node is not None else None
        own = self._own_addresses()
        out: Json = {
            "Version": engine.options.version,
            "TUN": not engine.options.hull.tun.is_userspace,
            "BackendState": account.state.text,
        }
        if account.has_node_key:
            out["HaveNodeKey"] = True
        out |= {"AuthURL": account.auth_url, "TailscaleIPs": own or None, "Self": self._self_status()}
        exit_node = self._exit_node_status()
        if exit_node:
            out["ExitNodeStatus"] = exit_node
        suffix = netmap.magic_suffix if netmap is not None else ""
        out |= {
            "Health": self._health_texts(),
            "MagicDNSSuffix": suffix,
            "CurrentTailnet": None
            if netmap is None
            else {"Name": netmap.domain, "MagicDNSSuffix": suffix, "MagicDNSEnabled": netmap.dns.proxied},
            "CertDomains": list(netmap.dns.cert_domains) if netmap is not None and netmap.dns.cert_domains else None,
            "ExtraRecords": to_go(list(netmap.dns.extra_records))
            if netmap is not None and netmap.dns.extra_records
            else None,
            "Peer": self._peer_statuses() if with_peers and netmap is not None else None,
            "User": self._users(),
            "ClientVersion": to_go(netmap.client_version) if netmap is not None and netmap.client_version else None,
            "Pump": self._pump + engine.inspection.pump_manner(),
        }
        return out

    def _own_addresses(self) -> list[str]:
        """Those of the netmap; before one came, those that the profile had last time."""
        engine = self._engine
        live = [str(ip) for ip in engine.tailnet.own_addresses]
        return live or (list(engine.profiles.addresses()) if engine.account.has_node_key else [])

    def _self_status(self) -> Json:
        engine = self._engine
        key = engine.account.node_key
        node = engine.account.self_node
        ports = engine.peerapi.ports
        return shapes.self_status(
            node,
            public_key=str(key.public() if key is not None else NodePublic.zero()),
            host_name=engine.account.prefs.hostname or engine.facts.hostname,
            os_name=engine.facts.os,
            endpoints=[str(e.address) for e in engine.reach.endpoints],
            relay_code=engine.derp_code(engine.reach.home),
            peerapi_urls=[f"http://{AddrPort(ip, port)}" for ip, port in ports.items()],
            is_online=engine.is_control_connected,
            known_addresses=self._own_addresses(),
        )

    def _health_texts(self) -> list[str]:
        engine = self._engine
        texts = engine.health.texts()
        if engine.tailnet.plan.hidden_routes and engine.account.state is State.RUNNING:
            texts.append("Some peers are advertising routes but --accept-routes is false")
        return texts

    def _exit_node_status(self) -> Json | None:
        wishes = self._engine.tailnet.plan.wishes
        if wishes is None or not wishes.wants_exit_node:
            return None
        for peer in self._engine.tailnet.peers:
            if wishes.is_exit_node(peer.node):
                return {
                    "ID": peer.node.stable_id,
                    "Online": bool(peer.node.online),
                    "TailscaleIPs": list(peer.node.addresses or ()),
                }
        return None

    def _peer_statuses(self) -> Json:
        engine = self._engine
        wall_ns = engine.tailnet.keys.now_ns()
        own = engine.account.self_node
        own_user = own.user if own is not None else 0
        can_share = own is not None and own.has_cap(shapes.CAP_FILE_SHARING)
        return {
            str(peer.node_key): shapes.peer_status(peer, self._live(peer), wall_ns, own_user, can_share)
            for peer in engine.tailnet.peers
        }

    def _live(self, peer: Peer) -> shapes.PeerLive:
        engine = self._engine
        plane = engine.plane
        wishes = engine.tailnet.plan.wishes
        is_exit = wishes is not None and wishes.wants_exit_node and wishes.is_exit_node(peer.node)
        code = engine.derp_code(peer.node.home_region)
        if plane is None:
            return shapes.PeerLive(relay_code=code, is_exit_node=is_exit)
        now = engine.options.clock.now()
        activity = plane.core.activity(peer.handle)
        path = plane.magicsock.path(peer.handle, now)
        since_s = now - activity.last_send
        is_active = bool(activity.last_send) and since_s < shapes.ACTIVE_S
        last_write_ns = engine.options.clock.wall_ns() - int(since_s * 1e9) if activity.last_send else 0
        return shapes.PeerLive(
            cur_addr=path.cur_addr,
            relay_code=code,
            rx_bytes=activity.rx_bytes,
            tx_bytes=activity.tx_bytes,
            last_write_ns=last_write_ns,
            last_handshake_ns=plane.wireguard.last_handshake_wall_ns(peer.handle),
            is_active=is_active,
            is_in_engine=plane.wireguard.has_peer(peer.handle),
            is_exit_node=is_exit,
        )

    def _users(self) -> Json | None:
        netmap = self._engine.tailnet.netmap
        if netmap is None:
            return None
        return {str(user_id): to_go(profile) for user_id, profile in sorted(netmap.users.items())}

    def suggest_exit_node(self) -> Json:
        tailnet = self._engine.tailnet
        node = tailnet.wishes.suggested_exit_node(tailnet.netmap) if tailnet.netmap is not None else None
        if node is None:
            return {"ID": "", "Name": ""}
        found: Json = {"ID": node.stable_id, "Name": node.name}
        location = node.hostinfo.location if node.hostinfo is not None else None
        return found | {"Location": to_go(location)} if location is not None else found

    def firewall_wiring(self) -> list[str]:
        return self._engine.options.hull.firewall_wiring()

    def check_ip_forwarding(self) -> str:
        """For any routes: asked before they are advertised."""
        return self._engine.options.hull.forwarding_trouble((DEFAULT_V4, DEFAULT_V6))

    # --- prefs and login

    def prefs(self) -> Json:
        return self._engine.account.prefs.to_go()

    async def edit_prefs(self, masked: Json) -> Json:
        context = EditContext(is_config_locked=self._engine.account.is_config_locked)
        try:
            return self._engine.account.edit_prefs(masked, context).to_go()
        except EnginePrefsError as err:
            raise PrefsError(str(err)) from None

    async def check_prefs(self, prefs: Json) -> None:
        try:
            check(Prefs.from_go(prefs), EditContext())
        except EnginePrefsError as err:
            raise PrefsError(str(err)) from None

    async def start(self, options: Json) -> None:
        await self._engine.account.start(options)

    async def login_interactive(self) -> None:
        await self._engine.account.login_interactive()

    async def logout(self, reason: str = "") -> None:
        await self._engine.account.logout()

    async def reset_auth(self) -> None:
        self._engine.account.reset_auth()

    def profiles(self) -> list[Json]:
        return [profile.to_go() for profile in self._engine.profiles.list()]

    def current_profile(self) -> Json:
        return self._engine.profiles.current.to_go()

    async def new_profile(self) -> None:
        self._engine.account.new_profile()

    async def switch_profile(self, profile_id: str) -> None:
        try:
            self._engine.account.switch_profile(profile_id)
        except ProfileNotFound:
            raise KeyError(profile_id) from None

    async def delete_profile(self, profile_id: str) -> None:
        try:
            self._engine.account.delete_profile(profile_id)
        except ProfileNotFound:
            return

    def operator_user(self) -> str:
        return self._engine.account.prefs.operator_user

    # --- bus

    def watch(self, mask: int) -> Watch:
        engine = self._engine
        initial: Json = {}
        if mask & 2:
            initial["State"] = engine.account.state.value
            if engine.account.state is State.NEEDS_LOGIN and engine.account.auth_url:
                initial["BrowseToURL"] = engine.account.auth_url
        if mask & 4:
            initial["Prefs"] = self.prefs()
        if mask & 8 and engine.account.self_node is not None:
            initial["SelfChange"] = engine.inspection.self_node()
            initial["NetMap"] = engine.inspection.netmap()
        if mask & 128:
            initial["Health"] = engine.health.state()
        if mask & (1 << 14):
            initial["InitialStatus"] = self.status()
        return engine.bus.watch(mask, initial)

    # --- the tailnet

    async def ping(self, ip: str, kind: str, size: int) -> Json:
        return await self._engine.ping(ip, kind, size)

    def whois(self, addr: str, proto: str) -> Json | None:
        """Raises ApiError 400 for an address that is none."""
        found = self._find_node(addr, proto)
        netmap = self._engine.tailnet.netmap
        if found is None or netmap is None:
            return None
        node, source = found
        profile = netmap.users.get(node.user)
        own = self._engine.own_address_for(source) if source is not None else None
        caps = self._engine.tailnet.rules.filter.caps(source, own) if source is not None and own is not None else {}
        return {
            "Node": shapes.go_node(node, netmap.magic_suffix),
            "UserProfile": to_go(profile)
            if profile is not None
            else {"ID": node.user, "LoginName": "", "DisplayName": ""},
            "CapMap": {name: values or None for name, values in caps.items()} or None,
        }

    def _find_node(self, addr: str, proto: str) -> tuple[Node, IPAddress | None] | None:
        own = self._engine.account.self_node
        if addr.startswith("nodekey:"):
            try:
                key = NodePublic.parse(addr)
            except DecodeError as err:
                raise ApiError(400, f"invalid node key: {err.reason}") from None
            if own is not None and own.key == addr:
                return own, None
            peer = self._engine.tailnet.peers.by_key(key)
            return (peer.node, next(iter(peer.addresses), None)) if peer is not None else None
        ip, port = _parse_addr(addr)
        for name in (proto,) if proto else ("tcp", "udp"):
            origin = self._proxy_origin(name, AddrPort(ip, port)) if port else None
            if origin is not None:
                ip = origin.ip
                break
        if own is not None and self._engine.is_own(ip):
            return own, ip
        by_address = self._engine.tailnet.peers.by_address(ip)
        return (by_address.node, ip) if by_address is not None else None

    async def dial(self, network: str, host: str, port: int) -> Stream | str:
        engine = self._engine
        if engine.account.state is not State.RUNNING:
            return _host_port(host, port)
        try:
            addresses = await engine.dialer.addresses(host)
        except OSError as err:
            raise ApiError(502, f"resolve failure: {err}") from None
        routed = [ip for ip in addresses if engine.is_overlay(ip)]
        held = next((reason for ip in addresses if (reason := engine.held_back(ip))), "") if not routed else ""
        if held:
            raise ApiError(502, f"dial failure: {held}")
        if not routed or network.startswith("udp"):
            return _host_port(str(addresses[0]), port)
        failure: Exception = OSError("no address")
        for ip in routed:
            try:
                return await engine.dialer.dial_ip(AddrPort(ip, port))
            except (OSError, TimeoutError) as err:
                failure = err
        raise ApiError(502, f"dial failure: {reason_of(failure) or 'timeout'}")

    def derp_map(self) -> Json | None:
        derp_map = self._engine.reach.derp_map
        if not derp_map.regions:
            return None
        shown: Json = to_go(derp_map)
        return shown

    def dns_config(self) -> Json | None:
        netmap = self._engine.tailnet.netmap
        return to_go(netmap.dns) if netmap is not None else None

    def dns_os_config(self) -> Json:
        dns = self._engine.options.hull.dns
        found: Json = {"Nameservers": dns.base_resolvers(), "SearchDomains": [], "MatchDomains": []}
        return found | {"Manager": dns.describe()}

    async def dns_query(self, name: str, qtype: str) -> tuple[bytes, list[Json], Json]:
        from tsd.dns import wire  # slow to import, and most runs never ask

        try:
            query = wire.question(name, qtype, query_id=0)
        except DecodeError as err:
            raise ApiError(400, err.reason) from None
        answer = await self._engine.resolver.ask(query, over_tcp=True)
        told: Json = {"Failure": answer.failure} if answer.failure else {}
        if answer.upstream:
            told = {"AnsweredBy": {"Addr": answer.upstream, "Transport": answer.transport}}
        return answer.wire, self._engine.resolver.resolvers_json(name), told

    def cert_domains(self) -> list[str] | None:
        netmap = self._engine.tailnet.netmap
        return sorted(netmap.dns.cert_domains) if netmap is not None and netmap.dns.cert_domains else None

    def services(self) -> Json | None:
        return {} if self._engine.tailnet.netmap is not None else None

    def node_by_id(self, node_id: int) -> Json | None:
        netmap = self._engine.tailnet.netmap
        if netmap is None:
            return None
        node = netmap.self_node if netmap.self_node.id == node_id else netmap.peers.get(node_id)
        return shapes.go_node(node, netmap.magic_suffix) if node is not None else None

    def user_profile(self, user_id: int) -> Json | None:
        netmap = self._engine.tailnet.netmap
        profile = netmap.users.get(user_id) if netmap is not None else None
        return to_go(profile) if profile is not None else None

    def tka_status(self) -> Json:
        return self.lock().status()

    def lock(self) -> LockOrders:
        return LockOrders(self._engine)

    # --- serve config: stored and given back, not acted on

    def _serve_key(self) -> str:
        return f"_serve/{self._engine.profiles.current.id}"

    def serve_config(self) -> bytes | None:
        return self._engine.options.hull.store.get(self._serve_key())

    async def set_serve_config(self, raw: bytes, if_match: str) -> None:
        if if_match and if_match != hashlib.sha256(self.serve_config() or b"null").hexdigest():
            raise EtagMismatch("etag mismatch")
        if raw.strip() not in (b"{}", b"null", b""):
            raise TsdError("updating config: this daemon does not serve yet; only an empty serve config is accepted")
        self._engine.options.hull.store.put(self._serve_key(), b"{}")

    # --- looking inside

    def user_metrics(self) -> str:
        return self._engine.inspection.user_metrics()

    def client_metrics(self) -> str:
        return self._engine.inspection.client_metrics()

    async def debug(self, action: str, body: bytes) -> tuple[str, bytes]:
        return await self._debug.run(action, body)

    def log_tap(self) -> AsyncIterator[Json]:
        return self._log_lines() if self._log_lines is not None else _no_lines()

    async def reload_config(self) -> bool:
        if self._reload is None:
            return False
        await self._reload()
        return True

    async def shutdown(self) -> None:
        self._stop()


async def _no_lines() -> AsyncIterator[Json]:
    for line in list[Json]():
        yield line


def _parse_addr(addr: str) -> tuple[IPAddress, int]:
    """An IP, or ip:port. Raises ApiError 400."""
    try:
        parsed = AddrPort.parse(addr)
        return parsed.ip, parsed.port
    except DecodeError:
        pass
    try:
        return parse_ip(addr.strip("[]")), 0
    except DecodeError:
        raise ApiError(400, f"invalid 'addr' parameter: {addr!r} is neither an IP nor ip:port") from None


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
