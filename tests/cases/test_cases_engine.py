"""Cases that need a whole engine: maps with every kind of oddity, clocks, links, exit nodes, starting and stopping."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
from typing import Any

import pytest

from harness.loneengine import DERP_MAP, OWN, Keys, LoneEngine, lone_engine, peer_json
from tsd.base.addr import parse_ip
from tsd.base.clock import ManualClock
from tsd.base.errors import TsdError
from tsd.disco.box import is_disco
from tsd.engine.account.states import State
from tsd.hull import LinkState
from tsd.packet.build import icmp_echo_request
from tsd.tailcfg.mapresponse import decode_map_response
from tsplatform.state_file import MemoryStore

LONG = "9" * 5000
ODD: list[Any] = [
    None, "", 0, -1, 2**64, 1.5, True, [], {}, [None], [""], ["x"], "\x00\x1b[2J", "a" * 70, "a..b", "x y", "\ud800",
    "äö", "0001-01-01T00:00:00Z", "9999-99-99T00:00:00Z", "1.2.3.4:" + LONG, ["1.2.3.4:" + LONG], ["0.0.0.0/0", "::/0"],
    ["fe80::1%eth0/128"], ["[fe80::1%eth0]:1", "[::]:0"], {"Hostname": "\ud800", "OS": 5}, {"Services": [None]},
    {"Services": [{"Proto": "peerapi4", "Port": 99999999}]}, "127.3.3.40:" + LONG, "nodekey:" + "0" * 64, "nodekey:zz",
]  # fmt: skip
MORE_FIELDS = (
    "KeyExpiry", "LastSeen", "Tags", "PrimaryRoutes", "CapMap", "Capabilities", "Sharer", "Machine", "DERP", "IsJailed",
    "IsWireGuardOnly", "ExitNodeDNSResolvers", "SelfNodeV4MasqAddrForThisPeer", "Expired", "UnsignedPeerAPIOnly",
)  # fmt: skip


def _echo(target: str) -> bytes:
    return icmp_echo_request(OWN.packed, parse_ip(target).packed, 1, 1)


async def _look(lone: LoneEngine, target: str) -> None:
    """Everything that reads a peer."""
    json.dumps(lone.backend.status())
    json.dumps(lone.backend.whois(f"{target}:1", ""))
    lone.backend.watch(0xFFFF).close()
    for address in (target, "100.64.0.3"):
        reverse = ".".join(reversed(address.split("."))) + ".in-addr.arpa"
        await lone.backend.dns_query(reverse, "PTR")
    await lone.backend.dns_query("no.tail.example", "A")
    lone.hull.tun.inject([_echo(target)])  # type: ignore[attr-defined]


async def test_w21_a_field_of_a_peer_missing_or_odd() -> None:
    """Another peer keeps its way and its place in status; the odd one is whole again when it is told properly."""
    async with lone_engine() as lone:
        lone.first_map(peer_json(3))
        for turn, name in enumerate((*peer_json(2), *MORE_FIELDS)):
            for value in (*ODD[:3], *ODD[3 + turn % 8 :: 8]):
                raw = json.dumps({"PeersChanged": [peer_json(2) | {name: value}]})
                lone.engine.on_map(decode_map_response(raw.encode()), False)
                assert lone.routed("100.64.0.3") == 3, (name, value)
                json.dumps(lone.backend.status())
            lone.map(PeersChanged=[peer_json(2), peer_json(3)])
            await _look(lone, "100.64.0.2")
            assert lone.routed("100.64.0.2") == 2, name
            lone.map(PeersRemoved=[2])


PARTS: dict[str, Any] = {
    "DERPMap": DERP_MAP,
    "PacketFilters": {"x": [{"SrcIPs": ["*"], "DstPorts": [{"IP": "*", "Ports": {"First": 0, "Last": 1}}]}]},
    "DNSConfig": {
        "Proxied": True,
        "Domains": ["tail.example"],
        "Resolvers": [{"Addr": "192.0.2.53"}],
        "Routes": {"corp.example": [{"Addr": "100.64.0.3"}]},
        "ExtraRecords": [{"Name": "x.tail.example", "Value": "100.64.0.9"}],
    },
    "UserProfiles": [{"ID": 7, "LoginName": "lab", "DisplayName": "L"}],
    "Health": ["x"],
    "DisplayMessages": {"a": {"Title": "t", "Text": "x", "Severity": "high"}},
    "ControlTime": "2026-01-01T00:00:00Z",
    "OnlineChange": {"3": True},
    "PeersChangedPatch": [{"NodeID": 3, "Endpoints": ["192.0.2.3:5"], "LastSeen": "2026-01-01T00:00:00Z"}],
    "PeersRemoved": [99],
    "Node": peer_json(1),
    "Domain": "example.com",
}


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _places(inner, (*path, key))
    return found


def _put(message: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copied: Any = json.loads(json.dumps(message))
    at = copied
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copied  # type: ignore[no-any-return]


async def test_w21_a_part_of_a_map_missing_or_odd() -> None:
    """Refused as a whole with a TsdError, or taken; either way the next good map makes everything good."""
    async with lone_engine() as lone:
        for turn, path in enumerate(_places(PARTS)):
            for value in (None, *ODD[turn % 16 :: 16]):
                message = json.dumps(_put(PARTS, path, value)).encode()
                try:
                    lone.engine.on_map(decode_map_response(message), False)
                except TsdError:
                    pass
                json.dumps(lone.backend.status())
            lone.first_map(peer_json(3))
            await _look(lone, "100.64.0.3")
            assert lone.routed("100.64.0.3") == 3 and lone.engine.account.state is State.RUNNING, path


async def test_w04_a_peer_without_any_way_becomes_reachable_later() -> None:
    async with lone_engine() as lone:
        lone.map(PeersChanged=[peer_json(2, Endpoints=None, HomeDERP=None)])
        lone.hull.tun.inject([_echo("100.64.0.2")])  # type: ignore[attr-defined]
        ping = asyncio.ensure_future(lone.backend.ping("100.64.0.2", "disco", 0))
        await asyncio.sleep(0)
        assert lone.sent == [] and not ping.done()
        lone.map(PeersChangedPatch=[{"NodeID": 2, "Endpoints": ["192.0.2.2:41641"]}])
        await asyncio.sleep(0.6)
        assert any(is_disco(data) for to, data in lone.sent if str(to) == "192.0.2.2:41641")
        ping.cancel()


async def test_n02_a_peer_that_came_by_delta_is_found_everywhere() -> None:
    async with lone_engine() as lone:
        lone.backend._engine.account.edit_prefs({"RouteAll": True, "RouteAllSet": True})
        routes = ["100.64.0.2/32", "10.9.0.0/24"]
        lone.map(PeersChanged=[peer_json(2, AllowedIPs=routes, PrimaryRoutes=routes[1:])])
        assert lone.routed("100.64.0.2") == lone.routed("10.9.0.7") == 2
        found = lone.backend.whois("100.64.0.2:1", "")
        assert found is not None and found["Node"]["ID"] == 2
        assert lone.engine.resolver.lookup("n2") == [parse_ip("100.64.0.2"), parse_ip("fd7a:115c:a1e0::2")]
        lone.hull.tun.inject([_echo("10.9.0.7")])  # type: ignore[attr-defined]
        assert lone.sent, "a packet for the subnet starts a way to its router"
        ping = asyncio.ensure_future(lone.backend.ping("10.9.0.7", "disco", 0))
        await asyncio.sleep(0)
        assert not ping.done()
        ping.cancel()


async def test_n03_patches_for_nobody_change_nothing() -> None:
    async with lone_engine() as lone:
        lone.first_map(peer_json(3))
        before = lone.backend.status()
        for patch in ({"NodeID": 999, "Online": False}, {"NodeID": 3}, {}, {"NodeID": -1}, {"NodeID": 2**70}):
            lone.map(PeersChangedPatch=[patch], OnlineChange={"999": True}, PeerSeenChange={"999": True})
        assert lone.backend.status() == before
        lone.map(PeersChangedPatch=[{"NodeID": 999}, None, {"NodeID": 3, "Online": False}])
        (peer,) = lone.backend.status()["Peer"].values()
        assert peer["Online"] is False


@pytest.mark.parametrize("peers", [{}, {"Peers": None}, {"Peers": []}])
async def test_n05_only_a_removal_removes(peers: dict[str, Any]) -> None:
    async with lone_engine() as lone:
        lone.first_map(peer_json(2))
        lone.map(**peers)
        assert lone.peer_ids() == [2] and lone.routed("100.64.0.2") == 2
        lone.map(**peers, PeersRemoved=[2])
        assert lone.peer_ids() == [] and lone.routed("100.64.0.2") is None
        lone.sent.clear()
        lone.hull.tun.inject([_echo("100.64.0.2")])  # type: ignore[attr-defined]
        assert lone.sent == []


async def test_n05_a_node_with_our_own_identity_is_no_peer() -> None:
    """A server that lists us among our peers (by number or by key) does not turn our own address into a route."""
    async with lone_engine() as lone:
        own_key = str(lone.key.public())
        lone.map(PeersChanged=[peer_json(1), peer_json(4, Key=own_key, Addresses=["100.64.0.1/32"]), peer_json(3)])
        assert lone.peer_ids() == [3]
        assert lone.routed("100.64.0.1") is None and lone.engine.is_own(OWN)


async def test_n19_other_prefixes_and_n20_ipv6_only() -> None:
    async with lone_engine() as lone:
        lone.first_map(
            peer_json(2, Addresses=["172.27.0.2/32", "fd00:1::2/128"], AllowedIPs=None),
            Node=peer_json(1, Key=str(lone.key.public()), Addresses=["172.27.0.1/32"], AllowedIPs=None),
        )
        status = lone.backend.status()
        (peer,) = status["Peer"].values()
        assert peer["TailscaleIPs"] == ["172.27.0.2", "fd00:1::2"] and status["TailscaleIPs"] == ["172.27.0.1"]
        assert lone.routed("172.27.0.2") == lone.routed("fd00:1::2") == 2
        only_v6 = peer_json(1, Key=str(lone.key.public()), Addresses=["fd7a:115c:a1e0::1/128"], AllowedIPs=None)
        lone.first_map(peer_json(2, Addresses=["fd7a:115c:a1e0::2/128"], AllowedIPs=None), Node=only_v6)
        assert lone.engine.account.state is State.RUNNING
        routes = [str(route) for route in lone.hull.router.config.routes]  # type: ignore[attr-defined]
        assert "fd7a:115c:a1e0::53/128" in routes and not any("." in route for route in routes)
        assert lone.engine.resolver.lookup("n2") == [parse_ip("fd7a:115c:a1e0::2")]


async def test_n21_every_peer_of_the_map_is_in_the_engine() -> None:
    """Whatever came before: another tailnet's plane, keys that changed, a peer that could not be used at first."""
    async with lone_engine() as lone:
        numbers = range(2, 18)
        lone.first_map(*(peer_json(n, Key="nodekey:zz" if n == 5 else None) for n in numbers))
        lone.map(PeersChanged=[peer_json(n, Key=str(Keys(n + 100).node.public())) for n in numbers])
        assert lone.engine.plane is not None
        for n in numbers:
            assert lone.routed(f"100.64.0.{n}") == n
            peer = lone.engine.tailnet.peers.by_id(n)
            assert peer is not None and lone.engine.plane.ensure_in_wireguard(peer.handle)
        assert len(lone.backend.status()["Peer"]) == len(numbers)


