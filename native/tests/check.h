/* What the C tests share. */
#ifndef TSN_CHECK_H
#define TSN_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                 \
  do {                                                                   \
    if (!(condition)) {                                                  \
      printf("FAIL %s:%d: %s\n", __FILE__, __LINE__, #condition);        \
      exit(1);                                                           \
    }                                                                    \
  } while (0)

static uint64_t check_state = 1;

static inline uint32_t below(uint32_t n) {
  check_state = check_state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(check_state >> 33) % n;
}

static inline void fill(uint8_t *p, size_t n) {
  for (size_t i = 0; i < n; i++) p[i] = (uint8_t)below(256);
}

#endif
