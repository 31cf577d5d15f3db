/* Vectorised by the compiler: 32-bit words summed into 64-bit lanes, once for the baseline and once for AVX2. */
#include "checksum.h"

#define SUM_BODY                                              \
  uint64_t sum = 0;                                           \
  size_t i = 0;                                               \
  for (; i + 4 <= bytes; i += 4) sum += load_le32(data + i);  \
  if (bytes & 2) {                                            \
    sum += (uint64_t)data[i] | (uint64_t)data[i + 1] << 8;    \
    i += 2;                                                   \
  }                                                           \
  if (bytes & 1) sum += data[i];                              \
  return ones_fold(sum);

#if defined(__x86_64__)
__attribute__((target("avx2"))) static uint32_t sum_avx2(const uint8_t *data, size_t bytes) { SUM_BODY }
#endif
static uint32_t sum_portable(const uint8_t *data, size_t bytes) { SUM_BODY }

uint32_t ones_sum(const uint8_t *data, size_t bytes) {
#if defined(__x86_64__)
  if (bytes >= 128 && __builtin_cpu_supports("avx2")) return sum_avx2(data, bytes);
#endif
  return sum_portable(data, bytes);
}

uint32_t pseudo_sum(const uint8_t *ip, uint32_t protocol, uint32_t bytes) {
  uint32_t addresses = ip[0] >> 4 == 4 ? ones_sum(ip + 12, 8) : ones_sum(ip + 8, 32);
  return ones_fold((uint64_t)addresses + ones_number(protocol) + ones_number(bytes));
}