async def test_n24_relay_map_absent_empty_or_without_our_home() -> None:
    async with lone_engine() as lone:
        reach = lone.engine.reach
        lone.first_map(DERPMap=None)
        assert reach.home == 1 and reach.derp_map.region(1) is not None
        lone.map(DERPMap={"Regions": {}})
        assert reach.home == 1 and reach.derp_map.region(1) is not None
        assert "without a relay" in " ".join(lone.backend.status()["Health"])
        other = {"RegionID": 2, "Nodes": [{"Name": "2a", "RegionID": 2, "HostName": "b", "IPv4": "192.0.2.7"}]}
        lone.map(DERPMap={"Regions": {"2": other}})
        assert reach.home != 1 and lone.backend.status()["Health"] == []
        await asyncio.sleep(0.2)
        assert any(str(to).startswith("192.0.2.7:") for to, _ in lone.sent), "the new relay is measured"


class _CountingStore(MemoryStore):
    writes = 0

    def put(self, name: str, value: bytes | None) -> None:
        self.writes += self.get(name) != value
        super().put(name, value)


async def test_s06_an_idle_hour_writes_nothing() -> None:
    store, clock = _CountingStore(), ManualClock()
    async with lone_engine(store=store, clock=clock) as lone:
        lone.first_map(peer_json(2))
        before = store.writes
        for minute in range(60):
            clock.advance(60.0)
            lone.map(KeepAlive=True)
            lone.map(OnlineChange={"2": bool(minute & 1)}, PeerSeenChange={"2": True})
            lone.engine.account.update_state()
        assert store.writes == before


