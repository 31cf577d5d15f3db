"""One end of a tunnel made of `FdPump` alone: static keys, one peer, no handshake, everything from the peer let in.

For measurements and tests in network namespaces. The session is dated into the future so that it does not expire;
both ends must be started anew together, because the keys are fixed. Not a VPN.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import time
from ipaddress import ip_address, ip_network
from types import FrameType

import tsnative
from tsd.base.addr import AddrPort
from tsd.dataplane.fdpump import FdPumpOptions, Upcall, UpKind
from tsd.hull import Frame

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
OFFLOAD_TCP, OFFLOAD_UDP = 0x07, 0x60
UDP_GRO = 104
BUFFER_BYTES = 7 << 20
PEER = 1


def open_tun(name: str, vnet: bool) -> tuple[int, bool, bool]:
    """Descriptor, and whether TCP and UDP super-segments were accepted."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = IFF_TUN | IFF_NO_PI | (IFF_VNET_HDR if vnet else 0)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    for offload in (OFFLOAD_TCP | OFFLOAD_UDP, OFFLOAD_TCP) if vnet else ():
        try:
            fcntl.ioctl(fd, TUNSETOFFLOAD, offload)
        except OSError:
            continue
        return fd, True, offload > OFFLOAD_TCP
    return fd, False, False


def open_udp(local: AddrPort, gro: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET if local.ip.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
    sock.setblocking(False)
    for option in (33, 32):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if gro:
        sock.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
    sock.bind((str(local.ip), local.port))
    return sock


def resident_kib() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def keys(is_first: bool) -> tuple[int, int, bytes, bytes]:
    """Local and remote index, send and receive key."""
    one, two = bytes(range(32)), bytes(range(32, 64))
    return (10, 11, one, two) if is_first else (11, 10, two, one)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tun")
    parser.add_argument("local", type=AddrPort.parse)
    parser.add_argument("remote", type=AddrPort.parse)
    parser.add_argument("--first", action="store_true", help="one of the two ends")
    parser.add_argument("--addresses", nargs="+", required=True, help="own overlay addresses")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="no offloads: one packet per call")
    parser.add_argument("--mtu", type=int, default=1280)
    parser.add_argument("--more-peers", type=int, default=0, help="with sessions, and nothing to do")
    parser.add_argument("--more-prefixes", type=int, default=0, help="of those peers")
    return parser.parse_args()


class End:
    def __init__(self, options: argparse.Namespace) -> None:
        assert tsnative.native is not None, tsnative.describe()
        self.core = tsnative.native.NativeCore(options.mtu, os.environ.get("TSD_AEAD", ""))
        self.pump = tsnative.native.FdPump(self.core)
        self.sock = open_udp(options.local, not options.plain)
        self.tun, tcp, udp = open_tun(options.tun, not options.plain)
        self.core.add_peer(PEER)
        self.core.set_allowed_ips(PEER, [ip_network("0.0.0.0/0"), ip_network("::/0")])
        local, remote, send, receive = keys(options.first)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.core.install_session(PEER, local, remote, send, receive, True, now + 1e6)
        fds = (self.sock.fileno(), None) if options.local.ip.version == 4 else (None, self.sock.fileno())
        choices = FdPumpOptions(not options.plain, tcp, udp, not options.plain, not options.plain, options.threads)
        self.pump.set_path(PEER, options.remote)
        self.pump.start(self.tun, *fds, choices)
        self.pump.set_local([ip_network(ip_address(text)) for text in options.addresses])
        self.seen: dict[str, int] = {}
        before = resident_kib()
        self.add_more(options.more_peers, options.more_prefixes, now)
        if options.more_peers:
            print(f"KiB for each peer: {(resident_kib() - before) / options.more_peers:.1f}", flush=True)

    def add_more(self, peers: int, prefixes: int, now: float) -> None:
        for number in range(peers):
            peer = PEER + 1 + number
            self.core.add_peer(peer)
            mine = [ip_network((167772160 + 256 * n, 24)) for n in range(number, prefixes, peers)]
            self.core.set_allowed_ips(peer, mine)
            self.core.install_session(peer, 1000 + number, number, bytes(32), bytes(range(32)), True, now + 1e6)

    def serve(self) -> None:
        while True:
            select.select([self.pump], [], [])
            for message in self.pump.take():
                self.seen[message.kind.name] = self.seen.get(message.kind.name, 0) + 1
                self.answer(message)

    def answer(self, message: Upcall) -> None:
        """The filter of this end says yes to everything that the pump asks about."""
        if message.kind is UpKind.INBOUND:
            self.pump.allow_like(message.data)
            self.pump.deliver([Frame(message.data, message.unit)])

    def report(self) -> str:
        return json.dumps({"counters": self.pump.counters, "drops": dict(self.core.drops), "upcalls": self.seen})


def stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit


def hold_everything(number: int, frame: FrameType | None) -> None:
    """Keeps the GIL for three seconds, inside one C call."""
    ctypes.PyDLL(None).usleep(3_000_000)
    print("held", flush=True)


def main() -> None:
    end = End(arguments())
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, hold_everything)
    print("ready", flush=True)
    try:
        end.serve()
    finally:
        print(end.report(), flush=True)
        end.pump.stop()


if __name__ == "__main__":
    main()
