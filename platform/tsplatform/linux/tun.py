"""The kernel TUN device: batches in and out on the running loop, with the kernel's segmentation offloads.

Interface: linux/if_tun.h. One read gives up to 64 KiB (TSO, USO), one write takes a coalesced TCP packet (GRO). Where
kernel or driver refuse, offloads are switched off for good and packets are split here. Nothing blocks; what the device
does not take is counted and gone. Addresses and routes are `tsplatform.linux.router`'s business.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import socket
import struct
from collections.abc import Callable, Sequence

from tsd.base.errors import HullError
from tsd.base.log import DropCounter, fields
from tsd.dataplane.segments import split
from tsd.hull import Frame
from tsd.packet.mss import clamped
from tsplatform.linux import vnet

log = logging.getLogger(__name__)

TUN_NODE = "/dev/net/tun"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}")
"""Narrower than the kernel's: firewall rules and hooks of resolvconf name it, where `+` and quotes mean something."""

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_SIOCGIFFLAGS = 0x8913
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_IFF_UP = 0x1
_CSUM, _TSO4, _TSO6, _USO4, _USO6 = 0x01, 0x02, 0x04, 0x20, 0x40
_OFFLOADS = (_CSUM | _TSO4 | _TSO6 | _USO4 | _USO6, _CSUM | _TSO4 | _TSO6, _CSUM, 0)

_READS_PER_WAKE = 128
_BYTES_PER_WAKE = 512 << 10
_FULL = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM})

Divert = Callable[[Frame], bool]
DivertMany = Callable[[Sequence[Frame]], Sequence[Frame]]


class KernelTun:
    """Implements `tsd.hull.Tun`. Made by `open_tun`; the device lives as long as this object is not closed."""

    is_userspace = False

    def __init__(self, fd: int, name: str, mtu_bytes: int, has_header: bool, offloads: int) -> None:
        self.name = name
        self.mtu_bytes = mtu_bytes
        self.drops = DropCounter()
        self.has_gso = bool(offloads & _TSO4)
        """Whether coalesced packets are written whole; ends for good with the first refusal."""
        self.has_uso = bool(offloads & _USO4)
        self.divert: Divert = lambda frame: False
        """Asked for every frame of the host; True: it was for a service of ours and goes no further."""
        self.divert_inbound: DivertMany = lambda frames: frames
        """Asked for what comes from the overlay and was let in; gives what is left for the host."""
        self.on_lost: Callable[[HullError], None] = lambda err: None
        """Somebody deleted the interface: nothing comes or goes any more."""
        self.is_lost = False
        self._fd = fd
        self._has_header = has_header
        self._header = bytearray(vnet.HEADER_BYTES)
        self._buffer = bytearray(65536)
        self._view = memoryview(self._buffer)
        self._parts = (self._header, self._buffer) if has_header else (self._buffer,)
        self._skip = vnet.HEADER_BYTES if has_header else 0
        self._on_frames: Callable[[list[Frame]], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- hull.Tun

    def attach(self, on_frames: Callable[[list[Frame]], None]) -> None:
        self._on_frames = on_frames
        if self._loop is None and self._fd >= 0:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._on_readable)

    def deliver(self, frames: Sequence[Frame]) -> None:
        if self._fd < 0:
            return
        for packet, segment_bytes in self.divert_inbound(frames):
            if not segment_bytes:
                self._write(vnet.PLAIN, clamped(packet, self.mtu_bytes))
                continue
            header = vnet.header_for(packet, segment_bytes) if self.has_gso else None
            if header is None or not self._write(header, packet):
                for piece in split(packet, segment_bytes):
                    self._write(vnet.PLAIN, piece)

    def send(self, frames: list[Frame]) -> None:
        """Into the overlay, as if the host had sent them."""
        if self._on_frames is not None:
            self._on_frames(frames)

    def close(self) -> None:
        """The device vanishes with its addresses and routes. Idempotent."""
        if self._fd < 0:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1

    # --- for a pump that works on the device itself

    def fileno(self) -> int:
        """The device; non-blocking. -1 when closed."""
        return self._fd

    @property
    def has_header(self) -> bool:
        """Whether every packet comes and goes behind a virtio header of 10 bytes."""
        return self._has_header

    def release(self, on_frames: Callable[[list[Frame]], None]) -> None:
        """Read no more on the loop; `attach` starts it again. `deliver` and `send` (to `on_frames`) go on working."""
        self._on_frames = on_frames
        self._stop_reading()

    def _stop_reading(self) -> None:
        if self._loop is not None and self._fd >= 0:
            self._loop.remove_reader(self._fd)
        self._loop = None

    def lost(self, code: int) -> None:
        """Reading fails for good. EBADFD: the interface was deleted."""
        self.drops.add("read_error")
        if self.is_lost or self._fd < 0:
            return
        self.is_lost = True
        reason = "somebody deleted the interface" if code == errno.EBADFD else os.strerror(code)
        hint = "tsd has ended and is started again by the service manager, which makes the device anew; else start tsd"
        self.on_lost(HullError(f"read from the network device {self.name}", reason, hint, code))

    # --- state

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    @property
    def is_up(self) -> bool:
        """Whether somebody set the interface down, or it is gone."""
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                found = fcntl.ioctl(sock.fileno(), _SIOCGIFFLAGS, struct.pack("16sh22x", self.name.encode(), 0))
        except OSError:
            return False
        return bool(struct.unpack_from("H", found, 16)[0] & _IFF_UP)

    def describe(self) -> str:
        extra = [text for has, text in ((self.has_gso, "TSO"), (self.has_uso, "USO")) if has]
        return f"{self.name}, MTU {self.mtu_bytes}, offloads: {' '.join(extra) or 'none'}"

    # --- host to overlay

    def _on_readable(self) -> None:
        frames: list[Frame] = []
        total = 0
        for _ in range(_READS_PER_WAKE):
            try:
                got = os.readv(self._fd, self._parts)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as err:
                self._read_failed(err)
                break
            size = got - self._skip
            if size <= 0:
                self.drops.add("short_read")
                continue
            self._take(bytes(self._view[:size]), frames)
            total += got
            if total > _BYTES_PER_WAKE:
                break
        if frames:
            self.send(frames)

    def _take(self, packet: bytes, frames: list[Frame]) -> None:
        found = vnet.frames_from(self._header, packet) if self._has_header else [Frame(packet)]
        if found is None:
            self.drops.add("bad_offload")
            return
        frames += [
            frame if frame.segment_bytes else Frame(clamped(frame.packet, self.mtu_bytes))
            for frame in found
            if not self.divert(frame)
        ]

    def _read_failed(self, err: OSError) -> None:
        """Reading on would spin."""
        self._stop_reading()
        self.lost(err.errno or 0)

    # --- overlay to host

    def _write(self, header: bytes, packet: bytes | bytearray | memoryview) -> bool:
        """False when this form of packet is refused, now and later: the caller splits it."""
        try:
            os.writev(self._fd, (header, packet) if self._has_header else (packet,))
        except OSError as err:
            return self._write_failed(err, is_plain=header is vnet.PLAIN)
        return True

    def _write_failed(self, err: OSError, is_plain: bool) -> bool:
        if err.errno in _FULL:
            self.drops.add("device_full")
        elif err.errno == errno.EIO and not self.is_up:
            self.drops.add("interface_down")
        elif is_plain:
            self.drops.add(errno.errorcode.get(err.errno or 0, "write_error"))
        else:
            self.has_gso = False
            log.warning(fields("writing joined packets does not work here, disabled", reason=err.strerror))
            return False
        return True