WALL_2026_NS = 1_790_000_000 * 10**9


@pytest.mark.parametrize("year", [1970, 2099])
async def test_s12_a_wrong_clock_expires_nobody(year: int) -> None:
    """The server's time decides while ours is wrong, and ours again as soon as it is right."""
    clock = ManualClock(wall_ns=(year - 1970) * 31_556_952 * 10**9 + 10**9)
    async with lone_engine(clock=clock) as lone:
        node = peer_json(1, Key=str(lone.key.public()), KeyExpiry="2027-01-01T00:00:00Z")
        told = {"Node": node, "ControlTime": "2026-09-21T14:13:20Z"}
        lone.first_map(
            peer_json(2, KeyExpiry="2026-12-01T00:00:00Z"), peer_json(3, KeyExpiry="2026-01-01T00:00:00Z"), **told
        )
        for _ in range(2):
            assert lone.engine.account.state is State.RUNNING
            assert lone.routed("100.64.0.2") == 2 and lone.routed("100.64.0.3") is None
            clock._wall_ns = WALL_2026_NS
            lone.map(PeersChanged=[peer_json(2, KeyExpiry="2026-12-01T00:00:01Z")])
        json.dumps(lone.backend.status())


async def test_p02_after_a_wake_sockets_and_relays_are_new() -> None:
    async with lone_engine() as lone:
        lone.first_map(peer_json(2))
        before = dict(lone.sockets)
        lone.sent.clear()
        lone.hull.links.wake()  # type: ignore[attr-defined]
        await asyncio.sleep(0.3)
        assert lone.sockets[4] is not before[4] and lone.sockets[4].port == before[4].port
        assert any(to.port == 3478 for to, _ in lone.sent), "asks STUN again"


