/* Software TSO: a TCP super-segment cut into packets (the rules of `tsd/dataplane/segments.py`), and USO for UDP. */
#ifndef TSN_SEGMENT_H
#define TSN_SEGMENT_H

#include <stdint.h>

#define SEGMENT_MOST_HEADER_BYTES 120 /* 60 of IPv4 and 60 of TCP */

typedef struct {
  const uint8_t *packet;
  uint32_t payload_bytes, segment_bytes, count;
  uint16_t ip_header_bytes, header_bytes; /* header_bytes: IP and TCP or UDP */
  uint32_t header_sum; /* of what is the same in every TCP or UDP header, and the pseudo header without its length */
  uint8_t is_udp;
} segment_source;

/* 0, or -1 when this is not a TCP packet that can be cut. `may_be_udp`: UDP can be, too. */
int segment_parse(segment_source *s, const uint8_t *packet, uint32_t bytes, uint32_t segment_bytes, uint32_t may_be_udp);
/* Writes the headers of piece `index` (header_bytes of them), checksums filled in. */
void segment_header(const segment_source *s, uint32_t index, uint8_t *out);
/* Payload of piece `index`: where, and how much. */
const uint8_t *segment_payload(const segment_source *s, uint32_t index, uint32_t *bytes);

#endif
