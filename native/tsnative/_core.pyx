# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""Glue between `tsd.dataplane.pump` and the C core: turns Python objects into pointers and back, nothing else.

The GIL is released while packets are sealed, opened and copied. A Python call that arrives meanwhile from another
thread is refused: there is one `core_work` for Python. The threads of an `FdPump` have their own.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

from tsd.base.log import DropCounter
from tsd.dataplane.pump import Activity, Opened, OpenResult, Other, Sealed, SealResult
from tsd.hull import Frame

cdef extern from "aead.h" nogil:
    ctypedef struct aead_key:
        pass
    ctypedef struct aead_packet:
        const uint8_t *head
        const uint8_t *src
        uint8_t *dst
        uint32_t head_bytes
        uint32_t src_bytes
        uint32_t bytes
        uint32_t ok
        uint64_t counter
    ctypedef struct aead_kernel:
        const char *name
    void aead_set_key(aead_key *key, const uint8_t *raw)
    const aead_kernel *aead_find(const char *name)
    int aead_self_test(const aead_kernel *kernel)
    void aead_seal(const aead_kernel *kernel, const aead_key *key, aead_packet *packets, size_t count)
    void aead_open(const aead_kernel *kernel, const aead_key *key, aead_packet *packets, size_t count)

cdef extern from "core.h" nogil:
    int CORE_ABI
    ctypedef struct core:
        pass
    ctypedef struct core_work:
        pass
    ctypedef struct core_frame:
        const uint8_t *packet
        size_t bytes
        int32_t segment_bytes
        uint32_t is_udp
    ctypedef struct core_prefix:
        uint8_t address[16]
        uint32_t bytes
        uint32_t bits
    ctypedef struct core_path:
        uint8_t family
        uint8_t up
        uint8_t no_gso
        uint16_t port
        uint8_t ip[16]
        uint32_t scope
    ctypedef struct core_run:
        int64_t peer
        uint8_t *out
        uint32_t bytes
        uint32_t datagram_bytes
        uint32_t count
    ctypedef struct core_refused:
        int64_t peer
        uint32_t frame
    ctypedef struct core_delivery:
        int64_t peer
        uint8_t *out
        uint32_t bytes
        uint32_t segment_bytes
    ctypedef struct core_other:
        int kind
        uint32_t at
        uint32_t bytes
    ctypedef struct core_activity:
        double first_unanswered_send
        double first_unreplied_receive
        double last_send
        double last_receive
        double session_created
        int is_initiator
        int has_current
        int has_next
        int rekey_wanted
        uint64_t rx_bytes
        uint64_t tx_bytes
        uint64_t rx_packets
        uint64_t tx_packets
    ctypedef struct core_seal_result:
        core_run *runs
        const core_refused *refused
        const int64_t *attention
        size_t run_count
        size_t refused_count
        size_t attention_count
    ctypedef struct core_open_result:
        core_delivery *deliveries
        const core_other *others
        const int64_t *authenticated
        const int64_t *confirmed
        const int64_t *attention
        size_t delivery_count
        size_t other_count
        size_t authenticated_count
        size_t confirmed_count
        size_t attention_count
    core *core_new(uint32_t mtu_bytes, const char *kernel)
    void core_free(core *c)
    const char *core_kernel_name(const core *c)
    const char *core_drop_name(int drop)
    int DROP_COUNT
    void core_get_drops(core *c, uint64_t *drops)
    int core_add_peer(core *c, int64_t peer)
    void core_remove_peer(core *c, int64_t peer)
    int core_has_peer(core *c, int64_t peer)
    int core_set_allowed(core *c, int64_t peer, const core_prefix *prefixes, size_t count)
    int core_route(core *c, const uint8_t *address, uint32_t bytes, int64_t *peer)
    int core_install_session(core *c, int64_t peer, uint32_t local_index, uint32_t remote_index,
                             const uint8_t *send_key, const uint8_t *receive_key, int is_initiator, double now)
    void core_drop_sessions(core *c, int64_t peer)
    void core_get_activity(core *c, int64_t peer, core_activity *out)
    void core_set_path(core *c, int64_t peer, const core_path *path)
    core_work *core_work_new(core *c)
    void core_work_free(core_work *w)
    int core_plan_seal(core_work *w, const core_frame *frames, size_t count, double now, int keep_unrouted,
                       core_seal_result *result)
    int core_plan_seal_to(core_work *w, int64_t peer, const core_frame *frames, size_t count, double now,
                          core_seal_result *result)
    void core_run_seal(core_work *w)
    int core_run_open(core_work *w, const uint8_t *datagrams, size_t bytes, size_t datagram_bytes, double now,
                      core_open_result *result)
    void core_write_opened(core_work *w)

