/* Unit tests of the C parts against slow models, made to run under sanitizers. Exit 0: all passed. */
#include "../src/internal.h"
#include "../src/checksum.h"
#include "check.h"

/* ---- allowed IPs against a list ---- */

typedef struct {
  uint8_t address[16];
  uint32_t bytes, bits, owner;
} rule;

static int covers(const rule *r, const uint8_t *address, uint32_t bytes) {
  if (r->bytes != bytes || !r->owner) return 0;
  for (uint32_t i = 0; i < r->bits; i++)
    if ((r->address[i / 8] ^ address[i / 8]) >> (7 - i % 8) & 1) return 0;
  return 1;
}

static void random_address(uint8_t *out) { /* few distinct bits, so that prefixes nest */
  memset(out, 0, 16);
  for (int i = 0; i < 16; i++)
    if (below(2)) out[i] = (uint8_t)(below(4) << 6 | below(2));
}

static void test_allowed(void) {
  allowed_table table = {{NULL, NULL}};
  allowed_owner owners[6] = {{NULL}};
  rule rules[400];
  uint32_t count = 0;
  for (int round = 0; round < 4000; round++) {
    uint8_t address[16];
    random_address(address);
    uint32_t bytes = below(2) ? 4 : 16, owner = 1 + below(5);
    if (below(40) == 0) {
      allowed_clear(&table, &owners[owner]);
      for (uint32_t i = 0; i < count; i++)
        if (rules[i].owner == owner) rules[i].owner = 0;
    } else if (count < 400) {
      rule r = {.bytes = bytes, .bits = below(bytes * 8 + 1), .owner = owner};
      memcpy(r.address, address, 16);
      CHECK(allowed_add(&table, &owners[owner], address, bytes, r.bits) == 0);
      for (uint32_t i = 0; i < count; i++)
        if (rules[i].bits == r.bits && covers(&rules[i], address, bytes)) rules[i].owner = 0;
      rules[count++] = r;
    } else {
      count = 0;
      for (int i = 0; i < 6; i++) allowed_clear(&table, &owners[i]);
      CHECK(!table.roots[0] && !table.roots[1]);
    }
    for (int probe = 0; probe < 5; probe++) {
      random_address(address);
      bytes = below(2) ? 4 : 16;
      uint32_t best = 0, best_bits = 0;
      for (uint32_t i = 0; i < count; i++)
        if (covers(&rules[i], address, bytes) && (!best || rules[i].bits >= best_bits))
          best = rules[i].owner, best_bits = rules[i].bits;
      CHECK(allowed_find(&table, address, bytes) == (best ? &owners[best] : NULL));
    }
  }
  allowed_free(&table);
}

/* ---- hash table against an array ---- */

static void test_table(void) {
  static int values[256];
  table t = {0};
  void *model[256] = {0};
  for (int round = 0; round < 20000; round++) {
    uint32_t key = below(256);
    if (below(2)) {
      model[key] = &values[below(256)];
      CHECK(table_put(&t, (uint64_t)key << 33 | key, model[key]) == 0);
    } else {
      model[key] = NULL;
      table_remove(&t, (uint64_t)key << 33 | key);
    }
    key = below(256);
    CHECK(table_get(&t, (uint64_t)key << 33 | key) == model[key]);
  }
  table_free(&t);
}

/* ---- replay window against a bitmap ---- */

static void test_replay(void) {
  static uint8_t seen[1 << 20];
  replay_window w = {0};
  uint64_t last = 0;
  for (int round = 0; round < 200000; round++) {
    uint64_t counter = last + below(20);
    if (below(3) == 0) counter = last > 9000 ? last - below(9000) : below(64);
    if (below(2000) == 0) counter = last + below(20000);
    if (counter >= sizeof seen) break;
    int expected = !seen[counter] && (counter > last || last - counter <= REPLAY_WINDOW);
    CHECK(replay_accept(&w, counter) == expected);
    if (expected) seen[counter] = 1;
    if (counter > last) last = counter;
  }
  CHECK(!replay_accept(&w, REJECT_AFTER_MESSAGES) && !replay_accept(&w, UINT64_MAX));
  CHECK(replay_accept(&w, REJECT_AFTER_MESSAGES - 1) && !replay_accept(&w, REJECT_AFTER_MESSAGES - 1));
}

/* ---- checksum against the book ---- */

