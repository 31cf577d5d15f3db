/* The largest segment that a TCP peer may be told of (RFC 879, RFC 8200): what fits the tunnel, whoever forwards. */
#ifndef TSN_MSS_H
#define TSN_MSS_H

#include <stdint.h>

/* Lowers the MSS of a SYN, or a SYN and ACK, to what fits `mtu_bytes`, and its checksum with it (RFC 1624). 1: lowered.
 * Anything else, and whatever does not parse, stays as it is. */
int mss_clamp(uint8_t *packet, uint32_t bytes, uint32_t mtu_bytes);

#endif
