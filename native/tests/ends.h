/* Two pumps with socket pairs as TUNs and UDP sockets on the loopback, for the tests of the pump. */
#ifndef TSN_TEST_ENDS_H
#define TSN_TEST_ENDS_H

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

static inline int open_udp(const variant *v, uint16_t *port) {
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

static inline void set_keys(end ends[2], uint32_t round) {
  uint8_t keys[2][32] = {{1}, {2}};
  store_le32(keys[0] + 4, round);
  store_le32(keys[1] + 4, round);
  for (uint32_t i = 0; i < 2; i++) /* the receiver first: both as initiators, so that both may send at once */
    CHECK(core_install_session(ends[!i].core, PEER, 2 * round + !i, 2 * round + i, keys[!i], keys[i], 1, fd_now()) == 0);
}

static inline void open_ends(end ends[2], const variant *v) {
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

static inline core_path path_to(const end *other, const variant *v) {
  core_path path = {.family = v->v6 ? 6 : 4, .port = other->port, .ip = {127, 0, 0, 1}};
  if (v->v6) memset(path.ip, 0, 4), path.ip[15] = 1;
  return path;
}

static inline void start(end ends[2], const variant *v) {
  for (int i = 0; i < 2; i++) {
    core_path path = path_to(&ends[!i], v);
    core_set_path(ends[i].core, PEER, &path);
    CHECK(fdpump_start(ends[i].pump) == 0);
  }
}

static inline void close_ends(end ends[2]) {
  for (int i = 0; i < 2; i++) {
    fdpump_free(ends[i].pump);
    core_free(ends[i].core);
    close(ends[i].host), close(ends[i].tun), close(ends[i].udp);
  }
}

static inline uint64_t counter_of(const end *e, enum fd_counter which) {
  uint64_t all[FD_COUNTERS];
  fdpump_counters(e->pump, all);
  return all[which];
}

static inline uint32_t build(uint8_t *p, int v6, uint32_t protocol, uint32_t sequence, uint32_t payload) {
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
static inline void inject(const end *e, const variant *v, const uint8_t *packet, uint32_t bytes, uint32_t unit) {
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
static inline uint32_t collect(const end *e, const variant *v, uint8_t *stream, uint8_t *seen, int wait_ms) {
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

static inline int next_message(end *e, up_message *m, uint8_t *data, int wait_ms) {
  struct pollfd ready = {fdpump_up_fd(e->pump), POLLIN, 0};
  if (!fdpump_up_peek(e->pump, m)) {
    fdpump_up_clear(e->pump); /* of messages that were taken */
    if (!fdpump_up_peek(e->pump, m) && (poll(&ready, 1, wait_ms) != 1 || !fdpump_up_peek(e->pump, m))) return 0;
  }
  CHECK(m->bytes <= FRAME_MOST_BYTES);
  fdpump_up_take(e->pump, data);
  return 1;
}

#endif