ABI = CORE_ABI
cdef tuple _OTHERS = (None, *Other)
cdef object _new = tuple.__new__


cdef list _handles(const int64_t *values, size_t count):
    cdef size_t i
    return [values[i] for i in range(count)]


cdef int fill_prefixes(core_prefix *out, list prefixes) except -1:
    cdef bytes address
    cdef bint is_single
    cdef size_t at = 0
    for prefix in prefixes:
        is_single = PyBytes_CheckExact(prefix)
        address = prefix if is_single else prefix.network_address.packed
        if len(address) != 4 and len(address) != 16:
            raise ValueError("addresses have 4 or 16 bytes")
        out[at].bytes = <uint32_t>len(address)
        out[at].bits = 8 * out[at].bytes if is_single else prefix.prefixlen
        memcpy(out[at].address, PyBytes_AS_STRING(address), len(address))
        at += 1
    return 0


cdef class _Frames:
    """Pointers to the packets of one call, held until the call ends."""

    cdef core_frame *frames
    cdef Py_buffer *views
    cdef size_t capacity, view_count
    cdef list held

    def __cinit__(self):
        self.held = []

    def __dealloc__(self):
        free(self.frames)
        free(self.views)

    cdef int reserve(self, size_t count) except -1:
        cdef void *frames
        cdef void *views
        if count <= self.capacity:
            return 0
        frames = realloc(self.frames, count * sizeof(core_frame))
        if frames != NULL:
            self.frames = <core_frame *>frames
        views = realloc(self.views, count * sizeof(Py_buffer))
        if views != NULL:
            self.views = <Py_buffer *>views
        if frames == NULL or views == NULL:
            raise MemoryError
        self.capacity = count
        return 0

    cdef int hold(self, size_t at, object packet, object segment_bytes) except -1:
        cdef core_frame *frame = &self.frames[at]
        cdef Py_buffer *view
        frame.is_udp = 0
        self.held.append(packet)
        if PyBytes_CheckExact(packet):
            frame.packet = <const uint8_t *>PyBytes_AS_STRING(packet)
            frame.bytes = PyBytes_GET_SIZE(packet)
        else:
            view = &self.views[self.view_count]
            PyObject_GetBuffer(packet, view, PyBUF_SIMPLE)
            self.view_count += 1
            frame.packet = <const uint8_t *>view.buf
            frame.bytes = view.len
        if segment_bytes is None:
            frame.segment_bytes = 0
        else:
            frame.segment_bytes = max(-1, min(segment_bytes, 65536))
        return 0

    cdef void release(self) noexcept:
        cdef size_t i
        for i in range(self.view_count):
            PyBuffer_Release(&self.views[i])
        self.view_count = 0
        self.held.clear()


