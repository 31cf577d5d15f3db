"""A web server and its clients, lean enough to measure what lies between them. Standard library only.

`python -m benchmarks.traffic serve PORT`: `GET /N` gives N bytes (0: a small page), PUT takes a body; every connection
serves one request, and the client closes it. `get`, `put` and `many` ask for it through a way (see `Way`) and print a
line of JSON; `get` and `put` over `--streams` connections side by side.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

_BLOCK = bytes(range(256)) * 4096
_PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
_HEAD_END = b"\r\n\r\n"
_TIMEOUT_S = 120.0


class Way(NamedTuple):
    """How to reach the server: `kind` is "socks" or "http" (a proxy at 127.0.0.1:port), or "local" (it leads there)."""

    kind: str
    port: int
    target: str
    """host:port as the far end knows it."""

    @classmethod
    def parse(cls, text: str) -> Way:
        kind, port, target = text.split(",", 2)
        return cls(kind, int(port), target)

    def __str__(self) -> str:
        return f"{self.kind},{self.port},{self.target}"

    def url_path(self, path: str) -> str:
        return f"http://{self.target}{path}" if self.kind == "http" else path


# --- server


class _Request:
    """One accepted connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.head = b""
        self.body_left = -1
        self.is_answered = False
        self.out: list[memoryview] = []
        self.bulk_left = 0

    def read(self) -> bool:
        """False: close."""
        data = self.sock.recv(1 << 20)
        if self.body_left >= 0:
            self.body_left -= len(data)
        else:
            self.head += data
            if _HEAD_END in self.head:
                self._begin(*self.head.split(_HEAD_END, 1))
        if self.body_left == 0 and not self.is_answered and not self.wants_write:
            self.out.append(memoryview(_PAGE))
        return bool(data) or self.wants_write

    def _begin(self, head: bytes, rest: bytes) -> None:
        method, path, _ = head.split(b"\r\n", 1)[0].split(b" ")
        if method == b"PUT":
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            self.body_left = int(length.split(b":")[1]) - len(rest)
            return
        self.body_left = 0
        size = int(path.rpartition(b"/")[2] or 0)
        if size:
            self.out.append(memoryview(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % size))
            self.bulk_left = size

    @property
    def wants_write(self) -> bool:
        return bool(self.out or self.bulk_left)

    def write(self) -> bool:
        """False: all is written."""
        if not self.out:
            self.out.append(memoryview(_BLOCK)[: self.bulk_left])
            self.bulk_left -= len(self.out[0])
        sent = self.sock.send(self.out[0])
        self.out[0] = self.out[0][sent:]
        if not len(self.out[0]):
            del self.out[0]
        self.is_answered = not self.wants_write
        return self.wants_write


def serve(port: int) -> None:
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    listener.setblocking(False)
    chosen = selectors.DefaultSelector()
    chosen.register(listener, selectors.EVENT_READ)
    while True:
        for key, events in chosen.select():
            if key.fileobj is listener:
                _accept(listener, chosen)
            elif not _advance(key.data, bool(events & selectors.EVENT_WRITE), chosen):
                chosen.unregister(key.data.sock)
                key.data.sock.close()


def _accept(listener: socket.socket, chosen: selectors.BaseSelector) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        sock.setblocking(False)
        chosen.register(sock, selectors.EVENT_READ, _Request(sock))


def _advance(request: _Request, is_writing: bool, chosen: selectors.BaseSelector) -> bool:
    """False: close."""
    try:
        if not is_writing and not request.read():
            return False
        if not is_writing and not (request.wants_write and request.write()):
            return True
        if is_writing and request.write():
            return True
        chosen.modify(request.sock, selectors.EVENT_READ if is_writing else selectors.EVENT_WRITE, request)
    except BlockingIOError:
        pass
    except OSError:
        return False
    return True


# --- clients


def connect(way: Way) -> socket.socket:
    """A connection that leads to the server (for "http": to the proxy)."""
    sock = socket.create_connection(("127.0.0.1", way.port), timeout=_TIMEOUT_S)
    if way.kind == "socks":
        host, _, port = way.target.rpartition(":")
        sock.sendall(b"\x05\x01\x00")
        _expect(sock, 2)
        sock.sendall(b"\x05\x01\x00\x01" + socket.inet_aton(host) + struct.pack("!H", int(port)))
        if _expect(sock, 10)[1] != 0:
            raise OSError("the SOCKS proxy refused")
    return sock