async def test_p03_no_network_at_all_is_quiet_and_ends_at_once() -> None:
    async with lone_engine() as lone:
        lone.first_map(peer_json(2))
        await asyncio.sleep(0.1)
        lone.hull.links.change(LinkState(is_up=False))  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        lone.sent.clear()
        await asyncio.sleep(0.5)
        assert len(lone.sent) <= 3, "no more than the end of a measurement that had begun"
        lone.hull.links.change(LinkState(is_up=True))  # type: ignore[attr-defined]
        await asyncio.sleep(0.2)
        assert lone.sent


EXIT = {"AllowedIPs": ["100.64.0.2/32", "0.0.0.0/0", "::/0"], "StableID": "n2"}


async def test_p05_nothing_goes_around_an_exit_node_that_is_away() -> None:
    async with lone_engine() as lone:
        engine, outside = lone.engine, parse_ip("203.0.113.9")
        lone.first_map(peer_json(2, **EXIT))
        engine.account.edit_prefs({"ExitNodeID": "n2", "ExitNodeIDSet": True})
        assert lone.routed("203.0.113.9") == 2 and engine.is_overlay(outside)
        for change in (
            {"PeersChanged": [peer_json(2, AllowedIPs=["100.64.0.2/32"])]},
            {"PeersChanged": [peer_json(2, **EXIT, KeyExpiry="2020-01-01T00:00:00Z")]},
            {"PeersRemoved": [2]},
        ):
            lone.map(**change)
            assert lone.routed("203.0.113.9") is None and "exit node n2" in engine.held_back(outside)
            with pytest.raises(OSError, match="does not go around it"):
                await engine.dialer.dial("203.0.113.9", 443)
            with pytest.raises(OSError, match="does not go around it"):
                await engine.dialer.open_datagram(outside)
            routes = {str(route) for route in lone.hull.router.config.routes}  # type: ignore[attr-defined]
            assert {"0.0.0.0/0", "::/0"} <= routes, "the host's routes stay"
        engine.account.edit_prefs({"ExitNodeID": "", "ExitNodeIDSet": True})
        assert engine.held_back(outside) == ""


