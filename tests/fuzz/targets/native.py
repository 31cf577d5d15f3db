"""Fuzz targets: the C core beside the Python one; both must say the same. Without the C core there is nothing to do."""

from __future__ import annotations

from ipaddress import ip_network

from tsd.dataplane.pump import Core
from tsd.dataplane.reference import ReferenceCore
from tsd.hull import Frame

try:
    from tsnative import native as built
except ImportError:
    built = None

KEY_A, KEY_B = b"a" * 32, b"b" * 32
ROUTES = [ip_network(text) for text in ("0.0.0.0/0", "::/0", "100.64.0.0/10", "100.64.0.7/32", "fd7a::/16")]


def _ready(core: Core, local: int, remote: int, send: bytes, receive: bytes) -> Core:
    for peer in (1, 2):
        core.add_peer(peer)
    core.set_allowed_ips(1, ROUTES[:2])
    core.set_allowed_ips(2, ROUTES[2:])
    core.install_session(1, local, remote, send, receive, True, 0.0)
    return core


def _pair() -> tuple[Core, Core]:
    assert built is not None
    cores = ReferenceCore(), built.NativeCore(1280, "")
    return _ready(cores[0], 0x04040404, 2, KEY_A, KEY_B), _ready(cores[1], 0x04040404, 2, KEY_A, KEY_B)


def fuzz_native_core_open(data: bytes) -> None:
    """Foreign datagrams, and the same bytes as plaintexts of a peer; the first two bytes choose a segment size."""
    if built is None:
        return
    sizes = (int.from_bytes(data[:2], "big") % 300, 0)
    for size in sizes:
        first, second = (_plain(core.open(data[2:], size, 1.0)) for core in _pair())
        assert first == second
    sender = _ready(ReferenceCore(), 2, 0x04040404, KEY_B, KEY_A)
    sealed = sender.seal_to(1, data[2:].split(b"\xff\x00")[:30], 1.0)
    reference, native = _pair()
    for batch in sealed:
        first = _plain(reference.open(batch.datagrams, batch.datagram_bytes, 1.0))
        assert first == _plain(native.open(batch.datagrams, batch.datagram_bytes, 1.0))
        again = _plain(native.open(batch.datagrams, batch.datagram_bytes, 1.0))
        assert not again[0], "a replay was opened"
    assert dict(reference.drops).items() <= dict(native.drops).items()


def fuzz_native_core_seal(data: bytes) -> None:
    """Frames of the host, cut at FF 00; the first two bytes choose the segment size of super-segments."""
    if built is None:
        return
    size = int.from_bytes(data[:2], "big") % 1500
    frames = [Frame(piece, size if len(piece) > 60 else 0) for piece in data[2:].split(b"\xff\x00")[:30]]
    reference, native = _pair()
    first, second = reference.seal(frames, 1.0), native.seal(frames, 1.0)
    assert [tuple(batch) for batch in first.sealed] == [tuple(batch) for batch in second.sealed]
    assert [(peer, bytes(frame.packet)) for peer, frame in first.no_session] == [
        (peer, bytes(frame.packet)) for peer, frame in second.no_session
    ]
    assert dict(reference.drops) == dict(native.drops)


def _plain(result: object) -> tuple[object, ...]:
    opened = [(item.peer, bytes(item.frame.packet), item.frame.segment_bytes) for item in result.opened]  # type: ignore[attr-defined]
    others = [(kind, bytes(datagram)) for kind, datagram in result.others]  # type: ignore[attr-defined]
    return opened, others, list(result.authenticated), list(result.confirmed)  # type: ignore[attr-defined]
