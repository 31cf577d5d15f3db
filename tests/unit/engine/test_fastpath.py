"""What the engine tells the pump's threads, and where it sends what they hand up."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_network
from types import SimpleNamespace
from typing import Any

import pytest

from tsd.base.addr import QUAD_100, AddrPort
from tsd.base.clock import ManualClock
from tsd.dataplane.fdpump import DeviceTun, FdPumpOptions, Upcall, UpKind
from tsd.dataplane.pump import Opened, Other, Sealed
from tsd.dataplane.reference import ReferenceCore
from tsd.engine.path import fastpath
from tsd.engine.path.datapath import Traffic
from tsd.engine.path.fastpath import SERVICES, FastPath
from tsd.engine.path.masquerade import MasqueradingCore
from tsd.engine.path.sockets import Lent
from tsd.filter.filter import PacketFilter
from tsd.hull import Frame
from tsd.magicsock.types import Route
from tsd.packet.build import udp_packet

PEER, OTHER_PEER = 5, 6
DIRECT = AddrPort(IPv4Address("192.0.2.7"), 41641)
OWN, FAR = IPv4Address("100.64.0.1"), IPv4Address("100.64.0.2")


class FakePump:
    """Records what it is told; `up` hands a message over."""

    def __init__(self, core: ReferenceCore) -> None:
        self.core = core
        self.told: list[tuple[Any, ...]] = []
        self.error: OSError | None = None
        self.counters: Mapping[str, int] = {}
        self._ends = socket.socketpair()
        self._ups: list[Upcall] = []

    def start(self, tun: int, udp4: int | None, udp6: int | None, options: FdPumpOptions) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(("start", tun, udp4, udp6))

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def up(self, kind: UpKind, peer: int = 0, data: bytes = b"", **more: Any) -> None:
        values = {"unit": 0, "detail": 0, "source": None} | more
        self._ups.append(Upcall(kind, peer, data, values["unit"], values["detail"], values["source"]))
        self._ends[1].send(b"x")

    def take(self, limit: int = 256) -> list[Upcall]:
        self._ends[0].recv(4096)
        ups, self._ups = self._ups, []
        return ups

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.told.append((name, *args))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [told[1:] for told in self.told if told[0] == name]


class FakeDevice:
    name, mtu_bytes, is_userspace, has_gso, has_uso, has_header = "tsd9", 1280, False, True, True, True

    def __init__(self) -> None:
        self.is_released = False
        self.diverted: list[Frame] = []
        self.lost_for = 0

    def lost(self, code: int) -> None:
        self.lost_for = code

    def divert(self, frame: Frame) -> bool:
        is_service = bytes(frame.packet[16:20]) == QUAD_100.packed
        self.diverted += [frame] if is_service else []
        return is_service

    def fileno(self) -> int:
        return 3

    def release(self, on_frames: Callable[[list[Frame]], None]) -> None:
        self.is_released = True

    def attach(self, on_frames: Callable[[list[Frame]], None]) -> None: ...

    def deliver(self, frames: Sequence[Frame]) -> None: ...

    def close(self) -> None: ...


class FakePath:
    """Datapath, magicsock, sockets and driver in one: records calls by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.filter = PacketFilter((), [ip_network(f"{OWN}/32")])
        self.jailed: frozenset[int] = frozenset()
        self.traffic = Traffic()
        self.direct: dict[int, AddrPort] = {}
        self.is_lent = False

    def lend(self, borrower: object) -> Lent:
        self.is_lent = True
        return self.lent()

    def lent(self) -> Lent:
        return Lent(7, None, True, False)

    def take_back(self) -> None:
        self.is_lent = False

    def trusted(self, handle: int, now: float) -> AddrPort | None:
        return self.direct.get(handle)

    def route(self, handle: int, now: float) -> Route:
        self.calls.append(("route", handle))
        return Route(self.direct.get(handle), 0)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.calls.append((name, *args))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
async def parts() -> Any:
    core = ReferenceCore()
    pump, path, device, clock = FakePump(core), FakePath(), FakeDevice(), ManualClock(100.0)
    core.add_peer(PEER)
    shell = MasqueradingCore(core)
    any_path: Any = path
    fast = FastPath(pump, shell, any_path, any_path, any_path, clock, any_path)
    yield SimpleNamespace(fast=fast, pump=pump, path=path, device=device, clock=clock, core=shell)
    fast.stop()
    pump.close()


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_the_fake_is_what_the_hull_promises() -> None:
    assert isinstance(FakeDevice(), DeviceTun)