def _expect(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise OSError("closed early")
        data += piece
    return data


def get(way: Way, size: int) -> dict[str, Any]:
    """One large answer."""
    with connect(way) as sock:
        started = time.perf_counter()
        sock.sendall(f"GET {way.url_path(f'/{size}')} HTTP/1.1\r\nHost: {way.target}\r\n\r\n".encode())
        buffer = bytearray(1 << 20)
        data = b""
        while _HEAD_END not in data:
            data += sock.recv(65536) or _fail("closed in the head")
        got = len(data) - data.index(_HEAD_END) - 4
        while got < size:
            count = sock.recv_into(buffer)
            if not count:
                _fail(f"closed after {got} of {size} bytes")
            got += count
        return _rate(size, started)


def put(way: Way, size: int) -> dict[str, Any]:
    """One large request; it counts as done when the server has read all and said so."""
    with connect(way) as sock:
        started = time.perf_counter()
        head = f"PUT {way.url_path('/in')} HTTP/1.1\r\nHost: {way.target}\r\nContent-Length: {size}\r\n\r\n"
        sock.sendall(head.encode())
        left = size
        while left:
            piece = memoryview(_BLOCK)[: min(left, len(_BLOCK))]
            sock.sendall(piece)
            left -= len(piece)
        if not sock.recv(4096).startswith(b"HTTP/1.1 200"):
            _fail("not accepted")
        return _rate(size, started)


def _rate(size: int, started: float) -> dict[str, Any]:
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "bytes": size, "mb_per_s": size / seconds / 1e6}


def side_by_side(one: Callable[[Way, int], dict[str, Any]], way: Way, size: int, streams: int) -> dict[str, Any]:
    """`size` bytes in all; the rate is theirs together, from the first's beginning to the last's end."""
    if streams == 1:
        return one(way, size)
    started = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(lambda _: one(way, size // streams), range(streams)))
    return _rate(size // streams * streams, started)


def _fail(text: str) -> bytes:
    raise OSError(text)


class _Many:
    """Small pages over `width` connections at a time, a new one for each."""

    def __init__(self, way: Way, width: int) -> None:
        self.done = self.failed = self.open = 0
        self.took_s: list[float] = []
        self._way = way
        self._width = width
        self._request = f"GET {way.url_path('/0')} HTTP/1.1\r\nHost: {way.target}\r\nConnection: close\r\n\r\n".encode()
        self._chosen = selectors.DefaultSelector()
        self._end = self._last = 0.0

    def run(self, seconds: float) -> float:
        """Returns how long it took; not the wait for those that never got an answer."""
        started = time.perf_counter()
        self._end = started + seconds
        while self.open < self._width:
            self._begin()
        while self.open:
            ready = self._chosen.select(5.0)
            if not ready:
                self.failed += self.open
                break
            for key, events in ready:
                self._advance(key.data, bool(events & selectors.EVENT_WRITE))
        return max(self._last, started + seconds) - started

    def _begin(self) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", self._way.port))
        self._chosen.register(sock, selectors.EVENT_WRITE, [sock, time.perf_counter(), b""])
        self.open += 1

    def _advance(self, state: list[Any], is_writing: bool) -> None:
        sock: socket.socket = state[0]
        try:
            if is_writing:
                sock.send(self._request)
                self._chosen.modify(sock, selectors.EVENT_READ, state)
                return
            piece = sock.recv(65536)
        except OSError:
            piece = b""
        state[2] += piece
        if piece and not state[2].endswith(b"ok"):
            return
        self._chosen.unregister(sock)
        sock.close()
        self.open -= 1
        self._last = now = time.perf_counter()
        if state[2].startswith(b"HTTP/1.1 200") and state[2].endswith(b"ok"):
            self.done += 1
            self.took_s.append(now - state[1])
        else:
            self.failed += 1
        if now < self._end:
            self._begin()


def many(way: Way, seconds: float, width: int) -> dict[str, Any]:
    work = _Many(way, width)
    spent = work.run(seconds)
    middle = sorted(work.took_s)[len(work.took_s) // 2] if work.took_s else 0.0
    per_s = work.done / spent
    return {"seconds": spent, "done": work.done, "failed": work.failed, "per_s": per_s, "median_ms": middle * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("serve", "get", "put", "many"))
    parser.add_argument("where", help="a port, or a way: KIND,PORT,HOST:PORT")
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--width", type=int, default=16)
    options = parser.parse_args()
    if options.action == "serve":
        serve(int(options.where))
        return
    way = Way.parse(options.where)
    actions: dict[str, Callable[[], dict[str, Any]]] = {
        "get": lambda: side_by_side(get, way, options.bytes, options.streams),
        "put": lambda: side_by_side(put, way, options.bytes, options.streams),
        "many": lambda: many(way, options.seconds, options.width),
    }
    try:
        print(json.dumps(actions[options.action]()))
    except OSError as err:
        sys.exit(f"{options.action} {way}: {err}")


if __name__ == "__main__":
    main()
