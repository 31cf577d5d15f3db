"""Full-sized packets on a direct path: a hole is told from loss and silence, measured, left, looked at again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tsd.base.addr import AddrPort, parse_ip
from tsd.engine.path import pathmtu
from tsd.engine.path.pathmtu import Narrow, PathMtuWatch
from tsd.engine.peers import MTU_SERVICE, Peer
from tsd.tailcfg.hostinfo import Hostinfo, Service
from tsd.tailcfg.node import Node, hostinfo_field

HERE, THERE = AddrPort(parse_ip("192.0.2.1"), 41641), AddrPort(parse_ip("192.0.2.2"), 41641)


class Path:
    """A path that passes datagrams for which `passes` is true."""

    def __init__(self, passes: Callable[[int], bool], mtu_bytes: int = 1280) -> None:
        self.passes = passes
        self.mtu_bytes = mtu_bytes
        self.asked: list[int] = []
        self.kept_off: list[AddrPort] = []
        self.told: list[dict[int, Narrow]] = []
        self.is_idle = False
        self.watch = PathMtuWatch(self, self.told.append)

    def path_mtu_bytes(self, handle: int) -> int:
        return self.mtu_bytes

    def probe_path(self, handle: int, address: AddrPort, size: int) -> asyncio.Future[None]:
        self.asked.append(size)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.passes(size):
            answer.set_result(None)
        return answer

    def is_in_use(self, handle: int) -> bool:
        return not self.is_idle

    def keep_off_path(self, handle: int, address: AddrPort, seconds: float) -> None:
        self.kept_off.append(address)
        self.watch.path_changed(handle, None)

    async def settle(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("SETTLE_S", 0.0), ("ANSWER_S", 0.02), ("AGAIN_S", 0.05), ("KEEP_OFF_S", 0.05)):
        monkeypatch.setattr(pathmtu, name, value)
    yield


@pytest.mark.parametrize(("most", "mtu"), [(1311, 1264), (1172, 1136), (1000, 960), (609, 576)])
async def test_f12_a_hole_is_measured_and_the_path_kept_off(most: int, mtu: int) -> None:
    path = Path(lambda size: size <= most)
    path.watch.path_changed(7, HERE)
    await path.settle(lambda: path.told)
    assert path.told == [{7: Narrow(HERE, mtu)}] and path.kept_off == [HERE]
    assert path.asked.count(1312) == pathmtu.TRIES + 1
    path.passes = lambda size: True
    path.watch.path_changed(7, HERE)
    await path.settle(lambda: path.told[-1] == {})
    path.watch.close()


@pytest.mark.parametrize("passes", [lambda size: True, lambda size: False, lambda size: not size])
async def test_a_good_path_a_dead_one_and_one_that_pads_nothing_are_left_alone(passes: Callable[[int], bool]) -> None:
    path = Path(passes)
    path.watch.path_changed(7, HERE)
    await path.settle(lambda: path.asked)
    await asyncio.sleep(0.2)
    assert path.told == [] and path.kept_off == []
    path.watch.close()


async def test_a_lost_packet_is_no_hole() -> None:
    lost = iter([False, False])
    path = Path(lambda size: next(lost, True) if size else True)
    path.watch.path_changed(7, HERE)
    await path.settle(lambda: len(path.asked) > 6)
    assert path.told == []
    path.watch.close()


async def test_idle_peers_are_left_asleep() -> None:
    path = Path(lambda size: True)
    path.is_idle = True
    path.watch.path_changed(7, HERE)
    await path.settle(lambda: path.asked)
    await asyncio.sleep(0.2)
    assert path.asked == [1312]
    path.is_idle = False
    await path.settle(lambda: len(path.asked) > 2)
    path.watch.close()


async def test_another_path_another_network_and_peers_that_go() -> None:
    path = Path(lambda size: size < 1000)
    path.watch.path_changed(7, HERE)
    path.watch.path_changed(7, THERE)
    path.watch.path_changed(8, HERE)
    await path.settle(lambda: path.told and len(path.told[-1]) == 2)
    assert path.told[-1][7].address == THERE
    path.watch.forget(8)
    assert list(path.told[-1]) == [7]
    path.watch.link_changed()
    assert path.told[-1] == {}
    path.watch.close()


async def test_what_is_not_renewed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathmtu, "_RENEWAL_S", 0.0)
    path = Path(lambda size: size < 1000)
    path.watch.path_changed(7, HERE)
    await path.settle(lambda: len(path.told) == 2)
    assert path.told[-1] == {}
    path.watch.close()


def test_a_peer_with_a_smaller_tunnel_says_so() -> None:
    def peer(*services: Service) -> Peer:
        return Peer(1, Node(id=1, hostinfo_raw=hostinfo_field(Hostinfo(services=services))), bytes(32), ())

    assert peer().mtu_bytes == 1280
    assert peer(Service(proto=MTU_SERVICE, port=1100)).mtu_bytes == 1100
