"""UDP echo for tests in namespaces: `python -m harness.udpecho serve PORT`, `… ask HOST PORT BYTES COUNT [SOCKS_PORT]`.

`ask` prints how many of COUNT datagrams came back whole; with SOCKS_PORT it asks through UDP ASSOCIATE of a SOCKS5
proxy on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from ipaddress import ip_address


def serve(port: int) -> None:
    def echo(family: socket.AddressFamily, address: str) -> None:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address, port))
            while True:
                data, source = sock.recvfrom(65535)
                with contextlib.suppress(OSError):
                    sock.sendto(data, source)

    threading.Thread(target=echo, args=(socket.AF_INET6, "::"), daemon=True).start()
    echo(socket.AF_INET, "0.0.0.0")


def ask(host: str, port: int, size: int, count: int, socks_port: int = 0) -> int:
    packed = ip_address(host).packed
    head = b"\0\0\0" + bytes((1 if len(packed) == 4 else 4,)) + packed + port.to_bytes(2, "big") if socks_port else b""
    target, keep = _associate(socks_port) if socks_port else ((host, port), None)
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    came = 0
    with socket.socket(family, socket.SOCK_DGRAM) as sock, keep or contextlib.nullcontext():
        sock.settimeout(2.0)
        for _ in range(count):
            data = os.urandom(size)
            sock.sendto(head + data, target)
            with contextlib.suppress(TimeoutError):
                came += sock.recv(65535)[len(head) :] == data
    return came


def _associate(socks_port: int) -> tuple[tuple[str, int], socket.socket]:
    sock = socket.create_connection(("127.0.0.1", socks_port), 5)
    sock.sendall(b"\x05\x01\x00\x05\x03\x00\x01" + bytes(6))
    answer = b""
    while len(answer) < 12:
        answer += sock.recv(64)
    return ("127.0.0.1", int.from_bytes(answer[10:12], "big")), sock


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        print(ask(sys.argv[2], *map(int, sys.argv[3:])))