static void test_checksum(void) {
  uint8_t data[3000];
  for (int round = 0; round < 3000; round++) {
    uint32_t bytes = below(sizeof data), sum = 0;
    fill(data, bytes);
    if (below(10) == 0) memset(data, 255, bytes);
    for (uint32_t i = 0; i < bytes; i++) {
      sum += i & 1 ? data[i] : (uint32_t)data[i] << 8;
      sum = (sum & 0xffff) + (sum >> 16);
    }
    uint8_t stored[2];
    uint8_t *exact = malloc(bytes ? bytes : 1); /* so that a sanitizer sees every read */
    memcpy(exact, data, bytes);
    ones_store(stored, ones_sum(exact, bytes));
    CHECK(load_be16(stored) == sum);
    free(exact);
  }
}

/* ---- seal, open and coalesce a super-segment ---- */

static uint32_t build_tcp(uint8_t *p, int v6, uint32_t payload) {
  uint32_t ip = v6 ? 40 : 20, bytes = ip + 20 + payload;
  memset(p, 0, ip + 20);
  p[0] = v6 ? 0x60 : 0x45;
  if (v6) {
    store_be16(p + 4, bytes - 40);
    p[6] = 6, p[7] = 64, p[23] = 1, p[39] = 1;
  } else {
    store_be16(p + 2, bytes);
    p[8] = 64, p[9] = 6, p[12] = 10, p[15] = 1, p[16] = 10, p[19] = 1;
    ones_store(p + 10, 0xffff ^ ones_sum(p, 20));
  }
  uint8_t *tcp = p + ip;
  tcp[1] = 5, tcp[3] = 80, tcp[12] = 0x50, tcp[13] = 0x18;
  store_be32(tcp + 4, 0xfffffff0);
  fill(tcp + 20, payload);
  return bytes;
}

static void test_core(const char *kernel) {
  core *c[2];
  core_work *w[2];
  uint8_t keys[2][32];
  const core_prefix any[2] = {{{0}, 4, 0}, {{0}, 16, 0}};
  fill(keys[0], 64);
  for (int i = 0; i < 2; i++) {
    CHECK((c[i] = core_new(1280, kernel)) != NULL);
    CHECK(core_add_peer(c[i], 7) == 0);
    CHECK((w[i] = core_work_new(c[i])) != NULL);
    CHECK(core_set_allowed(c[i], 7, any, 2) == 0);
    CHECK(core_install_session(c[i], 7, 10u + (uint32_t)i, 11u - (uint32_t)i, keys[i], keys[!i], !i, 1.0) == 0);
  }
  static uint8_t packet[65536];
  for (int round = 0; round < 200; round++) {
    uint32_t payload = below(round < 100 ? 3000 : 60000), bytes = build_tcp(packet, round & 1, payload);
    uint32_t unit = 1 + below(1220), from = round & 1 ? 60 : 40;
    if (payload / unit > 400) unit = payload / 400 + 1;
    core_frame frame = {packet, bytes, (int32_t)unit, 0};
    core_seal_result sealed;
    CHECK(core_plan_seal(w[0], &frame, 1, 2.0, 0, &sealed) == 0);
    CHECK(sealed.refused_count == 0 && sealed.run_count > 0);
    for (size_t i = 0; i < sealed.run_count; i++) CHECK((sealed.runs[i].out = malloc(sealed.runs[i].bytes)) != NULL);
    core_run_seal(w[0]);
    uint32_t got = 0;
    for (size_t i = 0; i < sealed.run_count; i++) {
      core_run *run = &sealed.runs[i];
      core_open_result opened;
      CHECK(run->count <= RUN_MOST_DATAGRAMS && run->bytes <= RUN_MOST_BYTES);
      CHECK(core_run_open(w[1], run->out, run->bytes, run->datagram_bytes, 2.0, &opened) == 0);
      for (size_t j = 0; j < opened.delivery_count; j++) {
        uint8_t *out = opened.deliveries[j].out = malloc(opened.deliveries[j].bytes);
        CHECK(out != NULL);
      }
      core_write_opened(w[1]);
      for (size_t j = 0; j < opened.delivery_count; j++) {
        core_delivery *d = &opened.deliveries[j];
        CHECK(d->bytes >= from && !memcmp(d->out + from, packet + from + got, d->bytes - from));
        got += d->bytes - from;
        free(d->out);
      }
      free(run->out);
    }
    CHECK(got == payload);
  }
  uint64_t drops[2][DROP_COUNT];
  for (int i = 0; i < 2; i++) core_get_drops(c[i], drops[i]), core_work_free(w[i]);
  for (int drop = 0; core_drop_name(drop); drop++) CHECK(drops[0][drop] == 0 && drops[1][drop] == 0);
  core_remove_peer(c[0], 7);
  core_free(c[0]);
  core_free(c[1]);
}

int main(void) {
  test_allowed();
  test_table();
  test_replay();
  test_checksum();
  test_core("portable");
  if (aead_find("avx2")) test_core("avx2");
  puts("core: all passed");
  return 0;
}
