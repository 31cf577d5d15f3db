/* Two pumps, socket pairs as TUNs, real UDP sockets on the loopback: what goes in at one end comes out at the other, with
 * and without offloads, while sessions come and go, and whatever strangers send. Made to run under sanitizers. */
#include "ends.h"

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
  bytes = build(packet, 0, 17, 0, 100); /* nor does the later part of a packet pass to where nothing does */
  store_be16(packet + 6, 20);
  inject(&ends[0], &v, packet, bytes, 0);
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
