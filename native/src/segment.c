#include "segment.h"

#include "bits.h"
#include "checksum.h"

#define TCP 6
#define UDP 17
#define UDP_HEADER_BYTES 8
#define FIN_PSH 0x09
#define CWR 0x80

/* The size of the transport header, or 0. */
static uint32_t transport_header(const uint8_t *transport, uint32_t bytes, uint32_t protocol, uint32_t may_be_udp) {
  if (protocol == UDP && may_be_udp && bytes >= UDP_HEADER_BYTES) return UDP_HEADER_BYTES;
  if (protocol != TCP || bytes < 20) return 0;
  uint32_t header = (transport[12] >> 4) * 4u;
  return header >= 20 && header <= bytes ? header : 0;
}

int segment_parse(segment_source *s, const uint8_t *packet, uint32_t bytes, uint32_t segment_bytes, uint32_t may_be_udp) {
  uint32_t ip_header = 40, protocol;
  if (bytes < 20) return -1;
  if (packet[0] >> 4 == 4) {
    ip_header = (packet[0] & 15) * 4u;
    protocol = load_be16(packet + 6) & 0x3fff ? 0 : packet[9]; /* a fragment has no whole segment */
  } else if (packet[0] >> 4 == 6 && bytes >= 40) {
    protocol = packet[6];
  } else {
    return -1;
  }
  if (ip_header < 20 || bytes < ip_header) return -1;
  const uint8_t *transport = packet + ip_header;
  uint32_t header = transport_header(transport, bytes - ip_header, protocol, may_be_udp);
  if (!header) return -1;
  s->packet = packet;
  s->is_udp = protocol == UDP;
  s->ip_header_bytes = (uint16_t)ip_header;
  s->header_bytes = (uint16_t)(ip_header + header);
  s->payload_bytes = bytes - s->header_bytes;
  s->segment_bytes = segment_bytes;
  s->count = s->payload_bytes ? (s->payload_bytes + segment_bytes - 1) / segment_bytes : 1;
  /* TCP: ports, acknowledgement, window, urgent pointer, options; not sequence, flags, checksum. UDP: ports */
  uint64_t sum = (uint64_t)ones_sum(transport, 4) + pseudo_sum(packet, protocol, 0);
  if (!s->is_udp)
    sum += (uint64_t)ones_sum(transport + 8, 4) + ones_sum(transport + 14, 2) + ones_sum(transport + 18, header - 18);
  s->header_sum = ones_fold(sum);
  return 0;
}

const uint8_t *segment_payload(const segment_source *s, uint32_t index, uint32_t *bytes) {
  uint32_t at = index * s->segment_bytes, left = s->payload_bytes - at;
  *bytes = left < s->segment_bytes ? left : s->segment_bytes;
  return s->packet + s->header_bytes + at;
}

static void finish_tcp(const segment_source *s, uint32_t index, uint8_t *tcp, uint64_t sum) {
  store_be32(tcp + 4, load_be32(tcp + 4) + index * s->segment_bytes);
  if (index + 1 < s->count) tcp[13] &= (uint8_t)~FIN_PSH;
  if (index) tcp[13] &= (uint8_t)~CWR;
  ones_store(tcp + 16, 0xffff ^ ones_fold(sum + ones_sum(tcp + 4, 4) + ones_sum(tcp + 12, 2)));
}

static void finish_udp(uint8_t *udp, uint32_t bytes, uint64_t sum) {
  store_be16(udp + 4, bytes);
  uint32_t checksum = 0xffff ^ ones_fold(sum + ones_number(bytes));
  ones_store(udp + 6, checksum ? checksum : 0xffff); /* 0 would mean "none" */
}

void segment_header(const segment_source *s, uint32_t index, uint8_t *out) {
  uint32_t payload_bytes, header = (uint32_t)s->header_bytes - s->ip_header_bytes;
  const uint8_t *payload = segment_payload(s, index, &payload_bytes);
  memcpy(out, s->packet, s->header_bytes);
  if (out[0] >> 4 == 4) {
    store_be16(out + 2, s->header_bytes + payload_bytes);
    store_be16(out + 4, load_be16(s->packet + 4) + index);
    store_be16(out + 10, 0);
    ones_store(out + 10, 0xffff ^ ones_sum(out, s->ip_header_bytes));
  } else {
    store_be16(out + 4, header + payload_bytes);
  }
  uint64_t sum = (uint64_t)s->header_sum + ones_sum(payload, payload_bytes) + ones_number(header + payload_bytes);
  if (s->is_udp) finish_udp(out + s->ip_header_bytes, header + payload_bytes, sum);
  else finish_tcp(s, index, out + s->ip_header_bytes, sum);
}
