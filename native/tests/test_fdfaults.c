/* Sends that fail in every way the kernel knows, other sockets while the threads run, peers that need a look at every packet,
 * the MSS of connections, and no memory. The sends of the pump and what it allocates come through here (ld --wrap). */
#include "ends.h"

static atomic_int failures, failure; /* how many of the next sends fail, and how */
static atomic_int many_only;         /* those of several datagrams in one */

int __real_sendmmsg(int fd, struct mmsghdr *m, unsigned messages, int flags);
ssize_t __real_sendto(int fd, const void *data, size_t bytes, int flags, const struct sockaddr *to, socklen_t to_bytes);
int __wrap_sendmmsg(int fd, struct mmsghdr *m, unsigned messages, int flags);
ssize_t __wrap_sendto(int fd, const void *data, size_t bytes, int flags, const struct sockaddr *to, socklen_t to_bytes);

static int fails(void) {
  if (atomic_load(&failures) <= 0) return 0;
  atomic_fetch_sub(&failures, 1);
  errno = atomic_load(&failure);
  return 1;
}

int __wrap_sendmmsg(int fd, struct mmsghdr *m, unsigned messages, int flags) {
  if ((!atomic_load(&many_only) || m[0].msg_hdr.msg_controllen) && fails()) return -1;
  return __real_sendmmsg(fd, m, messages, flags);
}

ssize_t __wrap_sendto(int fd, const void *data, size_t bytes, int flags, const struct sockaddr *to, socklen_t to_bytes) {
  if (!atomic_load(&many_only) && fails()) return -1;
  return __real_sendto(fd, data, bytes, flags, to, to_bytes);
}

static void fail_next(int count, int error, int only_many) {
  atomic_store(&many_only, only_many);
  atomic_store(&failure, error);
  atomic_store(&failures, count);
}

static atomic_int out_of_memory; /* for what is sealed; there is some for lists */
static core_work *last_work;
static int had_keys; /* of `last_work`, when memory ran out */

int __real_reserve(void *array, size_t *capacity, size_t count, size_t element_bytes);
core_work *__real_core_work_new(core *c);
int __wrap_reserve(void *array, size_t *capacity, size_t count, size_t element_bytes);
core_work *__wrap_core_work_new(core *c);

int __wrap_reserve(void *array, size_t *capacity, size_t count, size_t element_bytes) {
  if (!atomic_load(&out_of_memory) || count < 2000) return __real_reserve(array, capacity, count, element_bytes);
  had_keys = last_work->group_count > 0;
  return -1;
}

core_work *__wrap_core_work_new(core *c) { return last_work = __real_core_work_new(c); }

static const variant whole = {.vnet = 1, .gso = 1};
static uint8_t packet[FRAME_MOST_BYTES], data[FRAME_MOST_BYTES], stream[PAYLOAD], seen[PAYLOAD];

/* A super-segment through the tunnel; how much of it arrived. */
static uint32_t carry(end ends[2], uint32_t payload) {
  uint32_t got = 0;
  memset(seen, 0, sizeof seen);
  inject(&ends[0], &whole, packet, build(packet, 0, 6, 0, payload), 1000);
  for (int quiet = 0; got < payload && quiet < 20;) {
    uint32_t fresh = collect(&ends[1], &whole, stream, seen, 100);
    got += fresh, quiet = fresh ? 0 : quiet + 1;
  }
  return got;
}

static int wait_for(end *e, enum up_kind kind, up_message *m) {
  for (int i = 0; i < 50 && next_message(e, m, data, 2000); i++)
    if (m->kind == kind) return 1;
  return 0;
}

static void test_full_queues(void) {
  static const int errors[] = {EAGAIN, ENOBUFS};
  for (int i = 0; i < 2; i++) {
    end ends[2];
    open_ends(ends, &whole);
    start(ends, &whole);
    fail_next(2, errors[i], 0); /* there is room again soon enough */
    CHECK(carry(ends, 20000) == 20000);
    CHECK(counter_of(&ends[0], FD_UDP_SEND_WAITS) == 2 && counter_of(&ends[0], FD_UDP_SEND_ERRORS) == 0);
    fail_next(1 << 30, errors[i], 0); /* never: lost, told, and nothing hangs */
    CHECK(carry(ends, 20000) == 0);
    CHECK(counter_of(&ends[0], FD_UDP_SEND_ERRORS) > 0);
    fail_next(0, 0, 0);
    CHECK(carry(ends, 20000) == 20000);
    close_ends(ends);
  }
}

