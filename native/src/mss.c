#include "mss.h"

#include "bits.h"

enum { TCP = 6, TCP_BYTES = 20, TCP_SYN = 0x02, CHECKSUM_AT = 16, END = 0, FILLER = 1, MSS = 2, MSS_BYTES = 4 };

/* The TCP header of a packet that has all of it, or NULL. */
static uint8_t *tcp_of(uint8_t *packet, uint32_t bytes, uint32_t *ip_bytes) {
  if (bytes < 40) return NULL;
  if (packet[0] >> 4 == 4) {
    *ip_bytes = (packet[0] & 15) * 4u;
    if (packet[9] != TCP || *ip_bytes < 20 || load_be16(packet + 6) & 0x1fff) return NULL;
  } else if (packet[0] >> 4 == 6) {
    *ip_bytes = 40;
    if (packet[6] != TCP) return NULL;
  } else {
    return NULL;
  }
  return bytes >= *ip_bytes + TCP_BYTES ? packet + *ip_bytes : NULL;
}

static uint8_t *find_mss(uint8_t *options, uint32_t bytes) {
  for (uint32_t at = 0; at < bytes && options[at] != END;) {
    if (options[at] == FILLER) {
      at++;
      continue;
    }
    if (at + 1 >= bytes || options[at + 1] < 2 || at + options[at + 1] > bytes) return NULL;
    if (options[at] == MSS && options[at + 1] == MSS_BYTES) return options + at + 2;
    at += options[at + 1];
  }
  return NULL;
}

/* The option may lie on an odd place: then its bytes count the other way round. */
static void mend_checksum(uint8_t *field, uint32_t before, uint32_t after, int is_odd) {
  if (is_odd) before = (before >> 8 | before << 8) & 0xffff, after = (after >> 8 | after << 8) & 0xffff;
  uint32_t sum = (0xffff ^ load_be16(field)) + (0xffff ^ before) + after;
  sum = (sum & 0xffff) + (sum >> 16);
  sum = (sum & 0xffff) + (sum >> 16);
  store_be16(field, (uint16_t)(0xffff ^ sum));
}

int mss_clamp(uint8_t *packet, uint32_t bytes, uint32_t mtu_bytes) {
  uint32_t ip_bytes, header;
  uint8_t *tcp = tcp_of(packet, bytes, &ip_bytes), *mss;
  if (!tcp || !(tcp[13] & TCP_SYN) || mtu_bytes <= ip_bytes + TCP_BYTES) return 0;
  header = (tcp[12] >> 4) * 4u;
  if (header <= TCP_BYTES || ip_bytes + header > bytes) return 0;
  mss = find_mss(tcp + TCP_BYTES, header - TCP_BYTES);
  uint32_t most = mtu_bytes - TCP_BYTES - (packet[0] >> 4 == 4 ? 20 : 40);
  if (!mss || load_be16(mss) <= most) return 0;
  mend_checksum(tcp + CHECKSUM_AT, load_be16(mss), most, (int)((mss - tcp) & 1));
  store_be16(mss, (uint16_t)most);
  return 1;
}
