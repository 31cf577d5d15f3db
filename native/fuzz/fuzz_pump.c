/* The pump's whole way without its threads: frames behind virtio headers, raw datagrams, and the inside of authentic ones;
 * between them rules change. Socket pairs are TUNs, the loopback is the underlay. */
#include "../src/fdinternal.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <unistd.h>

#include "common.h"

#define PEER 7

typedef struct {
  fdpump *pump;
  core_work *work;
  int host, udp;
  struct sockaddr_in name;
} end;

static end ends[2];

static void set_up(int i) {
  static const core_prefix local = {{100, 64}, 4, 10};
  core_work *works[2];
  int pair[2], size = 1 << 20, on = 1;
  socklen_t bytes = sizeof ends[i].name;
  end *e = &ends[i];
  make_ends(works);
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, pair)) abort();
  for (int j = 0; j < 2; j++) setsockopt(pair[j], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
  e->host = pair[0];
  e->udp = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
  e->name = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(e->udp, (struct sockaddr *)&e->name, sizeof e->name)) abort();
  if (getsockname(e->udp, (struct sockaddr *)&e->name, &bytes)) abort();
  setsockopt(e->udp, IPPROTO_UDP, 104, &on, sizeof on);
  fdpump_options o = {.tun_fd = pair[1], .udp_fd = {e->udp, -1}, .vnet = 1, .tun_tcp_gso = 1, .tun_udp_gso = 1,
                      .udp_gso = 1, .udp_gro = 1};
  e->pump = fdpump_new(cores[i], &o);
  e->work = works[i];
  if (!e->pump || fdpump_set_local(e->pump, &local, 1)) abort();
}

static void drain(end *e) {
  static uint8_t packet[FRAME_MOST_BYTES + VNET_BYTES];
  up_message m;
  while (read(e->host, packet, sizeof packet) > 0) continue;
  while (fdpump_up_peek(e->pump, &m)) {
    uint8_t *data = malloc(m.bytes + 1);
    fdpump_up_take(e->pump, data);
    if (m.kind == UP_INBOUND && m.bytes && data[m.bytes - 1] & 1) fdpump_allow_like(e->pump, data, m.bytes);
    if (m.kind == UP_INBOUND) fdpump_deliver(e->pump, data, m.bytes, m.unit);
    free(data);
  }
  fdpump_up_clear(e->pump);
}

static void seal_inside(const uint8_t *data, size_t bytes) {
  core_frame frame = {data, bytes, 0, 0};
  core_seal_result plan;
  if (core_plan_seal_to(ends[0].work, PEER, &frame, 1, fd_now(), &plan)) abort();
  for (size_t i = 0; i < plan.run_count; i++) plan.runs[i].out = malloc(plan.runs[i].bytes);
  core_run_seal(ends[0].work);
  for (size_t i = 0; i < plan.run_count; i++) {
    sendto(ends[0].udp, plan.runs[i].out, plan.runs[i].bytes, 0, (struct sockaddr *)&ends[1].name, sizeof ends[1].name);
    free(plan.runs[i].out);
  }
}

static void change_rules(uint8_t how) {
  static const int64_t peer = PEER;
  fdpump_watch_icmp(ends[1].pump, how & 1);
  if (how & 2) fdpump_forget_flows(ends[1].pump);
  if (fdpump_set_guarded(ends[how >> 3 & 1].pump, &peer, how >> 2 & 1)) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  core_work *works[2];
  if (!ends[0].pump) set_up(0), set_up(1);
  make_ends(works);
  for (uint32_t i = 0; i < 2; i++) { /* keys of now, not of `make_ends`' first second */
    static const uint8_t keys[2][32] = {{1}, {2}};
    if (core_install_session(cores[i], PEER, 10u + i, 11u - i, keys[i], keys[!i], 1, fd_now())) abort();
  }
  core_path path = {.family = 4, .port = ntohs(ends[1].name.sin_port), .ip = {127, 0, 0, 1}};
  core_set_path(cores[0], PEER, &path);
  for (size_t at = 0; at + 3 <= size;) {
    uint8_t what = data[at];
    size_t bytes = load_be16(data + at + 1) & 0x0fff;
    at += 3;
    if (bytes > size - at) bytes = size - at;
    if ((what & 3) == 0) (void)!write(ends[0].host, data + at, bytes);
    if ((what & 3) == 1) sendto(ends[0].udp, data + at, bytes, 0, (struct sockaddr *)&ends[1].name, sizeof ends[1].name);
    if ((what & 3) == 2) seal_inside(data + at, bytes);
    if ((what & 3) == 3) change_rules(what >> 2);
    at += bytes;
    if (what & 0x80) continue; /* several in one batch */
    while (tx_once(ends[0].pump->tx) > 0) continue;
    while (rx_once(ends[1].pump->rx) > 0) continue;
    drain(&ends[0]), drain(&ends[1]);
  }
  return 0;
}
