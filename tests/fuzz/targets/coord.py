"""Fuzz targets: the policy text, and what nodes send to the coordination server."""

from __future__ import annotations

import msgspec

from harness.coordsim import Tailnet
from tsd.base.errors import DecodeError
from tsd.coord.policy.compile import CompiledPolicy
from tsd.coord.policy.hujson import PolicyError, parse
from tsd.coord.policy.load import load
from tsd.coord.state.naming import is_label
from tsd.coord.state.records import Moment
from tsd.coord.state.visibility import Visibility
from tsd.tailcfg.mapping import MapRequest
from tsd.tailcfg.register import RegisterRequest
from tsd.tailcfg.wire import decode_json

_NET = Tailnet()
_NODE = _NET.join("fuzzed")
_PEER = _NET.join("peer")


def fuzz_coord_policy(data: bytes) -> None:
    """A text is refused with a place inside it, or it compiles."""
    text = data.decode("utf-8", errors="replace")
    try:
        parse(text)
        policy = load(text)
    except PolicyError as err:
        assert 1 <= err.line <= text.count("\n") + 1 and err.column >= 1
        return
    view = Visibility(CompiledPolicy(policy))
    for node in _NET.coordinator.registry.nodes.values():
        view.put(_NET.coordinator.registry.subject(node))
    for node_id in view.subjects:
        msgspec.json.encode(view.filters(node_id))


def fuzz_coord_requests(data: bytes) -> None:
    """No request of one node keeps the others from their maps."""
    kind, raw = data[:1], data[1:]
    moment = Moment(_NET.clock.advance(0.1), _NET.clock.wall_ns())
    coordinator = _NET.coordinator
    try:
        if kind == b"r":
            coordinator.register(_NET.new_number(), _NODE.machine, decode_json(raw, RegisterRequest), moment)
        else:
            request = decode_json(raw, MapRequest)
            node = coordinator.find(_NODE.machine, _NODE.node_key)
            if node is None:
                return
            if kind == b"p":
                coordinator.map_once(node, request, moment)
            else:
                coordinator.update(node, request, moment)
    except DecodeError:
        return
    _NET.drain()
    _NET.settle()
    for one in coordinator.registry.nodes.values():
        assert is_label(one.label)
    if len(coordinator.registry.nodes) > 50:
        for node_id in list(coordinator.registry.nodes)[2:]:
            coordinator.registry.remove(node_id)
        _NET.drain()