def open_tun(name: str, mtu_bytes: int = 1280, *, offload: bool = True, node: str = TUN_NODE) -> KernelTun:
    """Make the device. Raises `HullError` that names what is missing and the fix."""
    fd = _open_node(name, node)
    try:
        flags = _IFF_TUN | _IFF_NO_PI
        has_header = False
        if offload:
            has_header = _set_interface(fd, name, flags | _IFF_VNET_HDR, is_probe=True)
        if not has_header:
            _set_interface(fd, name, flags)
        offloads = _set_offloads(fd) if has_header else 0
    except BaseException:
        os.close(fd)
        raise
    return KernelTun(fd, name, mtu_bytes, has_header, offloads)


def _open_node(name: str, node: str) -> int:
    if not _NAME.fullmatch(name):
        raise HullError(f"create {name!r}", "not a name for a network interface", "use 1 to 15 letters and digits")
    try:
        return os.open(node, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        code = err.errno or 0
        if code == errno.ENOENT:
            hint = "load the module: modprobe tun; in a container: --device=/dev/net/tun"
        elif code in (errno.EACCES, errno.EPERM):
            hint = "run as root with CAP_NET_ADMIN; in a container: --device=/dev/net/tun --cap-add=NET_ADMIN"
        else:
            hint = "the kernel has no TUN driver: modprobe tun"
        raise HullError(f"create {name}: open {node}", os.strerror(code), hint, code) from None


def _set_interface(fd: int, name: str, flags: int, is_probe: bool = False) -> bool:
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    except OSError as err:
        code = err.errno or 0
        if is_probe and code == errno.EINVAL:
            return False
        hints = {
            errno.EPERM: "CAP_NET_ADMIN is missing: run as root; in a container: --cap-add=NET_ADMIN",
            errno.EBUSY: "another process uses this interface: stop it, or choose another name with --tun",
            errno.EINVAL: "an interface of this name exists that is not a TUN device: choose another name with --tun",
        }
        raise HullError(f"create {name}", os.strerror(code), hints.get(code, ""), code) from None
    return True


def _set_offloads(fd: int) -> int:
    """The richest set that this kernel takes."""
    fcntl.ioctl(fd, _TUNSETVNETHDRSZ, struct.pack("i", vnet.HEADER_BYTES))
    for offloads in _OFFLOADS:
        try:
            fcntl.ioctl(fd, _TUNSETOFFLOAD, offloads)
            return offloads
        except OSError:
            continue
    return 0