cdef class NativeCore:
    """`tsd.dataplane.pump.Core` in C. `kernel`: "avx2", "portable", or empty for the fastest."""

    cdef core *_core
    cdef core_work *_work
    cdef _Frames _frames
    cdef object _drops
    cdef bint _busy
    cdef readonly str name

    def __cinit__(self, mtu_bytes: int = 1280, kernel: str = ""):
        if not 576 <= mtu_bytes <= 65535:
            raise ValueError(f"mtu_bytes={mtu_bytes} is not in 576..65535")
        self._core = core_new(mtu_bytes, kernel.encode())
        if self._core == NULL:
            raise RuntimeError(f"AEAD kernel {kernel or 'for this CPU'!r}: not available here, or its self-test failed")
        self._work = core_work_new(self._core)
        if self._work == NULL:
            raise MemoryError
        self._frames = _Frames()
        self._drops = DropCounter()
        self.name = f"native ({core_kernel_name(self._core).decode()})"

    def __dealloc__(self):
        core_work_free(self._work)
        core_free(self._core)

    cdef int _enter(self, bint stay = False) except -1:
        """`stay`: until `_leave`; the others neither release the GIL nor run Python code."""
        if self._busy:
            raise RuntimeError("the core is in use by another thread")
        self._busy = stay
        return 0

    cdef void _leave(self) noexcept:
        self._frames.release()
        self._busy = False

    @property
    def drops(self):
        cdef uint64_t counts[32]
        cdef int i
        core_get_drops(self._core, counts)
        for i in range(DROP_COUNT):
            if counts[i]:
                self._drops[core_drop_name(i).decode()] = counts[i]
        return self._drops

    def add_peer(self, int64_t peer):
        self._enter()
        if core_add_peer(self._core, peer):
            raise MemoryError

    def remove_peer(self, int64_t peer):
        self._enter()
        core_remove_peer(self._core, peer)

    def set_allowed_ips(self, int64_t peer, prefixes):
        cdef list wanted = list(prefixes)
        cdef core_prefix *packed = <core_prefix *>calloc(len(wanted) + 1, sizeof(core_prefix))
        cdef int failed
        if packed == NULL:
            raise MemoryError
        try:
            fill_prefixes(packed, wanted)
            self._enter()
            if not core_has_peer(self._core, peer):
                raise KeyError(peer)
            failed = core_set_allowed(self._core, peer, packed, len(wanted))
        finally:
            free(packed)
        if failed:
            raise MemoryError

    def route(self, bytes address not None):
        cdef int64_t peer = 0
        self._enter()
        return peer if core_route(self._core, address, <uint32_t>len(address), &peer) else None

    def install_session(self, int64_t peer, uint32_t local_index, uint32_t remote_index, bytes send_key not None,
                        bytes receive_key not None, bint is_initiator, double now):
        self._enter()
        if len(send_key) != 32 or len(receive_key) != 32:
            raise ValueError("session keys have 32 bytes")
        if not core_has_peer(self._core, peer):
            raise KeyError(peer)
        if core_install_session(self._core, peer, local_index, remote_index, send_key, receive_key, is_initiator, now):
            raise MemoryError

    def drop_sessions(self, int64_t peer):
        self._enter()
        core_drop_sessions(self._core, peer)

    cdef list _run_seal(self, core_seal_result *result):
        cdef list outputs = []
        cdef core_run *run
        cdef size_t i
        cdef bytes out
        for i in range(result.run_count):
            run = &result.runs[i]
            out = PyBytes_FromStringAndSize(NULL, run.bytes)
            run.out = <uint8_t *>PyBytes_AS_STRING(out)
            outputs.append(_new(Sealed, (run.peer, out, run.datagram_bytes, run.count)))
        with nogil:
            core_run_seal(self._work)
        return outputs

    def seal(self, frames, double now):
        cdef core_seal_result result
        cdef size_t i, count = 0
        cdef list wanted = list(frames)
        self._enter(True)
        try:
            self._frames.reserve(len(wanted))
            for frame in wanted:
                self._frames.hold(count, frame[0], frame[1])
                count += 1
            if core_plan_seal(self._work, self._frames.frames, count, now, 0, &result):
                raise MemoryError
            sealed = self._run_seal(&result)
            refused = [(result.refused[i].peer, wanted[result.refused[i].frame]) for i in range(result.refused_count)]
            return _new(SealResult, (sealed, refused, _handles(result.attention, result.attention_count)))
        finally:
            self._leave()

    def seal_to(self, int64_t peer, packets, double now):
        cdef core_seal_result result
        cdef size_t count = 0
        cdef list wanted = list(packets)
        self._enter(True)
        try:
            self._frames.reserve(len(wanted))
            for packet in wanted:
                self._frames.hold(count, packet, None)
                count += 1
            if core_plan_seal_to(self._work, peer, self._frames.frames, count, now, &result):
                raise MemoryError
            return self._run_seal(&result)
        finally:
            self._leave()

    def open(self, datagrams, size_t datagram_bytes, double now):
        cdef core_open_result result
        cdef core_frame *whole
        cdef int failed
        self._enter(True)
        try:
            self._frames.reserve(1)
            self._frames.hold(0, datagrams, None)
            whole = &self._frames.frames[0]
            with nogil:
                failed = core_run_open(self._work, whole.packet, whole.bytes, datagram_bytes, now, &result)
            if failed:
                raise MemoryError
            return self._take_opened(&result, <const char *>whole.packet)
        finally:
            self._leave()

    cdef object _take_opened(self, core_open_result *result, const char *datagrams):
        cdef core_delivery *delivery
        cdef size_t i
        cdef bytes out
        cdef list opened = [], others = []
        for i in range(result.other_count):
            out = PyBytes_FromStringAndSize(datagrams + result.others[i].at, result.others[i].bytes)
            others.append((_OTHERS[result.others[i].kind], out))
        for i in range(result.delivery_count):
            delivery = &result.deliveries[i]
            out = PyBytes_FromStringAndSize(NULL, delivery.bytes)
            delivery.out = <uint8_t *>PyBytes_AS_STRING(out)
            opened.append(_new(Opened, (delivery.peer, _new(Frame, (out, delivery.segment_bytes)))))
        with nogil:
            core_write_opened(self._work)
        return _new(OpenResult, (
            opened,
            others,
            _handles(result.authenticated, result.authenticated_count),
            _handles(result.confirmed, result.confirmed_count),
            _handles(result.attention, result.attention_count),
        ))

    def activity(self, int64_t peer):
        cdef core_activity a
        self._enter()
        core_get_activity(self._core, peer, &a)
        return Activity(
            a.first_unanswered_send, a.first_unreplied_receive, a.last_send, a.last_receive, a.session_created,
            bool(a.is_initiator), bool(a.has_current), bool(a.has_next), bool(a.rekey_wanted),
            a.rx_bytes, a.tx_bytes, a.rx_packets, a.tx_packets,
        )