async def test_start_takes_over_and_stop_gives_back(parts: Any) -> None:
    parts.fast.start(parts.device)
    assert parts.pump.of("start") == [(3, 7, None)] and parts.device.is_released and parts.path.is_lent
    assert parts.pump.of("set_local") == [([ip_network(f"{OWN}/32")],)]
    assert parts.core.route(QUAD_100.packed) == SERVICES
    parts.fast.stop()
    parts.fast.stop()
    assert not parts.path.is_lent and parts.pump.of("stop") == [()]


async def test_a_refused_start_leaves_everything_as_it_was(parts: Any) -> None:
    parts.pump.error = OSError(errno.EAGAIN, "no threads")
    with pytest.raises(OSError, match="no threads"):
        parts.fast.start(parts.device)
    assert not parts.path.is_lent and not parts.device.is_released


async def test_a_lane_while_one_address_is_trusted(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastpath, "SWEEP_S", 0.01)
    parts.fast.start(parts.device)
    parts.pump.up(UpKind.SEALED, PEER, bytes(96), unit=48)
    await turn()
    assert parts.path.of("send_sealed") == [((Sealed(PEER, bytes(96), 48, 2),), 100.0)]
    assert not parts.pump.of("set_path")
    parts.path.direct[PEER] = DIRECT
    parts.pump.up(UpKind.SEALED, PEER, bytes(48), unit=48)
    await turn()
    assert parts.pump.of("set_path") == [(PEER, DIRECT)]
    del parts.path.direct[PEER]
    await asyncio.sleep(0.1)
    assert parts.pump.of("set_path") == [(PEER, DIRECT), (PEER, None)]


async def test_sending_is_told_to_magicsock(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastpath, "SWEEP_S", 0.01)
    parts.fast.start(parts.device)
    parts.path.direct[PEER] = DIRECT
    sends = [0.0]
    monkeypatch.setattr(parts.core, "activity", lambda peer: SimpleNamespace(last_send=sends[0]))
    parts.pump.up(UpKind.SEALED, PEER, bytes(48), unit=48)
    await asyncio.sleep(0.05)
    assert parts.path.of("route") == []
    sends[0] = 101.0
    await asyncio.sleep(0.1)
    assert parts.path.of("route") == [(PEER,)]


async def test_a_path_that_changed_and_a_peer_that_left(parts: Any) -> None:
    parts.fast.start(parts.device)
    parts.path.direct[PEER] = DIRECT
    parts.pump.up(UpKind.SEALED, PEER, bytes(48), unit=48)
    await turn()
    other = AddrPort(IPv4Address("192.0.2.8"), 1)
    parts.path.direct[PEER] = other
    parts.fast.path_changed(PEER)
    parts.fast.path_changed(OTHER_PEER)
    assert parts.pump.of("set_path") == [(PEER, DIRECT), (PEER, other)]
    parts.fast.remove_peer(PEER)
    assert parts.pump.of("forget_peer") == [(PEER,)]


async def test_what_comes_up_goes_where_it_belongs(parts: Any) -> None:
    parts.fast.start(parts.device)
    to_peer = udp_packet(OWN.packed, 1, FAR.packed, 2, b"x")
    to_service = udp_packet(OWN.packed, 1, QUAD_100.packed, 53, b"q")
    parts.pump.up(UpKind.STAGE, PEER, to_peer)
    parts.pump.up(UpKind.STAGE, SERVICES, to_service)
    parts.pump.up(UpKind.HOST, 0, to_service)
    parts.pump.up(UpKind.HOST, 0, to_peer, unit=0)
    parts.pump.up(UpKind.HOST, 0, to_peer, unit=9)
    parts.pump.up(UpKind.INBOUND, PEER, to_peer, unit=0)
    parts.pump.up(UpKind.OTHER, 0, b"disco", detail=int(Other.DISCO), source=DIRECT)
    parts.pump.up(UpKind.HEARD, PEER, source=DIRECT)
    parts.pump.up(UpKind.CONFIRMED, PEER)
    parts.pump.up(UpKind.ATTENTION, PEER)
    parts.pump.up(UpKind.SEND_ERROR, PEER, detail=errno.EPERM, source=DIRECT)
    parts.pump.up(UpKind.TUN_ERROR, detail=errno.ENODEV)
    await turn()
    assert parts.device.lost_for == errno.ENODEV
    assert [bytes(frame.packet) for frame in parts.device.diverted] == [to_service, to_service]
    assert parts.path.calls == [
        ("stage", ((PEER, Frame(to_peer)),)),
        ("from_host", [Frame(to_peer), Frame(to_peer, 9)]),
        ("take_opened", (Opened(PEER, Frame(to_peer)),)),
        ("take_other", Other.DISCO, b"disco", DIRECT),
        ("note_received", (PEER,), DIRECT, 100.0),
        ("note", (), (PEER,)),
        ("note", (PEER,), ()),
        ("send_failed", PEER, DIRECT, errno.EPERM, 100.0),
        ("kick",),
    ]


