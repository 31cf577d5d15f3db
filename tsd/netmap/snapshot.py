"""A network map as bytes that outlive the process: what it holds, written as the one map message that would build it.

One line of JSON about the snapshot, then the message. Reading goes through the decoder for what control sends, so a
file is trusted no more than a server is. Warnings of control and its news about versions are not kept: they are about
a moment that is over.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from tsd.base.errors import DecodeError
from tsd.netmap.netmap import Netmap
from tsd.tailcfg.mapresponse import MapResponse, decode_in_slices
from tsd.tailcfg.wire import Wire, always, decode_json, encode_json, time_ns

VERSION = 1
SLICE_NODES = 1000


class About(Wire, frozen=True):
    """Whose map this is; another login server's is not used. The node key is in the map itself."""

    version: int = always(0)
    saved: str = always("")
    control_url: str = always("")
    home_derp: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    about: About
    message: MapResponse

    @property
    def saved_ns(self) -> int:
        return time_ns(self.about.saved) or 0

    @property
    def node_key(self) -> str:
        return self.message.node.key if self.message.node is not None else ""


def encode(netmap: Netmap, about: About) -> Generator[None, None, bytes]:
    """Pauses after every thousand peers; the generator's return value is the snapshot."""
    message = MapResponse(
        node=netmap.self_node,
        derp_map=netmap.derp_map,
        dns_config=netmap.dns,
        domain=netmap.domain,
        collect_services=netmap.collect_services,
        packet_filters={**netmap.filters},
        user_profiles=tuple(netmap.users.values()),
        ssh_policy=netmap.ssh_policy,
        tka_info=netmap.tka,
        domain_data_plane_audit_log_id=netmap.audit_log_id,
    )
    peers: list[bytes] = []
    for count, peer in enumerate(netmap.peers.values(), 1):
        peers.append(encode_json(peer))
        if count % SLICE_NODES == 0:
            yield
    return b'%s\n%s,"Peers":[%s]}' % (encode_json(about), encode_json(message)[:-1], b",".join(peers))


def decode(raw: bytes, problems: list[str] | None = None) -> Generator[None, None, Snapshot]:
    """Pauses as `encode`. Raises `DecodeError`."""
    head, _, body = raw.partition(b"\n")
    about = decode_json(head, About)
    if about.version != VERSION:
        raise DecodeError("netmap", f"snapshot of version {about.version}")
    message = yield from decode_in_slices(memoryview(body), problems)
    if message.node is None:
        raise DecodeError("netmap", "snapshot without our own node")
    return Snapshot(about, message)
