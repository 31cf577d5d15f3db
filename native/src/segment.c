#include "segment.h"

#include "bits.h"
#include "checksum.h"

#define TCP 6
#define FIN_PSH 0x09
#define CWR 0x80

int segment_parse(segment_source *s, const uint8_t *packet, uint32_t bytes, uint32_t segment_bytes) {
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
  if (protocol != TCP || ip_header < 20 || bytes < ip_header + 20) return -1;
  uint32_t tcp_header = (packet[ip_header + 12] >> 4) * 4u;
  if (tcp_header < 20 || bytes < ip_header + tcp_header) return -1;
  s->packet = packet;
  s->ip_header_bytes = (uint16_t)ip_header;
  s->header_bytes = (uint16_t)(ip_header + tcp_header);
  s->payload_bytes = bytes - s->header_bytes;
  s->segment_bytes = segment_bytes;
  s->count = s->payload_bytes ? (s->payload_bytes + segment_bytes - 1) / segment_bytes : 1;
  /* ports, acknowledgement, window, urgent pointer, options; not sequence, flags, checksum */
  const uint8_t *tcp = packet + ip_header;
  s->header_sum = ones_fold((uint64_t)ones_sum(tcp, 4) + ones_sum(tcp + 8, 4) + ones_sum(tcp + 14, 2) +
                            ones_sum(tcp + 18, tcp_header - 18) + pseudo_sum(packet, TCP, 0));
  return 0;
}

const uint8_t *segment_payload(const segment_source *s, uint32_t index, uint32_t *bytes) {
  uint32_t at = index * s->segment_bytes, left = s->payload_bytes - at;
  *bytes = left < s->segment_bytes ? left : s->segment_bytes;
  return s->packet + s->header_bytes + at;
}

void segment_header(const segment_source *s, uint32_t index, uint8_t *out) {
  uint32_t payload_bytes, tcp_header = (uint32_t)s->header_bytes - s->ip_header_bytes;
  const uint8_t *payload = segment_payload(s, index, &payload_bytes);
  uint8_t *tcp = out + s->ip_header_bytes;
  memcpy(out, s->packet, s->header_bytes);
  if (out[0] >> 4 == 4) {
    store_be16(out + 2, s->header_bytes + payload_bytes);
    store_be16(out + 4, load_be16(s->packet + 4) + index);
    store_be16(out + 10, 0);
    ones_store(out + 10, 0xffff ^ ones_sum(out, s->ip_header_bytes));
  } else {
    store_be16(out + 4, tcp_header + payload_bytes);
  }
  store_be32(tcp + 4, load_be32(tcp + 4) + index * s->segment_bytes);
  if (index + 1 < s->count) tcp[13] &= (uint8_t)~FIN_PSH;
  if (index) tcp[13] &= (uint8_t)~CWR;
  uint64_t sum = (uint64_t)s->header_sum + ones_sum(tcp + 4, 4) + ones_sum(tcp + 12, 2) + ones_sum(payload, payload_bytes) +
                 ones_number(tcp_header + payload_bytes);
  ones_store(tcp + 16, 0xffff ^ ones_fold(sum));
}