async def test_p05_this_host_and_the_lan_stay_reachable() -> None:
    async with lone_engine() as lone:
        engine = lone.engine
        lone.hull.links.change(_lan())  # type: ignore[attr-defined]
        lone.first_map(peer_json(2, **EXIT))
        engine.account.edit_prefs({"ExitNodeID": "n2", "ExitNodeIDSet": True})
        assert not engine.is_overlay(parse_ip("127.0.0.1")) and engine.held_back(parse_ip("127.0.0.1")) == ""
        assert engine.is_overlay(parse_ip("192.0.2.7")), "the LAN goes through the exit node too"
        engine.account.edit_prefs({"ExitNodeAllowLANAccess": True, "ExitNodeAllowLANAccessSet": True})
        assert not engine.is_overlay(parse_ip("192.0.2.7")) and engine.is_overlay(parse_ip("203.0.113.9"))
        assert engine.is_overlay(parse_ip("100.64.0.2"))


def _lan() -> LinkState:
    from ipaddress import ip_network

    return LinkState({"eth0": (ip_network("192.0.2.9/32"),)}, "eth0", "", True, (ip_network("192.0.2.0/24"),))


async def test_u05_the_route_table_decides_for_each_target() -> None:
    async with lone_engine() as lone:
        engine = lone.engine
        lone.names["public.example"] = [parse_ip("203.0.113.9")]
        router = peer_json(2, AllowedIPs=["100.64.0.2/32", "fd7a:115c:a1e0::2/128", "10.9.0.0/24"])
        lone.first_map(router)
        assert not engine.is_overlay(parse_ip("10.9.0.7")), "routes that were not accepted"
        engine.account.edit_prefs({"RouteAll": True, "RouteAllSet": True})
        wanted = {"n2": True, "n2.tail.example": True, "N2.TAIL.example.": True, "10.9.0.7": True}
        wanted |= {
            "fd7a:115c:a1e0::2": True,
            "[fd7a:115c:a1e0::2]": True,
            "public.example": False,
            "203.0.113.9": False,
        }
        for host, in_overlay in wanted.items():
            addresses = await engine.dialer.addresses(host)
            assert addresses and engine.is_overlay(addresses[0]) is in_overlay, host
        for host in ("nosuch.example", "nosuch", "a..b", "", "x" * 300, "\ufffd", "fe80::1%eth0"):
            with pytest.raises(OSError):
                await engine.dialer.dial(host, 80)


async def test_u05_nobody_is_asked_for_names_of_the_tailnet_that_do_not_exist() -> None:
    """Before, the host's resolvers were, which is slow where they are not reached and tells them what is looked for."""
    async with lone_engine() as lone:
        lone.names["nosuch.tail.example"] = [parse_ip("203.0.113.9")]
        lone.first_map(peer_json(2, Name="n2.tail.example."))
        with pytest.raises(OSError, match="no such name"):
            await lone.engine.dialer.addresses("nosuch.tail.example")


async def test_u05_localhost_is_this_machine_though_a_peer_is_called_so() -> None:
    """As many phones are."""
    async with lone_engine() as lone:
        lone.names |= {host: [parse_ip("127.0.0.1")] for host in ("localhost", "LocalHost.", "x.localhost")}
        lone.first_map(peer_json(2, Name="localhost.tail.example."))
        for host in lone.names:
            assert await lone.engine.dialer.addresses(host) == [parse_ip("127.0.0.1")], host
        [address, _] = await lone.engine.dialer.addresses("localhost.tail.example")
        assert str(address) == "100.64.0.2"


async def test_u12_starting_and_stopping_leaves_nothing_behind() -> None:
    def resources() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())

    async def once(delay_s: float) -> None:
        lone = LoneEngine()
        await lone.engine.start()
        if delay_s > 0.001:
            lone.register()
            lone.first_map(peer_json(2))
            lone.engine.reach._set_home(1)
        await asyncio.sleep(delay_s)
        await lone.engine.close()

    await once(0.01)
    await asyncio.sleep(0.05)
    before = resources()
    for n in range(40):
        await once(n % 5 * 0.003)
    await asyncio.sleep(0.1)
    assert resources() == before


async def test_p06_packets_for_many_silent_peers_stay_few() -> None:
    async with lone_engine() as lone:
        lone.first_map(*(peer_json(n) for n in range(2, 102)))
        for _ in range(300):
            lone.hull.tun.inject([_echo(f"100.64.0.{n}") for n in (2, 50, 101)])  # type: ignore[attr-defined]
        assert lone.engine.plane is not None
        waiting = lone.engine.plane.wireguard._peers
        staged = [len(peer.staged) for peer in waiting.values()]
        assert 0 < max(staged) <= 128
        assert len(lone.sent) < 200, "one handshake and one round of pings per peer, not one per packet"
