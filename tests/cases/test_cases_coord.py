"""Cases of the field that touch the coordination server."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import pytest

from harness.coordsim import Client, Tailnet
from tsd.base.errors import ConfigError, StateError
from tsd.coord.settings import load_derp_map
from tsd.coord.state.events import Save
from tsd.coord.state.naming import is_label, label_for
from tsd.coord.state.records import NodeRecord
from tsd.coord.storage import Storage
from tsd.tailcfg.hostinfo import Location, Service
from tsd.tailcfg.wire import ZERO_TIME


def test_n05_deleting_the_only_other_node_is_told_outright() -> None:
    net = Tailnet()
    one, two = net.join("one"), net.join("two")
    net.settle()
    net.admin.delete("two", net.moment())
    net.drain()
    net.settle()
    assert json.loads(one.raw_frames[-1])["PeersRemoved"] == [2]
    assert one.netmap is not None and one.netmap.peers == {}
    assert two.is_ended and two.record is None


def test_n09_spent_single_use_key_of_an_expired_node_is_refused_in_words() -> None:
    net = Tailnet()
    key = net.auth_key()
    one = net.join("one", key)
    net.admin.expire("one", net.moment())
    again = one.register(key)
    assert again is not None and again.error == "authkey already used" and not again.node_key_expired
    anew = Client(net, "one").register(key)
    assert anew is not None and anew.error == "authkey already used"


def test_n10_single_use_key_stays_used_when_its_node_is_deleted() -> None:
    net = Tailnet()
    key = net.auth_key()
    net.join("one", key)
    net.admin.delete("one", net.moment())
    net.drain()
    net.boot()
    refused = Client(net, "two").register(key)
    assert refused is not None and refused.error == "authkey already used"


def test_n11_reauthentication_with_a_key_of_another_tag_changes_the_tags() -> None:
    net = Tailnet()
    one = net.join("one", net.auth_key(tags=("tag:a",)))
    one.new_node_key()
    key = net.auth_key(tags=("tag:b",))
    assert one.register(key) is not None
    assert one.record is not None and one.record.tags == ("tag:b",) and one.record.id == 1
    assert net.admin.list_keys(net.moment())[-1]["state"] == "used"


def test_n11_a_refused_key_stays_unused() -> None:
    net = Tailnet()
    client = Client(net, "one")
    client.hostinfo = msgspec.structs.replace(client.hostinfo, request_tags=("tag:nobody-owns",))
    refused = client.register(net.auth_key())
    assert refused is not None and "not permitted" in refused.error
    assert net.admin.list_keys(net.moment())[-1]["state"] == "valid"


@pytest.mark.parametrize("state", ["revoked", "expired", "used"])
def test_n12_running_nodes_survive_the_end_of_their_key(state: str) -> None:
    net = Tailnet()
    key = net.auth_key(expiry_s=60)
    one = net.join("one", key)
    if state == "revoked":
        net.admin.revoke_key(key, net.moment())
    net.run(120 if state == "expired" else 1)
    net.boot()
    for auth in (key, ""):
        answer = one.register(auth)
        assert answer is not None and not answer.error and not answer.auth_url
    one.poll()


def test_n13_restarts_of_a_client_leave_its_expiry_alone() -> None:
    net = Tailnet(node_expiry_s=86400)
    one = net.join("one")
    assert one.record is not None
    expiry_ns = one.record.expiry_ns
    for _ in range(5):
        one.hang_up()
        net.run(30)
        assert one.register(expiry=ZERO_TIME) is not None
        one.poll()
    assert one.record.expiry_ns == expiry_ns and not one.record.is_expired(net.clock.wall_ns())


@pytest.mark.parametrize(
    ("hostname", "label"),
    [
        ("Ann's MacBook Pro", "anns-macbook-pro"),
        ("Foo_Bar", "foo-bar"),
        ("ÄÖ-1", "ao-1"),
        ("a" * 70, "a" * 63),
        ("", "node"),
        ("host.home.lan", "host"),
        ("-x-", "x"),
        ("日本", "node"),
        ("...", "node"),
        ("\x00\n", "node"),
        ("a-" * 40, ("a-" * 32)[:63]),
        ("localhost.localdomain", "node"),
    ],
)
def test_n14_host_names_become_stable_labels(hostname: str, label: str) -> None:
    assert label_for(hostname) == label and is_label(label)
    net = Tailnet()
    one = net.join(hostname)
    assert one.record is not None and one.record.label == label and one.record.hostname == hostname
    for _ in range(3):
        one.update(hostname=hostname)
        net.boot()
        one.poll()
    assert one.record.label == label


def test_n14_two_of_the_same_name_get_numbers_and_keep_them() -> None:
    net = Tailnet()
    first, second, third = (net.join("Foo_Bar") for _ in range(3))
    labels = [client.record.label for client in (first, second, third) if client.record is not None]
    assert labels == ["foo-bar", "foo-bar-1", "foo-bar-2"]
    net.admin.delete("foo-bar", net.moment())
    second.update(hostname="Foo_Bar")
    assert second.record is not None and second.record.label == "foo-bar-1"


@pytest.mark.parametrize(
    "damage",
    [
        {"label": "no good!"},
        {"node_key": ""},
        {"node_key": "nodekey:" + "0" * 64},
        {"addresses": ()},
        {"addresses": ("nowhere",)},
        {"machine_key": "mkey:xyz"},
        {"disco_key": "discokey:12"},
    ],
)
def test_n15_one_bad_node_in_the_store_is_left_out(damage: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    net = Tailnet()
    clients = [net.join(name) for name in ("one", "two", "three")]
    stored = msgspec.json.decode(net.store["nodes"][2], type=NodeRecord)
    net.store["nodes"][2] = msgspec.json.encode(msgspec.structs.replace(stored, **damage))
    with caplog.at_level(logging.WARNING):
        net.boot()
    assert "node left out node=2" in caplog.text
    clients[0].poll()
    clients[2].poll()
    assert list(clients[0].peers()) == ["three"] and list(clients[2].peers()) == ["one"]
    assert net.join("four").record.id == 4, "its number is not given away"  # type: ignore[union-attr]


async def test_n15_a_row_that_is_no_record_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = Tailnet()
    for name in ("one", "two"):
        net.join(name)
    storage = Storage(tmp_path)
    await storage.open()
    good, bad = net.store["nodes"][1], b'{"id": 2, "label": 7'
    await storage.save([Save("nodes", 1, good), Save("nodes", 2, bad), Save("nodes", 3, b"\xff\xfe")])
    with caplog.at_level(logging.WARNING):
        stored = await storage.load()
    await storage.close()
    assert [node.id for node in stored.nodes] == [1] and stored.last_ids["nodes"] == 3
    assert caplog.text.count("record left out") == 2


async def test_n15_an_emptied_database_is_no_new_tailnet(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "new")
    await storage.open()
    await storage.close()
    database = storage.folder / "coord.db"
    for name in ("coord.db-wal", "coord.db-shm"):
        (storage.folder / name).unlink(missing_ok=True)
    database.write_bytes(b"")
    again = Storage(storage.folder)
    with pytest.raises(StateError, match=r"coord\.db is empty \(0 bytes\).*backup.*delete it"):
        await again.open()
    await again.close()
    assert database.stat().st_size == 0, "left alone"
    database.unlink()
    begun = Storage(storage.folder)
    await begun.open()
    await begun.close()


def test_n15_odd_values_of_one_node_do_not_reach_its_peers() -> None:
    net = Tailnet()
    one, odd = net.join("one"), net.join("odd")
    services = (Service(proto="peerapi4", port=70000), Service(proto="peerapi4", port=5), Service(proto="tcp", port=-1))
    odd.update(
        endpoints=("1.2.3.4:99999", "x", "192.0.2.1:5"), region=1 << 40, services=services,
        routable_ips=("10.0.0.1/8", "nowhere", "10.0.0.0/8"), location=Location(priority=1 << 62),
    )  # fmt: skip
    net.settle()
    seen = one.peers()["odd"]
    assert seen.hostinfo.services == (Service(proto="peerapi4", port=5),) and seen.hostinfo.location is None
    assert seen.hostinfo.routable_ips == ("10.0.0.0/8",)
    assert seen.endpoints == ("192.0.2.1:5",) and seen.home_region == 0


def test_n16_ephemeral_nodes_are_counted_from_their_last_contact() -> None:
    net = Tailnet(ephemeral_timeout_s=10)
    key = net.auth_key(ephemeral=True, reusable=True)
    net.run(9)
    slow = net.join("slow", key, poll=False)
    net.run(3)
    assert slow.record is not None
    net.run(6.5)
    slow.poll()
    net.run(60)
    assert slow.record is not None, "a poll is contact"
    slow.hang_up()
    net.run(9)
    slow.poll()
    slow.hang_up()
    net.run(9)
    assert slow.record is not None
    net.run(2)
    assert slow.record is None


def test_n16_a_restart_of_the_server_gives_ephemeral_nodes_their_grace() -> None:
    net = Tailnet(ephemeral_timeout_s=10)
    one = net.join("one", net.auth_key(ephemeral=True))
    net.run(100)
    net.boot()
    net.run(9)
    assert one.record is not None
    net.run(2)
    assert one.record is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"HostName": "https://relay.example"}, "HostName 'https://relay.example'"),
        ({"DERPPort": 70000}, "DERPPort 70000"),
        ({"STUNPort": -7}, "STUNPort -7"),
        ({"HostName": ""}, "HostName is empty"),
    ],
)
def test_n18_a_bad_relay_is_refused_at_load(tmp_path: Path, change: dict[str, object], words: str) -> None:
    node = {"Name": "1a", "RegionID": 1, "HostName": "relay.example", "DERPPort": 30000, "STUNPort": -1, "IPv6": "none"}
    path = tmp_path / "derp.json"
    region = {"RegionID": 1, "RegionCode": "r", "RegionName": "R"}
    path.write_text(json.dumps({"Regions": {"1": {**region, "Nodes": [node]}}}))
    found = load_derp_map(path).region(1)
    assert found is not None and found.derp_nodes[0].derp_port == 30000
    path.write_text(json.dumps({"Regions": {"1": {**region, "Nodes": [{**node, **change}]}}}))
    with pytest.raises(ConfigError, match="region 1 node '1a'") as caught:
        load_derp_map(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ['{"Regions": {}}', "{}", "nonsense", '{"Regions": {"1": null}}'])
def test_n24_an_empty_relay_map_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "derp.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_derp_map(path)


def test_n24_every_first_map_has_relays() -> None:
    net = Tailnet()
    one = net.join("one")
    for _ in range(2):
        one.hang_up()
        one.poll()
    assert all("DERPMap" in json.loads(raw) for raw in one.raw_frames if b'"Node"' in raw)


def test_n19_prefixes_of_ones_own() -> None:
    from ipaddress import IPv4Network, IPv6Network

    net = Tailnet(prefix_v4=IPv4Network("172.27.0.0/24"), prefix_v6=IPv6Network("fd00:1::/48"))
    one, two = net.join("one"), net.join("two")
    net.settle()
    assert one.peers()["two"].addresses == ("172.27.0.2/32", "fd00:1::2/128")
    assert two.peers()["one"].allowed_ips == ("172.27.0.1/32", "fd00:1::1/128")


def test_n20_ipv6_only_tailnet() -> None:
    net = Tailnet(prefix_v4=None)
    one = net.join("one")
    assert one.netmap is not None and one.netmap.self_node.addresses == ("fd7a:115c:a1e0::1/128",)


def test_w13_cloned_state_gets_health_text_and_no_storm() -> None:
    net = Tailnet()
    one = net.join("one")
    one.update(endpoints=("192.0.2.1:1",))
    twin = one.clone()
    twin.poll()
    net.settle()
    assert not one.is_ended and not twin.is_ended, "neither poll throws the other out"
    twin.update(endpoints=("192.0.2.2:1",))
    assert one.netmap is not None and one.netmap.health == ()
    one.update(endpoints=("192.0.2.1:1",))
    net.settle()
    assert "in use by another" in one.netmap.health[0]
    assert twin.netmap is not None and "in use by another" in twin.netmap.health[0]
    twin.hang_up()
    net.settle()
    assert one.netmap.health == (), "it is over when one of them has gone"


def test_w13_a_restart_is_no_clone() -> None:
    net = Tailnet()
    one = net.join("one")
    one.update(endpoints=("192.0.2.1:1",))
    old_session = one.session
    one.new_disco_key()
    one.poll()
    one.update(endpoints=("192.0.2.1:2",))
    net.coordinator.close_poll(old_session, net.moment())
    net.run(60)
    assert one.netmap is not None and one.netmap.health == ()


@pytest.mark.parametrize(
    "key", ["a" * 48, "hskey-auth-abcdefabcdef-" + "x" * 64, "tskey-client-abc?ephemeral=true", "ключ", " " * 5]
)
def test_s08_keys_of_others_are_opaque_and_politely_refused(key: str) -> None:
    answer = Client(Tailnet(), "one").register(key)
    assert answer is not None and (answer.error == "invalid pre auth key" or answer.auth_url)


def test_s08_white_space_around_a_key_does_not_matter() -> None:
    net = Tailnet()
    answer = Client(net, "one").register(f"  {net.auth_key()}\r\n")
    assert answer is not None and not answer.error
