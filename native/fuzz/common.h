/* Two ends with a session, for the fuzz targets. Output goes to exactly sized memory, so that sanitizers see overruns. */
#ifndef TSN_FUZZ_COMMON_H
#define TSN_FUZZ_COMMON_H

#include <stdlib.h>

#include "../src/bits.h"
#include "../src/core.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The same two cores for every input; a new session makes them forget the last one. */
static inline void make_ends(core *ends[2]) {
  static core *kept[2];
  static const uint8_t keys[2][32] = {{1}, {2}}, any[16];
  for (int i = 0; i < 2; i++) {
    if (!kept[i] && (!(kept[i] = core_new(1280, NULL)) || core_add_peer(kept[i], 7) ||
                     core_add_allowed(kept[i], 7, any, 4, 1) || core_add_allowed(kept[i], 7, any, 16, 1)))
      abort();
    ends[i] = kept[i];
    if (core_install_session(ends[i], 7, 10u + (uint32_t)i, 11u - (uint32_t)i, keys[i], keys[!i], !i, 1.0)) abort();
  }
}

static inline void open_all(core *c, const uint8_t *datagrams, size_t bytes, size_t unit) {
  core_open_result result;
  if (core_run_open(c, datagrams, bytes, unit, 2.0, &result)) abort();
  for (size_t i = 0; i < result.delivery_count; i++) {
    core_delivery *d = &result.deliveries[i];
    if (!d->bytes || d->bytes > 65535 || !(d->out = malloc(d->bytes))) abort();
  }
  core_write_opened(c);
  for (size_t i = 0; i < result.delivery_count; i++) free(result.deliveries[i].out);
}

/* Seals what was planned and lets the other end open it. */
static inline void seal_and_open(core *from, core *to, core_seal_result *plan) {
  const uint64_t *drops = core_drops(to), bad = drops[DROP_AUTH] + drops[DROP_REPLAY];
  for (size_t i = 0; i < plan->run_count; i++)
    if (!(plan->runs[i].out = malloc(plan->runs[i].bytes))) abort();
  core_run_seal(from);
  for (size_t i = 0; i < plan->run_count; i++) {
    core_run *run = &plan->runs[i];
    if (run->count > RUN_MOST_DATAGRAMS || (run->count > 1 && run->bytes > RUN_MOST_BYTES)) abort();
    open_all(to, run->out, run->bytes, run->datagram_bytes);
    free(run->out);
  }
  if (drops[DROP_AUTH] + drops[DROP_REPLAY] != bad) abort();
}

#endif
