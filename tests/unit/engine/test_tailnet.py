"""The tailnet without a plane: what watchers hear of maps, whose clock counts, peers that need special treatment."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tsd.base.addr import parse_ip
from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import DiscoPrivate
from tsd.base.notify import Mask
from tsd.engine.account.prefs import Prefs
from tsd.engine.report.bus import NotifyBus
from tsd.engine.report.health import Health
from tsd.engine.tailnet import Tailnet
from tsd.tailcfg.mapresponse import MapResponse, decode_map_response


def node(number: int, **changes: Any) -> dict[str, Any]:
    base = {"ID": number, "StableID": f"n{number}", "Name": f"n{number}.tn.example.", "User": 1}
    return base | {"Key": f"nodekey:{number:064x}", "Addresses": [f"100.64.0.{number}/32"]} | changes


def message(**parts: Any) -> MapResponse:
    return decode_map_response(json.dumps(parts).encode())


class Engine:
    """As much of an engine as a tailnet without a plane looks at."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        steps = SimpleNamespace(apply=lambda config: None, base_resolvers=list)
        self.options = SimpleNamespace(clock=self.clock, hull=SimpleNamespace(router=steps, dns=steps))
        self.disco_private = DiscoPrivate.generate(SeededEntropy(1))
        self.bus = NotifyBus("1", SeededEntropy(2))
        self.health = Health(self.clock)
        self.told_of_us: list[str] = []
        self.account = SimpleNamespace(
            prefs=Prefs.fresh(),
            self_node=None,
            update_state=lambda: None,
            on_self_node=lambda node, profile, network: self.told_of_us.append(node.name),
        )
        self.plane = None
        self.reach = SimpleNamespace(set_derp_map=lambda derp_map: None)
        self.resolver = SimpleNamespace(own_addresses=frozenset(), configure=lambda config: None)
        self.peerapi = SimpleNamespace(ports={}, serve=lambda addresses: None)
        self.expiry = SimpleNamespace(arm=lambda nodes: None)
        self.lock = SimpleNamespace(is_enforced=lambda told: False, save=lambda: None)
        self.spawned: list[Any] = []

    def spawn(self, work: Any) -> None:
        self.spawned.append(work)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def tailnet(engine: Engine) -> Tailnet:
    return Tailnet(engine)  # type: ignore[arg-type]


def start(tailnet: Tailnet, *peers: dict[str, Any], **parts: Any) -> None:
    tailnet.apply(message(Node=node(1), Peers=list(peers), **parts), True)


def test_watchers_hear_of_every_full_map_and_of_changed_peers(engine: Engine, tailnet: Tailnet) -> None:
    plain, curious = engine.bus.watch(0), engine.bus.watch(Mask.PEER_CHANGES)
    start(tailnet, node(2))
    assert engine.told_of_us == ["n1.tn.example."]
    assert [bool(told.get("SelfChange")) for told in plain.take()] == [True]
    assert [peer["ID"] for told in curious.take() for peer in told["PeersChanged"]] == [2]
    tailnet.apply(message(Node=node(1)), False)
    assert [told["SelfChange"]["ID"] for told in plain.take()] == [1], "the same again is news too"
    tailnet.apply(message(PeersChangedPatch=[{"NodeID": 2, "Online": True}]), False)
    assert plain.take() == []
    assert [peer["Online"] for told in curious.take() for peer in told.get("PeersChanged") or ()][-1] is True
    tailnet.apply(message(PeersRemoved=[2]), False)
    assert curious.take()[-1]["PeersRemoved"] == [2] and len(tailnet.peers) == 0
    tailnet.apply(message(KeepAlive=True), False)
    assert plain.take() == []


@pytest.mark.parametrize(
    ("control_time", "is_believed"),
    [("2020-08-03T00:00:00.000000001Z", False), ("2023-11-14T22:13:40Z", False), ("2033-05-18T03:33:20Z", True)],
)
def test_whose_clock_counts(engine: Engine, tailnet: Tailnet, control_time: str, is_believed: bool) -> None:
    """Ours, unless the server's is more than a minute off and could be right."""
    start(tailnet, ControlTime=control_time)
    engine.clock.advance(7.0)
    expected = 2_000_000_007 * 10**9 if is_believed else engine.clock.wall_ns()
    assert tailnet.keys.now_ns() == expected


