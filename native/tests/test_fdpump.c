/* Two pumps, socket pairs as TUNs, real UDP sockets on the loopback: what goes in at one end comes out at the other, with
 * and without offloads, while sessions come and go, and whatever strangers send. Made to run under sanitizers. */
#include "../src/fdinternal.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "../src/checksum.h"
#include "check.h"

#define PEER 7
#define PAYLOAD 50000

typedef struct {
  core *core;
  fdpump *pump;
  int host, tun, udp; /* host: what the kernel would hold of the TUN */
  uint16_t port;
} end;

typedef struct {
  int v6, vnet, gso, one_thread, no_check;
  uint32_t ring_bytes;
} variant;

static int open_udp(const variant *v, uint16_t *port) {
  int fd = socket(v->v6 ? AF_INET6 : AF_INET, SOCK_DGRAM, 0), on = 1, size = 4 << 20;
  struct sockaddr_storage name = {0};
  socklen_t bytes = sizeof name;
  CHECK(fd >= 0 && fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
  if (v->gso) setsockopt(fd, IPPROTO_UDP, 104, &on, sizeof on);
  if (v->no_check) CHECK(setsockopt(fd, SOL_SOCKET, SO_NO_CHECK, &on, sizeof on) == 0);
  name.ss_family = v->v6 ? AF_INET6 : AF_INET;
  if (v->v6) ((struct sockaddr_in6 *)&name)->sin6_addr = in6addr_loopback;
  else ((struct sockaddr_in *)&name)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(bind(fd, (struct sockaddr *)&name, v->v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in)) == 0);
  CHECK(getsockname(fd, (struct sockaddr *)&name, &bytes) == 0);
  *port = ntohs(((struct sockaddr_in *)&name)->sin_port); /* at the same place in both */
  return fd;
}

static void set_keys(end ends[2], uint32_t round) {
  uint8_t keys[2][32] = {{1}, {2}};
  store_le32(keys[0] + 4, round);
  store_le32(keys[1] + 4, round);
  for (uint32_t i = 0; i < 2; i++) /* the receiver first: both as initiators, so that both may send at once */
    CHECK(core_install_session(ends[!i].core, PEER, 2 * round + !i, 2 * round + i, keys[!i], keys[i], 1, fd_now()) == 0);
}

