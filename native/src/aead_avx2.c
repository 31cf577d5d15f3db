/* The batch kernel for x86-64 with AVX2 and BMI2: eight lanes. Empty elsewhere. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>

typedef uint32_t lanes8 __attribute__((vector_size(32), may_alias));

/* Named for the assembler: an address in a register would cost Poly1305 two of its own. */
static const uint8_t rotate16[32] __asm__("tsn_rotate16") __attribute__((used, aligned(32))) = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13,
                                                                  2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
static const uint8_t rotate8[32] __asm__("tsn_rotate8") __attribute__((used, aligned(32))) = {3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14,
                                                                 3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14};

#define KERNEL_RUN aead_run_avx2
#define TARGET __attribute__((target("avx2,bmi2")))
#define LANES 8
#define LANE_T lanes8
/* Assembly keeps the table in memory: all sixteen registers hold state. */
#define SHUFFLE(x, table)                                                                \
  ({                                                                                     \
    lanes8 shuffled_;                                                                    \
    __asm__("vpshufb tsn_" #table "(%%rip),%1,%0" : "=x"(shuffled_) : "x"(x));           \
    shuffled_;                                                                           \
  })
#define ROTATE(x, n) ((x) << (n) | (x) >> (32 - (n)))
#define ROT16(x) SHUFFLE(x, rotate16)
#define ROT12(x) ROTATE(x, 12)
#define ROT8(x) SHUFFLE(x, rotate8)
#define ROT7(x) ROTATE(x, 7)
#define POLY POLY_BLOCK_MULX

#include "aead_kernel.h"
#else
typedef int aead_avx2_is_for_x86_64;
#endif