def kernels():
    """Names of the AEAD kernels that this CPU can run, fastest first."""
    return [name for name in ("avx2", "portable") if aead_find(name.encode()) != NULL]


cdef list _batch(str kernel_name, bytes raw_key, list items, bint is_open):
    cdef const aead_kernel *kernel = aead_find(kernel_name.encode())
    cdef aead_key key
    cdef aead_packet *packets
    cdef size_t i, count = len(items)
    cdef bytes text, out
    cdef list outputs = []
    if kernel == NULL:
        raise ValueError(f"no AEAD kernel {kernel_name!r} on this CPU")
    if len(raw_key) != 32:
        raise ValueError("keys have 32 bytes")
    aead_set_key(&key, raw_key)
    packets = <aead_packet *>realloc(NULL, (count + 1) * sizeof(aead_packet))
    if packets == NULL:
        raise MemoryError
    try:
        memset(packets, 0, (count + 1) * sizeof(aead_packet))
        for i in range(count):
            counter, text = items[i]
            if is_open and len(text) < 16:
                raise ValueError("shorter than a tag")
            out = PyBytes_FromStringAndSize(NULL, len(text) - 16 if is_open else len(text) + 16)
            packets[i].src = <const uint8_t *>PyBytes_AS_STRING(text)
            packets[i].dst = <uint8_t *>PyBytes_AS_STRING(out)
            packets[i].bytes = <uint32_t>(len(text) - 16 if is_open else len(text))
            packets[i].src_bytes = packets[i].bytes
            packets[i].counter = counter
            outputs.append(out)
        with nogil:
            if is_open:
                aead_open(kernel, &key, packets, count)
            else:
                aead_seal(kernel, &key, packets, count)
        if is_open:
            outputs = [outputs[i] if packets[i].ok else None for i in range(count)]
        return outputs
    finally:
        memset(&key, 0, sizeof(key))
        free(packets)


def seal_batch(str kernel not None, bytes key not None, list packets not None):
    """[(counter, plaintext)] under one key -> [ciphertext and tag]."""
    return _batch(kernel, key, packets, False)


def open_batch(str kernel not None, bytes key not None, list packets not None):
    """[(counter, ciphertext and tag)] under one key -> [plaintext, or None when it is not authentic]."""
    return _batch(kernel, key, packets, True)


include "_fdpump.pxi"
