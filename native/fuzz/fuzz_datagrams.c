/* Inbound: the input as raw datagrams, and as the inside of authentic ones (pieces of varying size: hostile peers). */
#include "common.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  core_work *ends[2];
  core_frame packets[64];
  core_seal_result plan;
  size_t count = 0;
  if (size < 2) return 0;
  make_ends(ends);
  core_coalesce_udp(ends[1], data[0] & 1);
  for (size_t at = 2, step = 0; at < size && count < 64; at += step, count++) {
    step = load_be16(data + at - 1 - (at & 1)) % 200 + 1; /* sizes come from the input as well */
    if (step > size - at) step = size - at;
    packets[count] = (core_frame){data + at, step, 0, 0};
  }
  if (core_plan_seal_to(ends[0], 7, packets, count, 2.0, &plan)) abort();
  seal_and_open(ends[0], ends[1], &plan);
  open_all(ends[1], data + 2, size - 2, load_be16(data) % 300);
  return 0;
}