static void test_refused(void) {
  end ends[2];
  up_message m;
  open_ends(ends, &whole);
  start(ends, &whole);
  fail_next(1, EPERM, 0);
  CHECK(carry(ends, 20000) < 20000);
  CHECK(wait_for(&ends[0], UP_SEND_ERROR, &m));
  CHECK(m.peer == PEER && m.detail == EPERM && m.family == 4 && m.port == ends[1].port);
  CHECK(counter_of(&ends[0], FD_UDP_SEND_ERRORS) == 1);
  CHECK(carry(ends, 20000) == 20000);
  close_ends(ends);
}

/* A path with a small MTU refuses segmented sends, an old device all of them: everything arrives all the same. */
static void test_no_segmentation(void) {
  static const int errors[] = {EMSGSIZE, EINVAL, EIO};
  for (int i = 0; i < 3; i++) {
    end ends[2];
    open_ends(ends, &whole);
    start(ends, &whole);
    fail_next(1, errors[i], 1);
    CHECK(carry(ends, 20000) == 20000);
    CHECK(counter_of(&ends[0], FD_UDP_GSO_REFUSED) == 1);
    uint64_t sends = counter_of(&ends[0], FD_UDP_SENDS), datagrams = counter_of(&ends[0], FD_UDP4_DATAGRAMS_SENT);
    fail_next(1, errors[i], 1); /* it is not tried again */
    CHECK(carry(ends, 20000) == 20000);
    CHECK(counter_of(&ends[0], FD_UDP_GSO_REFUSED) == 1 && counter_of(&ends[0], FD_UDP_SENDS) > sends);
    CHECK(counter_of(&ends[0], FD_UDP4_DATAGRAMS_SENT) == datagrams + 20);
    fail_next(0, 0, 0);
    core_path path = path_to(&ends[1], &whole); /* as a new path is told: only EIO holds for the socket */
    core_set_path(ends[0].core, PEER, &path);
    fail_next(1, errors[i], 1);
    CHECK(carry(ends, 20000) == 20000);
    CHECK(counter_of(&ends[0], FD_UDP_GSO_REFUSED) == (errors[i] == EIO ? 1 : 2));
    fail_next(0, 0, 0);
    close_ends(ends);
  }
}

static void test_other_sockets(void) {
  end ends[2];
  open_ends(ends, &whole);
  start(ends, &whole);
  CHECK(carry(ends, 20000) == 20000);
  for (int round = 0; round < 5; round++) {
    static const int none[2] = {-1, -1};
    CHECK(fdpump_set_sockets(ends[1].pump, none, 1, 1) == 0);
    CHECK(carry(ends, 2000) == 0);
    close(ends[1].udp);
    ends[1].udp = open_udp(&whole, &ends[1].port);
    int fresh[2] = {ends[1].udp, -1};
    CHECK(fdpump_set_sockets(ends[1].pump, fresh, 1, 1) == 0);
    core_path path = path_to(&ends[1], &whole);
    core_set_path(ends[0].core, PEER, &path);
    CHECK(carry(ends, 20000) == 20000);
  }
  static const int none[2] = {-1, -1};
  CHECK(fdpump_set_sockets(ends[0].pump, none, 1, 1) == 0);
  CHECK(carry(ends, 2000) == 0 && counter_of(&ends[0], FD_UDP_NO_SOCKET) == 2);
  close_ends(ends);
}

typedef struct {
  fdpump *pump;
  atomic_int ends;
} guarding;

static void *guard_again(void *given) {
  static const int64_t peers[3] = {5, PEER, 9};
  guarding *g = given;
  while (!atomic_load(&g->ends)) CHECK(fdpump_set_guarded(g->pump, peers, 3) == 0);
  return NULL;
}

