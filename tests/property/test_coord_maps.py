"""Deltas add up to the full map, whatever happens in whatever order; and one change costs one change."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.coordsim import Client, Tailnet
from tsd.netmap.netmap import Netmap

GROUPS = """{"groups": {"group:g": ["alice@"]}, "tagOwners": {"tag:web": []}, "acls": [
  {"action": "accept", "src": ["group:g"], "dst": ["tag:web:80", "bob@:22"]}]}"""
MIXED = """{"tagOwners": {"tag:web": ["alice@", "bob@"]}, "acls": [
  {"action": "accept", "src": ["autogroup:member"], "dst": ["autogroup:self:*", "10.0.0.0/9:443"]},
  {"action": "accept", "src": ["tag:web", "100.64.0.2"], "dst": ["autogroup:tagged:*"]}],
  "autoApprovers": {"routes": {"10.0.0.0/8": ["tag:web"]}},
  "ssh": [{"action": "accept", "src": ["alice@"], "dst": ["tag:web"], "users": ["root"]}]}"""
POLICIES = ("{}", '{"acls": []}', GROUPS, MIXED)

ROUTES = ((), ("10.0.0.0/24",), ("10.0.0.0/24", "10.1.0.0/16"), ("0.0.0.0/0", "::/0"))
ENDPOINTS = ((), ("192.0.2.1:1",), ("192.0.2.1:1", "198.51.100.1:2"))

ON_A_NODE = (
    "hang_up", "poll", "blink", "delete", "expire", "disco", "rotate", "logout",
    "endpoints", "region", "routes", "approve", "rename", "hostname",
)  # fmt: skip
CHOICES: dict[str, tuple[Any, ...]] = {
    "endpoints": ENDPOINTS,
    "region": (0, 1, 2),
    "routes": ROUTES,
    "approve": ROUTES,
    "rename": ("x", "y", ""),
    "hostname": ("x", "Zed's", "n1"),
}


def random_step(dice: random.Random) -> tuple[Any, ...]:
    """Mostly something about one of the first few nodes; now and then time passes or the policy changes."""
    kind = dice.choices(["node", "join", "policy", "run"], [12, 2, 1, 4])[0]
    if kind == "join":
        return ("join", dice.choice(["alice", "bob", "tagged", "guest"]))
    if kind == "policy":
        return ("policy", dice.choice(("{}", *POLICIES)))
    if kind == "run":
        return ("run", dice.choice([0.01, 0.1, 7.0, 130.0]))
    verb = dice.choice(ON_A_NODE)
    options = CHOICES.get(verb)
    return (verb, dice.randrange(6), dice.choice(options)) if options else (verb, dice.randrange(6))


class World:
    def __init__(self) -> None:
        self.net = Tailnet()
        self.clients: list[Client] = []
        self.keys = {
            "alice": self.net.auth_key(user="alice", reusable=True, expiry_s=None),
            "bob": self.net.auth_key(user="bob", reusable=True, expiry_s=None),
            "tagged": self.net.auth_key(tags=("tag:web",), reusable=True, expiry_s=None),
            "guest": self.net.auth_key(user="bob", ephemeral=True, reusable=True, expiry_s=None),
        }
        self.watchers = [self.join("alice"), self.join("tagged")]
        self.join("bob")

    def join(self, kind: str) -> Client:
        client = self.net.join(f"n{len(self.clients)}", self.keys[kind])
        client.kind = kind  # type: ignore[attr-defined]
        self.clients.append(client)
        return client

    def step(self, kind: str, *rest: Any) -> None:
        if kind == "join":
            self.join(rest[0])
        elif kind == "policy":
            self.net.admin.set_policy(rest[0], self.net.moment())
            self.net.drain()
        elif kind == "run":
            self.net.run(rest[0])
        else:
            client = self.clients[rest[0] % len(self.clients)]
            record = client.record
            if record is not None and not (
                client in self.watchers and kind in ("hang_up", "blink", "delete", "logout")
            ):
                getattr(self, f"do_{kind}")(client, str(record.id), *rest[1:])
                self.net.drain()

    def do_hang_up(self, client: Client, _node: str) -> None:
        client.hang_up()

    def do_blink(self, client: Client, _node: str) -> None:
        """Gone long enough to be offline, and back."""
        client.hang_up()
        self.net.run(7)
        if client.record is not None:
            client.poll()

    def do_poll(self, client: Client, _node: str) -> None:
        if client.session in self.net.clients:
            client.hang_up()
        client.poll()

    def do_delete(self, _client: Client, node: str) -> None:
        self.net.admin.delete(node, self.net.moment())

    def do_expire(self, _client: Client, node: str) -> None:
        self.net.admin.expire(node, self.net.moment())

    def do_logout(self, client: Client, _node: str) -> None:
        client.register(expiry="1970-01-01T00:02:03Z")

    def do_disco(self, client: Client, _node: str) -> None:
        client.new_disco_key()
        client.update(endpoints=ENDPOINTS[1])

    def do_rotate(self, client: Client, _node: str) -> None:
        client.new_node_key()
        client.register(self.keys[client.kind])  # type: ignore[attr-defined]

    def do_endpoints(self, client: Client, _node: str, endpoints: tuple[str, ...]) -> None:
        client.update(endpoints=endpoints)

    def do_region(self, client: Client, _node: str, region: int) -> None:
        client.update(endpoints=ENDPOINTS[1], region=region)

    def do_routes(self, client: Client, _node: str, routes: tuple[str, ...]) -> None:
        client.update(endpoints=ENDPOINTS[1], routable_ips=routes)

    def do_approve(self, _client: Client, node: str, routes: tuple[str, ...]) -> None:
        self.net.admin.approve_routes(node, routes, self.net.moment())

    def do_rename(self, _client: Client, node: str, name: str) -> None:
        if self.net.coordinator.registry.by_label.get(name) is None:
            self.net.admin.rename(node, name, self.net.moment())

    def do_hostname(self, client: Client, _node: str, name: str) -> None:
        client.update(endpoints=ENDPOINTS[1], hostname=name)


def seen(netmap: Netmap) -> dict[str, Any]:
    """What counts of a map; how it was told does not."""
    peers = {
        node_id: msgspec.structs.replace(
            node,
            legacy_derp="",
            last_seen=None if node.online else node.last_seen,
            hostinfo_raw=msgspec.Raw(b""),
        )
        for node_id, node in netmap.peers.items()
    }
    own = msgspec.structs.replace(netmap.self_node, hostinfo_raw=msgspec.Raw(b""), cap=0)
    hosts = {node_id: node.hostinfo for node_id, node in netmap.peers.items()}
    users = {user: netmap.users[user] for user in {node.user for node in netmap.peers.values()}}
    rules = {name: netmap.filters[name] for name in sorted(netmap.filters) if netmap.filters[name]}
    ssh = netmap.ssh_policy.rules if netmap.ssh_policy is not None else ()
    return {"peers": peers, "self": own, "hosts": hosts, "users": users, "rules": rules, "ssh": ssh or ()}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 32))
def test_deltas_add_up_to_the_full_map(seed: int) -> None:
    world, dice = World(), random.Random(seed)
    for number in range(40):
        world.step(*random_step(dice))
        if number % 4 == 3:
            check(world)


def check(world: World) -> None:
    """What the watchers were told bit by bit is what a newcomer with their key is told at once."""
    world.net.settle()
    for watcher in world.watchers:
        fresh = Client(world.net, "fresh")
        fresh.machine, fresh.node_key, fresh.disco_key = watcher.machine, watcher.node_key, watcher.disco_key
        fresh.poll()
        world.net.settle()
        told = watcher.netmap
        assert told is not None and fresh.netmap is not None
        assert seen(told) == seen(fresh.netmap)
        fresh.hang_up()


def tailnet_of(count: int) -> tuple[Tailnet, Client, Client]:
    net = Tailnet()
    key = net.auth_key(reusable=True)
    for number in range(count):
        net.join(f"n{number}", key, poll=False)
    watcher, changing = net.join("watcher", key), net.join("changing", key)
    changing.update(endpoints=("192.0.2.1:1",))
    net.settle()
    return net, watcher, changing


def cost_of_changes(count: int) -> tuple[int, int]:
    """Bytes of the largest frame and fragments of nodes built for 50 changes."""
    net, watcher, changing = tailnet_of(count)
    built = net.coordinator.sessions.fragments_built
    watcher.raw_frames.clear()
    for number in range(50):
        changing.update(endpoints=(f"192.0.2.9:{number + 1}",))
        net.settle()
    assert len(watcher.raw_frames) == 50
    return max(map(len, watcher.raw_frames)), net.coordinator.sessions.fragments_built - built


def test_one_change_costs_one_change_also_among_1000_nodes() -> None:
    small_bytes, _ = cost_of_changes(10)
    large_bytes, built = cost_of_changes(1000)
    assert built == 0, "a patch builds no node"
    assert large_bytes <= small_bytes + 8 and large_bytes < 500


def test_a_new_node_among_1000_is_told_as_one_node() -> None:
    net, watcher, _ = tailnet_of(1000)
    watcher.raw_frames.clear()
    saves = net.saves
    net.join("another", poll=False)
    net.settle()
    (frame,) = watcher.raw_frames
    assert len(frame) < 1500
    assert net.saves - saves <= 4
