#include "coalesce.h"

#include <stdlib.h>

#include "bits.h"
#include "checksum.h"

#define TCP 6
#define UDP 17
#define MOST_DATAGRAMS 64
#define ACK 0x10
#define PSH 0x08
#define MOST_BYTES 65535

void coalesce_reset(coalescer *c) {
  c->item_count = 0;
  c->piece_count = 1; /* 0 means none */
  memset(c->buckets, 0, sizeof c->buckets);
}

void coalesce_free(coalescer *c) {
  free(c->items);
  free(c->pieces);
  c->items = NULL;
  c->pieces = NULL;
  c->item_capacity = c->piece_capacity = 0;
}

int coalesce_reserve(coalescer *c, uint32_t packets) {
  uint32_t items = c->item_count + packets, pieces = c->piece_count + packets;
  if (items > c->item_capacity) {
    coalesce_item *more = realloc(c->items, items * sizeof *more);
    if (!more) return -1;
    c->items = more, c->item_capacity = items;
  }
  if (pieces > c->piece_capacity) {
    coalesce_piece *more = realloc(c->pieces, pieces * sizeof *more);
    if (!more) return -1;
    c->pieces = more, c->piece_capacity = pieces;
  }
  return 0;
}

/* Where the transport header is taken to start; 0 when nothing can be joined to this kind of packet. */
static uint32_t transport_at(const coalescer *c, const uint8_t *packet, uint32_t bytes) {
  uint32_t at = packet[0] >> 4 == 4 ? 20 : 40, protocol = packet[at == 20 ? 9 : 6];
  if (protocol == TCP && bytes >= at + 20) return at;
  return protocol == UDP && c->takes_udp && bytes >= at + 8 ? at : 0;
}

/* Plain data: no IP options or fragments, TCP flags exactly ACK or ACK+PSH, a UDP checksum, at least one byte. */
static int is_candidate(const coalesce_item *item) {
  const uint8_t *p = item->packet, *transport = p + item->ip_header_bytes;
  if (item->ip_header_bytes == 20 && (p[0] != 0x45 || load_be16(p + 6) & 0x3fff)) return 0;
  if (item->bytes <= item->header_bytes) return 0;
  if (item->is_udp)
    return load_be16(transport + 4) == item->bytes - item->ip_header_bytes && load_be16(transport + 6);
  return (transport[13] & ~PSH) == ACK && item->header_bytes >= item->ip_header_bytes + 20;
}

static int has_valid_checksums(const coalesce_item *item) {
  const uint8_t *p = item->packet;
  uint32_t bytes = item->bytes - item->ip_header_bytes;
  if (p[0] == 0x45 && ones_sum(p, 20) != 0xffff) return 0;
  uint64_t sum = pseudo_sum(p, item->is_udp ? UDP : TCP, bytes);
  return ones_fold(sum + ones_sum(p + item->ip_header_bytes, bytes)) == 0xffff;
}

/* Addresses and ports: of a packet with IP options they do not lie side by side. */
static int read_flow(coalesce_item *item) {
  const uint8_t *p = item->packet;
  uint32_t from = item->ip_header_bytes == 20 ? 12 : 8, size = item->ip_header_bytes - from, ports = item->ip_header_bytes;
  if (from == 12 && p[0] != 0x45) ports = (p[0] & 15) * 4u;
  if (ports + 4 > item->bytes) return 0;
  memcpy(item->flow, p + from, size);
  memcpy(item->flow + size, p + ports, 4);
  memset(item->flow + size + 4, 0, sizeof item->flow - size - 4);
  uint64_t mixed = (uint64_t)item->peer;
  for (uint32_t i = 0; i < size + 4; i += 4) mixed = (mixed ^ load_le32(item->flow + i)) * 0x9E3779B97F4A7C15ull;
  item->bucket = (uint32_t)(mixed >> 56);
  return 1;
}

static int same_flow(const coalesce_item *a, const coalesce_item *b) {
  return a->peer == b->peer && a->is_udp == b->is_udp && a->ip_header_bytes == b->ip_header_bytes && !memcmp(a->flow, b->flow, sizeof a->flow);
}

static int continues(const coalesce_item *item, const coalesce_item *next) {
  const uint8_t *a = item->packet, *b = next->packet;
  uint32_t at = item->ip_header_bytes, header = item->header_bytes, payload = next->bytes - next->header_bytes;
  if (item->closed || header != next->header_bytes || payload > item->segment_bytes) return 0;
  if (item->bytes + payload > MOST_BYTES) return 0;
  if (at == 20 ? a[1] != b[1] || memcmp(a + 6, b + 6, 3) : load_le32(a) != load_le32(b) || a[7] != b[7]) return 0;
  if (item->is_udp) return item->count < MOST_DATAGRAMS;
  if (load_be32(b + at + 4) != item->next_sequence) return 0;
  /* acknowledgement and data offset, window, urgent pointer and options */
  return !memcmp(a + at + 8, b + at + 8, 5) && !memcmp(a + at + 14, b + at + 14, 2) &&
         !memcmp(a + at + 18, b + at + 18, header - at - 18);
}

