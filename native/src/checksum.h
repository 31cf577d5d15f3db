/* The Internet checksum (RFC 1071). Sums are kept in wire order: what `ones_store` writes needs no swapping. */
#ifndef TSN_CHECKSUM_H
#define TSN_CHECKSUM_H

#include "bits.h"

/* Folded one's-complement sum; 0 only when every byte is zero. */
uint32_t ones_sum(const uint8_t *data, size_t bytes);

TSN_INLINE uint32_t ones_fold(uint64_t sum) {
  sum = (sum & 0xffffffff) + (sum >> 32);
  sum = (sum & 0xffff) + (sum >> 16);
  sum = (sum & 0xffff) + (sum >> 16);
  return (uint32_t)((sum & 0xffff) + (sum >> 16));
}

/* A number (port, length, protocol) as a summand. */
TSN_INLINE uint32_t ones_number(uint32_t value) { return __builtin_bswap16((uint16_t)value) + __builtin_bswap16((uint16_t)(value >> 16)); }

/* A sum over bytes that start at an odd offset of the whole. */
TSN_INLINE uint32_t ones_odd(uint32_t folded) { return (folded & 0xff) << 8 | folded >> 8; }

TSN_INLINE void ones_store(uint8_t *field, uint32_t folded) {
  uint16_t v = (uint16_t)folded;
  memcpy(field, &v, 2);
}

/* Of the addresses of an IP header, a protocol and a length; folded. */
uint32_t pseudo_sum(const uint8_t *ip, uint32_t protocol, uint32_t bytes);

#endif
