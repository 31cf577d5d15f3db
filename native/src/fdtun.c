/* The TUN's side: virtio network headers (linux: `virtio_net.h`), checksums the kernel left to us, super-segments in and out.
 * Without IFF_VNET_HDR one packet is one read or write. A super-segment that the kernel refuses (EINVAL) is written packet
 * by packet, and so are all after it. */
#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include "checksum.h"
#include "fdinternal.h"
#include "mss.h"

enum { NEEDS_CSUM = 1, GSO_TCP4 = 1, GSO_UDP = 3, GSO_TCP6 = 4, GSO_UDP_L4 = 5, GSO_ECN = 0x80 };
#define MOST_PARTS 1000

typedef struct {
  uint8_t flags, gso_type;
  uint16_t header_bytes, gso_size, checksum_start, checksum_offset; /* of the host's byte order */
} vnet_header;

/* The field holds the sum of the pseudo header. */
static int finish_checksum(uint8_t *packet, uint32_t bytes, const vnet_header *h) {
  uint32_t start = h->checksum_start, field = start + h->checksum_offset;
  if (field + 2 > bytes) return -1;
  uint32_t sum = 0xffff ^ ones_sum(packet + start, bytes - start);
  ones_store(packet + field, sum ? sum : 0xffff);
  return 0;
}

int tun_parse(fdpump *p, uint8_t *raw, uint32_t bytes, core_frame *out) {
  vnet_header h = {0};
  uint32_t skip = p->options.vnet ? VNET_BYTES : 0;
  if (bytes <= skip) return -1;
  copy_bytes(&h, raw, skip);
  *out = (core_frame){.packet = raw + skip, .bytes = bytes - skip};
  int type = h.gso_type & ~GSO_ECN;
  if (type == 0) {
    if (h.flags & NEEDS_CSUM && finish_checksum(raw + skip, bytes - skip, &h)) return -1;
    count(p, FD_MSS_LOWERED, (uint64_t)mss_clamp(raw + skip, bytes - skip, p->core->mtu_bytes));
    return 0;
  }
  if ((type != GSO_TCP4 && type != GSO_TCP6 && type != GSO_UDP_L4) || !h.gso_size) return -1;
  out->segment_bytes = h.gso_size;
  out->is_udp = type == GSO_UDP_L4;
  return 0;
}

static int write_parts(fdpump *p, const struct iovec *parts, int part_count) {
  for (int tries = 0; tries < 3; tries++) {
    ssize_t written = writev(p->options.tun_fd, parts, part_count);
    if (written >= 0) {
      count(p, FD_TUN_WRITES, 1);
      count(p, FD_TUN_WRITTEN_BYTES, (uint64_t)written);
      return 0;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != ENOBUFS) break;
    struct pollfd wanted = {p->options.tun_fd, POLLOUT, 0};
    poll(&wanted, 1, 5);
  }
  return errno;
}

static int write_packet(fdpump *p, const uint8_t *packet, uint32_t bytes) {
  static const uint8_t plain[VNET_BYTES];
  union {
    const uint8_t *from;
    void *base;
  } header = {plain}, body = {packet};
  struct iovec parts[2] = {{header.base, VNET_BYTES}, {body.base, bytes}};
  int error = p->options.vnet ? write_parts(p, parts, 2) : write_parts(p, parts + 1, 1);
  if (error) count(p, FD_TUN_WRITE_ERRORS, 1);
  return error;
}

/* Each packet still has its own header in front of its payload. */
static void write_singly(fdpump *p, const coalescer *c, const coalesce_item *item) {
  write_packet(p, item->packet, item->first_bytes);
  for (uint32_t i = item->first_piece; i; i = c->pieces[i].next)
    write_packet(p, c->pieces[i].data - item->header_bytes, c->pieces[i].bytes + item->header_bytes);
}

static vnet_header header_of(const coalesce_item *item) {
  int is_v4 = item->ip_header_bytes == 20;
  return (vnet_header){.flags = NEEDS_CSUM,
                       .gso_type = item->is_udp ? GSO_UDP_L4 : is_v4 ? GSO_TCP4 : GSO_TCP6,
                       .header_bytes = item->header_bytes,
                       .gso_size = (uint16_t)item->segment_bytes,
                       .checksum_start = item->ip_header_bytes,
                       .checksum_offset = item->is_udp ? 6 : 16};
}

static int write_joined(fdpump *p, const coalescer *c, coalesce_item *item) {
  vnet_header h = header_of(item);
  struct iovec parts[MOST_PARTS];
  int used = 0;
  union {
    const uint8_t *from;
    uint8_t *at;
  } first = {item->packet};
  coalesce_finish_header(item, first.at);
  parts[used++] = (struct iovec){&h, VNET_BYTES};
  parts[used++] = (struct iovec){first.at, item->first_bytes};
  for (uint32_t i = item->first_piece; i; i = c->pieces[i].next) {
    union {
      const uint8_t *from;
      void *base;
    } piece = {c->pieces[i].data};
    parts[used++] = (struct iovec){piece.base, c->pieces[i].bytes};
  }
  return write_parts(p, parts, used);
}

void tun_write_item(fdpump *p, coalescer *c, coalesce_item *item) {
  atomic_int *may = item->is_udp ? &p->tun_udp_gso : &p->tun_tcp_gso;
  if (!item->first_piece) {
    write_packet(p, item->packet, item->first_bytes);
    return;
  }
  if (!atomic_load_explicit(may, memory_order_relaxed) || item->count > MOST_PARTS - 2) {
    write_singly(p, c, item);
    return;
  }
  uint8_t saved[SEGMENT_MOST_HEADER_BYTES];
  memcpy(saved, item->packet, item->header_bytes);
  int error = write_joined(p, c, item);
  if (!error) return;
  if (error != EINVAL) {
    count(p, FD_TUN_WRITE_ERRORS, 1);
    return;
  }
  union {
    const uint8_t *from;
    uint8_t *at;
  } first = {item->packet};
  memcpy(first.at, saved, item->header_bytes);
  count(p, FD_TUN_GSO_REFUSED, 1);
  atomic_store(may, 0);
  write_singly(p, c, item);
}

int fdpump_deliver(fdpump *p, const uint8_t *packet, uint32_t bytes, uint32_t segment_bytes) {
  segment_source source;
  uint8_t piece[FRAME_MOST_BYTES];
  if (!segment_bytes) return write_packet(p, packet, bytes);
  if (segment_parse(&source, packet, bytes, segment_bytes, 0)) return EINVAL;
  for (uint32_t i = 0; i < source.count; i++) {
    uint32_t payload_bytes;
    const uint8_t *payload = segment_payload(&source, i, &payload_bytes);
    segment_header(&source, i, piece);
    copy_bytes(piece + source.header_bytes, payload, payload_bytes);
    int error = write_packet(p, piece, source.header_bytes + payload_bytes);
    if (error) return error;
  }
  return 0;
}