def test_a_clock_that_differs_from_the_server_s_is_told_until_it_is_set(engine: Engine, tailnet: Tailnet) -> None:
    start(tailnet, ControlTime="2033-05-18T03:33:20Z")
    days = (2_000_000_000 - engine.clock.wall_ns() // 10**9) // 86400
    [text] = engine.health.texts()
    assert engine.health.is_broken("clock-wrong") and f"{days} days behind that of the coordination server" in text
    for skew_s, told in ((70, "1 minute ahead of"), (-7300, "2 hours behind"), (30, "")):
        engine.clock._wall_ns = (2_000_000_000 + skew_s) * 10**9
        tailnet.apply(message(KeepAlive=True), False)
        assert [told in text for text in engine.health.texts()] == [True] * bool(told)


def test_peers_that_need_special_treatment(tailnet: Tailnet) -> None:
    own = parse_ip("100.64.0.1")
    start(tailnet, node(2, IsJailed=True), node(3, SelfNodeV4MasqAddrForThisPeer="100.64.1.1"), node(4))
    jailed, stranger = tailnet.peers.by_id(2), tailnet.peers.by_id(3)
    assert jailed is not None and stranger is not None
    assert list(tailnet.members.jailed) == [jailed.handle] and list(tailnet.members.aliases) == [stranger.handle]
    assert tailnet.names_of_us() == [own, parse_ip("100.64.1.1")]
    tailnet.apply(message(PeersChanged=[node(2), node(3)]), False)
    assert not tailnet.members.jailed and tailnet.names_of_us() == [own]
    tailnet.apply(message(PeersChanged=[node(2, IsJailed=True)]), False)
    tailnet.apply(message(PeersRemoved=[2]), False)
    assert not tailnet.members.jailed


def lets_in(tailnet: Tailnet, source: str) -> bool:
    return bool(tailnet.rules.filter.check(parse_ip(source), parse_ip("100.64.0.1"), 22))


def rule(source: str, *ports: int) -> dict[str, Any]:
    targets = [{"IP": "*", "Ports": {"First": port, "Last": port}} for port in ports]
    return {"SrcIPs": [source], "DstPorts": targets} if ports else {"SrcIPs": [source], "CapGrant": []}


@pytest.mark.parametrize(
    ("source", "is_lawful"),
    [("*", False), ("100.64.0.0/24", False), ("100.64.0.3", False), ("10.9.0.7", False), ("100.64.0.2", True)],
)
def test_a_filter_that_lets_in_what_nobody_signed_is_not_applied(
    engine: Engine, tailnet: Tailnet, source: str, is_lawful: bool
) -> None:
    """Peers with PeerAPI alone need no signature, so a rule for them would be the way around tailnet lock."""
    unsigned = node(3, UnsignedPeerAPIOnly=True, AllowedIPs=["100.64.0.3/32", "10.9.0.0/24"])
    start(tailnet, node(2), unsigned, PacketFilter=[rule(source, 22), rule("*")])
    assert lets_in(tailnet, "100.64.0.2") is is_lawful
    assert any("nobody signed" in text for text in engine.health.texts()) is not is_lawful


def test_such_a_peer_that_comes_and_goes_changes_what_is_applied(engine: Engine, tailnet: Tailnet) -> None:
    start(tailnet, node(2), PacketFilter=[rule("*", 22)])
    assert lets_in(tailnet, "100.64.0.2")
    tailnet.apply(message(PeersChanged=[node(3, UnsignedPeerAPIOnly=True)]), False)
    assert not lets_in(tailnet, "100.64.0.2") and any("nobody signed" in text for text in engine.health.texts())
    tailnet.apply(message(PeersRemoved=[3]), False)
    assert lets_in(tailnet, "100.64.0.2") and not any("nobody signed" in text for text in engine.health.texts())


EXIT = {"AllowedIPs": ["100.64.0.2/32", "0.0.0.0/0", "::/0"], "Online": True}


def test_p05_an_exit_node_that_only_goes_offline_is_told_and_so_is_its_return(engine: Engine, tailnet: Tailnet) -> None:
    engine.account.prefs = replace(Prefs.fresh(), exit_node_id="n2")
    start(tailnet, node(2, **EXIT))
    assert not engine.health.is_broken("exit-node-gone")
    tailnet.apply(message(OnlineChange={"2": False}), False)
    assert engine.health.is_broken("exit-node-gone")
    tailnet.apply(message(PeersChangedPatch=[{"NodeID": 2, "Online": True}]), False)
    assert not engine.health.is_broken("exit-node-gone")


def test_p05_another_exit_node_is_taken_when_the_one_in_use_only_goes_offline(engine: Engine, tailnet: Tailnet) -> None:
    engine.reach.net_info = SimpleNamespace(derp_latency={})
    engine.account.prefs = replace(Prefs.fresh(), auto_exit_node="any")
    other = {"AllowedIPs": ["100.64.0.3/32", "0.0.0.0/0", "::/0"], "Online": True}
    start(tailnet, node(2, **EXIT), node(3, **other))
    assert tailnet.plan.wishes is not None
    first = tailnet.plan.wishes.exit_node_id
    tailnet.apply(message(OnlineChange={first.removeprefix("n"): False}), False)
    assert tailnet.plan.wishes.exit_node_id == {"n2": "n3", "n3": "n2"}[first]
    assert not engine.health.is_broken("exit-node-gone")