/* Not for a moment, while the list is replaced by another one with the peer in it. */
static void test_stays_guarded(void) {
  end ends[2];
  up_message m;
  core_activity before, after;
  guarding g = {0};
  pthread_t thread;
  open_ends(ends, &whole);
  start(ends, &whole);
  g.pump = ends[0].pump;
  static const int64_t peer = PEER;
  CHECK(fdpump_set_guarded(g.pump, &peer, 1) == 0);
  CHECK(!pthread_create(&thread, NULL, guard_again, &g));
  core_get_activity(ends[0].core, PEER, &before);
  uint32_t bytes = build(packet, 0, 6, 0, 100);
  for (int i = 0; i < 2000; i++) {
    inject(&ends[0], &whole, packet, bytes, 0);
    CHECK(wait_for(&ends[0], UP_HOST, &m));
  }
  atomic_store(&g.ends, 1);
  pthread_join(thread, NULL);
  core_get_activity(ends[0].core, PEER, &after);
  CHECK(before.tx_packets == after.tx_packets);
  close_ends(ends);
}

/* Both directions of a guarded peer are shown, and nothing of it is sealed. */
static void test_guarded(void) {
  static const int64_t peers[3] = {5, PEER, 9};
  end ends[2];
  up_message m;
  core_activity before, after;
  open_ends(ends, &whole);
  start(ends, &whole);
  CHECK(fdpump_set_guarded(ends[0].pump, peers, 3) == 0);
  core_get_activity(ends[0].core, PEER, &before);
  uint32_t bytes = build(packet, 0, 6, 0, 100);
  inject(&ends[0], &whole, packet, bytes, 0);
  CHECK(wait_for(&ends[0], UP_HOST, &m) && m.bytes == bytes && !memcmp(data, packet, bytes));
  core_get_activity(ends[0].core, PEER, &after);
  CHECK(before.tx_packets == after.tx_packets);
  inject(&ends[1], &whole, packet, bytes, 0);
  CHECK(wait_for(&ends[0], UP_INBOUND, &m) && m.peer == PEER && m.bytes == bytes);
  CHECK(fdpump_set_guarded(ends[0].pump, NULL, 0) == 0);
  CHECK(carry(ends, 5000) == 5000);
  close_ends(ends);
}

static void test_mss(void) {
  end ends[2];
  up_message m;
  open_ends(ends, &whole);
  start(ends, &whole);
  for (int v6 = 0; v6 < 2; v6++) {
    uint32_t ip = v6 ? 40 : 20, bytes = build(packet, v6, 6, 0, 4);
    packet[ip + 12] = 0x60, packet[ip + 13] = 0x02; /* SYN; the payload becomes an option */
    memcpy(packet + ip + 20, "\x02\x04\x05\xb4", 4);
    store_be16(packet + ip + 16, 0);
    uint64_t sum = (uint64_t)pseudo_sum(packet, 6, bytes - ip) + ones_sum(packet + ip, bytes - ip);
    ones_store(packet + ip + 16, 0xffff ^ ones_fold(sum));
    inject(&ends[0], &whole, packet, bytes, 0);
    CHECK(wait_for(&ends[1], UP_INBOUND, &m) && m.bytes == bytes);
    CHECK(load_be16(data + ip + 22) == (v6 ? 1220 : 1240));
    sum = (uint64_t)pseudo_sum(data, 6, bytes - ip) + ones_sum(data + ip, bytes - ip);
    CHECK(ones_fold(sum) == 0xffff);
  }
  CHECK(counter_of(&ends[0], FD_MSS_LOWERED) == 2 && counter_of(&ends[1], FD_MSS_LOWERED) == 0);
  close_ends(ends);
}

/* Without memory for what is sealed nothing is sent, and the keys do not stay where they were copied to. */
static void test_out_of_memory(void) {
  end ends[2];
  open_ends(ends, &whole);
  tx_worker *tx = tx_new(ends[0].pump);
  CHECK(tx != NULL);
  inject(&ends[0], &whole, packet, build(packet, 0, 6, 0, 20000), 1000);
  atomic_store(&out_of_memory, 1);
  CHECK(tx_once(tx) == 1 && had_keys && !last_work->group_count);
  atomic_store(&out_of_memory, 0);
  for (size_t i = 0; i < last_work->group_capacity * sizeof *last_work->groups; i++)
    CHECK(((const uint8_t *)last_work->groups)[i] == 0);
  tx_free(tx);
  close_ends(ends);
}

int main(void) {
  test_full_queues();
  test_refused();
  test_no_segmentation();
  test_other_sockets();
  test_guarded();
  test_stays_guarded();
  test_mss();
  test_out_of_memory();
  puts("fdfaults: all passed");
  return 0;
}
