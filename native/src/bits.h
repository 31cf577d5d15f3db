/* Unaligned loads and stores, wiping, and the branch-free helpers that every part of the core shares. */
#ifndef TSN_BITS_H
#define TSN_BITS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the native core is written for little-endian machines; the Python core runs everywhere"
#endif

#define TSN_INLINE static inline __attribute__((always_inline))

TSN_INLINE uint64_t load_le64(const uint8_t *p) {
  uint64_t v;
  memcpy(&v, p, 8);
  return v;
}

TSN_INLINE void store_le64(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }

TSN_INLINE uint32_t load_le32(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, 4);
  return v;
}

TSN_INLINE void store_le32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }

TSN_INLINE uint16_t load_be16(const uint8_t *p) { return (uint16_t)(p[0] << 8 | p[1]); }

TSN_INLINE void store_be16(uint8_t *p, uint32_t v) {
  p[0] = (uint8_t)(v >> 8);
  p[1] = (uint8_t)v;
}

TSN_INLINE uint32_t load_be32(const uint8_t *p) { return __builtin_bswap32(load_le32(p)); }

TSN_INLINE void store_be32(uint8_t *p, uint32_t v) { store_le32(p, __builtin_bswap32(v)); }

/* memcpy and memcmp that may be given a null pointer with a length of 0. */
TSN_INLINE void copy_bytes(void *to, const void *from, size_t n) {
  if (n) memcpy(to, from, n);
}

TSN_INLINE void wipe(void *p, size_t n) {
  if (!n) return;
  memset(p, 0, n);
  __asm__ volatile("" : : "r"(p) : "memory");
}

#endif
