/* Software GRO: TCP packets of one batch joined into super-segments (the rules of `tsd/dataplane/segments.py`);
 * UDP datagrams on request. */
#ifndef TSN_COALESCE_H
#define TSN_COALESCE_H

#include <stdint.h>

#define COALESCE_BUCKETS 256

typedef struct {
  const uint8_t *data;
  uint32_t bytes;
  uint32_t next; /* piece of the same item, 0: none */
} coalesce_piece;

/* A packet, perhaps with the payloads of its successors. */
typedef struct {
  int64_t peer;
  const uint8_t *packet; /* the first */
  uint32_t bytes, first_bytes, last_piece, first_piece;
  uint32_t segment_bytes; /* payload of the first; 0: takes nothing */
  uint32_t next_sequence;
  uint32_t next_in_bucket; /* item + 1 */
  uint32_t bucket;
  uint16_t ip_header_bytes, header_bytes; /* header_bytes: IP and TCP or UDP */
  uint16_t count; /* of packets in it */
  uint8_t is_udp;
  uint8_t last_flags; /* of TCP */
  uint8_t closed;  /* nothing may follow */
  int8_t verified; /* checksums: 1 right, -1 wrong, 0 not looked at */
  uint8_t flow[36]; /* addresses and ports */
} coalesce_item;

typedef struct {
  coalesce_item *items;
  coalesce_piece *pieces;
  uint32_t item_count, piece_count, item_capacity, piece_capacity;
  uint32_t buckets[COALESCE_BUCKETS]; /* item + 1 */
  uint8_t takes_udp;
} coalescer;

void coalesce_reset(coalescer *c);
void coalesce_free(coalescer *c);
/* Makes room for `packets` more. -1: out of memory. */
int coalesce_reserve(coalescer *c, uint32_t packets);
/* `packet` is exactly one IP packet and stays in place until written; room was reserved. */
void coalesce_add(coalescer *c, int64_t peer, const uint8_t *packet, uint32_t bytes);
/* 0 when the item is a single packet. */
uint32_t coalesce_segment_bytes(const coalesce_item *item);
void coalesce_write(const coalescer *c, const coalesce_item *item, uint8_t *out);
/* Makes the header at `out`, a copy of the first packet's or that itself, the header of the whole item. */
void coalesce_finish_header(const coalesce_item *item, uint8_t *out);

#endif
