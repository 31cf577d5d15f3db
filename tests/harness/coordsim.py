"""The coordinator without sockets: clients whose netmap is fed by its frames, and a clock turned by hand."""

from __future__ import annotations

from typing import Any

import msgspec

from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import DiscoPrivate, MachinePrivate, NodePrivate
from tsd.coord.policy.load import load
from tsd.coord.policy.model import DEFAULT_POLICY
from tsd.coord.state.administration import Administration
from tsd.coord.state.config import CoordConfig
from tsd.coord.state.coordinator import Coordinator
from tsd.coord.state.events import ApprovalWanted, FrameReady, RegisterAnswered, Save, SessionEnded
from tsd.coord.state.records import AuthKey, Moment, NodeRecord, User, decode_record
from tsd.netmap.netmap import Netmap, apply
from tsd.tailcfg.hostinfo import Hostinfo, NetInfo
from tsd.tailcfg.mapping import MapRequest
from tsd.tailcfg.mapresponse import MapResponse, decode_map_response
from tsd.tailcfg.register import RegisterAuth, RegisterRequest, RegisterResponse

CAPABILITY_VERSION = 145


class Client:
    """One machine with one node key."""

    def __init__(self, tailnet: Tailnet, name: str) -> None:
        self.tailnet = tailnet
        self.machine = str(MachinePrivate.generate(tailnet.entropy).public())
        self.new_node_key()
        self.new_disco_key()
        self.hostinfo = Hostinfo(hostname=name, os="linux")
        self.session = 0
        self.netmap: Netmap | None = None
        self.frames: list[MapResponse] = []
        self.raw_frames: list[bytes] = []
        self.is_ended = False

    def new_node_key(self) -> None:
        self.old_node_key = getattr(self, "node_key", "nodekey:" + "0" * 64)
        self.node_key = str(NodePrivate.generate(self.tailnet.entropy).public())

    def new_disco_key(self) -> None:
        self.disco_key = str(DiscoPrivate.generate(self.tailnet.entropy).public())

    def clone(self) -> Client:
        """The same machine once more, as after copying a disk."""
        copy = Client(self.tailnet, self.hostinfo.hostname)
        copy.machine, copy.node_key = self.machine, self.node_key
        return copy

    def register(self, auth_key: str = "", **more: Any) -> RegisterResponse | None:
        """The answer, None while the request is held."""
        request = RegisterRequest(
            version=CAPABILITY_VERSION,
            node_key=self.node_key,
            old_node_key=self.old_node_key,
            hostinfo=self.hostinfo,
            auth=RegisterAuth(auth_key=auth_key) if auth_key else None,
            **more,
        )
        return self.tailnet.register(self.machine, request)

    @property
    def record(self) -> NodeRecord | None:
        return self.tailnet.coordinator.find(self.machine, self.node_key)

    def request(self, **more: Any) -> MapRequest:
        values = {"version": CAPABILITY_VERSION, "node_key": self.node_key, "disco_key": self.disco_key}
        return MapRequest(**{**values, **more})

    def poll(self) -> None:
        record = self.record
        assert record is not None
        self.session = self.tailnet.new_number()
        self.tailnet.clients[self.session] = self
        self.netmap = None
        self.is_ended = False
        self.tailnet.coordinator.open_poll(self.session, record, self.request(stream=True), self.tailnet.moment())
        self.tailnet.drain()

    def hang_up(self) -> None:
        self.tailnet.clients.pop(self.session, None)
        self.tailnet.coordinator.close_poll(self.session, self.tailnet.moment())
        self.tailnet.drain()

    def update(self, endpoints: tuple[str, ...] = (), region: int = 900, **hostinfo: Any) -> None:
        """A lite update."""
        record = self.record
        assert record is not None
        changed = msgspec.structs.replace(self.hostinfo, net_info=NetInfo(preferred_derp=region), **hostinfo)
        self.hostinfo = changed
        request = self.request(omit_peers=True, hostinfo=changed, endpoints=endpoints)
        self.tailnet.coordinator.update(record, request, self.tailnet.moment())
        self.tailnet.drain()

    def take(self, message: bytes) -> None:
        problems: list[str] = []
        response = decode_map_response(message, problems)
        assert not problems, problems
        self.raw_frames.append(message)
        self.frames.append(response)
        if not response.keep_alive:
            wall_ns = self.tailnet.clock.wall_ns()
            self.netmap, _diff = apply(self.netmap, response, wall_ns=wall_ns, is_first=self.netmap is None)

    def peers(self) -> dict[str, Any]:
        """By name, as the client sees them."""
        assert self.netmap is not None
        return {node.base_name: node for node in self.netmap.sorted_peers()}


