/* Two ends with a session, for the fuzz targets. Output goes to exactly sized memory, so that sanitizers see overruns. */
#ifndef TSN_FUZZ_COMMON_H
#define TSN_FUZZ_COMMON_H

#include <stdlib.h>

#include "../src/bits.h"
#include "../src/core.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The same two cores for every input; a new session makes them forget the last one. */
static core *cores[2];

static inline void make_ends(core_work *ends[2]) {
  static core_work *kept[2];
  static const uint8_t keys[2][32] = {{1}, {2}};
  static const core_prefix any[2] = {{{0}, 4, 1}, {{0}, 16, 1}};
  for (int i = 0; i < 2; i++) {
    if (!kept[i]) {
      core *c = core_new(1280, NULL);
      if (!c || core_add_peer(c, 7) || core_set_allowed(c, 7, any, 2) || !(kept[i] = core_work_new(c))) abort();
      cores[i] = c;
    }
    ends[i] = kept[i];
    if (core_install_session(cores[i], 7, 10u + (uint32_t)i, 11u - (uint32_t)i, keys[i], keys[!i], !i, 1.0)) abort();
  }
}

static inline void open_all(core_work *w, const uint8_t *datagrams, size_t bytes, size_t unit) {
  core_open_result result;
  if (core_run_open(w, datagrams, bytes, unit, 2.0, &result)) abort();
  for (size_t i = 0; i < result.delivery_count; i++) {
    core_delivery *d = &result.deliveries[i];
    if (!d->bytes || d->bytes > 65535 || !(d->out = malloc(d->bytes))) abort();
  }
  core_write_opened(w);
  for (size_t i = 0; i < result.delivery_count; i++) free(result.deliveries[i].out);
}

/* Seals what was planned and lets the other end open it. */
static inline void seal_and_open(core_work *from, core_work *to, core_seal_result *plan) {
  uint64_t before[DROP_COUNT], after[DROP_COUNT];
  core_get_drops(cores[1], before); /* `to` is always the second */
  for (size_t i = 0; i < plan->run_count; i++)
    if (!(plan->runs[i].out = malloc(plan->runs[i].bytes))) abort();
  core_run_seal(from);
  for (size_t i = 0; i < plan->run_count; i++) {
    core_run *run = &plan->runs[i];
    if (run->count > RUN_MOST_DATAGRAMS || (run->count > 1 && run->bytes > RUN_MOST_BYTES)) abort();
    open_all(to, run->out, run->bytes, run->datagram_bytes);
    free(run->out);
  }
  core_get_drops(cores[1], after);
  if (after[DROP_AUTH] != before[DROP_AUTH] || after[DROP_REPLAY] != before[DROP_REPLAY]) abort();
}

#endif
