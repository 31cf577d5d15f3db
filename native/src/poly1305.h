/* Poly1305 in radix 2^64 (RFC 8439 section 2.5), as macros on local variables so that a caller can weave the blocks of
 * two streams into other work. S is a name prefix: S##0, S##1, S##2 hold the accumulator, S##r is {r0, r1, r1 + r1/4}. */
#ifndef TSN_POLY1305_H
#define TSN_POLY1305_H

#include "bits.h"

typedef unsigned __int128 poly_wide;

typedef struct {
  uint64_t h0, h1, h2;
  uint64_t r[3];
  const uint8_t *at;
  uint32_t blocks; /* whole blocks left at `at` */
  uint32_t packet;
  uint8_t tail[16]; /* the last bytes, kept because an open in place overwrites them */
} poly_stream;

#if defined(__x86_64__)
#define POLY_ADD(h0, h1, h2, m0, m1, high_bit)                         \
  __asm__("add %3,%0\n\tadc %4,%1\n\tadc %5,%2"                        \
          : "+r"(h0), "+r"(h1), "+r"(h2)                               \
          : "rm"(m0), "rm"(m1), "i"(high_bit)                          \
          : "cc")
#define POLY_CARRY(h0, h1, h2, c) \
  __asm__("add %3,%0\n\tadc $0,%1\n\tadc $0,%2" : "+r"(h0), "+r"(h1), "+r"(h2) : "r"(c) : "cc")
#else
#define POLY_ADD(h0, h1, h2, m0, m1, high_bit)            \
  do {                                                    \
    poly_wide sum_ = (poly_wide)(h0) + (m0);              \
    h0 = (uint64_t)sum_;                                  \
    sum_ = (poly_wide)(h1) + (m1) + (uint64_t)(sum_ >> 64); \
    h1 = (uint64_t)sum_;                                  \
    h2 += (high_bit) + (uint64_t)(sum_ >> 64);            \
  } while (0)
#define POLY_CARRY(h0, h1, h2, c) POLY_ADD(h0, h1, h2, c, 0ull, 0)
#endif

#define POLY_MULTIPLY(h0, h1, h2, r)                                                                              \
  do {                                                                                                            \
    const uint64_t r0_ = (r)[0], r1_ = (r)[1], s1_ = (r)[2];                                                      \
    poly_wide d0_ = (poly_wide)(h0) * r0_ + (poly_wide)(h1) * s1_;                                                \
    poly_wide d1_ = (poly_wide)(h0) * r1_ + (poly_wide)(h1) * r0_ + (h2) * s1_;                                   \
    uint64_t d2_ = (h2) * r0_;                                                                                    \
    d1_ += (uint64_t)(d0_ >> 64);                                                                                 \
    h0 = (uint64_t)d0_;                                                                                           \
    h1 = (uint64_t)d1_;                                                                                           \
    h2 = d2_ + (uint64_t)(d1_ >> 64);                                                                             \
    uint64_t fold_ = (h2 >> 2) + (h2 & ~3ull);                                                                    \
    h2 &= 3;                                                                                                      \
    POLY_CARRY(h0, h1, h2, fold_);                                                                                \
  } while (0)

#define POLY_BLOCK(S, q)                                           \
  do {                                                             \
    uint64_t m0_ = load_le64(q), m1_ = load_le64((q) + 8);         \
    POLY_ADD(S##0, S##1, S##2, m0_, m1_, 1);                       \
    POLY_MULTIPLY(S##0, S##1, S##2, S##r);                         \
  } while (0)

#if defined(__x86_64__)
/* The same block with mulx: six temporaries, rdx, and r kept in memory, which leaves registers for two streams. */
#define POLY_BLOCK_MULX(S, q)                                                                                   \
  do {                                                                                                          \
    uint64_t t0_, t1_, t2_, t3_, t4_, t5_;                                                                      \
    __asm__("add (%[p]),%[h0]\n\tadc 8(%[p]),%[h1]\n\tadc $1,%[h2]\n\t"                                         \
            "mov %[r0],%%rdx\n\tmulx %[h0],%[t0],%[t1]\n\tmulx %[h1],%[t2],%[t3]\n\t"                           \
            "mov %[s1],%%rdx\n\tmulx %[h1],%[t4],%[t5]\n\tmov %[h2],%[h1]\n\timul %%rdx,%[h1]\n\t"              \
            "imul %[r0],%[h2]\n\tadd %[t4],%[t0]\n\tadc %[t5],%[t1]\n\t"                                        \
            "mov %[r1],%%rdx\n\tmulx %[h0],%[t4],%[t5]\n\t"                                                     \
            "add %[h1],%[t2]\n\tadc $0,%[t3]\n\tadd %[t4],%[t2]\n\tadc %[t5],%[t3]\n\t"                         \
            "add %[t1],%[t2]\n\tadc %[t3],%[h2]\n\t"                                                            \
            "mov %[h2],%[h0]\n\tmov %[h2],%[t4]\n\tand $-4,%[h0]\n\tshr $2,%[t4]\n\tand $3,%[h2]\n\t"           \
            "add %[t4],%[h0]\n\tmov %[t2],%[h1]\n\tadd %[t0],%[h0]\n\tadc $0,%[h1]\n\tadc $0,%[h2]"             \
            : [h0] "+&r"(S##0), [h1] "+&r"(S##1), [h2] "+&r"(S##2), [t0] "=&r"(t0_), [t1] "=&r"(t1_),           \
              [t2] "=&r"(t2_), [t3] "=&r"(t3_), [t4] "=&r"(t4_), [t5] "=&r"(t5_)                                \
            : [p] "r"(q), [r0] "m"(S##r[0]), [r1] "m"(S##r[1]), [s1] "m"(S##r[2]),                              \
              "m"(*(const uint8_t(*)[16])(q))                                                                   \
            : "rdx", "cc");                                                                                     \
  } while (0)
#endif

TSN_INLINE void poly_start(poly_stream *s, const uint8_t *one_time_key, const uint8_t *text, uint32_t bytes,
                           uint32_t packet) {
  s->h0 = s->h1 = s->h2 = 0;
  s->r[0] = load_le64(one_time_key) & 0x0ffffffc0fffffffull;
  s->r[1] = load_le64(one_time_key + 8) & 0x0ffffffc0ffffffcull;
  s->r[2] = s->r[1] + (s->r[1] >> 2);
  s->at = text;
  s->blocks = bytes / 16;
  s->packet = packet;
  copy_bytes(s->tail, text + (bytes & ~15u), bytes & 15);
}

#endif
