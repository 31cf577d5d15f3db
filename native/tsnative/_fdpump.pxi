"""Glue between `tsd.dataplane.fdpump` and the pump's threads in C. Included by `_core.pyx`: it needs the core itself."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport calloc, free

import os
from ipaddress import IPv4Address, IPv6Address

from tsd.base.addr import AddrPort
from tsd.dataplane.fdpump import FdPumpOptions, Upcall, UpKind

cdef extern from "fdpump.h" nogil:
    ctypedef struct fdpump:
        pass
    ctypedef struct up_message:
        uint8_t kind
        uint8_t family
        uint16_t port
        uint32_t bytes
        uint32_t unit
        uint32_t detail
        uint32_t scope
        uint8_t ip[16]
        int64_t peer
    ctypedef struct fdpump_options:
        int tun_fd
        int udp_fd[2]
        int vnet
        int tun_tcp_gso
        int tun_udp_gso
        int udp_gso
        int udp_gro
        int one_thread
        uint32_t ring_bytes
    int FD_COUNTERS
    const char *fd_counter_name(int counter)
    fdpump *fdpump_new(core *c, const fdpump_options *options)
    int fdpump_start(fdpump *p)
    int fdpump_set_sockets(fdpump *p, const int *udp_fd, int udp_gso, int udp_gro)
    void fdpump_stop(fdpump *p)
    void fdpump_free(fdpump *p)
    void fdpump_counters(const fdpump *p, uint64_t *out)
    int fdpump_up_fd(const fdpump *p)
    int fdpump_up_peek(fdpump *p, up_message *m)
    void fdpump_up_take(fdpump *p, uint8_t *out)
    void fdpump_up_clear(fdpump *p)
    void fdpump_up_again(fdpump *p)
    int fdpump_deliver(fdpump *p, const uint8_t *packet, uint32_t bytes, uint32_t segment_bytes)
    int fdpump_set_local(fdpump *p, const core_prefix *prefixes, size_t count)
    void fdpump_allow_like(fdpump *p, const uint8_t *packet, uint32_t bytes)
    void fdpump_forget_flows(fdpump *p)
    int fdpump_set_guarded(fdpump *p, const int64_t *peers, size_t count)
    void fdpump_watch_icmp(fdpump *p, int on)
    void fdpump_forget_peer(fdpump *p, int64_t peer)

cdef extern from "mss.h" nogil:
    int mss_clamp(uint8_t *packet, uint32_t bytes, uint32_t mtu_bytes)

cdef tuple _UP_KINDS = (None, *UpKind)
_SOURCES_KEPT = 4096


def clamp_mss(bytes packet not None, uint32_t mtu_bytes):
    """As `tsd.packet.mss.clamped`; what the threads do to every SYN."""
    cdef bytearray changed = bytearray(packet)
    cdef uint8_t *at = <uint8_t *>changed
    mss_clamp(at, <uint32_t>len(changed), mtu_bytes)
    return bytes(changed)


cdef class FdPump:
    """`tsd.dataplane.fdpump.FdPump` in C, on a `NativeCore`."""

    cdef fdpump *_pump
    cdef dict _sources
    cdef readonly NativeCore core

    def __cinit__(self, NativeCore core not None):
        self.core = core
        self._sources = {}

    def __dealloc__(self):
        with nogil:
            fdpump_free(self._pump)

    def start(self, int tun_fd, udp4_fd, udp6_fd, options=FdPumpOptions()):
        cdef fdpump_options o
        cdef int error
        if self._pump != NULL:
            raise RuntimeError("the pump has been started")
        o.tun_fd = tun_fd
        o.udp_fd[0] = -1 if udp4_fd is None else udp4_fd
        o.udp_fd[1] = -1 if udp6_fd is None else udp6_fd
        o.vnet = options.vnet_header
        o.tun_tcp_gso = options.tun_tcp_gso
        o.tun_udp_gso = options.tun_udp_gso
        o.udp_gso = options.udp_gso
        o.udp_gro = options.udp_gro
        o.one_thread = options.threads == 1
        o.ring_bytes = options.ring_bytes
        self._pump = fdpump_new(self.core._core, &o)
        if self._pump == NULL:
            raise MemoryError
        error = fdpump_start(self._pump)
        if error:
            self.stop()
            raise OSError(error, os.strerror(error))

    def stop(self):
        cdef fdpump *pump = self._pump
        self._pump = NULL
        with nogil:
            fdpump_free(pump)

    def set_sockets(self, udp4_fd, udp6_fd, bint udp_gso=True, bint udp_gro=True):
        cdef int fds[2]
        cdef int error
        cdef fdpump *pump = self._running()
        fds[0] = -1 if udp4_fd is None else udp4_fd
        fds[1] = -1 if udp6_fd is None else udp6_fd
        with nogil:
            error = fdpump_set_sockets(pump, fds, udp_gso, udp_gro)
        if error:
            raise OSError(error, os.strerror(error))

    cdef fdpump *_running(self) except NULL:
        if self._pump == NULL:
            raise RuntimeError("the pump is not running")
        return self._pump

    def fileno(self):
        return fdpump_up_fd(self._running())

    @property
    def counters(self):
        cdef uint64_t counts[64]
        cdef int i
        fdpump_counters(self._running(), counts)
        return {fd_counter_name(i).decode(): counts[i] for i in range(FD_COUNTERS)}

    def set_path(self, int64_t peer, udp, bint up=False):
        cdef core_path path
        cdef bytes ip
        memset(&path, 0, sizeof(path))
        path.up = up or udp is None
        if udp is not None:
            ip = udp.ip.packed
            path.family = udp.ip.version
            path.port = udp.port
            memcpy(path.ip, PyBytes_AS_STRING(ip), len(ip))
            if path.family == 6 and udp.ip.scope_id:
                path.scope = int(udp.ip.scope_id)
        core_set_path(self.core._core, peer, &path)

    def set_local(self, prefixes):
        cdef list wanted = list(prefixes)
        cdef core_prefix *packed = <core_prefix *>calloc(len(wanted) + 1, sizeof(core_prefix))
        cdef int failed
        if packed == NULL:
            raise MemoryError
        try:
            fill_prefixes(packed, wanted)
            failed = fdpump_set_local(self._running(), packed, len(wanted))
        finally:
            free(packed)
        if failed:
            raise MemoryError

    def set_guarded(self, peers):
        cdef list wanted = list(peers)
        cdef int64_t *handles = <int64_t *>calloc(len(wanted) + 1, sizeof(int64_t))
        cdef size_t i
        cdef int failed
        if handles == NULL:
            raise MemoryError
        try:
            for i in range(<size_t>len(wanted)):
                handles[i] = wanted[i]
            failed = fdpump_set_guarded(self._running(), handles, len(wanted))
        finally:
            free(handles)
        if failed:
            raise MemoryError

    def allow_like(self, const uint8_t[::1] packet not None):
        if len(packet):
            fdpump_allow_like(self._running(), &packet[0], <uint32_t>len(packet))

    def forget_flows(self):
        fdpump_forget_flows(self._running())

    def forget_peer(self, int64_t peer):
        fdpump_forget_peer(self._running(), peer)

    def watch_icmp(self, bint on):
        fdpump_watch_icmp(self._running(), on)

    def deliver(self, frames):
        cdef const uint8_t[::1] packet
        cdef uint32_t segment_bytes
        cdef fdpump *pump = self._running()
        for frame in frames:
            packet = frame[0]
            segment_bytes = frame[1]
            if 0 < len(packet) <= 65535:
                with nogil:
                    fdpump_deliver(pump, &packet[0], <uint32_t>packet.shape[0], segment_bytes)

    def take(self, int limit=256):
        cdef up_message m
        cdef bytes data
        cdef list messages = []
        cdef fdpump *pump = self._running()
        fdpump_up_clear(pump)
        while len(messages) < limit and fdpump_up_peek(pump, &m):
            data = PyBytes_FromStringAndSize(NULL, m.bytes)
            fdpump_up_take(pump, <uint8_t *>PyBytes_AS_STRING(data))
            messages.append(_new(Upcall, (_UP_KINDS[m.kind], m.peer, data, m.unit, m.detail, self._source(&m))))
        if len(messages) == limit:
            fdpump_up_again(pump)
        return messages

    cdef object _source(self, up_message *m):
        cdef bytes raw
        if m.family == 0:
            return None
        raw = PyBytes_FromStringAndSize(<const char *>m.ip, 4 if m.family == 4 else 16)
        key = (raw, m.port, m.scope)
        known = self._sources.get(key)
        if known is None:
            if len(self._sources) >= _SOURCES_KEPT:
                self._sources.clear()
            ip = IPv4Address(raw) if m.family == 4 else IPv6Address(raw)
            if m.scope:
                ip = IPv6Address(f"{ip}%{m.scope}")
            known = self._sources[key] = AddrPort(ip, m.port)
        return known