async def test_link_local_sources_and_faults_cost_only_themselves(parts: Any) -> None:
    parts.fast.start(parts.device)
    local = AddrPort(IPv6Address("fe80::1%2"), 5)
    parts.pump.up(UpKind.OTHER, 0, b"x", detail=int(Other.DISCO), source=local)
    parts.pump.up(UpKind.OTHER, 0, b"x", detail=77, source=DIRECT)
    parts.pump.up(UpKind.CONFIRMED, PEER)
    await turn()
    assert parts.path.calls == [("note", (), (PEER,)), ("kick",)]


async def test_rules_jails_and_other_names(parts: Any) -> None:
    parts.fast.start(parts.device)
    parts.path.jailed = frozenset({OTHER_PEER})
    parts.core.set_aliases([OWN], {PEER: (IPv4Address("100.99.0.1"),)})
    parts.path.filter = parts.path.filter.replace((), wider := [ip_network("192.0.2.0/24"), ip_network(f"{OWN}/32")])
    site = ip_network("fd7a:115c:a1e0:b1a:0:7:a01:200/120")
    parts.path.filter = parts.path.filter.replace((), [*wider, site])
    before = len(parts.pump.of("forget_flows"))
    parts.fast.apply_rules()
    assert parts.pump.of("set_local")[-1] == (wider,), "each packet to a 4via6 host is for the hull"
    assert parts.pump.of("set_guarded")[-1] == ([PEER, OTHER_PEER],)
    assert len(parts.pump.of("forget_flows")) == before
    parts.path.filter = parts.path.filter.replace((), wider, shields_up=True)
    parts.fast.apply_rules()
    assert len(parts.pump.of("forget_flows")) == before + 1
    inbound = udp_packet(FAR.packed, 1, IPv4Address("100.99.0.1").packed, 2, b"x")
    parts.pump.up(UpKind.INBOUND, PEER, inbound)
    await turn()
    (opened,) = parts.path.of("take_opened")[0][0]
    assert bytes(opened.frame.packet[16:20]) == OWN.packed


async def test_sockets_are_let_go_before_they_close(parts: Any) -> None:
    parts.fast.start(parts.device)
    parts.fast.sockets_closing()
    parts.fast.sockets_opened()
    assert parts.pump.of("set_sockets") == [(None, None), (7, None, True, False)]


async def test_threads_that_do_not_start_again_leave_it_to_the_loop(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EAGAIN, "no threads")

    parts.fast.start(parts.device)
    failed = []
    parts.fast.on_failed = lambda: failed.append(True)
    monkeypatch.setattr(parts.pump, "set_sockets", refuse, raising=False)
    parts.fast.sockets_closing()
    parts.fast.sockets_opened()
    assert failed == [True] and not parts.path.is_lent and parts.fast.counters == {}


async def test_traffic_is_counted_once(parts: Any) -> None:
    parts.fast.start(parts.device)
    parts.pump.counters = {"udp4_datagrams": 3, "udp4_bytes": 300, "udp6_datagrams_sent": 2, "udp6_bytes_sent": 99}
    parts.fast.count_traffic()
    parts.fast.count_traffic()
    four, six = parts.path.traffic.direct_ipv4, parts.path.traffic.direct_ipv6
    assert (four.rx_packets, four.rx_bytes, six.tx_packets, six.tx_bytes) == (3, 300, 2, 99)
