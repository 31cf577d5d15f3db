"""The TUN on a socket pair in place of the device: batches, offload fallback, drops, and what is said when it fails."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tsd.base.errors import HullError
from tsd.dataplane.segments import split
from tsd.hull import Frame
from tsd.packet.build import tcp_packet, udp_packet
from tsplatform.linux import vnet
from tsplatform.linux.tun import KernelTun, open_tun

ALL = 0x67
A, B = bytes((100, 64, 0, 1)), bytes((100, 64, 0, 2))
SMALL = udp_packet(A, 1, B, 2, b"x")
BIG = tcp_packet(A, 1, B, 2, sequence=1, payload=bytes(5000))


class Bed:
    def __init__(self, has_header: bool = True) -> None:
        self.kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.kernel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.kernel.setblocking(False)
        device.setblocking(False)
        self.tun = KernelTun(device.detach(), "tsdtest0", 1280, has_header, ALL if has_header else 0)
        self.batches: list[list[Frame]] = []

    def written(self) -> list[bytes]:
        found = []
        while True:
            try:
                found.append(self.kernel.recv(70000))
            except BlockingIOError:
                return found


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed()
    yield made
    made.tun.close()
    made.kernel.close()


async def _settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0.001)


async def test_what_waits_is_one_batch(bed: Bed) -> None:
    bed.tun.attach(bed.batches.append)
    for _ in range(10):
        bed.kernel.send(vnet.PLAIN + SMALL)
    bed.kernel.send(vnet.header_for(BIG, 1200) + BIG)  # type: ignore[operator]
    await _settle()
    assert bed.batches == [[Frame(SMALL)] * 10 + [Frame(BIG, 1200)]]


async def test_a_long_queue_is_read_in_several_batches(bed: Bed) -> None:
    sent = 0
    while sent < 1000:
        try:
            bed.kernel.send(vnet.PLAIN + SMALL)
        except BlockingIOError:
            break
        sent += 1
    bed.tun.attach(bed.batches.append)
    await _settle()
    assert sum(map(len, bed.batches)) == sent and max(map(len, bed.batches)) <= 128


async def test_diverted_frames_go_no_further_and_nonsense_is_counted(bed: Bed) -> None:
    diverted: list[Frame] = []
    bed.tun.divert = lambda frame: not diverted.append(frame) and len(diverted) == 1  # type: ignore[func-returns-value]
    bed.tun.attach(bed.batches.append)
    bed.kernel.send(vnet.PLAIN + SMALL)
    bed.kernel.send(vnet.PLAIN + SMALL)
    bed.kernel.send(bytes((0, 77)) + bytes(8) + SMALL)
    bed.kernel.send(b"short")
    await _settle()
    assert bed.batches == [[Frame(SMALL)]]
    assert dict(bed.tun.drops) == {"bad_offload": 1, "short_read": 1}


async def test_a_device_that_cannot_be_read_is_told_once(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> int:
        raise OSError(errno.EBADFD, "bad state")

    said: list[HullError] = []
    bed.tun.on_lost = said.append
    bed.tun.attach(bed.batches.append)
    monkeypatch.setattr(os, "readv", refused)
    bed.kernel.send(vnet.PLAIN + SMALL)
    await _settle()
    bed.tun.lost(errno.EBADFD)
    assert len(said) == 1 and "tsdtest0: somebody deleted the interface (tsd has ended" in str(said[0])


def test_joined_packets_are_written_whole(bed: Bed) -> None:
    bed.tun.deliver([Frame(SMALL), Frame(BIG, 1200)])
    assert bed.written() == [vnet.PLAIN + SMALL, (vnet.header_for(BIG, 1200) or b"") + BIG]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_f15_a_kernel_that_refuses_joined_packets_gets_pieces_from_then_on(
    bed: Bed, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = 0
    real = os.writev

    def writev(fd: int, parts: list[bytes]) -> int:
        nonlocal refused
        if parts[0] != vnet.PLAIN:
            refused += 1
            raise OSError(code, "refused")
        return real(fd, parts)

    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(KernelTun, "is_up", True)
    bed.tun.deliver([Frame(BIG, 1200), Frame(BIG, 1200)])
    assert bed.written() == [vnet.PLAIN + piece for piece in split(BIG, 1200)] * 2
    assert refused == 1 and not bed.tun.has_gso and not bed.tun.drops


def test_a_device_without_the_header_gets_pieces() -> None:
    bed = Bed(has_header=False)
    bed.tun.deliver([Frame(SMALL), Frame(BIG, 1200)])
    assert bed.written() == [SMALL, *split(BIG, 1200)]
    bed.tun.close()
    bed.kernel.close()


def test_what_the_device_does_not_take_is_counted(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(20000):
        bed.tun.deliver([Frame(SMALL)])
        if bed.tun.drops:
            break
    assert bed.tun.drops["device_full"] == 1
    monkeypatch.setattr(os, "writev", lambda fd, parts: (_ for _ in ()).throw(OSError(errno.EIO, "down")))
    bed.tun.deliver([Frame(SMALL), Frame(BIG, 1200)])
    assert bed.tun.drops["interface_down"] == 2 and bed.tun.has_gso


async def test_a_released_device_is_not_read_until_it_is_attached_again(bed: Bed) -> None:
    bed.tun.attach(bed.batches.append)
    bed.tun.release(bed.batches.append)
    bed.tun.send([Frame(BIG)])
    assert bed.batches.pop() == [Frame(BIG)], "what the hull itself sends"
    bed.kernel.send(vnet.PLAIN + SMALL)
    await _settle()
    assert bed.batches == [] and bed.tun.fileno() >= 0 and bed.tun.has_header
    bed.tun.deliver([Frame(SMALL)])
    assert bed.written() == [vnet.PLAIN + SMALL]
    bed.tun.attach(bed.batches.append)
    await _settle()
    assert bed.batches == [[Frame(SMALL)]]


async def test_closing_twice_and_using_a_closed_device(bed: Bed) -> None:
    bed.tun.attach(bed.batches.append)
    bed.tun.close()
    bed.tun.close()
    bed.tun.deliver([Frame(SMALL)])
    bed.tun.attach(bed.batches.append)
    assert not bed.tun.is_open


@pytest.mark.parametrize("name", ["tsd+", "it's", "tun%d", "-x", "", "a/b", "sixteen-letters-", "..", "a b"])
def test_impossible_names_are_refused(name: str) -> None:
    with pytest.raises(HullError, match="not a name for a network interface"):
        open_tun(name)


def test_k10_a_missing_node_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(HullError, match=r"no-tun: No such file.*modprobe tun.*--device=/dev/net/tun"):
        open_tun("tsd0", node=str(tmp_path / "no-tun"))
