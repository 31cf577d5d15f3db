"""The underlay's UDP socket: batches in and out, with UDP_GRO and UDP_SEGMENT where the kernel has them.

Works on asyncio and uvloop (`add_reader`). One socket per family, IPv6 with V6ONLY, so that no source address is
ever a mapped one. Link-local sources are refused: their zone would be lost on the way back (W08).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from tsd.base.addr import AddrPort, parse_ip
from tsd.base.errors import DecodeError, HullError
from tsd.base.log import DropCounter, fields

_log = logging.getLogger("tsd.transport.udp")

BUFFER_BYTES = 7 << 20
_SOL_UDP = 17
_UDP_SEGMENT = 103
_UDP_GRO = 104
_SO_SNDBUFFORCE = 32
_SO_RCVBUFFORCE = 33
_GRO_MIN_KERNEL = (5, 12)

_READS_PER_WAKE = 64
_BYTES_PER_WAKE = 1 << 20
_SLOT_BYTES = 65536
_SLOTS = 4
_BATCH_MAX_DATAGRAMS = 64
_BATCH_MAX_BYTES = 65000
_QUEUE_MAX_BYTES = 1 << 20
_RETRY_S = 0.002
_CACHE_MAX = 16384
_U16 = struct.Struct("=H")

_BUSY = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.ENOMEM})

OnBatch = Callable[[memoryview, int, AddrPort], None]
OnError = Callable[[AddrPort, int], None]


class UdpSocket:
    """One bound socket.

    `on_batch(datagrams, datagram_bytes, source)` gets datagrams of one source back to back, each `datagram_bytes`
    long but the last; the view is valid during the call only. `on_error(address, errno)` reports a destination
    that the kernel refused; sends to others go on. Raises `HullError` when the port cannot be bound.
    """

    def __init__(
        self,
        family: int,
        port: int,
        protect: Callable[[socket.socket], None],
        on_batch: OnBatch,
        *,
        on_error: OnError | None = None,
        host: str = "",
        offload: bool = True,
    ) -> None:
        self.family = family
        self.drops = DropCounter()
        self.has_gso = False
        self.has_gro = False
        self._on_batch = on_batch
        self._on_error = on_error
        self._queue: deque[tuple[bytes | memoryview, int, AddrPort]] = deque()
        self._queued_bytes = 0
        self._is_waiting = False
        self._sources: dict[object, AddrPort | None] = {}
        self._targets: dict[AddrPort, tuple[str, int]] = {}
        self._last_to: AddrPort | None = None
        self._last_target: tuple[str, int] = ("", 0)
        self._view = memoryview(bytearray(_SLOTS * _SLOT_BYTES))
        self._sock = _bound_socket(family, port, protect, host)
        self.port: int = self._sock.getsockname()[1]
        _enlarge_buffers(self._sock)
        if offload:
            self._probe_offloads()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    @property
    def is_closed(self) -> bool:
        return self._sock.fileno() < 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def pause(self) -> None:
        """Read no more: somebody else does, on the descriptor."""
        self._loop.remove_reader(self._sock.fileno())

    def resume(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def close(self) -> None:
        """Idempotent; what was queued is lost."""
        if self.is_closed:
            return
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._queue.clear()
        self._sock.close()

    def send(self, datagrams: bytes | memoryview, datagram_bytes: int, to: AddrPort) -> bool:
        """Send datagrams that lie back to back (0 or their full length: just one); never blocks.

        False when the kernel refused the destination (and `on_error` was called) or the queue is full.
        """
        if self.is_closed:
            return False
        if self._queue:
            return self._enqueue(datagrams, datagram_bytes, to)
        failure = self._send_now(datagrams, datagram_bytes, to)
        return failure == 0 or self._recover(failure, datagrams, datagram_bytes, to)

    def _send_now(self, datagrams: bytes | memoryview, datagram_bytes: int, to: AddrPort) -> int:
        """0 or an errno."""
        if to is self._last_to:
            target = self._last_target
        else:
            target = self._targets.get(to) or self._target(to)
            self._last_to, self._last_target = to, target
        try:
            if not 0 < datagram_bytes < len(datagrams):
                self._sock.sendto(datagrams, target)
            elif self.has_gso:
                cmsg = ((_SOL_UDP, _UDP_SEGMENT, _U16.pack(datagram_bytes)),)
                self._sock.sendmsg((datagrams,), cmsg, 0, target)
            else:
                return self._send_each(memoryview(datagrams), datagram_bytes, target, to)
        except OSError as err:
            return err.errno or errno.EIO
        return 0

    def _send_each(self, datagrams: memoryview, datagram_bytes: int, target: tuple[str, int], to: AddrPort) -> int:
        for at in range(0, len(datagrams), datagram_bytes):
            try:
                self._sock.sendto(datagrams[at : at + datagram_bytes], target)
            except OSError as err:
                if err.errno in _BUSY:
                    self._enqueue(datagrams[at:], datagram_bytes, to)
                    return 0
                return err.errno or errno.EIO
        return 0

    def _recover(self, failure: int, datagrams: bytes | memoryview, datagram_bytes: int, to: AddrPort) -> bool:
        if failure in _BUSY:
            return self._enqueue(datagrams, datagram_bytes, to)
        if failure in (errno.EIO, errno.EINVAL) and self.has_gso and 0 < datagram_bytes < len(datagrams):
            if failure == errno.EIO:
                self.has_gso = False
                _log.warning("UDP segmentation offload does not work here, disabled")
            target = self._target(to)
            failure = self._send_each(memoryview(datagrams), datagram_bytes, target, to)
            if failure == 0:
                return True
        self.drops.add(errno.errorcode.get(failure, str(failure)))
        if self._on_error is not None:
            self._on_error(to, failure)
        return False

    def _target(self, to: AddrPort) -> tuple[str, int]:
        if len(self._targets) >= _CACHE_MAX:
            self._targets.clear()
        target = self._targets[to] = (str(to.ip), to.port)
        return target

    def _enqueue(self, datagrams: bytes | memoryview, datagram_bytes: int, to: AddrPort) -> bool:
        if self._queued_bytes + len(datagrams) > _QUEUE_MAX_BYTES:
            self.drops.add("send queue full", -(-len(datagrams) // (datagram_bytes or len(datagrams) or 1)))
            return False
        self._queue.append((bytes(datagrams), datagram_bytes, to))
        self._queued_bytes += len(datagrams)
        if not self._is_waiting:
            self._is_waiting = True
            self._loop.call_later(_RETRY_S, self._flush)
        return True

    def _flush(self) -> None:
        """A timer and not `add_writer`: after ENOBUFS the socket counts as writable all the time."""
        self._is_waiting = False
        pending, self._queue, self._queued_bytes = self._queue, deque(), 0
        while pending and not self.is_closed:
            datagrams, datagram_bytes, to = pending.popleft()
            self.send(datagrams, datagram_bytes, to)
            if self._queue:
                for rest in pending:
                    self._enqueue(*rest)
                return

    def _on_readable(self) -> None:
        """Datagrams of one source and size are held in `view[start:end]` until something else comes."""
        receive = self._sock.recvmsg_into
        view = self._view
        start = end = held = held_size = 0
        held_from: object = None
        left = _BYTES_PER_WAKE
        for _ in range(_READS_PER_WAKE):
            try:
                got, cmsgs, _, sockaddr = receive((view[end : end + _SLOT_BYTES],), 32)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as err:
                self.drops.add(errno.errorcode.get(err.errno or 0, "receive error"))
                break
            size = _U16.unpack_from(cmsgs[0][2])[0] if cmsgs else got
            count = -(-got // size) if size else 1
            fits = held + count <= _BATCH_MAX_DATAGRAMS and end + got - start <= _BATCH_MAX_BYTES
            if held and not (sockaddr == held_from and size == held_size and fits):
                self._deliver(view[start:end], held_size, held_from)
                start, held = end, 0
            held, held_size, held_from = held + count, size, sockaddr
            end += got
            if not size or got % size or end > (_SLOTS - 1) * _SLOT_BYTES:
                self._deliver(view[start:end], held_size, held_from)
                start = end = held = 0
            left -= got
            if self.is_closed:
                return
            if left <= 0:
                break
        if held:
            self._deliver(view[start:end], held_size, held_from)

    def _deliver(self, datagrams: memoryview, datagram_bytes: int, sockaddr: object) -> None:
        source = self._sources.get(sockaddr) or self._source(sockaddr)
        if source is None:
            self.drops.add("link-local source")
            return
        try:
            self._on_batch(datagrams, datagram_bytes, source)
        except Exception:
            _log.exception("batch handler failed")

    def _source(self, sockaddr: object) -> AddrPort | None:
        if len(self._sources) >= _CACHE_MAX:
            self._sources.clear()
        source: AddrPort | None = None
        if isinstance(sockaddr, tuple):
            try:
                ip = parse_ip(sockaddr[0])
                source = None if ip.version == 6 and ip.is_link_local else AddrPort(ip, sockaddr[1])
            except DecodeError:
                pass
        self._sources[sockaddr] = source
        return source

    def _probe_offloads(self) -> None:
        try:
            self._sock.getsockopt(_SOL_UDP, _UDP_SEGMENT)
            self.has_gso = True
        except OSError:
            pass
        if _kernel_version() < _GRO_MIN_KERNEL:
            return
        try:
            self._sock.setsockopt(_SOL_UDP, _UDP_GRO, 1)
            self.has_gro = True
        except OSError:
            pass


def _bound_socket(family: int, port: int, protect: Callable[[socket.socket], None], host: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        if family == 6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        protect(sock)
        sock.bind((host, port))
    except OSError as err:
        sock.close()
        hint = "another process holds the port" if err.errno == errno.EADDRINUSE else ""
        raise HullError(f"bind UDP port {port}", os.strerror(err.errno or 0), hint, err.errno or 0) from None
    return sock


def _enlarge_buffers(sock: socket.socket) -> None:
    for forced, plain in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        try:
            sock.setsockopt(socket.SOL_SOCKET, forced, BUFFER_BYTES)
        except OSError:
            try:
                sock.setsockopt(socket.SOL_SOCKET, plain, BUFFER_BYTES)
            except OSError as err:
                _log.debug(fields("UDP buffer stays small", reason=err))


def _kernel_version() -> tuple[int, int]:
    """(0, 0) where the kernel is not Linux."""
    if not hasattr(os, "uname") or os.uname().sysname != "Linux":
        return 0, 0
    major, _, rest = os.uname().release.partition(".")
    minor = "".join(c for c in rest.partition(".")[0] if c.isdigit())
    return (int(major), int(minor or 0)) if major.isdigit() else (0, 0)