class Tailnet:
    def __init__(self, policy: str = "", **config: Any) -> None:
        self.clock = ManualClock()
        self.entropy = SeededEntropy("coord")
        self.config = CoordConfig(**config)
        self.clients: dict[int, Client] = {}
        self.answers: dict[int, RegisterResponse] = {}
        self.store: dict[str, dict[int, bytes]] = {"users": {}, "auth_keys": {}, "nodes": {}}
        self.saves = 0
        self.waiting: list[str] = []
        self._number = 0
        self.policy = load(policy) if policy else DEFAULT_POLICY
        self.boot()

    def boot(self) -> None:
        """(Re)start from the store; open polls are gone."""
        self.clients.clear()
        self.coordinator = Coordinator(self.config, self.entropy, self.policy)
        self.admin = Administration(self.coordinator)
        kinds = {"users": User, "auth_keys": AuthKey, "nodes": NodeRecord}
        loaded = {name: [decode_record(raw, kind) for raw in self.store[name].values()] for name, kind in kinds.items()}
        self.coordinator.load(loaded["users"], loaded["auth_keys"], loaded["nodes"], self.moment())  # type: ignore[arg-type]
        self.drain()

    def moment(self) -> Moment:
        return Moment(self.clock.now(), self.clock.wall_ns())

    def new_number(self) -> int:
        self._number += 1
        return self._number

    def register(self, machine: str, request: RegisterRequest) -> RegisterResponse | None:
        token = self.last_token = self.new_number()
        self.coordinator.register(token, machine, request, self.moment())
        self.drain()
        return self.answers.get(token)

    def auth_key(self, **options: Any) -> str:
        made = self.admin.create_key(self.moment(), **options)
        self.drain()
        return str(made["key"])

    def join(self, name: str, auth_key: str = "", poll: bool = True) -> Client:
        client = Client(self, name)
        answer = client.register(auth_key or self.auth_key(reusable=True))
        assert answer is not None and not answer.error, answer
        if poll:
            client.poll()
        return client

    def drain(self) -> None:
        for output in self.coordinator.take_outputs():
            match output:
                case Save(table, key, document):
                    self.saves += 1
                    if document is None:
                        self.store[table].pop(key, None)
                    else:
                        self.store[table][key] = document
                case RegisterAnswered(token, response):
                    self.answers[token] = response
                case FrameReady(session, message):
                    if session in self.clients:
                        self.clients[session].take(message)
                case SessionEnded(session):
                    self.clients.pop(session).is_ended = True
                case ApprovalWanted(auth_id, _):
                    self.waiting.append(auth_id)

    def settle(self) -> None:
        """Let the pending frames go out."""
        self.run(0.1)

    def run(self, seconds: float) -> None:
        """Turn the clock, stopping at every deadline."""
        end = self.clock.now() + seconds
        while (deadline := self.coordinator.next_deadline()) is not None and deadline.at <= end:
            self.clock.advance(max(0.0, deadline.at - self.clock.now()))
            self.coordinator.on_deadline(self.moment())
            self.drain()
        self.clock.advance(end - self.clock.now())

    def set_policy(self, text: str) -> None:
        self.admin.set_policy(text, self.moment())
        self.drain()
        self.settle()