static void append_piece(coalescer *c, coalesce_item *item, const uint8_t *data, uint32_t bytes) {
  uint32_t at = c->piece_count++;
  c->pieces[at] = (coalesce_piece){data, bytes, 0};
  if (item->last_piece) c->pieces[item->last_piece].next = at;
  else item->first_piece = at;
  item->last_piece = at;
}

static void take(coalescer *c, coalesce_item *item, const coalesce_item *next) {
  uint32_t payload = next->bytes - next->header_bytes;
  append_piece(c, item, next->packet + next->header_bytes, payload);
  item->bytes += payload;
  item->count++;
  item->closed = payload < item->segment_bytes;
  if (item->is_udp) return;
  item->next_sequence += payload;
  item->last_flags = next->packet[next->ip_header_bytes + 13];
  item->closed |= (item->last_flags & PSH) != 0;
}

/* The link to the newest item of a flow, or to the end of its bucket. */
static uint32_t *find_flow(coalescer *c, const coalesce_item *item) {
  uint32_t *link = &c->buckets[item->bucket];
  while (*link && !same_flow(&c->items[*link - 1], item)) link = &c->items[*link - 1].next_in_bucket;
  return link;
}

static int verify(coalesce_item *item) {
  if (!item->verified) item->verified = has_valid_checksums(item) ? 1 : -1;
  return item->verified > 0;
}

/* 1 when the packet went into an earlier item. Otherwise it becomes the newest of its flow, or ends the flow. */
static int join(coalescer *c, coalesce_item *fresh) {
  uint32_t *link = find_flow(c, fresh);
  coalesce_item *former = *link ? &c->items[*link - 1] : NULL;
  int candidate = is_candidate(fresh), fits = candidate && former && continues(former, fresh);
  if (fits && !verify(fresh)) candidate = 0;
  if (fits && candidate && verify(former)) {
    take(c, former, fresh);
    return 1;
  }
  if (former) *link = former->next_in_bucket;
  if (!candidate) return 0;
  fresh->segment_bytes = fresh->bytes - fresh->header_bytes;
  if (!fresh->is_udp) {
    fresh->next_sequence = load_be32(fresh->packet + fresh->ip_header_bytes + 4) + fresh->segment_bytes;
    fresh->last_flags = fresh->packet[fresh->ip_header_bytes + 13];
    fresh->closed = fresh->last_flags & PSH;
  }
  fresh->next_in_bucket = c->buckets[fresh->bucket];
  c->buckets[fresh->bucket] = c->item_count + 1;
  return 0;
}

void coalesce_add(coalescer *c, int64_t peer, const uint8_t *packet, uint32_t bytes) {
  coalesce_item fresh = {.peer = peer, .packet = packet, .bytes = bytes, .first_bytes = bytes, .count = 1};
  uint32_t at = transport_at(c, packet, bytes);
  if (at) {
    fresh.is_udp = packet[at == 20 ? 9 : 6] == UDP;
    fresh.ip_header_bytes = (uint16_t)at;
    fresh.header_bytes = (uint16_t)(at + (fresh.is_udp ? 8 : (packet[at + 12] >> 4) * 4u));
    if (read_flow(&fresh) && join(c, &fresh)) return;
  }
  c->items[c->item_count++] = fresh;
}

uint32_t coalesce_segment_bytes(const coalesce_item *item) { return item->first_piece ? item->segment_bytes : 0; }

void coalesce_finish_header(const coalesce_item *item, uint8_t *out) {
  uint8_t *transport = out + item->ip_header_bytes;
  uint32_t bytes = item->bytes - item->ip_header_bytes;
  if (out[0] >> 4 == 4) {
    store_be16(out + 2, item->bytes);
    store_be16(out + 10, 0);
    ones_store(out + 10, 0xffff ^ ones_sum(out, item->ip_header_bytes));
  } else {
    store_be16(out + 4, bytes);
  }
  if (item->is_udp) {
    store_be16(transport + 4, bytes);
    ones_store(transport + 6, pseudo_sum(out, UDP, bytes));
  } else {
    transport[13] = item->last_flags;
    ones_store(transport + 16, pseudo_sum(out, TCP, bytes));
  }
}

void coalesce_write(const coalescer *c, const coalesce_item *item, uint8_t *out) {
  uint8_t *at = out + item->first_bytes;
  memcpy(out, item->packet, item->first_bytes);
  if (!item->first_piece) return;
  for (uint32_t i = item->first_piece; i; at += c->pieces[i].bytes, i = c->pieces[i].next)
    memcpy(at, c->pieces[i].data, c->pieces[i].bytes);
  coalesce_finish_header(item, out);
}
