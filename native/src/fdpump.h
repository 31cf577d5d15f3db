/* The pump on file descriptors: threads that move packets between a TUN and UDP sockets, without Python.
 *
 * It stands on a `core`, which others may use meanwhile (see core.h). The caller opens and configures the descriptors and
 * keeps them open until `fdpump_free`. What the threads cannot decide (handshakes, disco, STUN, frames without a session,
 * packets that need a verdict, batches for a relay) goes up through a bounded ring; when it is full the message is
 * counted and lost. Linux with every offload, and a portable path with plain calls, chosen at run time. */
#ifndef TSN_FDPUMP_H
#define TSN_FDPUMP_H

#include "core.h"

typedef struct fdpump fdpump;

enum up_kind {
  UP_STAGE = 1,  /* frame without a session: peer, unit = segment size */
  UP_HOST,       /* frame from the host that needs a look: unit */
  UP_SEALED,     /* batch for the relay: peer, unit = datagram size */
  UP_OTHER,      /* not transport data: detail = Other of pump.py, source */
  UP_INBOUND,    /* opened frame that needs a verdict: peer, unit */
  UP_HEARD,      /* authentic data: peer, source */
  UP_CONFIRMED,  /* peer */
  UP_ATTENTION,  /* peer */
  UP_SEND_ERROR, /* peer, detail = errno, source = where it was to go */
  UP_TUN_ERROR,  /* detail = errno: the TUN is not read any more */
  UP_KINDS
};

typedef struct {
  uint8_t kind, family; /* family of `ip`: 4, 6 or 0 */
  uint16_t port;
  uint32_t bytes, unit, detail;
  uint32_t scope;
  uint8_t ip[16];
  int64_t peer;
} up_message;

enum fd_counter {
  FD_TUN_READS, FD_TUN_FRAMES, FD_TUN_READ_BYTES, FD_TUN_WRITES, FD_TUN_WRITTEN_BYTES, FD_TUN_WRITE_ERRORS,
  FD_TUN_GSO_REFUSED, FD_TUN_MALFORMED,
  FD_UDP_SENDS, FD_UDP4_DATAGRAMS_SENT, FD_UDP4_BYTES_SENT, FD_UDP6_DATAGRAMS_SENT, FD_UDP6_BYTES_SENT, FD_UDP_SEND_ERRORS, FD_UDP_SEND_WAITS, FD_UDP_GSO_REFUSED,
  FD_UDP_NO_SOCKET,
  FD_UDP_RECEIVES, FD_UDP4_DATAGRAMS, FD_UDP4_BYTES, FD_UDP6_DATAGRAMS, FD_UDP6_BYTES,
  FD_MSS_LOWERED, FD_FILTER_PASSED, FD_FILTER_ASKED,
  FD_UP_MESSAGES, FD_UP_OVERFLOW,
  FD_COUNTERS
};
const char *fd_counter_name(int counter);

typedef struct {
  int tun_fd;        /* does not block */
  int udp_fd[2];     /* IPv4, IPv6; -1: none; do not block */
  int vnet;          /* the TUN has IFF_VNET_HDR (10 bytes) */
  int tun_tcp_gso;   /* super-segments may be written to the TUN: TUNSETOFFLOAD was accepted */
  int tun_udp_gso;
  int udp_gso;       /* UDP_SEGMENT may be tried */
  int udp_gro;       /* UDP_GRO is on */
  int one_thread;    /* both directions in one */
  uint32_t ring_bytes; /* 0: 4 MiB */
} fdpump_options;

/* NULL: out of memory or descriptors. */
fdpump *fdpump_new(core *c, const fdpump_options *options);
int fdpump_start(fdpump *p); /* 0, or an errno */
/* Other sockets from now on; -1: none. What was learnt about offloads is forgotten with the old ones. 0, or an errno. */
int fdpump_set_sockets(fdpump *p, const int udp_fd[2], int udp_gso, int udp_gro);
void fdpump_stop(fdpump *p); /* returns when the threads have ended; may start again */
void fdpump_free(fdpump *p);
void fdpump_counters(const fdpump *p, uint64_t out[FD_COUNTERS]);

/* Readable when there are messages. */
int fdpump_up_fd(const fdpump *p);
/* The next message: 1 and its size is `m->bytes`, or 0. `fdpump_up_take` removes it and copies its bytes. One caller. */
int fdpump_up_peek(fdpump *p, up_message *m);
void fdpump_up_take(fdpump *p, uint8_t *out);
/* To be called before the ring is emptied: the next message makes the descriptor readable again. Who leaves messages
 * behind says `again`. */
void fdpump_up_clear(fdpump *p);
void fdpump_up_again(fdpump *p);

/* Writes one frame to the TUN, from any thread. 0, or an errno. */
int fdpump_deliver(fdpump *p, const uint8_t *packet, uint32_t bytes, uint32_t segment_bytes);

/* The filter. What is not said here goes up for a verdict.
 * Addresses that running TCP, ICMP answers and known flows may reach. Replaces; forgets what rules had allowed. */
int fdpump_set_local(fdpump *p, const core_prefix *prefixes, size_t count);
/* Packets like this inbound one pass from now on (a rule allowed it): TCP and UDP by addresses, protocol and destination
 * port, others by addresses and protocol. */
void fdpump_allow_like(fdpump *p, const uint8_t *packet, uint32_t bytes);
void fdpump_forget_flows(fdpump *p); /* those that we started, too */
/* Every packet of these peers and to them goes up (INBOUND, HOST). Replaces. */
int fdpump_set_guarded(fdpump *p, const int64_t *peers, size_t count);
/* The peer was removed: what is kept about it can go. */
void fdpump_forget_peer(fdpump *p, int64_t peer);
/* While on, ICMP answers go up. */
void fdpump_watch_icmp(fdpump *p, int on);

#endif
