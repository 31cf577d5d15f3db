"""Sockets in other network namespaces, held by the test itself: a server that tells who asks, and a sniffer."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from ipaddress import ip_address

from harness.netlab import inside

_ETH_P_ALL, _PACKET_OUTGOING = 0x0003, 4
_IPV4, _IPV6 = 0x0800, 0x86DD
_TCP, _UDP, _ICMPV6 = 6, 17, 58
WHO = 9000


class WhoServer:
    """TCP on all addresses of a namespace: each client is told its own address, then the connection ends."""

    def __init__(self, namespace: str, port: int = WHO) -> None:
        with inside(namespace):
            self._sock = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, (source, *_) = self._sock.accept()
                with client, contextlib.suppress(OSError):
                    client.sendall(source.removeprefix("::ffff:").encode())

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def who_am_i(namespace: str, host: str, port: int = WHO, timeout_s: float = 2.0) -> str:
    """As which address a server sees a connection from the namespace; "" when there is no answer."""
    with inside(namespace):
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    with sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect((host, port))
            return sock.recv(100).decode()
        except OSError:
            return ""


def soon(asked: Callable[[], str], wanted: str, timeout_s: float = 15.0) -> str:
    """What `asked` gives, as soon as it is `wanted`, else at the end."""
    deadline = time.monotonic() + timeout_s
    while (found := asked()) != wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def shout(namespace: str, *hosts: str) -> None:
    """A datagram to each host, whether or not there is a way."""
    for host in hosts:
        with inside(namespace):
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        with sock, contextlib.suppress(OSError):
            sock.sendto(b"leak?", (host, 9))


class Sniffer:
    """What comes out of a host: frames that enter the hub by `port` (an interface in `namespace`)."""

    def __init__(self, namespace: str, port: str) -> None:
        with inside(namespace):
            self._sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
            self._sock.bind((port, _ETH_P_ALL))
        self._sock.setblocking(False)

    def foreign(self, *allowed_hosts: str, udp_port: int = 41641) -> list[str]:
        """Packets since the last call that are no neighbour discovery, not to the hosts and not of our UDP port."""
        found = []
        while True:
            try:
                frame, (_, _, kind, *_) = self._sock.recvfrom(65536)
            except BlockingIOError:
                return found
            if kind != _PACKET_OUTGOING:
                text = _describe(frame, udp_port)
                if text and not any(f" > {host} " in text for host in allowed_hosts):
                    found.append(text)

    def close(self) -> None:
        self._sock.close()


def _describe(frame: bytes, udp_port: int) -> str:
    ethertype = int.from_bytes(frame[12:14], "big")
    if ethertype == _IPV4:
        start, protocol = 14 + 4 * (frame[14] & 15), frame[23]
        source, target = frame[26:30], frame[30:34]
    elif ethertype == _IPV6:
        start, protocol = 54, frame[20]
        source, target = frame[22:38], frame[38:54]
        if protocol in (0, _ICMPV6) and (target[0] == 0xFF or target[0] == 0xFE or frame[start] in range(133, 138)):
            return ""  # neighbour discovery, multicast reports
    else:
        return ""
    ports = [int.from_bytes(frame[at : at + 2], "big") for at in (start, start + 2)]
    if protocol == _UDP and ports[0] == udp_port:
        return ""
    shown = f"{ip_address(source)} > {ip_address(target)} protocol {protocol}"
    return shown + (f" ports {ports[0]} > {ports[1]}" if protocol in (_TCP, _UDP) else "")
