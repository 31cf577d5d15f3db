/* Outbound: frames from the host, each preceded by its size and segment size. */
#include "common.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  core_work *ends[2];
  core_frame frames[64];
  core_seal_result plan;
  size_t count = 0, at = 0;
  make_ends(ends);
  while (at + 4 <= size && count < 64) {
    size_t bytes = load_be16(data + at) & 0x0fff;
    int32_t segment = (int32_t)(load_be16(data + at + 2) & 0x7fff) - 1;
    uint32_t is_udp = data[at + 2] >> 7;
    at += 4;
    if (bytes > size - at) bytes = size - at;
    frames[count++] = (core_frame){data + at, bytes, segment, is_udp};
    at += bytes;
  }
  if (core_plan_seal(ends[0], frames, count, 2.0, 0, &plan)) abort();
  seal_and_open(ends[0], ends[1], &plan);
  return 0;
}