static void open_ends(end ends[2], const variant *v) {
  static const core_prefix any[2] = {{{0}, 4, 0}, {{0}, 16, 0}};
  for (int i = 0; i < 2; i++) {
    int pair[2], size = 1 << 20;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    for (int j = 0; j < 2; j++) {
      setsockopt(pair[j], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
      fcntl(pair[j], F_SETFL, O_NONBLOCK);
    }
    ends[i] = (end){.core = core_new(1280, NULL), .host = pair[0], .tun = pair[1]};
    ends[i].udp = open_udp(v, &ends[i].port);
    CHECK(ends[i].core && core_add_peer(ends[i].core, PEER) == 0 && core_set_allowed(ends[i].core, PEER, any, 2) == 0);
    fdpump_options o = {.tun_fd = pair[1], .udp_fd = {v->v6 ? -1 : ends[i].udp, v->v6 ? ends[i].udp : -1},
                        .vnet = v->vnet, .tun_tcp_gso = v->vnet, .tun_udp_gso = v->vnet, .udp_gso = v->gso,
                        .udp_gro = v->gso, .one_thread = v->one_thread, .ring_bytes = v->ring_bytes};
    CHECK((ends[i].pump = fdpump_new(ends[i].core, &o)) != NULL);
    CHECK(fdpump_set_local(ends[i].pump, any, 2) == 0);
  }
  set_keys(ends, 1);
}

static core_path path_to(const end *other, const variant *v) {
  core_path path = {.family = v->v6 ? 6 : 4, .port = other->port, .ip = {127, 0, 0, 1}};
  if (v->v6) memset(path.ip, 0, 4), path.ip[15] = 1;
  return path;
}

static void start(end ends[2], const variant *v) {
  for (int i = 0; i < 2; i++) {
    core_path path = path_to(&ends[!i], v);
    core_set_path(ends[i].core, PEER, &path);
    CHECK(fdpump_start(ends[i].pump) == 0);
  }
}

static void close_ends(end ends[2]) {
  for (int i = 0; i < 2; i++) {
    fdpump_free(ends[i].pump);
    core_free(ends[i].core);
    close(ends[i].host), close(ends[i].tun), close(ends[i].udp);
  }
}

static uint64_t counter_of(const end *e, enum fd_counter which) {
  uint64_t all[FD_COUNTERS];
  fdpump_counters(e->pump, all);
  return all[which];
}

static uint32_t build(uint8_t *p, int v6, uint32_t protocol, uint32_t sequence, uint32_t payload) {
  uint32_t ip = v6 ? 40 : 20, header = protocol == 6 ? 20 : 8, bytes = ip + header + payload;
  memset(p, 0, ip + header);
  p[0] = v6 ? 0x60 : 0x45;
  if (v6) {
    store_be16(p + 4, bytes - 40);
    p[6] = (uint8_t)protocol, p[7] = 64, p[8] = 0xfd, p[23] = 1, p[24] = 0xfd, p[39] = 2;
  } else {
    store_be16(p + 2, bytes);
    p[8] = 64, p[9] = (uint8_t)protocol, p[12] = 100, p[15] = 1, p[16] = 100, p[19] = 2;
    ones_store(p + 10, 0xffff ^ ones_sum(p, 20));
  }
  uint8_t *transport = p + ip;
  store_be16(transport, 1000);
  store_be16(transport + 2, 2000);
  if (protocol == 6) store_be32(transport + 4, sequence), transport[12] = 0x50, transport[13] = 0x10;
  else store_be16(transport + 4, 8 + payload);
  for (uint32_t i = 0; i < payload; i++) transport[header + i] = (uint8_t)((sequence + i) * 7 + (sequence + i) / 256);
  uint64_t sum = (uint64_t)pseudo_sum(p, protocol, bytes - ip) + ones_sum(transport, bytes - ip);
  ones_store(transport + (protocol == 6 ? 16 : 6), 0xffff ^ ones_fold(sum));
  return bytes;
}

/* One frame as the host's kernel would give it. `unit` 0: a single packet. */
static void inject(const end *e, const variant *v, const uint8_t *packet, uint32_t bytes, uint32_t unit) {
  static uint8_t raw[FRAME_MOST_BYTES + VNET_BYTES];
  uint32_t skip = v->vnet ? VNET_BYTES : 0;
  memset(raw, 0, VNET_BYTES);
  if (unit) {
    int v6 = packet[0] >> 4 == 6, udp = packet[v6 ? 6 : 9] == 17;
    raw[0] = 1, raw[1] = (uint8_t)(udp ? 5 : v6 ? 4 : 1);
    memcpy(raw + 4, &(uint16_t){(uint16_t)unit}, 2);
    memcpy(raw + 6, &(uint16_t){v6 ? 40 : 20}, 2);
    memcpy(raw + 8, &(uint16_t){udp ? 6 : 16}, 2);
  }
  memcpy(raw + skip, packet, bytes);
  for (;;) {
    if (send(e->host, raw, skip + bytes, 0) >= 0) return;
    CHECK(errno == EAGAIN);
    struct pollfd wanted = {e->host, POLLOUT, 0};
    CHECK(poll(&wanted, 1, 5000) == 1);
  }
}

/* What came out of a TUN: payload bytes by their place in the stream. Returns how many were new. */
static uint32_t collect(const end *e, const variant *v, uint8_t *stream, uint8_t *seen, int wait_ms) {
  static uint8_t raw[FRAME_MOST_BYTES + VNET_BYTES];
  struct pollfd ready = {e->host, POLLIN, 0};
  if (poll(&ready, 1, wait_ms) != 1) return 0;
  ssize_t got = recv(e->host, raw, sizeof raw, 0);
  if (got <= 0) return 0;
  uint32_t skip = v->vnet ? VNET_BYTES : 0, bytes = (uint32_t)got - skip;
  uint8_t *p = raw + skip, protocol = p[p[0] >> 4 == 6 ? 6 : 9];
  uint32_t ip = p[0] >> 4 == 6 ? 40 : 20, header = protocol == 6 ? 20 : 8, fresh = 0;
  CHECK(bytes == (ip == 20 ? load_be16(p + 2) : load_be16(p + 4) + 40u));
  uint64_t sum = pseudo_sum(p, protocol, bytes - ip);
  if (!v->vnet || !raw[0]) sum = ones_fold(sum + ones_sum(p + ip, bytes - ip)) == 0xffff ? 0 : 1;
  else sum = ones_fold(sum) == *(uint16_t *)(void *)(p + ip + (protocol == 6 ? 16 : 6)) ? 0 : 1;
  CHECK(sum == 0); /* whole checksums, or that of the pseudo header in super-segments */
  if (protocol != 6) return bytes - ip - header;
  uint32_t at = load_be32(p + ip + 4);
  for (uint32_t i = ip + header; i < bytes; i++, at++) {
    if (at >= PAYLOAD || seen[at]) continue;
    seen[at] = 1, stream[at] = p[i], fresh++;
  }
  return fresh;
}

static void test_carry(const variant *v) {
  end ends[2];
  static uint8_t packet[FRAME_MOST_BYTES], stream[PAYLOAD], seen[PAYLOAD];
  uint64_t refused = 0;
  open_ends(ends, v);
  start(ends, v);
  for (int round = 0; round < 8; round++) {
    const end *from = &ends[round & 1], *to = &ends[!(round & 1)];
    uint32_t got = 0, unit = 100 + below(1100);
    memset(seen, 0, sizeof seen);
    if (v->vnet && v->gso) {
      inject(from, v, packet, build(packet, round & 2, 6, 0, PAYLOAD), unit);
    } else {
      for (uint32_t at = 0; at < PAYLOAD; at += unit)
        inject(from, v, packet, build(packet, round & 2, 6, at, PAYLOAD - at < unit ? PAYLOAD - at : unit), 0);
    }
    for (int quiet = 0; got < PAYLOAD && quiet < 30;) {
      uint32_t fresh = collect(to, v, stream, seen, 100);
      got += fresh, quiet = fresh ? 0 : quiet + 1;
    }
    CHECK(got == PAYLOAD);
    for (uint32_t i = 0; i < PAYLOAD; i++) CHECK(stream[i] == (uint8_t)(i * 7 + i / 256));
    if (round == 0) refused = counter_of(&ends[0], FD_UDP_GSO_REFUSED);
  }
  if (v->no_check) CHECK(refused > 0 && counter_of(&ends[0], FD_UDP_GSO_REFUSED) == refused); /* for good */
  if (FD_LINUX && v->vnet && v->gso && !v->no_check)
    CHECK(counter_of(&ends[1], FD_TUN_WRITES) < counter_of(&ends[1], v->v6 ? FD_UDP6_DATAGRAMS : FD_UDP4_DATAGRAMS));
  close_ends(ends);
}

static int next_message(end *e, up_message *m, uint8_t *data, int wait_ms) {
  struct pollfd ready = {fdpump_up_fd(e->pump), POLLIN, 0};
  if (!fdpump_up_peek(e->pump, m)) {
    fdpump_up_clear(e->pump); /* of messages that were taken */
    if (!fdpump_up_peek(e->pump, m) && (poll(&ready, 1, wait_ms) != 1 || !fdpump_up_peek(e->pump, m))) return 0;
  }
  CHECK(m->bytes <= FRAME_MOST_BYTES);
  fdpump_up_take(e->pump, data);
  return 1;
}

/* UDP: asked about once, allowed, then a flow; answers pass by the sender's own table; USO both ways. */
static void test_filter(void) {
  const variant v = {.vnet = 1, .gso = 1};
  end ends[2];
  up_message m;
  static uint8_t packet[FRAME_MOST_BYTES], data[FRAME_MOST_BYTES], stream[PAYLOAD], seen[PAYLOAD];
  open_ends(ends, &v);
  start(ends, &v);
  uint32_t bytes = build(packet, 0, 17, 0, 4000);
  inject(&ends[0], &v, packet, bytes, 1000);
  int asked = 0;
  while (asked < 4 && next_message(&ends[1], &m, data, 3000))
    if (m.kind == UP_INBOUND) {
      CHECK(m.peer == PEER && m.unit == 0 && m.bytes == 1028);
      fdpump_allow_like(ends[1].pump, data, m.bytes);
      asked++;
    }
  CHECK(asked == 4);
  inject(&ends[0], &v, packet, bytes, 1000);
  CHECK(collect(&ends[1], &v, stream, seen, 3000) > 0);
  for (int i = 0; i < 100 && !counter_of(&ends[1], FD_FILTER_PASSED); i++) poll(NULL, 0, 10);
  CHECK(counter_of(&ends[1], FD_FILTER_ASKED) >= 1 && counter_of(&ends[1], FD_FILTER_PASSED) >= 1);
  for (uint32_t i = 0; i < 4; i++) data[i] = packet[12 + i], packet[12 + i] = packet[16 + i], packet[16 + i] = data[i];
  store_be16(packet + 20, 2000);
  store_be16(packet + 22, 1000);
  inject(&ends[1], &v, packet, bytes, 1000);
  CHECK(collect(&ends[0], &v, stream, seen, 3000) > 0);
  fdpump_set_local(ends[1].pump, NULL, 0);
  inject(&ends[0], &v, packet, build(packet, 0, 6, 0, 10), 0);
  do CHECK(next_message(&ends[1], &m, data, 3000));
  while (m.kind != UP_INBOUND);
  close_ends(ends);
}

static void test_hostile(void) {
  const variant v = {.vnet = 1, .gso = 1};
  end ends[2];
  static uint8_t packet[FRAME_MOST_BYTES], stream[PAYLOAD], seen[PAYLOAD];
  open_ends(ends, &v);
  start(ends, &v);
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(ends[1].port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  for (int round = 0; round < 4000; round++) {
    uint32_t bytes = below(4) ? below(200) : below(1500);
    fill(packet, bytes);
    if (below(2) && bytes >= 8) store_le32(packet, 1 + below(4)), store_le32(packet + 4, 2 + below(4));
    sendto(ends[0].udp, packet, bytes, 0, (struct sockaddr *)&to, sizeof to);
    if (below(4) == 0 && bytes) send(ends[1].host, packet, bytes, 0); /* nonsense from the host as well */
  }
  memset(seen, 0, sizeof seen);
  uint32_t got = 0;
  inject(&ends[0], &v, packet, build(packet, 0, 6, 0, 20000), 1000);
  for (int tries = 0; got < 20000 && tries < 60; tries++) got += collect(&ends[1], &v, stream, seen, 100);
  CHECK(got == 20000);
  CHECK(counter_of(&ends[1], FD_TUN_MALFORMED) > 0);
  close_ends(ends);
}

/* A small ring and nobody who empties it. */
static void test_overflow(void) {
  const variant v = {.vnet = 1, .gso = 1, .ring_bytes = 1 << 16};
  end ends[2];
  up_message m;
  static uint8_t packet[FRAME_MOST_BYTES], data[FRAME_MOST_BYTES];
  open_ends(ends, &v);
  core_drop_sessions(ends[0].core, PEER);
  start(ends, &v);
  for (int i = 0; i < 20; i++) inject(&ends[0], &v, packet, build(packet, 0, 6, 0, 20000), 1000);
  for (int i = 0; i < 100 && counter_of(&ends[0], FD_UP_OVERFLOW) < 17; i++) poll(NULL, 0, 20);
  CHECK(counter_of(&ends[0], FD_UP_OVERFLOW) == 17 && counter_of(&ends[0], FD_UP_MESSAGES) == 3);
  for (int i = 0; i < 3; i++) {
    CHECK(next_message(&ends[0], &m, data, 1000));
    CHECK(m.kind == UP_STAGE && m.peer == PEER && m.unit == 1000 && m.bytes == 20040 && !memcmp(data, packet, 20040));
  }
  CHECK(!fdpump_up_peek(ends[0].pump, &m));
  close_ends(ends);
}

typedef struct {
  end *ends;
  const variant *v;
  atomic_int stop;
} churn;

/* What Python does meanwhile. */
static void *disturb(void *argument) {
  churn *c = argument;
  static const core_prefix any[2] = {{{0}, 4, 0}, {{0}, 16, 0}};
  core_work *work = core_work_new(c->ends[0].core);
  uint8_t out[2048];
  core_activity activity;
  for (uint32_t round = 2; !atomic_load(&c->stop); round++) {
    core_seal_result plan;
    core_frame keepalive = {NULL, 0, 0, 0};
    set_keys(c->ends, round);
    if (round % 7 == 0) core_drop_sessions(c->ends[round & 1].core, PEER);
    for (int i = 0; i < 2; i++) {
      core_path path = path_to(&c->ends[!i], c->v);
      if (round % 5 == 0) path.up = 1;
      core_set_path(c->ends[i].core, PEER, &path);
      core_set_allowed(c->ends[i].core, PEER, any, 2);
      core_add_peer(c->ends[i].core, 100 + round);
      core_remove_peer(c->ends[i].core, 99 + round);
      fdpump_set_local(c->ends[i].pump, any, 2);
      core_get_activity(c->ends[i].core, PEER, &activity);
      fdpump_forget_peer(c->ends[i].pump, PEER);
    }
    if (!core_plan_seal_to(work, PEER, &keepalive, 1, fd_now(), &plan) && plan.run_count) {
      plan.runs[0].out = out;
      core_run_seal(work);
    }
    poll(NULL, 0, 1);
  }
  core_work_free(work);
  return NULL;
}

/* Sealed batches come up as well: no nonce is used twice under a key, from whichever thread. */
static void test_churn(int one_thread) {
  const variant v = {.vnet = 1, .gso = 1, .one_thread = one_thread};
  end ends[2];
  up_message m;
  pthread_t thread;
  static uint8_t packet[FRAME_MOST_BYTES], data[FRAME_MOST_BYTES], stream[PAYLOAD], seen[PAYLOAD];
  table nonces = {0};
  static int mark;
  uint32_t batches = 0;
  open_ends(ends, &v);
  start(ends, &v);
  churn c = {.ends = ends, .v = &v};
  CHECK(pthread_create(&thread, NULL, disturb, &c) == 0);
  for (int round = 0; round < 400; round++) {
    for (int i = 0; i < 2; i++) inject(&ends[i], &v, packet, build(packet, 0, 6, 0, 5000), 1000);
    for (int i = 0; i < 2; i++) collect(&ends[i], &v, stream, seen, 1);
    while (next_message(&ends[0], &m, data, 0)) {
      if (m.kind != UP_SEALED) continue;
      batches++;
      for (uint32_t at = 0; at < m.bytes; at += m.unit) {
        uint64_t key = (uint64_t)load_le32(data + at + 4) << 32 | load_le32(data + at + 8);
        CHECK(!table_get(&nonces, key));
        CHECK(table_put(&nonces, key, &mark) == 0);
      }
    }
    while (next_message(&ends[1], &m, data, 0)) continue;
    if (round % 100 == 99) { /* stop and start again */
      fdpump_stop(ends[1].pump);
      CHECK(fdpump_start(ends[1].pump) == 0);
    }
  }
  atomic_store(&c.stop, 1);
  pthread_join(thread, NULL);
  CHECK(batches > 0);
  table_free(&nonces);
  close_ends(ends);
}

int main(void) {
  for (int i = 0; i < 16; i++) test_carry(&(variant){.v6 = i & 1, .vnet = i >> 1 & 1, .gso = i >> 2 & 1, .one_thread = i >> 3});
  if (FD_LINUX) test_carry(&(variant){.vnet = 1, .gso = 1, .no_check = 1});
  if (FD_LINUX) test_filter();
  test_hostile();
  test_overflow();
  test_churn(0);
  test_churn(1);
  puts("fdpump: all passed");
  return 0;
}
